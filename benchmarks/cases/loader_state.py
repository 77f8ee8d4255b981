"""Measure how long a save waits for the buffers of a data loader with four workers (ByteCheckpoint, section 4.5).

With `state_every` the workers hand their buffers over before the step of the save (state prefetching); without it the save
asks for them. `wall` is the blocking time of an asynchronous save of nothing but the loader. "Gathering" is the part until
the loader's state is there, "staging" the copy of it into the staging pool.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, measure
from benchmarks.raw import Raw
from bytecheckpoint.dataloader import MapSource, TokenBufferLoader, TokenRecipe, WorkerOptions

__all__ = ["BufferedLoader", "loader_state"]

_STREAMS, _LENGTH = 16, 4096
_EVERY, _STEP_SECONDS = 4, 0.25


class _Documents(MapSource):
    """Documents of one row each, that cost nothing to read."""

    name, shuffle = "documents", True

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> NDArray[np.uint16]:
        return np.full(_LENGTH, index & 0x7FFF, np.uint16)

    def describe(self) -> dict[str, Any]:
        return {}


class BufferedLoader(TokenBufferLoader):
    """A loader whose shuffle buffers are of `nbytes` bytes, on all ranks together."""

    def __init__(self, nbytes: int, workers: WorkerOptions, **place: int) -> None:
        documents = max(nbytes // (_STREAMS * _LENGTH * 4), 2)
        recipe = TokenRecipe(_Documents(), _LENGTH, _STREAMS, shuffle_buffer=documents)
        super().__init__(recipe, workers=workers, rank=place.get("rank"), ranks=place.get("ranks"))


def loader_state(bench: Bench) -> None:
    """Measure the blocking of saves by the size of the buffers."""
    for nbytes in sorted({min(bench.options.nbytes, size << 20) for size in (16, 64, 1024)}):
        if shutil.disk_usage("/dev/shm").free < 8 * nbytes:
            print(f"  NOT MEASURED: {nbytes >> 20} MiB of buffers need {nbytes >> 27} GiB in /dev/shm", file=sys.stderr)
            continue
        _compare(bench, nbytes)
    bench.clear_all()


def _compare(bench: Bench, nbytes: int) -> None:
    raw = Raw(nbytes)
    arms = [Arm("memcpy", raw.copy)]
    loaders = {
        "bytecheckpoint": BufferedLoader(nbytes, WorkerOptions(4, state_every=_EVERY)),
        "bytecheckpoint, asked at the save": BufferedLoader(nbytes, WorkerOptions(4)),
    }
    for name, loader in loaders.items():
        path = bench.folder / name

        def steps(loader: BufferedLoader = loader) -> None:
            for _ in range(_EVERY):
                next(loader)
                time.sleep(_STEP_SECONDS)

        def run(loader: BufferedLoader = loader, path: Path = path) -> dict[str, float]:
            begin = time.perf_counter()
            handle = bytecheckpoint.save(path, {"dataloader": loader}, async_checkpoint=True)
            blocking = time.perf_counter() - begin
            phases = handle.result().phases
            return {"blocking": blocking, "gathering": phases["capture"], "staging": phases["stage"]}

        arms.append(Arm(name, run, steps))
    try:
        case = f"loader of {nbytes / 2**20:.4g} MiB: blocking"
        results = measure(bench.world, case, bench.place, nbytes, arms, bench.options.rounds)
    finally:
        for loader in loaders.values():
            loader.close()
    for result in results:
        result.wall = result.extra.pop("blocking", result.wall)
    bench.add(*results)
