"""Base of storages that take a file only as a whole, from its first byte on, such as object stores.

The first bytes of a storage file hold the checksums of all others, so nothing can be sent before everything is hashed.
Stable buffers (the staging pool of an asynchronous save) stay where they are until then, and are sent from there. Other
buffers are written to a spool: a temporary file without a name, which disappears with the process. Either way memory stays
bounded, and no byte is copied from a device twice.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import Capabilities, FileWriter, NewFile, Storage, check_name
from bytecheckpoint.storage.posix.files import translated
from bytecheckpoint.storage.posix.open_files import write_fully
from bytecheckpoint.tracing.operation import bind_operation, count

__all__ = ["Pieces", "UploadingStorage"]

#: Bytes per read of the spool.
_SPOOL_STEP = 8 << 20
_END = 1 << 62


class Pieces(Protocol):
    """The content of a file: called with a range, it returns an iterator over the bytes, in order.

    It can be called repeatedly and from several threads. After an abort the iterator raises a CheckpointError, which the
    upload must let through.
    """

    def __call__(self, start: int = 0, stop: int = _END) -> Iterator[memoryview]:
        """Iterate over the bytes from `start` to `stop` or to the file's end."""
        ...


class UploadingStorage(Storage):
    """Base of storages that implement `upload` instead of `create`."""

    capabilities = Capabilities(whole_files=True, parallel_reads=8)

    def create(self, request: NewFile) -> FileWriter:
        check_name(request.name)
        self.check_upload(request)
        return _BufferWriter(self, request) if request.stable else _SpoolWriter(self, request)

    def check_upload(self, request: NewFile) -> None:
        """Raise the error that the upload would raise later, as far as it is cheap to find out."""

    @abstractmethod
    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        """Store a file atomically and durably, in parallel parts where the storage has those.

        Args:
            name: relative name.
            size: length in bytes.
            pieces: the content.
        """


class _UploadWriter(FileWriter):
    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        self._storage = storage
        self._name = request.name
        self._aborted = threading.Event()
        self._sent = False

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _until_aborted(self, start: int = 0, stop: int = _END) -> Iterator[memoryview]:
        for piece in self._pieces(start, stop):
            if self._aborted.is_set():
                raise CheckpointError(f"the upload of {self._storage.url}/{self._name} was aborted")
            begun = time.perf_counter()
            yield piece
            self._count("write", 1, time.perf_counter() - begun, len(piece))

    def _upload(self, size: int) -> None:
        self._count = bind_operation(count)  # a client takes the pieces on threads of its own
        self._storage.upload(self._name, size, self._until_aborted)
        self._sent = True
        self._release()

    def interrupt(self) -> None:
        self._aborted.set()

    def abort(self) -> None:
        self._aborted.set()
        self._release()
        if self._sent:
            with contextlib.suppress(StorageError):
                self._storage.delete([self._name])


class _BufferWriter(_UploadWriter):
    """Sends stable buffers from where they are."""

    preferred_bytes = _END

    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        super().__init__(storage, request)
        self._written: dict[int, list[memoryview]] = {}
        self._ordered: list[tuple[int, list[memoryview]]] = []

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if any(map(len, buffers)):
            self._written[offset] = list(buffers)  # a repeated write replaces the one that failed

    def finish(self, size: int) -> None:
        self._ordered = sorted(self._written.items(), key=lambda item: item[0])
        position = 0
        for offset, buffers in self._ordered:
            assert offset == position, f"bytes {position} to {offset} of {self._name} were not written"
            position += sum(map(len, buffers))
        assert position == size, f"{self._name} has {position} bytes, not {size}"
        self._upload(size)

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        for position, buffers in self._ordered:
            for buffer in buffers:
                piece = buffer[max(start - position, 0) : max(stop - position, 0)]
                position += len(buffer)
                if len(piece):
                    yield piece

    def _release(self) -> None:
        self._written, self._ordered = {}, []


class _SpoolWriter(_UploadWriter):
    """Spools the bytes in a temporary file until the file is complete."""

    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        super().__init__(storage, request)
        self._folder = settings().storage.spool_dir or tempfile.gettempdir()
        self._label = f"the spool of {storage.url}/{request.name} in {self._folder} (setting spool_dir)"
        self._written: dict[int, int] = {}
        self._size = 0
        with translated("create", self._label):
            # It is never linked, so its space is freed however this process ends.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  closed by `_release`
                dir=self._folder, prefix="bytecheckpoint-", buffering=0
            )

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translated("write", self._label):
            write_fully(self._file.fileno(), offset, buffers)
        if any(map(len, buffers)):
            self._written[offset] = sum(map(len, buffers))  # a repeated write counts once

    def finish(self, size: int) -> None:
        written = sum(self._written.values())
        assert written == size, f"{self._name} has {written} bytes, not {size}"
        self._size = size
        self._upload(size)

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        stop = min(stop, self._size)
        for at in range(start, stop, _SPOOL_STEP):
            with translated("read", self._label):
                piece = os.pread(self._file.fileno(), min(_SPOOL_STEP, stop - at), at)
            assert len(piece) == min(_SPOOL_STEP, stop - at)
            yield memoryview(piece)

    def _release(self) -> None:
        self._file.close()
