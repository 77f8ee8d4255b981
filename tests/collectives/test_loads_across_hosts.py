"""A load by ranks of several machines: bytes that several ranks want go over the data plane."""

from __future__ import annotations

from pathlib import Path

from tests.support.memory import as_on_disk
from tests.support.worlds import World

SIZE = (40 << 20) + 1236


def load_on_two_hosts(path: str) -> tuple[int, int, list[int]]:
    """Load as one rank of four; return the bytes read, the bytes received and the ranks that it is connected with."""
    import torch
    import torch.distributed as dist

    import bytecheckpoint
    from bytecheckpoint.collectives import current

    rank = dist.get_rank()
    expected = torch.arange(SIZE // 4, dtype=torch.int32)
    bytecheckpoint.save(path, {"model": {"w": expected}})
    collective = current()
    collective.host = f"host {rank // 2}"
    filled = torch.zeros_like(expected)
    report = bytecheckpoint.load(as_on_disk(path), {"model": {"w": filled}})
    assert torch.equal(filled, expected)
    mesh = collective._mesh  # type: ignore[attr-defined]
    linked = sorted(peer.rank for peer in mesh._peers.values() if peer.links)
    return report.bytes_read, report.bytes_received, linked


def test_replicas_on_two_hosts(tmp_path: Path) -> None:
    world = World(4, tmp_path / "world")
    try:
        ranks = world.run(load_on_two_hosts, str(tmp_path / "step"))
    finally:
        world.close()
    read, received = (sum(rank[i] for rank in ranks) for i in (0, 1))
    assert SIZE <= read < 1.05 * SIZE, "storage is read once"
    assert received >= 3 * SIZE, "the others get it from their peers"
    for rank, (_, _, linked) in enumerate(ranks):
        assert 1 - rank // 2 in {other // 2 for other in linked}
