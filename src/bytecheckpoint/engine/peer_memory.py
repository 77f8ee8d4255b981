"""Copy out of the memory of another process of this machine, without shared pages and in one step.

Linux lets processes of one user read each other's memory (process_vm_readv), unless a security module or another
container stands between them. So the reader always tests it: each process sends the others a handshake, which holds a
secret and the secret's address. A process that finds the secret at that address can read the rest of the memory too.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.tuning import tuning

__all__ = [
    "Segments",
    "make_segments",
    "peer_handshake",
    "pid_if_readable",
    "read_peer_memory",
    "segments_of_buffers",
    "slice_segments",
]

#: Pieces of memory that hold one sequence of bytes: rows (address, length), int64 [n, 2].
Segments = NDArray[np.int64]

_HANDSHAKE = struct.Struct("<QQ16s")  # process id, address of the secret, secret
_MAX_SEGMENTS = 1024  # that the kernel takes in one call
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_YAMA_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"

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


def _renew_secret() -> None:
    """Make a new secret for a forked child, whose siblings have the parent's at the same address."""
    _secret.raw = secrets.token_bytes(16)


os.register_at_fork(after_in_child=_renew_secret)


def peer_handshake() -> bytes:
    """Let other processes of this user read the memory of this one; return the bytes by which they test that.

    Yama, a security module, by default restricts such reads to parents. The restriction is lifted before the handshake
    exists, so nobody tests too early. It stays lifted: a process has one permission, which it cannot read, and
    UCX and MPI set the same one for as long as they run. Without Yama every process is as open as this one is then.
    """
    _allow_reads_by_any_process()
    return _HANDSHAKE.pack(os.getpid(), ctypes.addressof(_secret), _secret.raw)


def pid_if_readable(handshake: bytes) -> int:
    """Return the id of the process that made `handshake`, or 0 when its memory cannot be read from here.

    The same id may name another process in another container. That process does not hold the secret.
    """
    if len(handshake) != _HANDSHAKE.size:
        return 0
    pid, address, secret = _HANDSHAKE.unpack(handshake)
    found = ctypes.create_string_buffer(16)
    try:
        read_peer_memory(pid, make_segments([(address, 16)]), make_segments([(ctypes.addressof(found), 16)]))
    except OSError:
        return 0
    return int(pid) if found.raw == secret else 0


def _allow_reads_by_any_process() -> None:
    try:
        with open(_YAMA_SCOPE) as file:
            restricted = file.read().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)


def make_segments(pieces: Sequence[tuple[int, int]]) -> Segments:
    """Make `Segments` from (address, length) pairs."""
    return np.array(pieces, np.int64).reshape(-1, 2)


def segments_of_buffers(buffers: Sequence[memoryview]) -> Segments:
    """Return the addresses and lengths of `buffers`, which the caller must keep alive."""
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
    return make_segments([(array.ctypes.data, array.nbytes) for array in arrays])


def slice_segments(segments: Segments, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Segments:
    """Return the segments of some slices of a byte sequence, one slice after the other.

    Args:
        segments: memory of the whole sequence.
        starts: position of each slice in the sequence, [n].
        lengths: bytes of each slice, positive, [n].
    """
    if len(segments) == 1:
        return np.column_stack((segments[0, 0] + starts, lengths))
    ends = np.cumsum(segments[:, 1])
    begins = ends - segments[:, 1]
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, starts + lengths, side="left")
    count = last - first + 1
    part = np.repeat(np.arange(len(starts)), count)
    segment = first[part] + np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begins[segment], starts[part])
    high = np.minimum(ends[segment], (starts + lengths)[part])
    return np.column_stack((segments[segment, 0] + low - begins[segment], high - low))


def _joined(segments: Segments) -> Segments:
    """Join segments that follow each other in memory."""
    new = np.ones(len(segments), bool)
    new[1:] = segments[1:, 0] != segments[:-1, 0] + segments[:-1, 1]
    begin = np.flatnonzero(new)
    if len(begin) == len(segments):
        return segments
    return np.column_stack((segments[begin, 0], np.add.reduceat(segments[:, 1], begin)))


def read_peer_memory(pid: int, remote: Segments, local: Segments) -> None:
    """Copy bytes from process `pid` to this process.

    Args:
        pid: id of the process to read from.
        remote: addresses of the bytes there.
        local: addresses for the bytes here, of the same total length.

    Raises:
        OSError: the process is gone, or this process may not read its memory.
    """
    if _readv is None or not tuning().peer_memory:
        raise OSError(38, "this system has no process_vm_readv")
    remote, local = (np.ascontiguousarray(_joined(segments), np.int64) for segments in (remote, local))
    while len(local):
        remote_count, local_count = min(len(remote), _MAX_SEGMENTS), min(len(local), _MAX_SEGMENTS)
        done = _readv(pid, local.ctypes.data, local_count, remote.ctypes.data, remote_count, 0)
        if done <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        remote, local = _skip(remote, done), _skip(local, done)


def _skip(segments: Segments, nbytes: int) -> Segments:
    """Return the segments without their first `nbytes` bytes."""
    ends = np.cumsum(segments[:, 1])
    rest = segments[int(np.searchsorted(ends, nbytes, side="right")) :].copy()
    if len(rest):
        skipped = nbytes - (ends[-1] - rest[:, 1].sum())
        rest[0] += skipped, -skipped
    return rest
