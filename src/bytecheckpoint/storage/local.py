"""Local and mounted POSIX file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

from ..errors import StorageError, StorageFullError, StorageUnavailableError
from .base import FileReader, FileWriter, Storage

__all__ = ["LocalStorage"]

_ALIGN = 4096
_IOV = 512
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV}
_TEMPORARY = ".publishing-"


@contextlib.contextmanager
def _translated(action: str, path: str, *, may_be_absent: bool = False) -> Iterator[None]:
    """Turn an OSError into the typed error that tells a handler what it can do."""
    try:
        yield
    except OSError as error:
        if may_be_absent and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            raise FileNotFoundError(error.errno, error.strerror, path) from error  # no such *file*, in any case
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise StorageFullError(f"cannot {action} {path}: {reason}; free space and save again") from error
        if error.errno in _TRANSIENT:
            raise StorageUnavailableError(f"cannot {action} {path}: {reason}; check the device or mount") from error
        raise StorageError(f"cannot {action} {path}: {reason}") from error


def _fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _advance(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after `done` bytes of them were moved."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


class _Writer(FileWriter):
    def __init__(self, path: str, size: int, direct: bool) -> None:
        self._path = path
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.direct = direct
        with _translated("create", path):
            try:
                self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                # Some file systems create the file before they refuse the flag.
                self._fd = os.open(path, flags & ~os.O_EXCL, 0o666)
            if self.direct:
                # Blocks are reserved at once: parallel direct writes then need no exclusive lock for extending the
                # file, and a full disk shows before the first byte is copied.
                try:
                    os.posix_fallocate(self._fd, 0, max(-(-size // _ALIGN) * _ALIGN, 1))
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        self.abort()
                        raise

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        left = [b for b in buffers if len(b)]
        with _translated("write", self._path):
            while left:
                done = os.pwritev(self._fd, left[:_IOV], offset)
                offset += done
                left = _advance(left, done)

    def finish(self, size: int) -> None:
        with _translated("finish", self._path):
            try:
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            os.unlink(self._path)


class _Reader(FileReader):
    def __init__(self, path: str) -> None:
        self._path = path
        with _translated("open", path, may_be_absent=True):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        left = [b for b in buffers if len(b)]
        total = 0
        with _translated("read", self._path):
            while left:
                done = os.preadv(self._fd, left[:_IOV], offset + total)
                if done == 0:
                    break
                total += done
                left = _advance(left, done)
        return total

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalStorage(Storage):
    """A folder of a POSIX file system. The path is made absolute when the object is made."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(path)

    def _path(self, name: str) -> str:
        return os.path.join(self.url, *name.split("/"))

    def create(self, name: str, size: int, *, direct: bool = False) -> FileWriter:
        path = self._path(name)
        folder = os.path.dirname(path)
        with _translated("create the folder of", path):
            self._make_folder(folder)
            # tmpfs, overlay and network file systems have anonymous device numbers: nothing to bypass there.
            direct = direct and os.major(os.stat(folder).st_dev) != 0
        return _Writer(path, size, direct)

    def open(self, name: str) -> FileReader:
        return _Reader(self._path(name))

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with _translated("read", path, may_be_absent=True), open(path, "rb") as file:
            return file.read()

    def publish(self, name: str, data: bytes) -> None:
        path = self._path(name)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        with _translated("publish", path):
            self._make_folder(folder)
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            _fsync_directory(folder)
        # What publishers left that were killed on the way. One that still lives would fail, and say so.
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.startswith(_TEMPORARY):
                    os.unlink(entry.path)

    @staticmethod
    def _make_folder(folder: str) -> None:
        """Create `folder` with durable names for all new parents: a commit must not sit in a directory that is lost."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            _fsync_directory(os.path.dirname(path))

    def list(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        with _translated("list", self.url):
            try:
                entries = list(os.scandir(self.url))
            except (FileNotFoundError, NotADirectoryError):
                return []
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        for inner in os.scandir(entry.path):
                            if inner.is_file():
                                found.append((f"{entry.name}/{inner.name}", inner.stat().st_size))
                elif entry.is_file():
                    found.append((entry.name, entry.stat().st_size))
        return sorted(found)

    def modified(self, name: str) -> float:
        path = self._path(name)
        with _translated("look at", path):
            return os.stat(path).st_mtime

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with _translated("delete", path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if "/" in name:
                folders.add(os.path.dirname(path))
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}
        with _translated("sync", self.url):
            for folder in sorted(folders | {self.url}):
                _fsync_directory(folder)
