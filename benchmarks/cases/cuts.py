"""Loads of checkpoints that another number of ranks has cut, with the exchange between ranks and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, read_bytes
from benchmarks.state import Tensors, dense, size_of
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing.wrappers import DelayedStorage

__all__ = ["cuts"]

_SAVED_BY = (1, 2, 3, 4)
_LARGEST = 256 << 20
#: Bytes per second of each read of the slow storage, and seconds that each call takes.
_BANDWIDTH, _LATENCY = 100e6, 1e-3


@dataclass
class _Part:
    """In place of a tensor: the box of it that one rank holds."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor

    def __bytecheckpoint_shards__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        yield self.shape, self.offsets, self.data


def cuts(bench: Bench) -> None:
    """Measure loads by rows from any number of ranks, by columns, and by replicas; `read_sum` is what all ranks read."""
    world = bench.world.size
    full = dense(min(bench.options.nbytes, _LARGEST))
    bench.world.barrier()
    if bench.world.rank == 0:
        for ranks in _SAVED_BY:
            ThreadWorld(ranks).run(_save, bench.folder / f"by-{ranks}", full, timeout=300)
    bench.world.barrier()
    rows, columns, replica = (
        _parts(full, world, bench.world.rank, 0),
        _parts(full, world, bench.world.rank, 1),
        _parts(full, 1, 0, 0),
    )
    loads = {f"rows {ranks} to {world}": (f"by-{ranks}", rows) for ranks in (world, *_SAVED_BY)}
    loads |= {f"rows {world} to columns {world}": (f"by-{world}", columns)}
    loads |= {f"rows {world} to DDP {world}": (f"by-{world}", replica)}
    for slow in (False, True) if world > 1 and bench.place == "tmpfs" else (False,):
        arms = []
        for name, (folder, target) in loads.items():
            for overlap in (True, False) if world > 1 else (True,):
                arms.append(
                    Arm(name + ("" if overlap else ", alone"), _load(bench.folder / folder, target, overlap, slow))
                )
        bench.measure("cuts, slow storage" if slow else "cuts", size_of(full), arms)
    bench.clear_all()


def _save(collective: Collective, path: Path, full: Tensors) -> None:
    bytecheckpoint.save(path, {"model": _parts(full, collective.world_size, collective.rank, 0)})


def _parts(full: Tensors, world: int, rank: int, dim: int) -> dict[str, _Part]:
    """Cut tensors along `dim` (vectors along 0) into parts of this rank, the last ones shorter."""
    parts = {}
    for name, tensor in full.items():
        cut = min(dim, tensor.ndim - 1)
        length = -(-tensor.shape[cut] // world)
        first = min(rank * length, tensor.shape[cut])
        data = tensor.narrow(cut, first, min(length, tensor.shape[cut] - first)).clone().contiguous()
        parts[name] = _Part(tuple(tensor.shape), tuple(first if d == cut else 0 for d in range(tensor.ndim)), data)
    return parts


def _load(path: Path, target: dict[str, _Part], overlap: bool, slow: bool) -> Callable[[], dict[str, float]]:
    storage: Storage = resolve(path)
    if slow:
        storage = DelayedStorage(storage, _LATENCY, _BANDWIDTH)

    def run() -> dict[str, float]:
        before = read_bytes()
        bytecheckpoint.load(storage, {"model": target}, overlap_loading=overlap)
        return {"read_sum": float(read_bytes() - before)}

    return run
