"""Use files of earlier checkpoints again, whose tensors have not changed since (decision 0069).

A file of frozen parameters is adopted in three steps: it gets its name in the checkpoint's folder; its header must describe
the tensors of the planned file; and the live tensors must have its checksums. If one fails, the file is written.

A save that copies in the background compares only a part of a large file before the next step of an optimizer, so a tensor
that changes between all saves is found there, and copied with the others. It compares the rest behind the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.earlier_files import EarlierFiles, holds_chunks, read_header
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.staging import Image, chunks_of
from bytecheckpoint.engine.writing import WrittenSums
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.fingerprints import FileBoxSums
from bytecheckpoint.representation.header_reader import content_of_header
from bytecheckpoint.representation.names import file_stem, generation_of
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, moved_up, record_of
from bytecheckpoint.saving.messages import FileRecord
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.storage.base import file_size
from bytecheckpoint.tracing.operation import span
from bytecheckpoint.tuning import tuning

__all__ = ["Adoption"]

_log = logging.getLogger("bytecheckpoint")


class Adoption:
    """The files of earlier checkpoints that one rank uses again in one save.

    Args:
        origin: origin of the files that the save writes.
        request: arguments of the save.
        earlier: files that may be used again.
        cancel: token of the save.

    Attributes:
        records: descriptions of the adopted files.
        written: descriptions of files that were written behind the step, because only their rest differed.
        linked: names that files of `records` and `written` got in the checkpoint's folder for this save.
    """

    def __init__(self, origin: FileOrigin, request: SaveRequest, earlier: EarlierFiles, cancel: Cancellation) -> None:
        self._origin = origin
        self._request = request
        self._rest: list[tuple[PlannedFile, Image, NDArray[np.uint64]]] = []
        self._earlier = earlier
        self._cancel = cancel
        self._contents: dict[str, bytes] = {}
        self.records: list[FileRecord] = []
        self.written: list[FileRecord] = []
        self.linked: list[str] = []

    @property
    def files(self) -> list[FileRecord]:
        """Descriptions of all files in the place of planned ones that `adopt` did not return."""
        return [*self.records, *self.written]

    @property
    def to_compare(self) -> list[int]:
        """Indexes of the plan's tensors that `compare_rest` reads."""
        return [number for file, _, _ in self._rest for number in file.image.shards]

    def adopt(
        self, files: Sequence[PlannedFile], tensors: list[torch.Tensor | Runs], copies: DeviceCopies
    ) -> list[PlannedFile]:
        """Adopt the files whose tensors are unchanged; return the others, which must be written.

        Args:
            files: planned files.
            tensors: tensors of the plan's image.
            copies: copies from the devices.
        """
        self._contents.clear()
        self.records, self.written, self.linked = [], [], []
        return [
            file for file in files if not file.frozen or not self._adopt(file, Image(tensors, [file.image], copies))
        ]

    def compare_rest(self) -> tuple[list[PlannedFile], Image | None]:
        """Compare the live tensors of the files of which only a part is compared yet.

        Returns:
            The files that differ, which must be written in place of the adopted ones, and their image; None for no files.
        """
        rest, self._rest = self._rest, []
        different = []
        for file, image, stored in rest:
            name = self._name(file)
            (old,) = (record for record in self.records if file_stem(record.name) == file_stem(name))
            if self._holds(file, image, stored) and file_size(self._request.storage, old.name) == old.size:
                continue
            self.records.remove(old)
            if old.name in self.linked:
                self._request.storage.delete([old.name])
                self.linked.remove(old.name)
            self.linked.append(name)
            different.append(file)
        if not different:
            return [], None
        different = moved_up(different)
        return different, Image(image.tensors, [file.image for file in different], image.copies)

    def lost(self) -> list[str]:
        """Return the names of adopted files that somebody has removed meanwhile."""
        storage = self._request.storage
        return [record.name for record in self.records if file_size(storage, record.name) != record.size]

    def remember(self, records: Sequence[FileRecord]) -> None:
        """Remember the committed files, for later saves.

        Args:
            records: descriptions of all files of this rank in the checkpoint.
        """
        named = ((record.name, self._contents.get(file_stem(record.name))) for record in records)
        known = [(name, content) for name, content in named if content is not None]
        self._earlier.note_saved(self._request.storage.url, known)

    def _adopt(self, file: PlannedFile, image: Image) -> bool:
        """Adopt the file that takes the place of a planned one, if there is any; return whether there is.

        Args:
            file: planned file.
            image: its live tensors.
        """
        stem = file_stem(self._name(file))
        content, _, _ = content_of_header(file.header.render(np.zeros(file.header.blocks, np.uint64)))
        self._contents[stem] = content
        storage = self._request.storage
        candidates = () if self._request.incremental == "full" else self._earlier.candidates(stem, content)
        for url, name in candidates:
            is_here = url == storage.url  # this path is saved again
            if not is_here:
                if not storage.adopt(name, url):
                    continue
                self.linked.append(name)
            record = self._compared(name, content, file, image)
            if record is not None:
                self.records.append(record)
                return True
            if not is_here:
                storage.delete([self.linked.pop()])
        return False

    def _compared(self, name: str, content: bytes, file: PlannedFile, image: Image) -> FileRecord | None:
        """Describe a file in the checkpoint's folder if it holds the live tensors of a planned one."""
        header, storage = file.header, self._request.storage
        try:
            text, size = read_header(storage, name)
            found, generation, sums = content_of_header(text)
        except (CheckpointError, FileNotFoundError) as error:
            _log.warning("%s/%s cannot be used again, its tensors are written: %s", storage.url, name, error)
            return None
        if (
            (found, generation, size, len(sums))
            != (content, generation_of(name), len(text) + header.data_length, 8 * header.blocks)
        ):  # fmt: skip
            return None
        stored = np.frombuffer(sums, ">u8").astype(np.uint64)
        part = 1
        fingerprints = FileBoxSums(file.boxes() if self._request.settings.fingerprint else ())
        if (
            self._request.mode is SaveMode.BACKGROUND and not self._request.settings.fingerprint
        ):  # which reads all bytes
            part = max(1, -(-header.data_length // tuning().frozen_look_bytes))
        if not self._holds(file, image, stored, part, fingerprints):
            return None
        if file_size(storage, name) != size:  # it was removed meanwhile
            return None
        if part > 1:
            self._rest.append((file, image, stored))
        # Its header may have another length than the planned one: it names the files of its own save.
        written = WrittenSums(stored, fingerprints.sums)
        return replace(record_of(name, file, text, written), data_offset=len(text), size=size)

    def _holds(
        self,
        file: PlannedFile,
        image: Image,
        stored: NDArray[np.uint64],
        part: int = 1,
        fingerprints: FileBoxSums | None = None,
    ) -> bool:
        """Return whether the live tensors have the checksums `stored`, in all blocks or in each `part`-th."""
        settings, block_bytes = self._request.settings, file.header.block_bytes
        chunks = chunks_of(image.files, settings.storage.chunk_bytes if part == 1 else block_bytes)[::part]
        # A second thread would take the core that trains.
        threads = 1 if self._request.mode is SaveMode.BACKGROUND else settings.storage.write_threads
        with span("compare", sum(chunk.nbytes for chunk in chunks), self._name(file)):
            return holds_chunks(stored, image, chunks, block_bytes, settings, threads, self._cancel, fingerprints)

    def _name(self, file: PlannedFile) -> str:
        return self._origin.file_name(file.state, file.part, values=False)
