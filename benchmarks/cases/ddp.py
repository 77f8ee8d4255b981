"""DDP: every rank loads everything. Seconds, and bytes that all ranks together read from storage."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.measure import Arm, read_bytes
from benchmarks.peers import Peer
from benchmarks.peers.ours import Ours
from benchmarks.state import dense, fresh, same, size_of

__all__ = ["ddp_load"]


def ddp_load(bench: Bench) -> None:
    """Measure loads and saves; `nbytes` counts the state once, extra["read_sum"] is what all ranks read."""
    state = dense(bench.options.nbytes // 2)
    target = fresh(state)
    contenders: list[tuple[str, Peer]] = []
    for peer in bench.peers:
        if isinstance(peer, Ours):
            contenders.append(("bytecheckpoint", Ours()))
            contenders.append(("bytecheckpoint overlap_loading=False", Ours(overlap_loading=False)))
        elif peer.ranks:
            contenders.append((peer.name, peer))
    saves, loads = [], []
    for name, peer in contenders:

        def save(peer: Peer = peer, name: str = name) -> None:
            peer.save(bench.folder / name, state)

        def load(peer: Peer = peer, name: str = name) -> dict[str, float]:
            before = read_bytes()
            peer.load(bench.folder / name, target)
            return {"read_sum": float(read_bytes() - before)}

        save()
        bench.world.barrier()
        load()
        assert same(state, target), f"{name} loads other values than it saved"
        if "False" not in name:
            saves.append(Arm(name, save, lambda n=name: bench.clear(n)))  # type: ignore[misc]
        loads.append(Arm(name, load))
    bench.measure("DDP load", size_of(state), loads)
    bench.measure("DDP save", size_of(state), saves)
    bench.clear_all()
