"""Local and mounted POSIX file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import StorageError
from ..settings import settings
from .base import FileReader, FileStat, FileWriter, NewFile, Storage, check_name
from .parallel import within
from .posix_files import (
    FULL,
    TRANSIENT,
    fresh_stat,
    fsync_directory,
    fsync_way_to,
    lies_in_memory,
    open_file,
    translated,
    version_of,
)
from .posix_publish import publish

__all__ = ["FULL", "TRANSIENT", "LocalStorage", "PosixStorage", "translated", "write_fully"]

_T = TypeVar("_T")
_ALIGN = 4096
_IOV = 512


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after `done` bytes of them were moved."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def write_fully(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write `buffers` one after the other at byte `offset` of a file, in as many calls as it takes."""
    left = [b for b in buffers if len(b)]
    while left:
        done = os.pwritev(fd, left[:_IOV], offset)
        if done == 0:  # no error, and no end either
            raise OSError(errno.EIO, f"the file system took no byte of {sum(map(len, left))}")
        offset += done
        left = _advance(left, done)


class _Writer(FileWriter):
    def __init__(self, path: str, shown: str, size: int, *, direct: bool, reserve: bool) -> None:
        self._path = path
        self._shown = shown
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.direct = direct
        with translated("create", shown):
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
                # A full disk shows before the first byte is copied, and parallel direct writes need no exclusive lock
                # for extending the file.
                try:
                    os.posix_fallocate(self._fd, 0, max(-(-size // _ALIGN) * _ALIGN, 1))
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        self.abort()
                        raise

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with translated("write", self._shown):
            write_fully(self._fd, offset, buffers)

    def finish(self, size: int) -> None:
        with translated("finish", self._shown):
            try:
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
            finally:
                self._close()

    def _close(self) -> None:
        # Forgotten first: a close that fails has closed, and the number may be another file's by now.
        fd, self._fd = self._fd, -1
        os.close(fd)

    def abort(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._close()
        # On a mount that hung this may come late, when another attempt has written a file of the same name.
        with contextlib.suppress(OSError):
            if _identity(os.lstat(self._path)) == self._identity:
                os.unlink(self._path)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class _Reader(FileReader):
    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._lock = threading.Lock()
        with translated("open", shown, may_be_absent=True):
            self._fd, found = open_file(path)
            self.size = found.st_size
        self._outdated: list[int] = []

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        left = [b for b in buffers if len(b)]
        total = 0
        with translated("read", self._shown):
            while left:
                done = self._read(left[:_IOV], offset + total)
                if done == 0:
                    break
                total += done
                left = _advance(left, done)
        return total

    def _read(self, buffers: list[memoryview], offset: int) -> int:
        fd = self._fd
        try:
            return os.preadv(fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # The server was restarted, or lost track of this open file: its name leads to it still, if it exists.
        with self._lock:
            if self._fd == fd:
                self._outdated.append(fd)  # others may be reading from it
                self._fd, _ = open_file(self._path)
            fd = self._fd
        return os.preadv(fd, buffers, offset)

    def close(self) -> None:
        if self._fd >= 0:
            for fd in (*self._outdated, self._fd):
                os.close(fd)
            self._fd, self._outdated = -1, []


def _sizes(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
    """(name, size) of the files among them; those that are removed meanwhile were never there."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file():
                yield entry.name, entry.stat().st_size


def _unless_emptied(function: Callable[[], _T]) -> _T:
    """`function()`, which makes a folder and something in it; again when the folder is gone in between.

    Whoever removes a folder's last file removes the folder, since no storage shows empty ones.
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
        root: absolute path of the folder; it is made when something is written.
        url: how users call it.
    """

    def __init__(self, root: str, url: str) -> None:
        self.root = root
        self.url = url
        self.in_memory = lies_in_memory(root)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _shown(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def _answered(self, action: str, shown: str, call: Callable[[], _T], *, undecided: bool = False) -> _T:
        """`call()`; a file system that does not answer (a mount whose server is gone) is an error in the end.

        Files are created, written, opened and read on threads for which the engine waits with a limit.
        """
        if self.in_memory:
            return call()
        return within(self.limit(), call, f"cannot {action} {shown}", undecided=undecided)

    def create(self, request: NewFile) -> FileWriter:
        path, shown = self._path(request.name), self._shown(request.name)
        folder = os.path.dirname(path)

        def create() -> FileWriter:
            with translated("create the folder of", shown):
                self._make_folder(folder)
                # tmpfs, overlay and network file systems have anonymous device numbers: as a rule nothing to gain there.
                disk = os.major(os.stat(folder).st_dev) != 0
                direct = request.direct and (disk or settings().direct_io == "on")
            return _Writer(path, shown, request.size, direct=direct, reserve=disk)

        return _unless_emptied(create)

    def open(self, name: str) -> FileReader:
        return _Reader(self._path(name), self._shown(name))

    def read(self, name: str) -> bytes:
        path, shown = self._path(name), self._shown(name)

        def read() -> bytes:
            with translated("read", shown, may_be_absent=True):
                fd, _ = open_file(path)
                with os.fdopen(fd, "rb") as file:
                    return file.read()

        return self._answered("read", shown, read)

    def stat(self, name: str) -> FileStat:
        path, shown = self._path(name), self._shown(name)

        def look() -> os.stat_result:
            with translated("look at", shown, may_be_absent=True):
                return fresh_stat(path)

        found = self._answered("look at", shown, look)
        return FileStat(found.st_size, found.st_mtime, version_of(found))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, shown = self._path(name), self._shown(name)
        folder = os.path.dirname(path)

        def publish_it() -> None:
            with translated("publish", shown):
                self._make_folder(folder)
                publish(path, shown, data, expected)
                fsync_directory(folder)

        # What hangs may take effect when it is answered, if nobody has published anything else meanwhile.
        self._answered("publish", shown, lambda: _unless_emptied(publish_it), undecided=True)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` with durable names for all new parents: a commit must not sit in a directory that is lost."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            fsync_directory(os.path.dirname(path))

    def open_lock(self, name: str) -> int:
        """A descriptor of a file of the folder, made where it is missing, for processes of this machine to lock."""
        path, shown = self._path(name), self._shown(name)

        def opened() -> int:
            with translated("create", shown):
                self._make_folder(os.path.dirname(path))
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        return self._answered("create", shown, opened)

    def folders(self) -> list[str]:
        def folders() -> list[str]:
            with translated("list", self.url):
                try:
                    return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
                except (FileNotFoundError, NotADirectoryError):
                    return []

        return self._answered("list", self.url, folders)

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
        return self._answered("list", self.url, self._list)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self._answered("delete files of", self.url, lambda: self._delete(names))

    def _delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with (
                translated("delete", self._shown(name)),
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
                fsync_way_to(self.root)

        self._answered("sync", self.url, sync)


class LocalStorage(PosixStorage):
    """A folder of a local or mounted file system. The path is made absolute when the object is made."""

    def __init__(self, path: str) -> None:
        root = os.path.abspath(path)
        super().__init__(root, root)
