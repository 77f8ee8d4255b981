"""The base of storages that wrap another storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bytecheckpoint.storage.base import Capabilities, FileReader, FileStat, FileWriter, NewFile, Storage
from bytecheckpoint.storage.optional import (
    FolderProbe,
    RoomCheck,
    UnfinishedUpload,
    UploadCleanup,
    abort_uploads,
    check_room,
    folder_exists,
    unfinished_uploads,
)

__all__ = ["Call", "WrappedStorage", "unwrapped", "wrapped_like"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a storage, a writer or a reader.

    Attributes:
        operation: name of the method; "write" stands for `FileWriter.write_at`.
        names: names of the files, any number of them.
        nbytes: bytes that the caller gives or asks for; 0 for "read", whose result shows them.
        tear: function of a "write" that writes the first half of the first buffer, so that a fault can leave a torn write.
    """

    operation: str
    names: tuple[str, ...] = ()
    nbytes: int = 0
    tear: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """The names in one string, for rules that look for a part of a name."""
        return " ".join(self.names)


def unwrapped(storage: Storage) -> Storage:
    """Return the storage inside of all wrappers."""
    while isinstance(storage, WrappedStorage):
        storage = storage.inner
    return storage


def wrapped_like(storage: Storage, other: Storage) -> Storage:
    """Wrap another storage in the same wrappers.

    Args:
        storage: storage with any number of wrappers, or none.
        other: storage to wrap.
    """
    return storage.wrap(wrapped_like(storage.inner, other)) if isinstance(storage, WrappedStorage) else other


class WrappedStorage(Storage, FolderProbe, RoomCheck, UploadCleanup):
    """Passes every call on to `inner`, through `around`.

    Args:
        inner: the wrapped storage.
    """

    #: True if links in the folder may lead out of it.
    follows_links = False

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = _of_wrapped(inner)

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        """Carry out `call` by calling `function`. Called from several threads at once."""
        return function()

    def around_close(self, function: Callable[[], None]) -> None:
        """Abort a writer or close a reader by calling `function`."""
        function()

    @property
    def timeout(self) -> float | None:
        """Timeout of the inner storage, which uses it."""
        return self.inner.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self.inner.timeout = seconds

    @property
    def file_suffix(self) -> str:  # type: ignore[override]
        """Suffix of the inner storage's files."""
        return self.inner.file_suffix

    def encoded_bytes(self, name: str) -> int:
        return self.inner.encoded_bytes(name)

    def wrap(self, inner: Storage) -> Storage:
        """Return the same wrapper around another storage."""
        new = copy.copy(self)
        new.inner, new.url, new.capabilities = inner, inner.url, _of_wrapped(inner)
        return new

    def create(self, request: NewFile) -> FileWriter:
        call = Call("create", (request.name,), request.size)
        return self.around(call, lambda: _WrappedWriter(self, self.inner.create(request), request.name))

    def open(self, name: str) -> FileReader:
        return self.around(Call("open", (name,)), lambda: _WrappedReader(self, self.inner.open(name), name))

    def read(self, name: str) -> bytes:
        return self.around(Call("read", (name,)), lambda: self.inner.read(name))

    def stat(self, name: str) -> FileStat:
        return self.around(Call("stat", (name,)), lambda: self.inner.stat(name))

    def version(self, name: str) -> str:
        return self.around(Call("version", (name,)), lambda: self.inner.version(name))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        self.around(Call("publish", (name,), len(data)), lambda: self.inner.publish(name, data, expected=expected))

    def exists(self) -> bool:
        return self.around(Call("exists"), lambda: folder_exists(self.inner))

    def folders(self) -> list[str]:
        return self.around(Call("folders"), self.inner.folders)

    def list(self) -> list[tuple[str, int]]:
        return self.around(Call("list"), self.inner.list)

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self.around(Call("delete", names), lambda: self.inner.delete(names))

    def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        return self.around(Call("unfinished_uploads"), lambda: unfinished_uploads(self.inner))

    def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        names = tuple(upload.name for upload in uploads)
        self.around(Call("abort_uploads", names), lambda: abort_uploads(self.inner, uploads))

    def sync(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self.around(Call("sync", names), lambda: self.inner.sync(names))

    def adopt(self, name: str, from_url: str) -> bool:
        return self.around(Call("adopt", (name,)), lambda: self.inner.adopt(name, from_url))

    def check_publish(self, name: str, expected: str) -> None:
        self.around(Call("check_publish", (name,)), lambda: self.inner.check_publish(name, expected))

    def check_room(self, nbytes: int) -> None:
        self.around(Call("check_room"), lambda: check_room(self.inner, nbytes))


def _of_wrapped(inner: Storage) -> Capabilities:
    """Return the capabilities of a wrapper. Its calls may wait, even if those of `inner` do not."""
    return replace(inner.capabilities, in_memory=False)


class _WrappedWriter(FileWriter):
    def __init__(self, storage: WrappedStorage, inner: FileWriter, name: str) -> None:
        self._storage, self._inner, self._name = storage, inner, name
        self.direct, self.preferred_bytes = inner.direct, inner.preferred_bytes

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        def tear() -> None:
            self._inner.write_at(offset, [buffers[0][: len(buffers[0]) // 2]])

        call = Call("write", (self._name,), sum(map(len, buffers)), tear)
        self._storage.around(call, lambda: self._inner.write_at(offset, buffers))

    def finish(self, size: int) -> None:
        self._storage.around(Call("finish", (self._name,), size), lambda: self._inner.finish(size))

    def interrupt(self) -> None:
        self._inner.interrupt()

    def abort(self) -> None:
        self._storage.around_close(self._inner.abort)


class _WrappedReader(FileReader):
    def __init__(self, storage: WrappedStorage, inner: FileReader, name: str) -> None:
        self._storage, self._inner, self._name = storage, inner, name
        self.size, self.preferred_bytes = inner.size, inner.preferred_bytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        call = Call("read_into", (self._name,), sum(map(len, buffers)))
        return self._storage.around(call, lambda: self._inner.read_into(offset, buffers))

    def match_size(self, size: int) -> bool:
        matches = self._inner.match_size(size)
        self.size, self.preferred_bytes = self._inner.size, self._inner.preferred_bytes
        return matches

    def other_copies(self) -> Iterator[FileReader]:
        return (_WrappedReader(self._storage, other, self._name) for other in self._inner.other_copies())

    def close(self) -> None:
        self._storage.around_close(self._inner.close)
