"""A state in pieces of ten times the usual size, which two chunks of memory carry to the storage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, Extras, peak_memory, read_bytes

__all__ = ["pieces"]

_CHUNK = 8 << 20


class _Index:
    """An index of vectors that lies in no memory of its own: each piece repeats one block.

    Args:
        nbytes: bytes of all pieces.
        count: number of pieces.
    """

    def __init__(self, nbytes: int, count: int = 40) -> None:
        self._block = np.random.default_rng(0).integers(0, 256, _CHUNK, np.uint8)
        self.size = nbytes // count
        self.count = count

    def read(self, offset: int, buffer: memoryview) -> None:
        target, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(target):
            at = (offset + done) % _CHUNK
            part = min(_CHUNK - at, len(target) - done)
            target[done : done + part] = self._block[at : at + part]
            done += part

    def __bytecheckpoint_pieces__(self) -> Iterator[bytecheckpoint.Piece]:
        for number in range(self.count):
            yield bytecheckpoint.Piece(f"part{number}", self.size, self.read, stable=True)

    def load_pieces(self, pieces: Mapping[str, Any]) -> None:
        raise NotImplementedError


def pieces(bench: Bench) -> None:
    """Measure saves beside plain writes of the same bytes, which are made chunk by chunk too.

    extra["call"] is the call of `save`, extra["peak_bytes"] the memory that it takes beyond that of before, and
    extra["read"] the bytes that a read of a sixteenth of one piece makes, as a multiple of that part.
    """
    index = _Index(bench.options.nbytes * 10)
    nbytes = index.size * index.count
    path = bench.folder / "index"

    def save() -> Extras:
        found: dict[str, float] = {}
        with peak_memory(found):
            begin = time.perf_counter()
            handle = bytecheckpoint.save(path, {"index": index}, async_checkpoint=True)
            found["call"] = time.perf_counter() - begin
            handle.result()
        with bytecheckpoint.open(path) as checkpoint:
            part, before = index.size // 16, read_bytes()
            _ = checkpoint["index/part3"][part : 2 * part]
            found["read"] = (read_bytes() - before) / part
        return found

    def write(flags: int) -> None:
        buffer = np.zeros(_CHUNK + 4096, np.uint8)
        start = -buffer.ctypes.data % 4096  # O_DIRECT wants aligned memory
        memory = memoryview(buffer[start : start + _CHUNK])
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o644)
        try:
            for offset in range(0, nbytes, _CHUNK):
                index.read(offset, memory)
                os.pwrite(descriptor, memory, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    clear = partial(bench.clear, "index")
    arms = [
        Arm("bytecheckpoint", save, clear),
        Arm("raw 1 x 8 MiB", partial(write, 0), clear),
        Arm("raw 1 x 8 MiB O_DIRECT", partial(write, os.O_DIRECT), clear),
    ]
    bench.measure("pieces: save", nbytes, arms)
    bench.clear_all()
