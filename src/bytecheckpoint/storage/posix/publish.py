"""Publish a file on POSIX file systems: atomically, durably, and exclusively among publishers on all machines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.storage.base import conflict_error
from bytecheckpoint.storage.posix.files import durable_version, retry_stale, stat_file, version_of

__all__ = ["publish"]

_TEMPORARY = ".publishing-"
_IS_TEMPORARY = re.compile(rf"{re.escape(_TEMPORARY)}[0-9a-f]{{16}}")
#: Timeout of a wait for another publisher of the same folder.
_LOCK_SECONDS = 30.0
#: Errors of file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
#: Where files cannot be locked, a temporary file of this age counts as abandoned.
_ABANDONED_SECONDS = 600.0


def publish(path: str, label: str, data: bytes, expected: str | None) -> None:
    """Put `data` under `path`; the caller makes the name durable.

    Args:
        path: path of the file, in an existing folder.
        label: address of the file, for messages.
        data: the new content.
        expected: the `durable_version` that must be present, "" for no file; None: any.

    Raises:
        StorageConflictError: another version is present.
        StorageUnavailableError: another publisher holds the lock for too long.
        OSError: the file system refuses.
    """
    folder = os.path.dirname(path)
    with _locked_folder(folder, label):
        _remove_abandoned(folder)
        for last in (False, False, True):
            try:
                _publish(path, label, data, expected)
                break
            except FileNotFoundError:
                # Another machine has removed the temporary file as abandoned, before it was locked.
                if last:
                    raise


def _version_at(path: str) -> str:
    try:
        return version_of(stat_file(path))
    except FileNotFoundError:
        return ""


def _lock(fd: int, label: str) -> bool:
    """Lock an open file. Returns False where files cannot be locked.

    Raises:
        StorageUnavailableError: another process holds the lock for too long.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageUnavailableError(
                    f"cannot publish {label}: another process has held its lock for {_LOCK_SECONDS:g} s"
                ) from None
            time.sleep(0.01)
        except OSError:
            return False


@contextlib.contextmanager
def _locked_folder(folder: str, label: str) -> Iterator[None]:
    """Lock a folder against other publishers on this machine.

    Network file systems share locks of files among machines, but perhaps not those of folders (GlusterFS does not).
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, label)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked_file(path: str, label: str) -> Iterator[None]:
    """Lock the file that has the name now, if there is one.

    A publisher holds the lock of the file that it replaces until the new file is in place. A second publisher, on any
    machine, then finds that the file for which it waited is no longer the one with the name.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fd = retry_stale(path, lambda: _open_to_lock(path))
        except FileNotFoundError:
            yield
            return
        try:
            _lock(fd, label)
            version = _version_at(path)
            if version in ("", _version_of_open(fd)):  # "": not a regular file, so nobody has published it
                yield
                return
        finally:
            os.close(fd)
    raise StorageUnavailableError(f"cannot publish {label}: other processes have replaced it for {_LOCK_SECONDS:g} s")


def _version_of_open(fd: int) -> str:
    try:
        return version_of(os.fstat(fd))
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return ""  # it was replaced


def _open_to_lock(path: str) -> int:
    try:
        # NFS can only lock files that are open for writing.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _publish(path: str, label: str, data: bytes, expected: str | None) -> None:
    """Put `data` under `path` if the expected version is present.

    Raises:
        FileNotFoundError: the temporary file is gone.
    """
    temporary = os.path.join(os.path.dirname(path), f"{_TEMPORARY}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno(), label)  # marks it as in use
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            with _locked_file(path, label):
                if expected is not None and durable_version(path) != expected:
                    raise conflict_error(label)
                if expected == "":
                    _install_new(temporary, path, label)
                else:
                    os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files of killed publishers: those that are not locked."""
    with contextlib.suppress(OSError):
        entries = [*os.scandir(folder)]
        for entry in entries:
            if not _IS_TEMPORARY.fullmatch(entry.name):
                continue
            fd = os.open(entry.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            except BlockingIOError:
                continue
            except OSError:  # files cannot be locked here
                # By the clock of the file system: this machine's may be hours ahead.
                newest = max(other.stat(follow_symlinks=False).st_mtime for other in entries)
                if entry.stat().st_mtime <= newest - _ABANDONED_SECONDS:
                    os.unlink(entry.path)
            finally:
                os.close(fd)


def _install_new(temporary: str, path: str, label: str) -> None:
    """Give a temporary file the name `path`, which must be free: by a hard link, which only one machine can make."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may carry out a request twice when the first answer is lost.
        if not os.path.samefile(temporary, path):
            raise conflict_error(label) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.replace(temporary, path)
        return
    os.unlink(temporary)
