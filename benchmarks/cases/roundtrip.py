"""Sync save, async save, load, cold load and peak memory of one large state, against the raw limits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, drop_cached, measure, peak_memory
from benchmarks.peers import Peer
from benchmarks.peers.base import fsync_all
from benchmarks.raw import COPIES, READS, WRITES, Raw
from benchmarks.state import Tensors, dense, fresh, same, sharded, size_of

__all__ = ["quickest", "roundtrip"]

_TRIALS = 2  # of each raw way


def roundtrip(bench: Bench) -> None:
    state = dense(bench.options.nbytes) if bench.world.size == 1 else sharded(bench.options.nbytes)
    peers = [p for p in bench.peers if bench.world.size == 1 or p.ranks]
    raw = Raw(size_of(state, local=True))
    _save(bench, peers, state, raw)
    _async(bench, [p for p in peers if p.asynchronous], state, raw)
    _load(bench, peers, state, raw)
    if bench.world.size == 1 and bench.place == "tmpfs":
        _memory(bench, peers, state)
    bench.clear_all()


def _raw_file(bench: Bench) -> Path:
    return bench.folder / f"raw-{bench.world.rank}"


def quickest(bench: Bench, arms: list[Arm]) -> list[Arm]:
    """Try the ways to move bytes, and return the two quickest: which these are depends on the place.

    A way that fails (a file system may refuse O_DIRECT) is left out.
    """
    tried = measure(bench.world, "", bench.place, 0, arms, rounds=_TRIALS, warm=False)
    best = sorted((r for r in tried if r.wall), key=lambda r: min(r.wall))[:2]
    return [arm for arm in arms if arm.name in {r.arm for r in best}]


def _save(bench: Bench, peers: list[Peer], state: Tensors, raw: Raw) -> None:
    file = _raw_file(bench)

    def remove() -> None:
        shutil.rmtree(file, ignore_errors=True)

    arms = quickest(bench, [Arm(f"raw {way}", partial(raw.write, file, way), remove, remove) for way in WRITES])
    for peer in peers:

        def run(peer: Peer = peer) -> None:
            peer.save(bench.folder / peer.name, state)
            _make_durable(bench, peer)

        arms.append(Arm(_durable_name(peer), run, lambda p=peer: bench.clear(p.name)))  # type: ignore[misc]
    bench.measure("save", size_of(state), arms)
    for peer in peers:
        bench.clear(peer.name)


def _make_durable(bench: Bench, peer: Peer) -> None:
    """Make the files of a peer durable, if it reports a save before they are."""
    if not peer.durable:
        bench.world.barrier()
        if bench.world.rank == 0:
            fsync_all(bench.folder / peer.name)
        bench.world.barrier()


def _durable_name(peer: Peer) -> str:
    return peer.name if peer.durable else f"{peer.name} + fsync"


def _async(bench: Bench, peers: list[Peer], state: Tensors, raw: Raw) -> None:
    """Measure asynchronous saves: first their blocking time, then the time to their end."""
    ways = [way for peer in peers for way in peer.async_ways()]
    peers = [*peers, *ways]
    arms = [
        *quickest(bench, [Arm(f"memcpy {way}", partial(raw.copy, way)) for way in COPIES]),
        Arm("memcpy, tensor by tensor", partial(raw.copy_of, list(state.values()))),
    ]
    waiting: list[object] = []

    def wait() -> None:
        while waiting:
            waiting.pop()()  # type: ignore[operator]

    for peer in peers:

        def run(peer: Peer = peer) -> None:
            waiting.append(peer.save_async(bench.folder / peer.name, state))

        arms.append(Arm(peer.name, run, lambda p=peer: bench.clear(p.name), wait))  # type: ignore[misc]

    def background() -> None:
        handle = bytecheckpoint.save(
            str(bench.folder / "background"), {"model": state}, async_checkpoint=True, staging="background"
        )
        waiting.append(handle.result)

    arms.append(Arm("bytecheckpoint staging=background", background, lambda: bench.clear("background"), wait))
    bench.measure("async save: blocking", size_of(state), arms)
    bench.clear("background")

    ends = []
    for peer in peers:

        def end_to_end(peer: Peer = peer) -> dict[str, float]:
            begin = time.perf_counter()
            end = peer.save_async(bench.folder / peer.name, state)
            blocking = time.perf_counter() - begin
            end()
            _make_durable(bench, peer)
            return {"blocking": blocking}

        ends.append(Arm(_durable_name(peer), end_to_end, lambda p=peer: bench.clear(p.name)))  # type: ignore[misc]
    bench.measure("async save: end to end", size_of(state), ends, warm=False)
    for peer in peers:
        bench.clear(peer.name)
    for way in ways:
        way.close()


def _load(bench: Bench, peers: list[Peer], state: Tensors, raw: Raw) -> None:
    file = _raw_file(bench)
    raw.write(file)
    target = fresh(state)
    loads: list[tuple[str, Path, Callable[[], None]]] = []
    for peer in peers:
        folder = bench.folder / peer.name
        bench.world.barrier()
        bench.clear(peer.name)
        bench.world.barrier()
        peer.save(folder, state)
        bench.world.barrier()
        for tensor in target.values():
            tensor.zero_()
        peer.load(folder, target)
        assert same(state, target), f"{peer.name} loads other values than it saved"
        loads.append((peer.name, folder, partial(peer.load, folder, target)))
    cached = quickest(bench, [Arm(f"raw {way}", partial(raw.read, file, way)) for way in READS if not way.direct])
    arms = cached + [Arm(name, run) for name, _, run in loads]
    bench.measure("load (page cache)", size_of(state), arms, rounds=2 * bench.options.rounds)
    if bench.place == "disk":
        ways = [Arm(f"raw {way}", partial(raw.read, file, way), partial(drop_cached, file)) for way in READS]
        cold = [Arm(name, run, partial(drop_cached, path)) for name, path, run in loads]
        bench.measure("load (cold)", size_of(state), quickest(bench, ways) + cold, warm=False)


def _memory(bench: Bench, peers: list[Peer], state: Tensors) -> None:
    """Measure extra["peak_bytes"], the largest rise of resident memory."""
    target = fresh(state)
    arms = []
    for peer in peers:
        folder = bench.folder / peer.name

        def save(peer: Peer = peer, folder: Path = folder) -> dict[str, float]:
            figures: dict[str, float] = {}
            with peak_memory(figures):
                peer.save(folder, state)
            return figures

        def load(peer: Peer = peer, folder: Path = folder) -> dict[str, float]:
            figures: dict[str, float] = {}
            with peak_memory(figures):
                peer.load(folder, target)
            return figures

        arms.append(Arm(f"{peer.name} save", save, lambda p=peer: bench.clear(p.name)))  # type: ignore[misc]
        arms.append(Arm(f"{peer.name} load", load))
    bench.measure("peak memory", size_of(state), arms, rounds=1, warm=False)
