"""Lightning under DDP and FSDP2: kills, agreement of the ranks, and resumes at another number of ranks and layout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from bytecheckpoint.manager import Preemption
from tests.integrations.lightning.jobs import (
    ModelCheckpoint,
    Net,
    after,
    data,
    die_at_commit,
    export_ckpt,
    loader,
    make,
    ranks,
    run,
)
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks

CLOSE = 1e-5  # of losses whose additions were in another order
LAYOUTS = {"one": 1, "ddp": 2, "fsdp2": 2}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_killed_rank(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    """Rank 0 dies in the middle of a commit. Dropout draws other numbers on each rank, and these go on too."""
    wanted = worlds.run(2, run, None, strategy=strategy)
    worlds.fresh(2).start(die_at_commit, tmp_path, 2, strategy=strategy).outcomes(grace=1)
    assert steps_in(tmp_path) == [4]
    assert worlds.run(2, run, tmp_path, strategy=strategy) == [after(4, losses) for losses in wanted]
    assert steps_in(tmp_path) == [4, 8, 12, 16]


def train(folder: Path | None, layout: str, **options: Any) -> dict[int, float]:
    """Train without dropout, in an order that is the same for all numbers of ranks: that which DDP has anyway."""
    strategy = "fsdp2" if layout == "fsdp2" else "auto"
    net = Net(shard=layout == "fsdp2")
    sampler = None if layout == "ddp" else DistributedSampler(data(), ranks(), dist.get_rank() if ranks() > 1 else 0)
    losses = run(folder, net=net, train=loader(sampler is None, sampler=sampler), strategy=strategy, **options)
    assert all(isinstance(w, DTensor) for w in net.parameters()) == (layout == "fsdp2")
    return losses


@pytest.mark.parametrize(
    ("before", "now"),
    [("ddp", "one"), ("one", "ddp"), ("fsdp2", "fsdp2"), ("fsdp2", "one"), ("one", "fsdp2"), ("ddp", "fsdp2")],
)
def test_another_layout(worlds: Worlds, tmp_path: Path, before: str, now: str) -> None:
    """In the middle of an epoch; the samples of a batch of all ranks together stay the same."""
    wanted = worlds.run(1, train, None, "one")[0]
    stop = {"max_epochs": -1, "max_steps": 9, "checkpoint": {"every_n_train_steps": 3}}
    worlds.run(LAYOUTS[before], train, tmp_path, before, **stop)
    assert steps_in(tmp_path) == [3, 6, 9]
    got = worlds.run(LAYOUTS[now], train, tmp_path, now, max_epochs=-1, max_steps=18)[0]
    assert got == pytest.approx(after(9, wanted), rel=CLOSE)


@on_ranks(2)
def test_one_rank_gets_the_signal(tmp_path: Path) -> None:
    """All ranks save at one step and leave together; Lightning's own handler does nothing."""

    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    wanted = run(None, max_epochs=20)
    before = signal.getsignal(signal.SIGTERM)
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1000, preemption=Preemption())
    net = Net(dropout=0.2)
    net.at = {7: stop}
    trainer = make(callback, max_epochs=20)
    with pytest.raises(SystemExit):
        trainer.fit(net, loader(), ckpt_path="last")
    assert callback.preempted and signal.getsignal(signal.SIGTERM) == before
    (step,) = steps_in(tmp_path)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, trainer.global_step)
    assert found == [step, step] and step < 100
    assert run(tmp_path, max_epochs=20, checkpoint={"every_n_train_steps": 1000}) == after(step, wanted)


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
