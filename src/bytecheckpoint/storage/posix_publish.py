"""Publishing a file on POSIX file systems: atomically, durably, and by one of several publishers, on any machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator

from ..errors import StorageConflictError, StorageUnavailableError
from .posix_files import fresh, fresh_stat, version_of

__all__ = ["publish"]

_TEMPORARY = ".publishing-"
#: Longest wait for another publisher of the same folder.
_LOCK_SECONDS = 30.0
#: What file systems without links say.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
#: Where files cannot be locked, a temporary file of this age is nobody's any more.
_ABANDONED_SECONDS = 600.0


def publish(path: str, shown: str, data: bytes, expected: str | None) -> None:
    """Put `data` under `path`; the caller makes the name durable.

    Args:
        path: in a folder that exists.
        shown: what it is called in messages.
        data: the new content.
        expected: the version that must be there, "" for none; None: whatever is there.

    Raises:
        StorageConflictError: something else is there.
        StorageUnavailableError: another publisher does not end.
        OSError: the file system's refusal.
    """
    folder = os.path.dirname(path)
    with _locked_folder(folder, shown):
        _remove_abandoned(folder)
        for last in (False, False, True):
            try:
                _publish(path, shown, data, expected)
                break
            except FileNotFoundError:
                # Another machine took the temporary file for abandoned before it was locked.
                if last:
                    raise


def _version_at(path: str) -> str:
    try:
        return version_of(fresh_stat(path))
    except FileNotFoundError:
        return ""


def _conflict(shown: str) -> StorageConflictError:
    return StorageConflictError(
        f"cannot publish {shown}: another save replaced it meanwhile; let one job at a time save to a path"
    )


def _lock(fd: int, shown: str) -> bool:
    """Take the lock of an open file; False where files cannot be locked.

    Raises:
        StorageUnavailableError: another process holds it too long.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageUnavailableError(
                    f"cannot publish {shown}: another process has held its lock for {_LOCK_SECONDS:g} s"
                ) from None
            time.sleep(0.01)
        except OSError:
            return False


@contextlib.contextmanager
def _locked_folder(folder: str, shown: str) -> Iterator[None]:
    """Let one publisher of this machine at a time into a folder.

    Network file systems may keep locks of folders to each machine (GlusterFS does), those of files they share.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, shown)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked_file(path: str, shown: str) -> Iterator[str]:
    """Hold the lock of whatever file has the name now; yields its version, "" where there is none.

    Whoever replaces a file holds its lock until the new one is in place, so of several publishers, on whatever
    machines, the second finds another file than the one that it waited for.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fd = fresh(path, lambda: _open_to_lock(path))
        except FileNotFoundError:
            yield ""
            return
        try:
            _lock(fd, shown)
            version = _version_at(path)
            if version in ("", _version_of_open(fd)):  # "": no ordinary file, which nobody publishes
                yield version
                return
        finally:
            os.close(fd)
    raise StorageUnavailableError(f"cannot publish {shown}: other processes have replaced it for {_LOCK_SECONDS:g} s")


def _version_of_open(fd: int) -> str:
    try:
        return version_of(os.fstat(fd))
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return ""  # it was replaced


def _open_to_lock(path: str) -> int:
    try:
        # NFS takes the lock of a file that is open for writing only.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _publish(path: str, shown: str, data: bytes, expected: str | None) -> None:
    """Put `data` under `path` if what is there is what is expected.

    Raises:
        FileNotFoundError: the temporary file is gone.
    """
    temporary = os.path.join(os.path.dirname(path), f"{_TEMPORARY}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno(), shown)  # says that somebody works on it
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            with _locked_file(path, shown) as present:
                if expected is not None and present != expected:
                    raise _conflict(shown)
                _install(temporary, path, shown, once=expected == "")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files that killed publishers left: those whose lock nobody holds."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if not entry.name.startswith(_TEMPORARY):
                continue
            fd = os.open(entry.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            except BlockingIOError:
                continue
            except OSError:  # files cannot be locked here
                if entry.stat().st_mtime <= time.time() - _ABANDONED_SECONDS:
                    os.unlink(entry.path)
            finally:
                os.close(fd)


def _install(temporary: str, path: str, shown: str, *, once: bool) -> None:
    """Give a temporary file its name; `once`: only if nothing has it, which a link does on any machine's behalf."""
    if once:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # A network file system may carry out a request twice, when its first answer is lost.
            if not os.path.samefile(temporary, path):
                raise _conflict(shown) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(temporary, path)
            return
        os.unlink(temporary)
        return
    os.replace(temporary, path)
