"""Tokens per second of data loaders, and what the training process notices of them.

Rows of 2048 tokens, 32 of them in a global batch. "From files": documents of token ids in a memory-mapped file, so that
packing and handing over is all there is to do. "Text": a tokenizer in Python does most of the work. All but ours give the
tokens alone; ours gives the numbers of the documents and the positions too.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from benchmarks.bench import Bench
from benchmarks.loaders.contenders import CONTENDERS, MOSAIC_MISSING, MosaicProcess
from benchmarks.loaders.data import Corpus, write_corpus
from benchmarks.measure import Arm, Result, core_seconds, measure

__all__ = ["loader_speed"]

_STEP_SECONDS = 0.05
_PREFETCHED = 8  # batches that a loader with 4 workers may have made before it is measured
_IDLE = 0.2  # share of one core below which a process and its children count as idle


def loader_speed(bench: Bench) -> None:
    """Measure loading as fast as possible, and the wait of a training whose step takes 50 ms."""
    if not MosaicProcess.available():
        print(MOSAIC_MISSING, file=sys.stderr, flush=True)
    short = bench.options.short
    for text in (False, True):
        corpus = write_corpus(bench.folder, min(bench.options.nbytes // 16, (16 if text else 32) << 20), text=text)
        label = "loader: text" if text else "loader: token files"
        for workers in (2,) if short else (0, 1, 2, 4):
            _compare(bench, f"{label}, {workers} workers", corpus, workers, short)
    bench.clear_all()


def _compare(bench: Bench, case: str, corpus: Corpus, workers: int, short: bool) -> None:
    chosen = {
        name: make
        for name, make in CONTENDERS.items()
        if (name == "bytecheckpoint" or not bench.options.peers or name.split()[0] in bench.options.peers)
        and (make is not MosaicProcess or MosaicProcess.available())
    }
    loaders: dict[str, Any] = {name: make(corpus, workers) for name, make in chosen.items()}
    batches = (20 if short else 100) // (2 if corpus.text else 1)
    try:
        for suffix, count, step in (("", batches, 0.0), (", steps of 50 ms: wait", 10 if short else 40, _STEP_SECONDS)):
            arms = [
                Arm(name, partial(loader.take, count, step), partial(_begin, loader, 1 if step else _PREFETCHED))
                for name, loader in loaders.items()
            ]
            results = measure(bench.world, case + suffix, "", 0, arms, bench.options.rounds)
            bench.add(*(_in_batches(result, count, waits=bool(step)) for result in results))
    finally:
        for loader in loaders.values():
            loader.close()


def _begin(loader: Any, batches: int) -> None:
    """Wait until the loader before has made the batches that its workers make in advance, then take some of this one."""
    deadline = time.monotonic() + 10
    idle = False
    while not idle and time.monotonic() < deadline:
        core, begin = core_seconds(), time.perf_counter()
        time.sleep(0.05)
        idle = core_seconds() - core < _IDLE * (time.perf_counter() - begin)
    loader.take(batches)


def _in_batches(result: Result, batches: int, *, waits: bool) -> Result:
    """Return a result whose seconds are those of one batch, or of the wait for one; core time is in milliseconds too."""
    figures, result.extra = result.extra, {}
    if figures and not waits:
        rates = zip(figures["tokens"], result.wall, strict=True)
        result.extra["Mtokens_per_s"] = [tokens / seconds / 1e6 for tokens, seconds in rates]
    result.wall = figures.get("wait", []) if waits else [seconds / batches for seconds in result.wall]
    result.core = [seconds / batches for seconds in result.core]
    result.extra["core_ms"] = [seconds * 1e3 for seconds in result.core]
    result.extra["main_core_ms"] = [seconds * 1e3 for seconds in figures.get("main_core", [])]
    return result
