"""The storage files that one rank writes in one save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.save_job import SaveJob
from bytecheckpoint.engine.staging import Image, KnownTargets
from bytecheckpoint.engine.writing import FileTask
from bytecheckpoint.errors import CheckpointError, listed
from bytecheckpoint.representation.names import escape, file_stem
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.file_layout import FileOrigin, LocalPlan, PlannedFile, end_of, lay_out_values
from bytecheckpoint.saving.messages import FileRecord
from bytecheckpoint.saving.state import Value
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage

__all__ = ["FileBatch", "RankFiles"]

_log = logging.getLogger("bytecheckpoint")
#: File names in a message.


@dataclass(slots=True)
class FileBatch:
    """Files that are written together.

    Attributes:
        files: the files.
        image: their data sections.
        job: writes the files.
    """

    files: list[PlannedFile]
    image: Image
    job: SaveJob


class RankFiles:
    """All files of one rank in one save, in batches: the planned ones first, further values if the coordinator asks.

    Args:
        origin: see below.
        storage: where the files go.
        settings: threads, chunk length, direct I/O.
        copies: copies the shards that are on devices.

    Attributes:
        origin: of the files.
        bytes_written: total length of the finished files, headers included.
    """

    def __init__(self, origin: FileOrigin, storage: Storage, settings: Settings, copies: DeviceCopies) -> None:
        self.origin = origin
        self.bytes_written = 0
        self._storage = storage
        self._settings = settings
        self._copies = copies
        self._files: list[PlannedFile] = []
        self._jobs: list[SaveJob] = []
        self._places: dict[TensorKey, tuple[int, int]] = {}
        self._stopped: CheckpointError | None = None

    def stop(self, error: CheckpointError) -> None:
        """Make all writes fail with `error`, soon; return at once."""
        self._stopped = error
        for job in list(self._jobs):
            job.stop(error)

    def add_planned(self, plan: LocalPlan, shards: Sequence[LiveShard], values: Sequence[Value]) -> FileBatch:
        """Make the batch of a plan's files.

        Args:
            plan: this rank's part of the plan.
            shards: this rank's shards.
            values: the values to write.
        """
        tensors = [_source(shards[number], first, end) for number, first, end in plan.sources]
        return self._add(list(plan.files), tensors, plan.targets, values)

    def add_values(self, values: Sequence[Value]) -> FileBatch:
        """Make a batch of further values."""
        return self._add([], [], KnownTargets(), values)

    def _add(
        self,
        files: list[PlannedFile],
        tensors: Sequence[torch.Tensor | Runs],
        targets: KnownTargets,
        values: Sequence[Value],
    ) -> FileBatch:
        value_files, places = lay_out_values(
            values,
            self.origin,
            first=len(tensors),
            position=end_of(files[-1].image) if files else 0,
            part=1 if self._files else 0,
            siblings=[file_stem(self._name(f)) for f in (*self._files, *files)],
        )
        base = len(self._files) + len(files)
        self._places.update({v.key: (base + f, offset) for v, (f, offset) in zip(values, places, strict=True)})
        files += value_files
        self._files += files
        image = Image([*tensors, *(v.data for v in values)], [f.image for f in files], self._copies, targets)
        tasks = [
            FileTask(self._name(f), f.header.data_offset, f.header.data_length, f.header.block_bytes) for f in files
        ]
        job = SaveJob(image, tasks, self._storage, self._settings)
        self._jobs.append(job)
        if self._stopped is not None:
            job.stop(self._stopped)
        return FileBatch(files, image, job)

    def place_of(self, value: Value) -> tuple[int, int]:
        """Return the file of a value (index among this rank's files) and its offset there; (-1, 0) if it has none."""
        return self._places.get(value.key, (-1, 0))

    def finish(self, batch: FileBatch, sums: Sequence[NDArray[np.uint64]]) -> list[FileRecord]:
        """Write the headers of a batch, make its files durable and describe them.

        Args:
            batch: files whose data sections are written.
            sums: block sums of each file.
        """
        count = len(self._files)
        headers = [f.header.render(s, self.origin.generation, count) for f, s in zip(batch.files, sums, strict=True)]
        batch.job.finish(headers)
        records = []
        for file, header, file_sums in zip(batch.files, headers, sums, strict=True):
            template = file.header
            size = template.data_offset + template.data_length
            self.bytes_written += size
            records.append(
                FileRecord(
                    name=self._name(file),
                    state=escape(file.state),
                    part=file.part,
                    values=file.values,
                    size=size,
                    data_offset=template.data_offset,
                    header_sum=xxhash.xxh3_64_intdigest(header),
                    block_bytes=template.block_bytes,
                    sums=file_sums.tobytes(),
                )
            )
        return records

    def start_again(self) -> None:
        """Remove all files, so that others can be written."""
        self.abort_jobs()
        self._storage.delete([self._name(f) for f in self._files])
        self._files, self._places, self.bytes_written = [], {}, 0

    def discard(self) -> None:
        """Remove all files after a failure; never raises for the storage."""
        self.abort_jobs()
        names = [self._name(f) for f in self._files]
        if not names:
            return
        try:
            self._storage.delete(names)
        except (CheckpointError, OSError) as error:
            shown = listed(names, 3)
            _log.warning(
                "%s: what a failed save has written may stay (%s): %s; the next save there, or `bytecheckpoint gc`, "
                "removes it",
                self._storage.url,
                shown,
                error,
            )

    def release(self) -> None:
        """Drop the jobs of a save that is over."""
        self._jobs = []

    def abort_jobs(self) -> None:
        """End unfinished writes and remove their files."""
        for job in self._jobs:
            job.abort()
        self._jobs = []

    def _name(self, file: PlannedFile) -> str:
        return self.origin.file_name(file.state, file.part, values=file.values)


def _source(shard: LiveShard, first: int, end: int) -> torch.Tensor | Runs:
    """Return the elements of boxes `first` to `end` of a shard."""
    found = shard.fragments
    return shard.data if found is None else Runs(shard.data, found.places[first:end], found.counts[first:end])
