"""Lightning on two ranks: the best step, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bytecheckpoint.errors import UsageError
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
from tests.support.worlds import on_ranks


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


@on_ranks(2)
def test_a_file_of_lightning_stops_all_ranks(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        (tmp_path / "epoch=0-step=6.ckpt").touch()
    dist.barrier()
    with pytest.raises(UsageError, match=r"step=6.ckpt' continues from there"):
        run(tmp_path)


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
