"""Reading the memory of another process of this machine: one copy, and no shared pages that must be touched first.

Linux lets processes of one user read each other (process_vm_readv), unless a security module or another container
stands between them. Whether it works is tried out, never assumed: a process introduces itself by a secret and the
address where that secret stands, and who can read it there can read the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Segments", "introduction", "parts_of", "pull", "readable_by_peers", "sees", "segments", "segments_of"]

#: Pieces of memory that stand for one run of bytes: rows (address, length), int64 [n, 2].
Segments = NDArray[np.int64]

_INTRODUCTION = struct.Struct("<QQ16s")
_MOST = 1024  # pieces that the kernel takes in one call
_PR_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,  # iovec[]: two machine words each, as rows of Segments are
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
_secret = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
_open_doors = 0
_lock = threading.Lock()


def introduction() -> bytes:
    """What another process needs to find out whether it can read this one's memory."""
    return _INTRODUCTION.pack(os.getpid(), ctypes.addressof(_secret), _secret.raw)


def sees(other: bytes) -> int:
    """Process id of the process that introduced itself with `other`, 0 when its memory cannot be read from here.

    The same number may name another process in another container; that one does not know the secret.
    """
    if len(other) != _INTRODUCTION.size:
        return 0
    pid, address, secret = _INTRODUCTION.unpack(other)
    found = ctypes.create_string_buffer(16)
    try:
        pull(pid, segments([(address, 16)]), segments([(ctypes.addressof(found), 16)]))
    except OSError:
        return 0
    return int(pid) if found.raw == secret else 0


@contextlib.contextmanager
def readable_by_peers() -> Iterator[None]:
    """While this lasts, Yama's default restriction (only parents may look) does not apply to this process."""
    global _open_doors  # noqa: PLW0603  several ranks may be threads of one process
    with _lock:
        _open_doors += 1
        if _open_doors == 1:
            _allow(_ANYONE)
    try:
        yield
    finally:
        with _lock:
            _open_doors -= 1
            if not _open_doors:
                _allow(ctypes.c_ulong(0))


def _allow(whom: ctypes.c_ulong) -> None:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            restricted = file.read().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, whom, 0, 0, 0)


def segments(pieces: Sequence[tuple[int, int]]) -> Segments:
    """`Segments` of (address, length) pairs."""
    return np.array(pieces, np.int64).reshape(-1, 2)


def segments_of(buffers: Sequence[memoryview]) -> Segments:
    """Where `buffers` stand; somebody must keep them alive."""
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
    return segments([(array.ctypes.data, array.nbytes) for array in arrays])


def parts_of(run: Segments, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Segments:
    """Some parts of a run of bytes, one after the other.

    Args:
        run: where the run stands.
        starts: first byte of each part in the run, [n].
        lengths: of each part, positive, [n].
    """
    if len(run) == 1:
        return np.column_stack((run[0, 0] + starts, lengths))
    ends = np.cumsum(run[:, 1])
    begins = ends - run[:, 1]
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, starts + lengths, side="left")
    count = last - first + 1
    part = np.repeat(np.arange(len(starts)), count)
    piece = first[part] + np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begins[piece], starts[part])
    high = np.minimum(ends[piece], (starts + lengths)[part])
    return np.column_stack((run[piece, 0] + low - begins[piece], high - low))


def _joined(pieces: Segments) -> Segments:
    """The same with neighbours in memory made one."""
    new = np.ones(len(pieces), bool)
    new[1:] = pieces[1:, 0] != pieces[:-1, 0] + pieces[:-1, 1]
    begin = np.flatnonzero(new)
    if len(begin) == len(pieces):
        return pieces
    return np.column_stack((pieces[begin, 0], np.add.reduceat(pieces[:, 1], begin)))


def pull(pid: int, remote: Segments, local: Segments) -> None:
    """Copy the bytes at `remote` in process `pid` to `local` here; both stand for runs of one length.

    Raises:
        OSError: the process is gone, or may not be read.
    """
    if _readv is None:
        raise OSError(38, "this system has no process_vm_readv")
    remote, local = (np.ascontiguousarray(_joined(pieces), np.int64) for pieces in (remote, local))
    while len(local):
        there, here = min(len(remote), _MOST), min(len(local), _MOST)
        done = _readv(pid, local.ctypes.data, here, remote.ctypes.data, there, 0)
        if done <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        remote, local = _after(remote, done), _after(local, done)


def _after(pieces: Segments, nbytes: int) -> Segments:
    """What follows the first `nbytes` of the run."""
    ends = np.cumsum(pieces[:, 1])
    left = pieces[int(np.searchsorted(ends, nbytes, side="right")) :].copy()
    if len(left):
        taken = nbytes - (ends[-1] - left[:, 1].sum())
        left[0] += taken, -taken
    return left
