"""Lightning on two ranks: the best step, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations.conformance import after
from tests.integrations.lightning.jobs import (
    ModelCheckpoint,
    Net,
    data,
    export_ckpt,
    loader,
    make,
    pl,
    run,
)
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks


@on_ranks(2)
def test_the_best_step_on_all_ranks(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, mode="max")
    trainer = make(callback, limit_val_batches=1.0)
    net = Net()
    trainer.fit(net, loader(), DataLoader(data(8, seed=4), batch_size=4))
    dist.barrier()  # rank 0 deletes
    assert steps_in(tmp_path) == [6, 18] and callback.best_model_path.endswith("step_00000006")
    weights = [p.detach().clone() for p in net.parameters()]
    trainer.test(net, DataLoader(data(8, seed=4), batch_size=4), ckpt_path="best")
    assert not all((a == b).all() for a, b in zip(weights, net.parameters(), strict=True))
    if trainer.is_global_zero:  # alone
        export_ckpt(callback.best_model_path, tmp_path / "best.ckpt")
        loaded = Net.load_from_checkpoint(tmp_path / "best.ckpt")
        assert all((a == b).all() for a, b in zip(loaded.parameters(), net.parameters(), strict=True))
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(callback.best_model_score or 0), rel=1e-5)


def fit_of_lightning(folder: Path, steps: int, **options: Any) -> dict[int, float]:
    """Fit with Lightning itself, and save at the last step."""
    callback = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=steps)
    net = Net(shard=options.get("strategy") == "fsdp2")
    make(callback, max_epochs=-1, max_steps=steps, **options).fit(net, loader(False))
    return net.losses


@pytest.mark.parametrize("layouts", ["ddp-ddp", "fsdp2-fsdp2", "fsdp2-one", "fsdp2-ddp", "ddp-fsdp2"])
def test_a_job_that_changes_over_from_lightning(worlds: Worlds, tmp_path: Path, layouts: str) -> None:
    """From files and sharded folders, also where Lightning itself cannot read a folder; then from a step."""
    strategies = {"fsdp2": "fsdp2", "ddp": "auto", "one": "auto"}
    before, now = ({"strategy": strategies[layout]} for layout in layouts.split("-"))
    ranks = 1 if layouts.endswith("one") else 2
    wanted = worlds.run(2, fit_of_lightning, tmp_path / "whole", 12, **before)[0]
    worlds.run(2, fit_of_lightning, tmp_path / "run", 6, **before)
    sampler = {"sampler": DistributedSampler(data(), ranks, 0)} if ranks == 1 else {}
    for steps, expected in ((8, {7, 8}), (12, {9, 10, 11, 12})):
        got = worlds.run(ranks, fit_on, tmp_path / "run", steps, sampler, **now)[0]
        assert got.keys() == expected and got == pytest.approx({step: wanted[step] for step in expected}, rel=1e-5)
    assert steps_in(tmp_path / "run") == [8, 12]


def fit_on(folder: Path, steps: int, sampler: dict[str, Any], **options: Any) -> dict[int, float]:
    net = Net(shard=options["strategy"] == "fsdp2")
    return run(folder, net=net, max_epochs=-1, max_steps=steps, train=loader(False, **sampler), **options)


@on_ranks(2)
def test_two_callbacks_on_all_ranks(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", save_top_k=1)
    run(tmp_path, validate=True, callbacks=[best])
    dist.barrier()
    assert steps_in(tmp_path) == [4, 6, 8, 12, 16] and best.best_model_path.endswith("step_00000006")
    again = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", save_top_k=1)
    run(tmp_path, validate=True, callbacks=[again], max_steps=17)
    assert again.best_k_models.keys() == best.best_k_models.keys() and again.last_model_path == best.last_model_path


@on_ranks(2)
def test_averaged_weights_on_all_ranks(tmp_path: Path) -> None:
    """Losses, and the averages at the end, are those of a run without a stop, although the ranks begin differently."""

    class Different(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.2)
            self.layers[0].weight.data += dist.get_rank()

    def train(folder: Path | None, **options: Any) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        net = Different()
        callback = pl.callbacks.EMAWeightAveraging(decay=0.7, update_starting_at_step=5)
        losses = run(
            folder, net=net, callbacks=[callback], validate=True, checkpoint={"every_n_train_steps": 3}, **options
        )
        return losses, net.state_dict()

    wanted, averages = train(None)
    assert train(tmp_path / "run")[0] == wanted
    for number in (3, 12):
        got, weights = train(tmp_path / f"from-{number}", ckpt_path=tmp_path / "run" / f"step_{number:08d}")
        assert got == after(number, wanted)
        assert all(map(torch.equal, averages.values(), weights.values()))
