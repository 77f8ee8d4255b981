"""Write the bytes of one save on one rank, through the memory that suits the save and its storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.save_job import SaveJob
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.engine.writing import StagedChunk
from bytecheckpoint.liveness import busy
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving.call import SaveCall, SaveTask
from bytecheckpoint.saving.files import FileBatch, RankFiles
from bytecheckpoint.saving.messages import FileRecord
from bytecheckpoint.saving.planner import RankPlanner
from bytecheckpoint.saving.spare_values import SpareValues
from bytecheckpoint.saving.state import Value
from bytecheckpoint.storage.optional import check_room
from bytecheckpoint.tracing.operation import Operation, span

__all__ = ["RankWriter"]

#: Bytes per second that staging copies at least, unless a device hangs.
_SLOWEST_COPY = 64 << 20


@dataclass(slots=True)
class _Staged:
    """The bytes that an asynchronous save has copied.

    Attributes:
        batch: the files to write.
        pool: holds the chunks that are still to be written.
        chunks: those chunks.
        nbytes: bytes that a pool needs to hold all of them.
        values: the values among what was copied.
    """

    batch: FileBatch
    pool: StagingPool
    chunks: list[StagedChunk]
    nbytes: int
    values: Sequence[Value]


class RankWriter:
    """Stages and writes this rank's planned files, and further values that the coordinator asks for.

    Args:
        planner: has this rank's plan.
        files: this rank's files.
        resources: staging pool, helper process.
        call: the arguments of the save.
        task: on rank 0, gets the version of the catalog that the commit replaces; None elsewhere.
        operation: this rank's part of the save.
    """

    def __init__(
        self,
        planner: RankPlanner,
        files: RankFiles,
        resources: SaveResources,
        call: SaveCall,
        task: SaveTask | None,
        operation: Operation,
    ) -> None:
        self._files = files
        self._planner = planner
        self._resources = resources
        self._call = call
        self._task = task
        self._operation = operation
        self._staged: _Staged | None = None

    def prepare(self) -> None:
        """Touch the pages of the staging pool that `stage` needs; write nothing."""
        image = self._planned_batch().image
        nbytes = max(image.nbytes, self._spare_values(image).image.nbytes)
        self._files.release()
        self._resources.note_need(nbytes)
        self._resources.reserve(nbytes, self._call.settings, touch=True, device=self._device)

    def write_through(self) -> list[FileRecord]:
        """Write the planned files while the caller waits."""
        self._operation.phase = "write"
        self._check_target()
        batch = self._planned_batch()
        # A storage that takes whole files gets them from memory, if there is room, else from a spool file.
        whole_files = self._call.storage.capabilities.whole_files
        pool = (
            self._resources.whole_pool(batch.image.nbytes, self._call.settings, self._device) if whole_files else None
        )
        self._resources.note_need(batch.job.slot_bytes() if pool is None else batch.image.nbytes)
        if pool is None:
            records = self._stream(batch, self._resources.pool)
            self._resources.fit_pool()
            return records
        try:
            batch.job.create_files(pool, None)
            return self._finish(batch, batch.job.write_staged(batch.job.stage(pool)))
        finally:
            self._give_back(pool)

    def stage(self) -> None:
        """Copy the planned files into the staging pool, and let go of the live tensors."""
        self._operation.phase = "stage"
        batch = self._planned_batch()
        image = batch.image
        values = self._planner.values_to_write()
        spare = self._spare_values(image)
        nbytes = max(image.nbytes, spare.image.nbytes)
        settings = self._call.settings
        self._resources.note_need(nbytes)
        device = self._device
        with span("reserve", nbytes):
            pool = self._resources.whole_pool(nbytes, settings, device)
            if pool is None:
                pool = self._resources.staging_pool(image.nbytes, settings, device)
        self._operation.count("staging pool", nbytes=pool.capacity)
        if pool.capacity < image.nbytes:
            self._resources.warn_of_small_pool(image.nbytes, settings)
            self._create_files(batch.job, pool)
            with self._planner.state.copies.queued():
                for value in values:
                    value.hash()  # no copy stays that could be hashed later
                    value.release()
        with busy(settings.timeout + nbytes / _SLOWEST_COPY):
            with span("copy", image.nbytes):
                chunks = batch.job.stage(pool)
            self._staged = _Staged(batch, pool, chunks, nbytes, values)
        if pool.capacity >= image.nbytes:
            for value in values:
                file, offset = self._files.place_of(value)
                value.data = image.staged(value.data, file, offset, pool.tensor())
        spare.stage(pool)
        image.tensors = []
        self._operation.mark("stage")

    def write_staged(self) -> list[FileRecord]:
        """Write what `stage` has copied."""
        staged = self._staged
        assert staged is not None
        if staged.pool is self._resources.pool:
            records = self._write_staged(staged)
            self._resources.fit_pool()
            return records
        try:
            with self._resources.warming_up(staged.nbytes, self._call.settings):
                return self._write_staged(staged)
        finally:
            self._give_back(staged.pool)

    def rewrite(self) -> list[FileRecord]:
        """Remove the written files, and write those of another plan from the live tensors."""
        self._files.start_again()
        return self._stream(self._planned_batch(), self._resources.pool)

    def write_values(self, values: Sequence[Value]) -> list[FileRecord]:
        """Write further values, beside the planned files."""
        batch = self._files.add_values(values)
        if self._staged is None:
            return self._stream(batch, self._resources.pool)
        pool = StagingPool(shared=False)  # the values lie in the pool that they were staged into
        try:
            return self._stream(batch, pool)
        finally:
            pool.release()

    @property
    def _device(self) -> torch.device | None:
        """A device that copies into the pool."""
        devices = self._planner.state.copies.devices
        return devices[0] if devices else None

    # --- parts of these -------------------------------------------------------------------------------------------

    def _planned_batch(self) -> FileBatch:
        planner = self._planner
        batch = self._files.add_planned(planner.plan, planner.state.shards, planner.values_to_write())
        self._operation.planned_bytes = sum(file.nbytes for file in batch.image.files)
        return batch

    def _spare_values(self, image: Image) -> SpareValues:
        """Collect the values that this rank does not write, to be staged behind `image`."""
        others = [v for v in self._planner.state.values if self._files.place_of(v)[0] < 0]
        return SpareValues(others, image.nbytes, self._planner.state.copies)

    def _check_target(self) -> None:
        """On rank 0, before the first byte: note the catalog's version, and check that it may be replaced and all fits."""
        if self._task is not None:
            storage = self._call.storage
            self._task.replaces = storage.version(CATALOG_NAME)
            storage.check_publish(CATALOG_NAME, self._task.replaces)
            check_room(storage, self._planner.plan.nbytes)

    def _create_files(self, job: SaveJob, pool: StagingPool) -> None:
        self._check_target()
        by_helper = pool.shared and self._resources.start_helper(self._call.settings)
        job.create_files(pool, self._resources.helper if by_helper else None)

    def _write_staged(self, staged: _Staged) -> list[FileRecord]:
        self._operation.phase = "write"
        job = staged.batch.job
        if not job.opened:
            self._create_files(job, staged.pool)

        def hash_values() -> None:
            for value in staged.values:
                value.hash()
                value.release()  # other saves use the pool later

        return self._finish(staged.batch, job.write_staged(staged.chunks, hash_values))

    def _stream(self, batch: FileBatch, pool: StagingPool) -> list[FileRecord]:
        """Write a batch through a few small buffers of `pool`."""
        # The pool's pages are touched already; touching new ones would cost more than copying into them.
        pool.reserve(batch.job.slot_bytes(), touch=False, device=self._device)
        return self._finish(batch, batch.job.write_through(pool))

    def _finish(self, batch: FileBatch, sums: list[NDArray[np.uint64]]) -> list[FileRecord]:
        self._operation.mark("write")
        self._operation.phase = "finish"
        records = self._files.finish(batch, sums)
        self._operation.mark("finish")
        return records

    def _give_back(self, pool: StagingPool) -> None:
        """Free `pool`, and the plan's views of it, if it was made for this save only."""
        if self._resources.give_back(pool):
            self._planner.plan.targets.forget()
