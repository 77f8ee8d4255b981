"""Measure how much a save in the background slows the training loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Result
from benchmarks.peers import Peer
from benchmarks.state import Tensors, dense, size_of

__all__ = ["interference"]


def interpreter_step() -> None:
    """Run some milliseconds of pure Python."""
    total = 0
    for i in range(60_000):
        total += i & 7


_MATRIX = torch.rand(384, 384)


def torch_step() -> None:
    """Run some milliseconds of torch kernels of training size."""
    x = _MATRIX
    for _ in range(12):
        x = torch.relu(x @ _MATRIX) * 1e-3


def interference(bench: Bench) -> None:
    """Measure steps during saves; `wall` is seconds per step, extra["slowdown"] its ratio to the steps between saves."""
    state = dense(bench.options.nbytes)
    for label, step in (("interpreter-bound", interpreter_step), ("torch-bound", torch_step)):
        for arm, peer, writer in _arms(bench):
            if writer:
                bytecheckpoint.configure(writer=writer)
            try:
                bench.add(_loop(bench, f"step during a save: {label}", arm, peer, state, step))
            finally:
                bytecheckpoint.configure(writer="process")
    bench.clear_all()


def _arms(bench: Bench) -> list[tuple[str, Peer, str]]:
    arms = []
    for peer in bench.peers:
        if peer.name == "bytecheckpoint":
            arms += [(f"bytecheckpoint writer={writer}", peer, writer) for writer in ("process", "thread")]
        elif peer.asynchronous:
            arms.append((peer.name, peer, ""))
    return arms


def _loop(bench: Bench, case: str, arm: str, peer: Peer, state: Tensors, step: Callable[[], None]) -> Result:
    result = Result(case, bench.place, 1, arm, size_of(state))
    quiet: list[float] = []
    busy: list[float] = []

    def timed(samples: list[float]) -> None:
        begin = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begin)

    bench.clear("interference")
    try:
        peer.save_async(bench.folder / "interference", state)()
    except Exception as error:  # noqa: BLE001  a peer may fail; the other arms are still measured
        result.error = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return result
    end = time.perf_counter() + bench.options.seconds
    saves = 0
    while time.perf_counter() < end or saves < 2:
        for _ in range(20):
            timed(quiet)
        bench.clear("interference")
        waiting = _Background(peer.save_async(bench.folder / "interference", state))
        while not waiting.done():
            timed(busy)
        waiting.wait()
        saves += 1
    result.wall = [statistics.fmean(busy)] if busy else []
    result.extra["slowdown"] = [statistics.fmean(busy) / statistics.fmean(quiet)] if busy else []
    result.extra["lost_ms_per_save"] = [(sum(busy) - statistics.fmean(quiet) * len(busy)) / saves * 1e3]
    result.extra["quiet"] = [statistics.fmean(quiet)]
    result.extra["steps"] = [float(len(busy))]
    return result


class _Background:
    """A running save, and whether it has ended; it needs no thread of its own."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        owner = getattr(wait, "__self__", None)
        self.done: Callable[[], bool] = owner.done  # type: ignore[union-attr]
