"""The raw limits: the same bytes by plain system calls, with the same durability."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Raw"]

_CHUNK = 8 << 20


class Raw:
    """One rank's bytes in an aligned buffer, written and read by plain system calls.

    Args:
        nbytes: bytes of this rank's part.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // 4096) * 4096
        self._map = mmap.mmap(-1, max(self.nbytes, 4096))
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[: self.nbytes]
        self.buffer[:] = 1
        self._copy = np.ones_like(self.buffer)

    def write(self, path: Path, threads: int = 1, *, direct: bool = False) -> None:
        """Write the buffer to a new file, with fsync."""
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o644)
        try:
            if direct:
                os.posix_fallocate(fd, 0, self.nbytes)

            def transfer(start: int) -> None:
                view = memoryview(self.buffer[start : start + _CHUNK])
                while view:
                    done = os.pwrite(fd, view, start)
                    start, view = start + done, view[done:]

            self._for_each_chunk(transfer, threads)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, threads: int = 1) -> None:
        """Read a file into the buffer, whose pages are touched."""
        fd = os.open(path, os.O_RDONLY)
        try:

            def transfer(start: int) -> None:
                view = memoryview(self.buffer[start : start + _CHUNK])
                while view:
                    done = os.preadv(fd, [view], start)
                    assert done, "the file is too short"
                    start, view = start + done, view[done:]

            self._for_each_chunk(transfer, threads)
        finally:
            os.close(fd)

    def copy(self) -> None:
        """Copy the buffer into touched memory."""
        np.copyto(self._copy, self.buffer)

    def copy_of(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy each tensor (this rank's part) by itself: short copies use other store instructions than long ones."""
        position = 0
        for tensor in tensors:
            data = getattr(tensor, "_local_tensor", tensor).view(-1).view(torch.uint8).numpy()
            np.copyto(self._copy[position : position + len(data)], data)
            position += len(data)

    def _for_each_chunk(self, transfer: Callable[[int], None], threads: int) -> None:
        starts = range(0, self.nbytes, _CHUNK)
        if threads == 1:
            for start in starts:
                transfer(start)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(transfer, starts))
