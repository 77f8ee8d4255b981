"""Megatron's own `dist_checkpointing` with the strategies of this package, whose saves `bytecheckpoint.load` reads, too."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, MissingKeyError
from bytecheckpoint.tools import verify
from tests.frameworks.megatron.test_load_torch_dist import load as load_by_ours
from tests.support.damage import flip_bit, storage_file
from tests.support.megatron.models import Layout
from tests.support.megatron.torch_dist import load_torch_dist, save_torch_dist, start_with_own_shards
from tests.support.megatron.training import Trainer
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

#: Layout of the save, and those of the loads. Both have one model.
CASES = {
    "dense": (
        Layout(tp=2, dp=2, bf16=True),
        [Layout(tp=2, dp=2, bf16=True), Layout(dp=4, bf16=True), Layout(tp=2, pp=2, bf16=True)],
    ),
    "experts": (Layout(ep=2, dp=2, moe=True), [Layout(ep=2, dp=2, moe=True), Layout(pp=2, ep=2, dp=2, moe=True)]),
    "whole": (Layout(tp=2, bf16=True, distributed=False), [Layout(pp=2, bf16=True, distributed=False)]),
    "virtual": (Layout(pp=2, vpp=2, dp=2, tied=False), [Layout(dp=2, tied=False), Layout(tp=2, pp=2, tied=False)]),
}


def save(layout: Layout, path: str) -> list[float]:
    from bytecheckpoint.integrations.megatron import SaveStrategy

    trainer = start_with_own_shards(layout, lr=0.5)
    trainer.train(BEFORE)
    save_torch_dist(trainer, path, "fully_reshardable", sharded_strategy=SaveStrategy())
    save_torch_dist(trainer, f"{path}-stock", "fully_reshardable")
    return trainer.train(AFTER)


def load_stock(layout: Layout, path: str) -> list[float]:
    """Load what Megatron's own strategy saved."""
    trainer = Trainer(layout, seed=9, lr=0.5)  # Megatron finds param groups by their largest learning rate
    trainer.train(1)
    load_torch_dist(trainer, f"{path}-stock")
    return trainer.train(AFTER)


def load_by_megatron(layout: Layout, path: str) -> list[float]:
    from bytecheckpoint.integrations.megatron import LoadStrategy

    trainer = Trainer(layout, seed=9, lr=0.5)
    trainer.train(1)
    strategy = LoadStrategy()
    load_torch_dist(trainer, path, strategy=strategy)
    assert strategy.report is not None and strategy.report.bytes_read
    return trainer.train(AFTER)


@pytest.mark.parametrize("name", CASES)
def test_any_layout_trains_on(worlds: Worlds, name: str, tmp_path: Path) -> None:
    source, layouts = CASES[name]
    path = str(tmp_path / "step")
    losses, *_ = worlds.run(source.world, save, source, path, timeout=300)
    assert verify(path).ok
    with bytecheckpoint.open(path) as saved:
        steps = [saved[key][...] for key in saved if key.endswith("/step")]
    assert len(steps) > 20 and all(step.dtype == torch.float32 and step == BEFORE for step in steps)
    for layout in layouts:
        stock, by_megatron, by_ours = (
            worlds.run(layout.world, load, layout, path, timeout=300)[0]
            for load in (load_stock, load_by_megatron, load_by_ours)
        )
        assert by_megatron == stock
        assert_losses(by_ours, losses, 1e-2 if source.bf16 else 1e-4)


def variants(layout: Layout, path: str) -> None:
    """Save asynchronously and in buckets, by Megatron's wrappers that divide the work, and load again."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )

    from bytecheckpoint.integrations.megatron import LoadStrategy, SaveStrategy

    group = parallel_state.get_data_parallel_group
    for kind in ("fully_reshardable", "dp_reshardable"):
        trainer = start_with_own_shards(layout, lr=0.5)
        trainer.train(BEFORE)
        folder = f"{path}/{kind}"
        request = save_torch_dist(
            trainer,
            folder,
            kind,
            async_sharded_save=True,
            async_strategy="mcore",
            sharded_strategy=FullyParallelSaveStrategyWrapper(SaveStrategy(), group()),
        )
        losses = trainer.train(AFTER)  # the state of the save is copied already
        request.execute_sync()
        other = Trainer(layout, seed=9, lr=0.5)
        other.train(1)
        load_torch_dist(other, folder, strategy=FullyParallelLoadStrategyWrapper(LoadStrategy(), group()))
        assert other.train(AFTER) == losses


def objects_and_refusals(path: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from bytecheckpoint.integrations.megatron import LoadStrategy, SaveStrategy

    rank = dist.get_rank()
    rng = [{"random": (3, (1, rank), None), "numpy": ("MT", [7]), "torch": torch.arange(3) + rank}]

    def states(value: float, dtype: torch.dtype = torch.float32, rows: int = 3) -> dict[str, Any]:
        weight = torch.full((rows, 2), value, dtype=dtype)
        sharded = ShardedTensor.from_rank_offsets("w.weight", weight, (0, rank, 2), allow_shape_mismatch=rows != 3)
        extra = io.BytesIO(b"scales") if value else None
        return {
            "model": {"w.weight": sharded, "_extra_state": ShardedObject("w._extra_state", extra, (1,), (0,), rank)},
            "rng_state": ShardedObject("rng_state", rng if value else None, (2,), (rank,)),
            "iteration": int(value),
        }

    if rank == 0:
        Path(path).mkdir()
    dist.barrier()
    dist_checkpointing.save(states(5), path, SaveStrategy())
    loaded = dist_checkpointing.load(states(0), path, LoadStrategy())
    assert loaded["iteration"] == 5
    assert loaded["model"]["w.weight"].tolist() == [[5.0, 5.0]] * 3
    assert loaded["model"]["_extra_state"].getvalue() == b"scales"
    assert loaded["rng_state"][0]["random"] == (3, (1, rank), None)
    assert torch.equal(loaded["rng_state"][0]["torch"], rng[0]["torch"])
    padded = dist_checkpointing.load(states(0, rows=4), path, LoadStrategy())["model"]["w.weight"]
    assert padded[:, 0].tolist() == ([5.0] * 4 if rank == 0 else [5.0, 5.0, 0.0, 0.0])
    with pytest.raises(IncompatibleCheckpointError, match="float32 in the checkpoint and bfloat16 here"):
        dist_checkpointing.load(states(0, torch.bfloat16), path, LoadStrategy())
    cast = dist_checkpointing.load(states(0, torch.bfloat16), path, LoadStrategy(cast=True))
    assert cast["model"]["w.weight"].tolist() == [[5.0, 5.0]] * 3
    more = states(0) | {"more": ShardedTensor.from_rank_offsets("more", torch.ones(2), (0, rank, 2))}
    with pytest.raises(MissingKeyError, match="model/more"):
        dist_checkpointing.load(more, path, LoadStrategy())
    if rank == 0:
        flip_bit(storage_file(Path(path)), -2)
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch in model/"):
        dist_checkpointing.load(states(0), path, LoadStrategy())
    if rank == 0:
        torch.save({"iteration": 6}, Path(path, "common.pt"))
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match=r"common.pt is not the file that was saved"):
        dist_checkpointing.load(states(0), path, LoadStrategy())


def test_asynchronous_saves_and_wrappers(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, variants, Layout(tp=2, dp=2, bf16=True), str(tmp_path), timeout=300)


def test_objects_and_refusals(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, objects_and_refusals, str(tmp_path / "step"), timeout=120)
