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

__all__ = ["Segments", "introduction", "part_of", "pull", "readable_by_peers", "sees", "segments_of"]

#: Pieces of memory that stand for one run of bytes: (address, length) each.
Segments = list[tuple[int, int]]

_INTRODUCTION = struct.Struct("<QQ16s")
_MOST = 512  # pieces per call; the kernel takes 1024
_PR_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Piece),
        ctypes.c_ulong,
        ctypes.POINTER(_Piece),
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
        pull(pid, [(address, 16)], [(ctypes.addressof(found), 16)])
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


def segments_of(buffers: Sequence[memoryview]) -> Segments:
    """Where `buffers` stand; somebody must keep them alive."""
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def part_of(segments: Segments, start: int, nbytes: int) -> Segments:
    """Bytes [start, start + nbytes) of the run."""
    part: Segments = []
    for address, length in segments:
        if start < length and nbytes > 0:
            taken = min(length - start, nbytes)
            part.append((address + start, taken))
            nbytes -= taken
            start = 0
        else:
            start = max(start - length, 0)
    return part


def pull(pid: int, remote: Segments, local: Segments) -> None:
    """Copy the bytes at `remote` in process `pid` to `local` here; both stand for runs of one length.

    Raises:
        OSError: the process is gone, or may not be read.
    """
    if _readv is None:
        raise OSError(38, "this system has no process_vm_readv")
    left = sum(length for _, length in local)
    while left:
        there, here = remote[:_MOST], local[:_MOST]
        done = _readv(
            pid,
            (_Piece * len(here))(*(_Piece(a, n) for a, n in here)),
            len(here),
            (_Piece * len(there))(*(_Piece(a, n) for a, n in there)),
            len(there),
            0,
        )
        if done <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        left -= done
        if left:
            remote = part_of(remote, done, left)
            local = part_of(local, done, left)
