"""The raw limits: the same bytes by plain system calls, with the same durability."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["COPIES", "READS", "WRITES", "Raw", "Way"]


@dataclass(frozen=True)
class Way:
    """A way to move bytes, one of several that may be the quickest somewhere.

    Attributes:
        threads: number of threads.
        chunk: bytes of one system call or copy; 0 for all bytes at once.
        direct: by `O_DIRECT`.
        files: number of files; several are written by a thread each.
    """

    threads: int = 1
    chunk: int = 8 << 20
    direct: bool = False
    files: int = 1

    def __str__(self) -> str:
        size = f"{self.chunk >> 20} MiB" if self.chunk else "all"
        return (
            f"{self.threads} x {size}"
            + (" O_DIRECT" if self.direct else "")
            + (f", {self.files} files" if self.files > 1 else "")
        )


_MIB = 1 << 20
_BUFFERED = (Way(1, _MIB), Way(1), Way(2, _MIB), Way(2))
_DIRECT = (Way(1, direct=True), Way(2, direct=True), Way(2, 32 * _MIB, direct=True), Way(4, direct=True))
#: What may be quickest: threads that write to one file wait for each other in some file systems.
WRITES = (*_BUFFERED, Way(2, files=2), *_DIRECT, Way(2, direct=True, files=2))
READS = (*_BUFFERED, Way(4), *_DIRECT)
COPIES = (Way(1, 0), Way(2))


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
        self.copied = np.ones_like(self.buffer)

    def write(self, path: Path, way: Way = Way()) -> None:
        """Write the buffer to one or several new files in the folder `path`, with fsync."""
        path.mkdir(parents=True)
        bounds = [self.nbytes * i // way.files // 4096 * 4096 for i in range(way.files)] + [self.nbytes]
        if way.files == 1:
            self._write_file(path / "0", 0, self.nbytes, way, way.threads)
            return
        with ThreadPoolExecutor(way.threads) as pool:
            list(
                pool.map(lambda i: self._write_file(path / str(i), bounds[i], bounds[i + 1], way, 1), range(way.files))
            )

    def _write_file(self, path: Path, first: int, stop: int, way: Way, threads: int) -> None:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if way.direct else 0), 0o644)
        try:
            if way.direct:
                os.posix_fallocate(fd, 0, stop - first)

            def transfer(start: int, end: int) -> None:
                view = memoryview(self.buffer[start:end])
                while view:
                    done = os.pwrite(fd, view, start - first)
                    start, view = start + done, view[done:]

            _for_each_chunk(transfer, first, stop, way.chunk, threads)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, way: Way = Way()) -> None:
        """Read what `write` has written to one file into the buffer, whose pages are touched."""
        fd = os.open(path / "0", os.O_RDONLY | (os.O_DIRECT if way.direct else 0))
        try:

            def transfer(start: int, end: int) -> None:
                view = memoryview(self.buffer[start:end])
                while view:
                    done = os.preadv(fd, [view], start)
                    assert done, "the file is too short"
                    start, view = start + done, view[done:]

            _for_each_chunk(transfer, 0, self.nbytes, way.chunk, way.threads)
        finally:
            os.close(fd)

    def copy(self, way: Way = COPIES[0]) -> None:
        """Copy the buffer into touched memory."""

        def transfer(start: int, end: int) -> None:
            np.copyto(self.copied[start:end], self.buffer[start:end])

        _for_each_chunk(transfer, 0, self.nbytes, way.chunk, way.threads)

    def copy_of(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy each tensor (this rank's part) by itself: short copies use other store instructions than long ones."""
        position = 0
        for tensor in tensors:
            data = getattr(tensor, "_local_tensor", tensor).view(-1).view(torch.uint8).numpy()
            np.copyto(self.copied[position : position + len(data)], data)
            position += len(data)


def _for_each_chunk(transfer: Callable[[int, int], None], first: int, stop: int, chunk: int, threads: int) -> None:
    """Call `transfer` for the bounds of each chunk."""
    step = chunk or max(stop - first, 1)
    starts = range(first, stop, step)
    if threads == 1:
        for start in starts:
            transfer(start, min(start + step, stop))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: transfer(start, min(start + step, stop)), starts))
