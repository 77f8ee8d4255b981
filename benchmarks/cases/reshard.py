"""Loads at another layout: another world size, and shards along another dimension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.measure import Arm, read_bytes
from benchmarks.peers import Peer
from benchmarks.state import Tensors, dense, fresh, sharded, size_of

__all__ = ["reshard"]


def reshard(bench: Bench) -> None:
    """Measure loads of a world's own checkpoint, at the same layout and at another, and of the smaller world's."""
    world = bench.world.size
    state = dense(bench.options.nbytes) if world == 1 else sharded(bench.options.nbytes)
    peers = [p for p in bench.peers if p.reshards]
    for peer in peers:
        peer.save(bench.folder / f"sharded-{world}" / peer.name, state)
    bench.world.barrier()
    if world == 1:
        return  # the next world loads these
    columns = fresh(sharded(bench.options.nbytes, 1))
    rows = fresh(state)
    before = world // 2
    # One case for all three, so that the arms take turns.
    arms = []
    for peer in peers:
        arms += [
            Arm(f"{peer.name}, same layout", _load(bench, peer, world, rows)),
            Arm(f"{peer.name}, rows to columns", _load(bench, peer, world, columns)),
        ]
        if (bench.folder / f"sharded-{before}" / peer.name).exists():  # if that world ran
            arms.append(Arm(f"{peer.name}, {before} to {world} ranks", _load(bench, peer, before, rows)))
    bench.measure("load at a layout", size_of(state), arms)
    bench.clear(f"sharded-{before}")
    if world == 4:
        bench.clear_all()


def _load(bench: Bench, peer: Peer, world: int, target: Tensors) -> Callable[[], dict[str, float]]:
    path: Path = bench.folder / f"sharded-{world}" / peer.name

    def run() -> dict[str, float]:
        before = read_bytes()
        peer.load(path, target)
        return {"read_sum": float(read_bytes() - before)}

    return run
