"""Files of POSIX file systems: errors that say what to do, and names that network file systems' caches know wrongly."""

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

from ..errors import StorageError, StorageFullError, StorageUnavailableError

__all__ = [
    "FULL",
    "TRANSIENT",
    "fresh",
    "fresh_stat",
    "fsync_directory",
    "fsync_way_to",
    "lies_in_memory",
    "open_file",
    "translated",
    "version_of",
]

_T = TypeVar("_T")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV}
#: How the kernel writes spaces and the like in its list of mounts.
_ESCAPED = re.compile(r"\\([0-7]{3})")
#: Folders whose names have been synced by `fsync_way_to`.
_found_durable: set[str] = set()
#: Seconds between attempts at a name whose file was replaced: caches forget within a few seconds.
_STALE_PAUSES = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5)


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


def fresh(path: str, function: Callable[[], _T]) -> _T:
    """`function()`, which opens `path`, again for a while when a network file system's caches prove out of date.

    That is when another machine has given the name to a new file (ESTALE), or has made the file since this machine
    last looked in vain: then the folder lists what cannot be opened, and listing it is what brings the cache up to date.
    """
    for pause in _STALE_PAUSES:
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
        tries = f"{error.strerror} (attempt {len(_STALE_PAUSES) + 1})"
        raise type(error)(error.errno, tries, *([error.filename] if error.filename else [])) from error


def _listed(path: str) -> bool:
    folder, name = os.path.split(path)
    try:
        return name in os.listdir(folder)
    except OSError:
        return False


def fsync_directory(path: str) -> None:
    """Make the names in a folder durable, as far as the file system has a way to do so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # it may be entered and written and not be listed: such a folder cannot be opened, so not synced
    try:
        os.fsync(fd)
    except OSError as error:
        # Folders cannot be synced there: FAT, some FUSE and network file systems.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def fsync_way_to(folder: str) -> None:
    """Make durable the names that lead to a folder: whoever made it may not have done so.

    Its own name each time, since each step has another; those above it once per process.
    """
    path = os.path.dirname(folder)
    fsync_directory(path)
    while path not in _found_durable and not os.path.ismount(path):
        fsync_directory(os.path.dirname(path))
        _found_durable.add(path)
        path = os.path.dirname(path)


def fresh_stat(path: str) -> os.stat_result:
    """What is known about a regular file; network file systems bring their caches up to date at an open."""
    fd, found = open_file(path)
    os.close(fd)
    return found


def open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; anything else counts as absent."""

    def opened() -> tuple[int, os.stat_result]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return fd, os.fstat(fd)
        except OSError:
            os.close(fd)
            raise

    fd, found = fresh(path, opened)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a file", path)
    return fd, found


def version_of(found: os.stat_result) -> str:
    """A token that changes when the file or its content does."""
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def lies_in_memory(path: str) -> bool:
    """Whether an absolute path is on a tmpfs, as far as can be told without touching any other file system."""
    parts = path.rstrip("/").split("/")
    prefixes = ["/".join(parts[:number]) or "/" for number in range(1, len(parts) + 1)]
    try:
        mounts = _mounts(int(time.monotonic()))
        at = max((number for number, prefix in enumerate(prefixes) if prefix in mounts), default=0)
        if mounts.get(prefixes[at]) != "tmpfs":
            return False
        # A link may lead anywhere.
        return not any(stat.S_ISLNK(os.lstat(prefix).st_mode) for prefix in prefixes[at + 1 :])
    except FileNotFoundError:
        return True  # the rest of the way is to be made
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _mounts(_second: int) -> dict[str, str]:
    """Types of the mounted file systems by their places; looked up once a second at most."""
    mounts: dict[str, str] = {}
    with (
        contextlib.suppress(OSError),  # without /proc nothing is known to be in memory
        open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            mount, _, source = line.partition(" - ")
            point = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), mount.split(" ", 5)[4])
            mounts[point] = source.partition(" ")[0]  # of several at one place the last is seen
    return mounts
