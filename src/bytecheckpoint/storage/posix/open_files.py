"""Open files of POSIX file systems, which are opened again when a network file system has lost them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.representation.checksums import block_sum
from bytecheckpoint.storage.base import FileReader, FileWriter, NewFile
from bytecheckpoint.storage.posix.files import may_pass, open_file, retry_stale, translated
from bytecheckpoint.storage.posix.mounts import mounted, network_mount, on_network
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = ["PosixReader", "PosixWriter", "Retry", "write_fully"]

#: Carries out a call, and carries it out again while its errors may pass.
Retry = Callable[[Callable[[], None]], None]
_ALIGN = 4096
#: Buffers per system call.
_MAX_BUFFERS = 512
#: Errors by which file systems refuse direct I/O.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


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


class _Descriptor:
    """A file descriptor, which several threads use, and which is replaced when its file system has lost the file.

    Args:
        fd: the descriptor.
        reopen: opens the file by its name.
    """

    def __init__(self, fd: int, reopen: Callable[[], int]) -> None:
        self._fd = fd
        self._reopen = reopen
        self._lost = False
        self._outdated: list[int] = []  # other threads may be using them
        self._lock = threading.Lock()

    def get(self) -> int:
        """Return the descriptor, a new one after `give_up`."""
        if self._lost:
            with self._lock:
                if self._lost:
                    fd = self._reopen()
                    if self._fd >= 0:
                        self._outdated.append(self._fd)
                    self._fd, self._lost = fd, False
        return self._fd

    def give_up(self, fd: int) -> None:
        """Have the file opened again before the next use, unless that was done since `get` returned `fd`."""
        with self._lock:
            self._lost = self._lost or self._fd in (fd, -1)

    def close(self) -> None:
        """Close the file; once more does nothing. The error of a close that fails is raised."""
        # Reset before the close: even a close that fails closes, and the number may then belong to another file.
        outdated, self._outdated = self._outdated, []
        fd, self._fd = self._fd, -1
        for old in outdated:
            with contextlib.suppress(OSError):
                os.close(old)
        if fd >= 0:
            os.close(fd)


class _UnsyncedWrites:
    """The writes to a file on a network, to repeat them when its server was lost.

    The server may have lost bytes that it had taken but not synced, and after an fsync that fails the system drops them.

    Args:
        label: address of the file for messages.
        stable: True if the caller's buffers keep their contents: they are written again. Otherwise the bytes are read back,
            and must have their checksums.

    Attributes:
        in_doubt: True if some of the bytes may be lost.
    """

    def __init__(self, label: str, *, stable: bool) -> None:
        self._label = label
        self._stable = stable
        self._written: dict[int, list[memoryview] | tuple[int, int]] = {}  # offset -> buffers, or length and checksum
        self.in_doubt = False

    def note(self, offset: int, buffers: Sequence[memoryview], *, direct: bool) -> None:
        if self._stable:
            self._written[offset] = list(buffers)
            return
        for buffer in buffers:
            # The last page of a direct write may go beyond the end of the file.
            cut = max(len(buffer) - _ALIGN, 0) if direct else len(buffer)
            self._written[offset] = cut, block_sum(buffer[:cut])
            if direct:
                self._written[offset + cut] = [memoryview(bytes(buffer[cut:]))]
            offset += len(buffer)

    def write_again(self, fd: int) -> None:
        for offset, known in sorted(self._written.items(), key=lambda item: item[0]):
            if isinstance(known, list):
                write_fully(fd, offset, known)
                continue
            nbytes, checksum = known
            data = memoryview(bytearray(nbytes))
            got = os.preadv(fd, [data], offset)
            if got != nbytes or block_sum(data) != checksum:
                raise StorageUnavailableError(
                    f"cannot finish {self._label}: bytes {offset} to {offset + nbytes} were lost with the connection to "
                    f"the server; save again"
                )
            write_fully(fd, offset, [data])

    def clear(self) -> None:
        self._written.clear()


class PosixWriter(FileWriter):
    """A new file. On a network file system every call is retried.

    Args:
        path: absolute path of the file.
        label: address for messages.
        request: request for the new file.
        direct: bypass the page cache, if the file system can.
        reserve: reserve the space.
        first: no earlier attempt to create the file was made, which may have created it.
        retry: retries a call; None: the file system is on no network.
    """

    def __init__(
        self, path: str, label: str, request: NewFile, *, direct: bool, reserve: bool, first: bool, retry: Retry | None
    ) -> None:
        self._path = path
        self._label = label
        self._retry = retry
        self._unsynced = _UnsyncedWrites(label, stable=request.stable)
        self._interrupted = False
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.direct = direct
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            # Some file systems create the file before they refuse the flag, or before they lose their server.
            if direct and error.errno in _NOT_DIRECT:
                self.direct = False
            elif first or error.errno != errno.EEXIST or os.stat(path).st_size:
                raise
            fd = os.open(path, flags & ~os.O_EXCL, 0o666)
        self._file = _Descriptor(fd, self._open_again)
        self._identity = _identity(os.fstat(fd))
        if reserve:
            # So a full disk is found before the first byte is copied, and parallel direct writes need no exclusive
            # lock to extend the file.
            try:
                os.posix_fallocate(fd, 0, max(-(-request.size // _ALIGN) * _ALIGN, 1))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    self.abort()
                    raise

    def _open_again(self) -> int:
        with mounted(network_mount(self._path)):
            fd = retry_stale(self._path, lambda: os.open(self._path, os.O_RDWR | os.O_CLOEXEC))
            self._identity = _identity(os.fstat(fd))
        return fd

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._repeat("write", lambda fd: self._write(fd, offset, buffers))
        if self._retry is not None:
            self._unsynced.note(offset, buffers, direct=self.direct)

    def _write(self, fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
        try:
            write_fully(fd, offset, buffers)
        except OSError as error:
            if not self.direct or error.errno not in _NOT_DIRECT:
                raise
            # Some file systems refuse only now, or want larger blocks: through the page cache they take everything.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            write_fully(fd, offset, buffers)

    def finish(self, size: int) -> None:
        def finish(fd: int) -> None:
            if self._unsynced.in_doubt:
                self._unsynced.write_again(fd)
            os.ftruncate(fd, size)
            os.fsync(fd)
            self._file.close()

        self._repeat("finish", finish)
        self._unsynced.clear()

    def _repeat(self, action: str, call: Callable[[int], None]) -> None:
        """Call `call` with the descriptor, on a network file system again while its errors may pass."""

        def attempt() -> None:
            fd = -1
            if self._interrupted:
                raise StorageUnavailableError(f"cannot {action} {self._label}: the save was stopped")
            try:
                with translated(action, self._label):
                    fd = self._file.get()
                    call(fd)
            except StorageUnavailableError as error:
                if may_pass(error.__cause__, self._path):
                    self._unsynced.in_doubt = True
                    self._file.give_up(fd)
                raise

        attempt() if self._retry is None else self._retry(attempt)

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._unsynced.clear()
        # On a mount that hung this may run late, after another attempt has written a file of the same name.
        with contextlib.suppress(OSError):
            if _identity(os.lstat(self._path)) == self._identity:
                os.unlink(self._path)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class PosixReader(FileReader):
    """An open file.

    Args:
        path: absolute path of the file.
        label: address for messages.
        retry: retries a call.
    """

    def __init__(self, path: str, label: str, retry: Retry) -> None:
        self._path = path
        self._label = label
        self._retry = retry
        fd, found = open_file(path)
        self._file = _Descriptor(fd, self._open_again)
        self.size = found.st_size

    def _open_again(self) -> int:
        with mounted(network_mount(self._path)):
            return open_file(self._path)[0]

    def match_size(self, size: int) -> bool:
        # A network file system may know an older length of a file that another machine has written, for about a second.
        for seconds in tuning().stale_pauses:
            if self.size == size or not on_network(self._path):
                break
            pause(seconds)
            try:
                with translated("open", self._label, may_be_absent=True):
                    self._file.give_up(self._file.get())
                    self.size = os.fstat(self._file.get()).st_size
            except FileNotFoundError:  # removed meanwhile
                return False
        return self.size == size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        rest = [b for b in buffers if len(b)]
        total = 0

        def read() -> None:
            nonlocal rest, total
            fd = -1
            try:
                with translated("read", self._label, may_be_absent=True):
                    while rest:
                        fd = self._file.get()
                        done = os.preadv(fd, rest[:_MAX_BUFFERS], offset + total)
                        if done == 0:
                            break
                        total += done
                        rest = _advance(rest, done)
            except FileNotFoundError:  # removed meanwhile, and the descriptor was lost
                return
            except StorageUnavailableError as error:
                if may_pass(error.__cause__, self._path):
                    self._file.give_up(fd)
                raise

        self._retry(read)
        return total

    def close(self) -> None:
        with contextlib.suppress(OSError):  # everything was read
            self._file.close()
