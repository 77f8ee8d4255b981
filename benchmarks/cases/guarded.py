"""Core time of small tensors, small loads and saves, and of ranks, beside a peer: the figures of `make bench-guard`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm
from benchmarks.peers.dcp import DCP
from benchmarks.peers.ours import Ours
from benchmarks.peers.safetensors_file import Safetensors
from benchmarks.raw import Raw
from benchmarks.state import Tensors, dense, fresh, size_of, small

__all__ = ["guarded"]

_FEW = 16  # tensors of a state that costs what every save and load costs
_REPETITIONS = 5  # of a short operation within one measurement: core time of other processes is counted in 10 ms


def guarded(bench: Bench) -> None:
    """Measure ours and one peer side by side, each pair as a case of its own."""
    few = small(_FEW)
    if bench.world.size == 1:
        _tensors(bench, small(bench.options.tensors))
        _bytes(bench, dense(bench.options.nbytes))
        _index(bench, small(bench.options.tensors))
    for peer in (Ours(), DCP()):
        for number in range(_REPETITIONS):
            peer.save(bench.folder / f"{peer.name}-{number}", few)
    bench.world.barrier()
    _pair(bench, "save of 16 tensors", few, Ours().save, DCP().save)
    _pair(bench, "load of 16 tensors", few, Ours().load, DCP().load)
    bench.clear_all()


def _pair(bench: Bench, case: str, state: Tensors, *calls: Callable[[Path, Tensors], None]) -> None:
    """Measure calls of ours and of a peer, several in each measurement."""

    def run(name: str, call: Callable[[Path, Tensors], None]) -> None:
        for number in range(_REPETITIONS):
            call(bench.folder / f"{name}-{number}", state)

    arms = [Arm(name, partial(run, name, call)) for name, call in zip((Ours.name, DCP.name), calls, strict=True)]
    bench.measure(case, size_of(state), arms)


def _tensors(bench: Bench, state: Tensors) -> None:
    target = fresh(state)
    peers = (Ours(), Safetensors())
    saves = [Arm(p.name, partial(p.save, bench.folder / p.name, state), partial(bench.clear, p.name)) for p in peers]
    bench.measure("save of small tensors", size_of(state), saves)
    loads = [Arm(p.name, partial(p.load, bench.folder / p.name, target)) for p in peers]
    bench.measure("load of small tensors", size_of(state), loads)


def _bytes(bench: Bench, state: Tensors) -> None:
    target, raw, ours = fresh(state), Raw(size_of(state)), Ours()
    path, raw_path = bench.folder / ours.name, bench.folder / "raw"
    saves = [
        Arm(ours.name, partial(ours.save, path, state), partial(bench.clear, ours.name)),
        Arm("raw", partial(raw.write, raw_path), partial(bench.clear, "raw")),
    ]
    bench.measure("save of bytes", size_of(state), saves)
    loads = [Arm(ours.name, partial(ours.load, path, target)), Arm("raw", partial(raw.read, raw_path))]
    bench.measure("load of bytes", size_of(state), loads, rounds=2 * bench.options.rounds)


def _index(bench: Bench, state: Tensors) -> None:
    """Measure the index that ours makes of a checkpoint of DCP, beside the unpickling of its metadata, DCP's first step."""
    path = bench.folder / "dcp"
    DCP().save(path, state)
    metadata = (path / ".metadata").read_bytes()

    def unpickle() -> None:
        pickle.loads(metadata)

    arms = [Arm(Ours.name, lambda: bytecheckpoint.open(path).close()), Arm("raw", unpickle)]
    bench.measure("index of DCP", len(metadata), arms)
    bench.clear("dcp")
