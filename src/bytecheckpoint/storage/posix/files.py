"""Files of POSIX file systems: typed errors, durable names, and retries for stale caches of network file systems."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from bytecheckpoint.errors import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.tuning import tuning

__all__ = [
    "FULL_ERRNOS",
    "TRANSIENT_ERRNOS",
    "fsync_directory",
    "fsync_parents",
    "in_page_cache",
    "is_in_memory",
    "open_file",
    "retry_stale",
    "stat_file",
    "translated",
    "version_of",
]

_T = TypeVar("_T")
#: No space is left.
FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: The device or server does not answer now.
TRANSIENT_ERRNOS = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV,
}  # fmt: skip
#: The kernel's escapes for spaces and other characters in its list of mounts.
_ESCAPED = re.compile(r"\\([0-7]{3})")
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
            raise StorageFullError(f"cannot {action} {path}: {reason}; free space and save again") from error
        if error.errno in TRANSIENT_ERRNOS:
            raise StorageUnavailableError(f"cannot {action} {path}: {reason}; check the device or mount") from error
        raise StorageError(f"cannot {action} {path}: {reason}") from error


def retry_stale(path: str, function: Callable[[], _T]) -> _T:
    """Return `function()`, which opens `path`, and retry it for a while when a network file system's cache is stale.

    The cache is stale when another machine has given the name to a new file (ESTALE), or has created the file since this
    machine last looked for it. In the second case the folder lists a file that cannot be opened, and listing it updates
    the cache.
    """
    pauses = tuning().stale_pauses
    for pause in pauses:
        try:
            return function()
        except FileNotFoundError:
            if os.path.islink(path) or not _listed(path):
                raise
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause)
    try:
        return function()
    except OSError as error:
        tries = f"{error.strerror} (attempt {len(pauses) + 1})"
        raise type(error)(error.errno, tries, *([error.filename] if error.filename else [])) from error


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


def version_of(found: os.stat_result) -> str:
    """Return a token that changes when the file is replaced or its content changes."""
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def in_page_cache(fd: int, offset: int) -> bool:
    """Return whether the byte at `offset` of a file is in the page cache. Network file systems do not tell: False."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # EAGAIN: it is not; EOPNOTSUPP or no such flag: unknown
        return False


def is_in_memory(path: str) -> bool:
    """Return whether an absolute path is known to be on a tmpfs. No other file system is touched: it may hang."""
    parts = path.rstrip("/").split("/")
    prefixes = ["/".join(parts[:number]) or "/" for number in range(1, len(parts) + 1)]
    try:
        mounts = _mounts(int(time.monotonic()))
        at = max((number for number, prefix in enumerate(prefixes) if prefix in mounts), default=0)
        if mounts.get(prefixes[at]) != "tmpfs":
            return False
        # A symbolic link may lead anywhere.
        return not any(stat.S_ISLNK(os.lstat(prefix).st_mode) for prefix in prefixes[at + 1 :])
    except FileNotFoundError:
        return True  # the rest of the path does not exist yet
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _mounts(_second: int) -> dict[str, str]:
    """Return the types of the mounted file systems by mount point; read at most once a second."""
    mounts: dict[str, str] = {}
    with (
        contextlib.suppress(OSError),  # without /proc no path is known to be in memory
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            mount, _, source = line.partition(" - ")
            point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), mount.split(" ", 5)[4])
            mounts[point] = source.partition(" ")[0]  # of several at one mount point, the last is visible
    return mounts
