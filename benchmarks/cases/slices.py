"""Measure how much of a tensor a rank reads that needs 1/64 of it."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks.bench import Bench
from benchmarks.cases.fresh_process import run_alone
from benchmarks.measure import Result, core_seconds, read_bytes

__all__ = ["slices"]

_PARTS = 64


class _Rows:
    """A sharded leaf: some rows of a tensor."""

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...], start: int) -> None:
        self.tensor, self.shape, self.start = tensor, shape, start

    def __bytecheckpoint_shards__(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        return [(self.shape, (self.start, *(0,) * (len(self.shape) - 1)), self.tensor)]


def slices(bench: Bench) -> None:
    """Measure extra["share"]: bytes read divided by bytes of the tensor; the ideal is 1/64."""
    for name in ("bytecheckpoint", "DCP"):
        figures = run_alone("benchmarks.cases.slices", name, str(bench.folder / "slice"), bench.options.nbytes)
        bench.clear("slice")
        result = Result("1/64 of a tensor", bench.place, 1, name, int(figures["nbytes"]))
        result.wall, result.core = [figures["wall"]], [figures["core"]]
        result.extra["share"] = [figures["read"] / figures["nbytes"]]
        bench.add(result)


def main(name: str, path: str, nbytes: int) -> dict[str, float]:
    rows = _PARTS * max(nbytes // 4 // 1024 // _PARTS, 1)
    whole = torch.rand(rows, 1024)
    part = rows // _PARTS
    local = torch.zeros(part, 1024)
    if name == "bytecheckpoint":
        import bytecheckpoint

        bytecheckpoint.save(path, {"model": {"w": whole}})
        states = {"model": {"w": _Rows(local, tuple(whole.shape), 5 * part)}}
        bytecheckpoint.load(path, states)  # the first load of a process imports what it needs

        def load() -> None:
            bytecheckpoint.load(path, states)
    else:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dcp.save({"w": whole}, checkpoint_id=path, no_dist=True)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=_PARTS)
        mesh = init_device_mesh("cpu", (_PARTS,))
        wanted = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

        def load() -> None:
            dcp.load({"w": wanted}, checkpoint_id=path, no_dist=True)

        load()
    before, core, wall = read_bytes(), core_seconds(), time.perf_counter()
    load()
    wall, core, read = time.perf_counter() - wall, core_seconds() - core, read_bytes() - before
    assert torch.equal(local, whole[5 * part : 6 * part])
    return {"wall": wall, "core": core, "read": float(read), "nbytes": float(whole.nbytes)}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    Path(sys.argv[4]).write_text(json.dumps(figures))
