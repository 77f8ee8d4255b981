"""Local and mounted POSIX file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from bytecheckpoint.errors import StorageError
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.base import FileReader, FileStat, FileWriter, NewFile, Storage, check_name
from bytecheckpoint.storage.posix.files import (
    fsync_directory,
    fsync_parents,
    in_page_cache,
    is_in_memory,
    open_file,
    stat_file,
    translated,
    version_of,
)
from bytecheckpoint.storage.posix.publish import publish
from bytecheckpoint.storage.threads import call_with_timeout

__all__ = ["LocalStorage", "PosixStorage", "write_fully"]

_T = TypeVar("_T")
_ALIGN = 4096
#: Buffers per system call.
_MAX_BUFFERS = 512


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return the rest of `buffers` after `done` bytes of them were moved."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def write_fully(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write all of `buffers` one after the other at byte `offset` of a file."""
    rest = [b for b in buffers if len(b)]
    while rest:
        done = os.pwritev(fd, rest[:_MAX_BUFFERS], offset)
        if done == 0:  # the loop would never end
            raise OSError(errno.EIO, f"the file system took no byte of {sum(map(len, rest))}")
        offset += done
        rest = _advance(rest, done)


class _Writer(FileWriter):
    def __init__(self, path: str, label: str, size: int, *, direct: bool, reserve: bool) -> None:
        self._path = path
        self._label = label
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.direct = direct
        with translated("create", label):
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                # Some file systems create the file before they refuse the flag.
                self._fd = os.open(path, flags & ~os.O_EXCL, 0o666)
            self._identity = _identity(os.fstat(self._fd))
            if reserve:
                # So a full disk is found before the first byte is copied, and parallel direct writes need no exclusive
                # lock to extend the file.
                try:
                    os.posix_fallocate(self._fd, 0, max(-(-size // _ALIGN) * _ALIGN, 1))
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        self.abort()
                        raise

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translated("write", self._label):
            write_fully(self._fd, offset, buffers)

    def finish(self, size: int) -> None:
        with translated("finish", self._label):
            try:
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
            finally:
                self._close()

    def _close(self) -> None:
        # Reset before the close: even a close that fails closes, and the number may then belong to another file.
        fd, self._fd = self._fd, -1
        os.close(fd)

    def abort(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._close()
        # On a mount that hung this may run late, after another attempt has written a file of the same name.
        with contextlib.suppress(OSError):
            if _identity(os.lstat(self._path)) == self._identity:
                os.unlink(self._path)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class _Reader(FileReader):
    def __init__(self, path: str, label: str) -> None:
        self._path = path
        self._label = label
        self._lock = threading.Lock()
        with translated("open", label, may_be_absent=True):
            self._fd, found = open_file(path)
            self.size = found.st_size
        self._outdated: list[int] = []

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        rest = [b for b in buffers if len(b)]
        total = 0
        with translated("read", self._label):
            while rest:
                done = self._read(rest[:_MAX_BUFFERS], offset + total)
                if done == 0:
                    break
                total += done
                rest = _advance(rest, done)
        return total

    def _read(self, buffers: list[memoryview], offset: int) -> int:
        fd = self._fd
        try:
            return os.preadv(fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # The server was restarted or lost track of the open file. If the file still exists, it can be opened by its name.
        with self._lock:
            if self._fd == fd:
                self._outdated.append(fd)  # other threads may be reading from it
                self._fd, _ = open_file(self._path)
            fd = self._fd
        return os.preadv(fd, buffers, offset)

    def close(self) -> None:
        if self._fd >= 0:
            for fd in (*self._outdated, self._fd):
                os.close(fd)
            self._fd, self._outdated = -1, []


def _sizes(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
    """Iterate over (name, size) of the files among `entries`, without those that are removed meanwhile."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file():
                yield entry.name, entry.stat().st_size


def _retry_if_removed(function: Callable[[], _T]) -> _T:
    """Return `function()`, which makes a folder and a file in it, and retry it when the folder disappears in between.

    Another process may delete the folder's last file, and with it the folder, since no storage lists empty folders.
    """
    for _ in range(3):
        try:
            return function()
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return function()


class PosixStorage(Storage):
    """A folder of a POSIX file system.

    Args:
        root: absolute path of the folder; the first write creates it.
        url: its address for users.
    """

    def __init__(self, root: str, url: str) -> None:
        self.root = root
        self.url = url
        self.in_memory = is_in_memory(root)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _label(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _with_timeout(self, action: str, label: str, call: Callable[[], _T], *, undecided: bool = False) -> _T:
        """Return `call()`, or raise an error if the file system (a mount whose server is gone) does not answer.

        The engine creates, writes, opens and reads files on its own threads, for which it waits with a timeout.
        """
        if self.in_memory:
            return call()
        return call_with_timeout(self.call_timeout(), call, f"cannot {action} {label}", undecided=undecided)

    def create(self, request: NewFile) -> FileWriter:
        path, label = self._path(request.name), self._label(request.name)
        folder = os.path.dirname(path)

        def create() -> FileWriter:
            with translated("create the folder of", label):
                self._make_folder(folder)
                # tmpfs, overlay and network file systems have anonymous device numbers, and rarely gain from direct I/O.
                disk = os.major(os.stat(folder).st_dev) != 0
                direct = request.direct and (disk or settings().direct_io == "on")
            return _Writer(path, label, request.size, direct=direct, reserve=disk or self.in_memory)

        return _retry_if_removed(create)

    def open(self, name: str) -> FileReader:
        return _Reader(self._path(name), self._label(name))

    def read(self, name: str) -> bytes:
        path, label = self._path(name), self._label(name)

        def read() -> bytes:
            with translated("read", label, may_be_absent=True):
                fd, _ = open_file(path)
                with os.fdopen(fd, "rb") as file:
                    return file.read()

        return self._with_timeout("read", label, read)

    def is_cached(self, name: str, offsets: Sequence[int]) -> bool:
        path, label = self._path(name), self._label(name)

        def probe() -> bool:
            with translated("open", label, may_be_absent=True):
                fd, _ = open_file(path)
            try:
                return all(in_page_cache(fd, offset) for offset in offsets)
            finally:
                os.close(fd)

        return self.in_memory or self._with_timeout("open", label, probe)

    def stat(self, name: str) -> FileStat:
        path, label = self._path(name), self._label(name)

        def look() -> os.stat_result:
            with translated("look at", label, may_be_absent=True):
                return stat_file(path)

        found = self._with_timeout("look at", label, look)
        return FileStat(found.st_size, found.st_mtime, version_of(found))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, label = self._path(name), self._label(name)
        folder = os.path.dirname(path)

        def publish_it() -> None:
            with translated("publish", label):
                self._make_folder(folder)
                publish(path, label, data, expected)
                fsync_directory(folder)

        # A call that hangs may still take effect later, if nobody else has published meanwhile.
        self._with_timeout("publish", label, lambda: _retry_if_removed(publish_it), undecided=True)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` with durable names for all new parents, or a crash could lose a committed folder."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            fsync_directory(os.path.dirname(path))

    def open_lock(self, name: str) -> int:
        """Open a file, created if missing, that processes of this machine can lock; returns its descriptor."""
        path, label = self._path(name), self._label(name)

        def opened() -> int:
            with translated("create", label):
                self._make_folder(os.path.dirname(path))
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        return self._with_timeout("create", label, opened)

    def folders(self) -> list[str]:
        def folders() -> list[str]:
            with translated("list", self.url):
                try:
                    return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
                except (FileNotFoundError, NotADirectoryError):
                    return []

        return self._with_timeout("list", self.url, folders)

    def _list(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        with translated("list", self.url):
            try:
                entries = list(os.scandir(self.root))
            except (FileNotFoundError, NotADirectoryError):
                return []
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    inside = []
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        inside = list(os.scandir(entry.path))
                    found += [(f"{entry.name}/{name}", size) for name, size in _sizes(inside)]
                else:
                    found += _sizes([entry])
        return sorted(found)

    def list(self) -> list[tuple[str, int]]:
        return self._with_timeout("list", self.url, self._list)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self._with_timeout("delete files of", self.url, lambda: self._delete(names))

    def _delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with (
                translated("delete", self._label(name)),
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
            ):
                os.unlink(path)
            if "/" in name:
                folders.add(os.path.dirname(path))
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}

        def sync() -> None:
            with translated("sync", self.url):
                for folder in sorted(folders | {self.root}):
                    fsync_directory(folder)
                fsync_parents(self.root)

        self._with_timeout("sync", self.url, sync)


class LocalStorage(PosixStorage):
    """A folder of a local or mounted file system. A relative path is resolved at construction."""

    def __init__(self, path: str) -> None:
        root = os.path.abspath(path)
        super().__init__(root, root)
