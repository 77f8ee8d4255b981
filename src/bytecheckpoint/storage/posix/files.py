"""Files of POSIX file systems: typed errors, durable names, and retries for stale caches of network file systems."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import xxhash

from bytecheckpoint.errors import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage.posix.mounts import on_network
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = [
    "FULL_ERRNOS",
    "TRANSIENT_ERRNOS",
    "NotSyncedError",
    "content_of",
    "durable_version",
    "fsync_directory",
    "fsync_parents",
    "in_page_cache",
    "may_pass",
    "open_file",
    "read_file",
    "retry_stale",
    "stat_file",
    "translated",
    "version_of",
]

_T = TypeVar("_T")
_libc = ctypes.CDLL(None)
#: Errors of a storage that takes no more, with advice.
FULL_ERRNOS = {
    errno.ENOSPC: "free space and save again",
    errno.EDQUOT: "free space or raise the quota, and save again",
    errno.EFBIG: "the process or the file system limits the size of a file (ulimit -f)",
}
#: The server of a file system cannot be reached, or has lost an open file: no local disk says so.
_CONNECTION_ERRNOS = {
    errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ESHUTDOWN, errno.EREMOTEIO,
    errno.EBADFD,
}  # fmt: skip
#: The device or server does not answer now.
TRANSIENT_ERRNOS = {*_CONNECTION_ERRNOS, errno.EIO, errno.EAGAIN, errno.ENXIO, errno.ENODEV}
#: Folders whose names `fsync_parents` has synced.
_synced: set[str] = set()


@contextlib.contextmanager
def translated(action: str, path: str, *, may_be_absent: bool = False) -> Iterator[None]:
    """Translate an OSError of the `with` block into a typed error, "cannot {action} {path}: ...".

    Args:
        action: verb, "read".
        path: the file or folder.
        may_be_absent: raise FileNotFoundError for a missing file.
    """
    try:
        yield
    except OSError as error:
        if may_be_absent and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            raise FileNotFoundError(error.errno, error.strerror, path) from error  # in any case, no such *file* exists
        reason = error.strerror or str(error)
        if error.errno in FULL_ERRNOS:
            raise StorageFullError(f"cannot {action} {path}: {reason}; {FULL_ERRNOS[error.errno]}") from error
        if error.errno in TRANSIENT_ERRNOS:
            raise StorageUnavailableError(f"cannot {action} {path}: {reason}; check the device or mount") from error
        raise StorageError(f"cannot {action} {path}: {reason}") from error


class NotSyncedError(OSError):
    """An fsync has failed. Another one may succeed although the system has given the changes up."""


def may_pass(error: BaseException | None, path: str) -> bool:
    """Return whether an error of a file system may pass by itself, because its server restarts or is reached again.

    A broken connection may. An I/O error of a network file system may, too; that of a local disk does not.

    Args:
        error: error that the file system raised.
        path: the file or folder, absolute.
    """
    if not isinstance(error, OSError) or isinstance(error, NotSyncedError):
        return False
    if error.errno in _CONNECTION_ERRNOS:
        return True
    return error.errno in TRANSIENT_ERRNOS and on_network(path)


def retry_stale(path: str, function: Callable[[], _T]) -> _T:
    """Return `function()`, which opens `path`, and retry it for a while when a network file system's cache is stale.

    The cache is stale when another machine has given the name to a new file (ESTALE), or has created the file since this
    machine last looked for it. In the second case the folder lists a file that cannot be opened, and listing it updates
    the cache.
    """
    for seconds in tuning().stale_pauses:
        try:
            return function()
        except FileNotFoundError:
            if os.path.islink(path) or not _listed(path):
                raise
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        pause(seconds)
    return function()


def _listed(path: str) -> bool:
    folder, name = os.path.split(path)
    try:
        return name in os.listdir(folder)
    except OSError:
        return False


def fsync_directory(path: str) -> None:
    """Make the names in a folder durable, as far as the file system can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # a folder that may be entered and written but not listed cannot be opened, so not synced
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno == errno.EIO:
            raise NotSyncedError(error.errno, error.strerror, path) from error
        # FAT, some FUSE and network file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def fsync_parents(folder: str) -> None:
    """Make the names that lead to a folder durable, in case its creator has not.

    The folder's own name is synced each time, because each step has another; those above it once per process.
    """
    path = os.path.dirname(folder)
    fsync_directory(path)
    while path not in _synced and not os.path.ismount(path):
        fsync_directory(os.path.dirname(path))
        _synced.add(path)
        path = os.path.dirname(path)


def stat_file(path: str) -> os.stat_result:
    """Return the status of a regular file. It is opened, because network file systems update their caches at an open."""
    fd, found = open_file(path)
    os.close(fd)
    return found


def open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; any other kind of file counts as absent."""

    def opened() -> tuple[int, os.stat_result]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return fd, os.fstat(fd)
        except OSError:
            os.close(fd)
            raise

    fd, found = retry_stale(path, opened)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a file", path)
    return fd, found


def durable_version(path: str) -> str:
    """Return a token that changes when a file is replaced, "" without a file. It stays when its server is restarted.

    Many file systems over FUSE number their files anew then, so on a network the content counts.
    """
    if on_network(path):
        content = content_of(path)
        return "" if content is None else xxhash.xxh3_128_hexdigest(content)
    try:
        return version_of(stat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return ""


def content_of(path: str) -> bytes | None:
    """Return the content of a regular file, None if there is none."""
    try:
        return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_file(path: str) -> bytes:
    """Return the content of a regular file."""
    fd, found = open_file(path)
    try:
        parts = [os.read(fd, found.st_size)]  # not by a file object, whose `read` ends without an error at EAGAIN
        while parts[-1]:
            parts.append(os.read(fd, 1 << 20))
        return b"".join(parts)
    finally:
        os.close(fd)


def version_of(found: os.stat_result) -> str:
    """Return a token that changes when the file is replaced or its content changes."""
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def in_page_cache(fd: int, offsets: Sequence[int]) -> bool:
    """Return whether the bytes at `offsets` of a file of this machine are in the page cache."""
    if not os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True) and os.fstat(fd).st_uid != os.geteuid():
        return all(_read_without_waiting(fd, offset) for offset in offsets)  # to others mincore says that all is there
    try:
        mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):  # no file system for it, or an empty file
        return False
    with mapped:
        memory = np.frombuffer(mapped, np.uint8)
        found = ctypes.c_ubyte()
        try:
            for offset in offsets:
                page = memory.ctypes.data + offset // mmap.PAGESIZE * mmap.PAGESIZE
                if offset >= len(memory) or _libc.mincore(
                    ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(found)
                ):
                    return False
                if not found.value & 1:
                    return False
        finally:
            del memory  # else the mapping could not be closed
    return True


def _read_without_waiting(fd: int, offset: int) -> bool:
    """Return whether a byte can be read without waiting. On a quick device the question may bring the page in by itself."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # EAGAIN: it cannot; EOPNOTSUPP or no such flag: unknown
        return False
