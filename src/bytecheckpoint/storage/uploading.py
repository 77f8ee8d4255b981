"""Storages that take a file only as a whole, from its first byte on: object stores and the like.

A storage file's first bytes hold the checksums of all others, so nothing can be sent before everything was hashed. What
happens until then depends on the buffers. Stable ones (the staging pool of an asynchronous save) are only remembered, and
sent from where they are. The others are written to a spool: a temporary file of this machine without a name, which
disappears with the process. Either way memory stays bounded, and no byte is copied from a device twice.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..errors import CheckpointError, StorageError
from ..settings import settings
from .base import Capabilities, FileWriter, NewFile, Storage, check_name
from .local import translated, write_fully

__all__ = ["Pieces", "UploadingStorage"]

#: Bytes that are read back from the spool at a time.
_SPOOL_STEP = 8 << 20
_EVERYTHING = 1 << 62


class Pieces(Protocol):
    """Makes an iterator over the bytes of a file, or of a range of it, in order.

    It can be asked for more than once, and from several threads. It raises a CheckpointError, which the upload must let
    through, when the file is not wanted any more.
    """

    def __call__(self, start: int = 0, stop: int = _EVERYTHING) -> Iterator[memoryview]:
        """The bytes from `start` to before `stop`, or to the file's end."""
        ...


class UploadingStorage(Storage):
    """Base of storages that implement `upload` in the place of `create`."""

    capabilities = Capabilities(whole_files=True)
    reads = 8

    def create(self, request: NewFile) -> FileWriter:
        check_name(request.name)
        self.admit(request)
        return _Remembering(self, request) if request.stable else _Spooling(self, request)

    def admit(self, request: NewFile) -> None:
        """Refuse now an upload that would fail later, if that can be told cheaply."""

    @abstractmethod
    def upload(self, name: str, size: int, pieces: Pieces) -> None:
        """Store a file, atomically and durably, in parallel parts where the storage has those.

        Args:
            name: relative name.
            size: length in bytes.
            pieces: its bytes.
        """


class _Uploading(FileWriter):
    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        self._storage = storage
        self._name = request.name
        self._stopped = threading.Event()
        self._sent = False

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _until_stopped(self, start: int = 0, stop: int = _EVERYTHING) -> Iterator[memoryview]:
        for piece in self._pieces(start, stop):
            if self._stopped.is_set():
                raise CheckpointError(f"the upload of {self._storage.url}/{self._name} was given up")
            yield piece

    def _upload(self, size: int) -> None:
        self._storage.upload(self._name, size, self._until_stopped)
        self._sent = True
        self._release()

    def interrupt(self) -> None:
        self._stopped.set()

    def abort(self) -> None:
        self._stopped.set()
        self._release()
        if self._sent:
            with contextlib.suppress(StorageError):
                self._storage.delete([self._name])


class _Remembering(_Uploading):
    """Sends stable buffers from where they are."""

    step_bytes = _EVERYTHING

    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        super().__init__(storage, request)
        self._written: dict[int, list[memoryview]] = {}
        self._runs: list[tuple[int, list[memoryview]]] = []

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if any(map(len, buffers)):
            self._written[offset] = list(buffers)  # a write that is repeated takes the place of the one that failed

    def finish(self, size: int) -> None:
        self._runs = sorted(self._written.items(), key=lambda run: run[0])
        position = 0
        for offset, buffers in self._runs:
            assert offset == position, f"bytes {position} to {offset} of {self._name} were not written"
            position += sum(map(len, buffers))
        assert position == size, f"{self._name} has {position} bytes, not {size}"
        self._upload(size)

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        for position, buffers in self._runs:
            for buffer in buffers:
                piece = buffer[max(start - position, 0) : max(stop - position, 0)]
                position += len(buffer)
                if len(piece):
                    yield piece

    def _release(self) -> None:
        self._written, self._runs = {}, []


class _Spooling(_Uploading):
    """Keeps bytes in a temporary file until all are there."""

    def __init__(self, storage: UploadingStorage, request: NewFile) -> None:
        super().__init__(storage, request)
        self._folder = settings().spool_dir or tempfile.gettempdir()
        self._shown = f"the spool of {storage.url}/{request.name} in {self._folder} (settings.spool_dir)"
        self._written: dict[int, int] = {}
        self._size = 0
        with translated("create", self._shown):
            # Unlinked as it is made: whatever ends this process, the space comes back.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  closed by `_release`
                dir=self._folder, prefix="bytecheckpoint-", buffering=0
            )

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translated("write", self._shown):
            write_fully(self._file.fileno(), offset, buffers)
        if any(map(len, buffers)):
            self._written[offset] = sum(map(len, buffers))  # a write that is repeated counts once

    def finish(self, size: int) -> None:
        written = sum(self._written.values())
        assert written == size, f"{self._name} has {written} bytes, not {size}"
        self._size = size
        self._upload(size)

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        stop = min(stop, self._size)
        for at in range(start, stop, _SPOOL_STEP):
            with translated("read", self._shown):
                piece = os.pread(self._file.fileno(), min(_SPOOL_STEP, stop - at), at)
            assert len(piece) == min(_SPOOL_STEP, stop - at)
            yield memoryview(piece)

    def _release(self) -> None:
        self._file.close()
