"""Use files of earlier checkpoints again, whose tensors have not changed since (decision 0069).

A file of frozen parameters is adopted in three steps: it gets its name in the checkpoint's folder; its header must describe
the tensors of the planned file; and the live tensors must have its checksums. If one fails, the file is written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.earlier_files import EarlierFiles, holds_image, read_header
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.header_reader import content_of_header
from bytecheckpoint.representation.names import escape, file_stem, generation_of
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile
from bytecheckpoint.saving.messages import FileRecord
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.tracing.operation import span

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
        linked: names that adopted files got in the checkpoint's folder for this save.
    """

    def __init__(self, origin: FileOrigin, request: SaveRequest, earlier: EarlierFiles, cancel: Cancellation) -> None:
        self._origin = origin
        self._storage = request.storage
        self._settings = request.settings
        # A second one would take the core that trains.
        self._threads = 1 if request.mode is SaveMode.BACKGROUND else request.settings.storage.write_threads
        self._earlier = earlier
        self._cancel = cancel
        self._contents: dict[str, bytes] = {}
        self.records: list[FileRecord] = []
        self.linked: list[str] = []

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
        self.records, self.linked = [], []
        return [
            file for file in files if not file.frozen or not self._adopt(file, Image(tensors, [file.image], copies))
        ]

    def remember(self, records: Sequence[FileRecord]) -> None:
        """Remember the committed files, for later saves.

        Args:
            records: descriptions of all files of this rank in the checkpoint.
        """
        named = ((record.name, self._contents.get(file_stem(record.name))) for record in records)
        self._earlier.note_saved(self._storage.url, [(name, content) for name, content in named if content is not None])

    def _adopt(self, file: PlannedFile, image: Image) -> bool:
        """Adopt the file that takes the place of a planned one, if there is any; return whether there is.

        Args:
            file: planned file.
            image: its live tensors.
        """
        stem = file_stem(self._origin.file_name(file.state, file.part, values=False))
        content, _, _ = content_of_header(file.header.render(np.zeros(file.header.blocks, np.uint64)))
        self._contents[stem] = content
        for url, name in self._earlier.candidates(stem, content):
            is_here = url == self._storage.url  # this path is saved again
            if not is_here:
                if not self._storage.adopt(name, url):
                    continue
                self.linked.append(name)
            record = self._compared(name, content, file, image)
            if record is not None:
                self.records.append(record)
                return True
            if not is_here:
                self._storage.delete([self.linked.pop()])
        return False

    def _compared(self, name: str, content: bytes, file: PlannedFile, image: Image) -> FileRecord | None:
        """Describe a file in the checkpoint's folder if it holds the live tensors of a planned one."""
        header = file.header
        try:
            text, size = read_header(self._storage, name)
            found, generation, sums = content_of_header(text)
        except (CheckpointError, FileNotFoundError) as error:
            _log.warning("%s/%s cannot be used again, its tensors are written: %s", self._storage.url, name, error)
            return None
        if (
            (found, generation, size, len(sums))
            != (content, generation_of(name), len(text) + header.data_length, 8 * header.blocks)
        ):  # fmt: skip
            return None
        stored = np.frombuffer(sums, ">u8").astype(np.uint64)
        with span("compare", header.data_length, name):
            if not holds_image(stored, image, header.block_bytes, self._settings, self._threads, self._cancel):
                return None
        return FileRecord(
            name=name,
            state=escape(file.state),
            part=file.part,
            values=False,
            size=size,
            data_offset=len(text),
            header_sum=xxhash.xxh3_64_intdigest(text),
            block_bytes=header.block_bytes,
            sums=stored.tobytes(),
        )
