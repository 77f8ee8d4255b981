"""Local and mounted POSIX file systems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence

from ..errors import StorageConflictError, StorageError, StorageFullError, StorageUnavailableError
from .base import FileReader, FileStat, FileWriter, NewFile, Storage, check_name

__all__ = ["LocalStorage", "PosixStorage", "translated", "write_fully"]

_ALIGN = 4096
_IOV = 512
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV}
_TEMPORARY = ".publishing-"
#: Longest wait for another publisher of the same folder.
_LOCK_SECONDS = 30.0
#: Where folders cannot be locked, a temporary file of this age is nobody's any more.
_ABANDONED_SECONDS = 600.0


@contextlib.contextmanager
def translated(action: str, path: str, *, may_be_absent: bool = False) -> Iterator[None]:
    """Turn an OSError into the typed error that tells a handler what it can do.

    Args:
        action: what is being done, for the message.
        path: what it is done to, for the message.
        may_be_absent: a missing file is a FileNotFoundError.
    """
    try:
        yield
    except OSError as error:
        if may_be_absent and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            raise FileNotFoundError(error.errno, error.strerror, path) from error  # no such *file*, in any case
        reason = error.strerror or str(error)
        if error.errno in FULL:
            raise StorageFullError(f"cannot {action} {path}: {reason}; free space and save again") from error
        if error.errno in TRANSIENT:
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


def write_fully(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write `buffers` one after the other at byte `offset` of a file, in as many calls as it takes."""
    left = [b for b in buffers if len(b)]
    while left:
        done = os.pwritev(fd, left[:_IOV], offset)
        offset += done
        left = _advance(left, done)


class _Writer(FileWriter):
    def __init__(self, path: str, shown: str, size: int, direct: bool) -> None:
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
        with translated("write", self._shown):
            write_fully(self._fd, offset, buffers)

    def finish(self, size: int) -> None:
        with translated("finish", self._shown):
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
    def __init__(self, path: str, shown: str) -> None:
        self._shown = shown
        with translated("open", shown, may_be_absent=True):
            self._fd, found = _open_file(path)
            self.size = found.st_size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        left = [b for b in buffers if len(b)]
        total = 0
        with translated("read", self._shown):
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


class PosixStorage(Storage):
    """A folder of a POSIX file system.

    Args:
        root: absolute path of the folder; it is made when something is written.
        url: how users call it.
    """

    def __init__(self, root: str, url: str) -> None:
        self.root = root
        self.url = url

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _shown(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def create(self, request: NewFile) -> FileWriter:
        path, shown = self._path(request.name), self._shown(request.name)
        folder = os.path.dirname(path)
        with translated("create the folder of", shown):
            self._make_folder(folder)
            # tmpfs, overlay and network file systems have anonymous device numbers: nothing to bypass there.
            direct = request.direct and os.major(os.stat(folder).st_dev) != 0
        return _Writer(path, shown, request.size, direct)

    def open(self, name: str) -> FileReader:
        return _Reader(self._path(name), self._shown(name))

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with translated("read", self._shown(name), may_be_absent=True), open(path, "rb") as file:
            return file.read()

    def stat(self, name: str) -> FileStat:
        path = self._path(name)
        with translated("look at", self._shown(name), may_be_absent=True):
            found = _fresh_stat(path)
        return FileStat(found.st_size, found.st_mtime, _version(found))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        path, shown = self._path(name), self._shown(name)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        with translated("publish", shown):
            self._make_folder(folder)
            with _locked(folder, shown) as locked:
                # Under the lock nobody else publishes here: what killed publishers left behind can go.
                _remove_abandoned(folder, 0.0 if locked else _ABANDONED_SECONDS)
                try:
                    with open(temporary, "xb") as file:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                    if expected is not None and _present(path) != expected:
                        raise _conflict(shown)
                    _install(temporary, path, shown, once=expected == "" and not locked)
                except (OSError, StorageError):
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                    raise
            _fsync_directory(folder)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` with durable names for all new parents: a commit must not sit in a directory that is lost."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            _fsync_directory(os.path.dirname(path))

    def folders(self) -> list[str]:
        with translated("list", self.url):
            try:
                return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def list(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        with translated("list", self.url):
            try:
                entries = list(os.scandir(self.root))
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

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            with translated("delete", self._shown(name)), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if "/" in name:
                folders.add(os.path.dirname(path))
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}
        with translated("sync", self.url):
            for folder in sorted(folders | {self.root}):
                _fsync_directory(folder)


class LocalStorage(PosixStorage):
    """A folder of a local or mounted file system. The path is made absolute when the object is made."""

    def __init__(self, path: str) -> None:
        root = os.path.abspath(path)
        super().__init__(root, root)


def _fresh_stat(path: str) -> os.stat_result:
    """What is known about a regular file; network file systems bring their caches up to date at an open."""
    fd, found = _open_file(path)
    os.close(fd)
    return found


def _open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; anything else counts as absent."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a file", path)
    return fd, found


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def _present(path: str) -> str:
    try:
        return _version(_fresh_stat(path))
    except FileNotFoundError:
        return ""


def _conflict(shown: str) -> StorageConflictError:
    return StorageConflictError(
        f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
    )


@contextlib.contextmanager
def _locked(folder: str, shown: str) -> Iterator[bool]:
    """Let one publisher at a time into a folder; yields False where folders cannot be locked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        locked = False
        while not locked:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageUnavailableError(
                        f"cannot publish {shown}: another process has held its folder's lock for {_LOCK_SECONDS:g} s"
                    ) from None
                time.sleep(0.01)
            except OSError:
                break
        yield locked
    finally:
        os.close(fd)


def _remove_abandoned(folder: str, age: float) -> None:
    """Remove temporary files at least `age` seconds old."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(_TEMPORARY) and entry.stat().st_mtime <= time.time() - age:
                os.unlink(entry.path)


def _install(temporary: str, path: str, shown: str, *, once: bool) -> None:
    """Give a temporary file its name; `once`: only if nothing has it, which a link can do without a lock."""
    if once:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise _conflict(shown) from None
        except OSError:
            pass  # a file system without links
        else:
            os.unlink(temporary)
            return
    os.replace(temporary, path)
