"""Lightning's Trainer with our ModelCheckpoint, in one process: what is saved and kept, and equal losses after kills."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import bytecheckpoint
from bytecheckpoint.dataloader import ResumableLoader, ResumableSampler
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.manager import SaveOptions
from tests.integrations.conformance import after, collected_warnings, notify
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
from tests.support.faulty_storage import Faults
from tests.support.runs import steps_in
from tests.support.worlds import on_ranks


def step(root: Path, number: int) -> str:
    return f"{root}/step_{number:08d}"


STEPS_ONLY: dict[str, Any] = {"max_epochs": -1, "max_steps": 18}
EPOCHS: dict[str, Any] = {"checkpoint": {"every_n_train_steps": None}}
# Forked as in a program; that of a rank of a world would be started anew, and import everything.
WORKER: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}


class Hooked(Net):
    """Draws numbers in hooks, has a state of its own, and ends its epochs early."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("counted", torch.zeros(()))

    def on_fit_start(self) -> None:
        torch.rand(3)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(1)

    def on_train_epoch_end(self) -> None:
        torch.rand(2)

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == 4 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.counted += 1
        assert self.counted == self.global_step


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8, 12, 16]),
        (STEPS_ONLY, [4, 8, 12, 16]),
        ({"accumulate_grad_batches": 2, "checkpoint": {"every_n_train_steps": 2}}, [2, 4, 6, 8]),
        ({"validate": True}, [4, 8, 12, 16]),
        ({"checkpoint": {"every_n_train_steps": 6}}, [6, 12, 18]),
        ({"checkpoint": {"every_n_train_steps": 6}, **STEPS_ONLY}, [6, 12, 18]),
        ({**EPOCHS, "validate": True, "num_sanity_val_steps": 2}, [6, 12, 18]),
        ({**EPOCHS, "validate": True, **STEPS_ONLY}, [6, 12, 18]),
        ({**EPOCHS, "validate": True, "val_check_interval": 3}, [3, 6, 9, 12, 15, 18]),
        ({**EPOCHS, "validate": True, "val_check_interval": 5, "accumulate_grad_batches": 3}, [2, 4, 6]),
        ({**EPOCHS, "net": "plateau", "validate": True}, [6, 12, 18]),
        ({"train": WORKER, "max_epochs": 1, "checkpoint": {"every_n_train_steps": 3}}, [3, 6]),
        ({"limit_train_batches": 3, "max_epochs": 4}, [4, 8, 12]),
        ({"reload_dataloaders_every_n_epochs": 1}, [4, 8, 12, 16]),
        ({"train": {"generator": torch.Generator}}, [4, 8, 12, 16]),
        ({"net": Hooked, "checkpoint": {"every_n_train_steps": 2}}, [2, 4, 6, 8, 10, 12]),
    ],
)
@on_ranks(1)
def test_losses_go_on(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    """From every step: in the middle of an epoch, behind a validation, at its end; with dropout and shuffled."""

    def train(folder: Path | None, **more: Any) -> dict[int, float]:
        given: dict[str, Any] = {**options, **more}
        net = given.get("net", "step")
        given["net"] = Net(dropout=0.2, interval=net) if isinstance(net, str) else net(dropout=0.2)
        given["train"] = loader(**{k: v() if isinstance(v, type) else v for k, v in given.get("train", {}).items()})
        return run(folder, **given)

    wanted = train(None)
    assert train(tmp_path) == wanted
    assert steps_in(tmp_path) == steps
    left: list[int] = []
    for number in steps[:-1]:
        got = train(tmp_path / f"from-{number}", ckpt_path=step(tmp_path, number))
        assert [*got.items()] == [*wanted.items()][-len(got) :]
        left.append(len(got))
    assert left == sorted({*left}, reverse=True) and 0 < left[-1] <= left[0] < len(wanted)


@on_ranks(1)
def test_a_run_that_is_continued(tmp_path: Path) -> None:
    """A run that ended in the middle of an epoch, by max_steps or by hand, continues there; a finished one does not."""
    wanted = run(None)
    options: dict[str, Any] = {"checkpoint": {"every_n_train_steps": None, "every_n_epochs": 1}}
    run(tmp_path, max_epochs=-1, max_steps=8, **options)
    assert steps_in(tmp_path) == [6, 8]
    assert run(tmp_path, max_epochs=-1, max_steps=8, **options) == {}
    net = Net(dropout=0.2)
    stop = {10: lambda: setattr(net.trainer, "should_stop", True)}
    assert run(tmp_path, net=net, at=stop, **options).keys() == {9, 10}
    last = Net(dropout=0.2)
    assert run(tmp_path, net=last, **options) == after(10, wanted)
    assert steps_in(tmp_path) == [6, 8, 10, 12, 18] and last.trainer.current_epoch == 3


@on_ranks(1)
def test_fits_of_one_trainer(tmp_path: Path) -> None:
    """A second fit continues where the first one ended, and saves into the same folder."""
    callback = ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer, net = make(callback, max_epochs=1), Net()
    trainer.fit(net, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, loader())
    assert steps_in(tmp_path) == [6, 12]
    assert not {"on_advance_end", "_load_combined_loader_states"} & vars(trainer.fit_loop).keys()


# --- where to go on from ----------------------------------------------------------------------------------------------


@on_ranks(1)
def test_what_ckpt_path_takes(tmp_path: Path) -> None:
    wanted = run(tmp_path / "run")  # "last": begins
    assert steps_in(tmp_path / "run") == [4, 8, 12, 16]
    with pytest.raises(UsageError, match=r"holds a run up to step 16: pass ckpt_path='last'"):
        run(tmp_path / "run", ckpt_path=None)
    with pytest.raises(CheckpointNotFoundError):
        run(tmp_path / "run", ckpt_path=step(tmp_path / "run", 5))
    branch = tmp_path / "branch"
    assert run(branch, ckpt_path=step(tmp_path / "run", 8)) == after(8, wanted)
    assert steps_in(branch) == [12, 16]
    run(tmp_path / "run", ckpt_path=tmp_path / "run" / "step_00000008", max_steps=12, max_epochs=-1)
    assert steps_in(tmp_path / "run") == [4, 8, 12, 16]
    assert run(tmp_path / "run", max_steps=13, max_epochs=-1).keys() == {13}  # the branch, not the steps it left


@on_ranks(1)
def test_files_of_lightning(tmp_path: Path) -> None:
    """The way from Lightning's own checkpoints, which a program may still write."""
    stock = pl.callbacks.ModelCheckpoint(tmp_path / "stock", every_n_epochs=1, save_top_k=-1)
    trainer, net = make(stock), Net()
    trainer.fit(net, loader(False))
    file = str(tmp_path / "stock" / "epoch=0-step=6.ckpt")
    got = run(tmp_path / "run", ckpt_path=file, net=Net(), shuffle=False)
    assert got == after(6, net.losses) and steps_in(tmp_path / "run") == [8, 12, 16]
    callback = ModelCheckpoint(tmp_path / "new")
    trainer, net = make(callback, max_epochs=1), Net()
    trainer.fit(net, loader(False))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=False).keys() >= {"optimizer_states", "state_dict"}


@pytest.mark.parametrize("name", ["epoch=0-step=6.ckpt", "last.ckpt", "train_step=7-10:30.ckpt"])
@on_ranks(1)
def test_a_job_that_changes_over_from_lightning(tmp_path: Path, name: str) -> None:
    """It goes on behind Lightning's newest file, whose name may have no step, and then behind its own steps."""
    trainer, net = make(None), Net()
    trainer.fit(net, loader(False))
    stock = pl.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, save_last=True)
    make(stock, max_epochs=2).fit(Net(), loader(False))
    files = ["last.ckpt", "epoch=1-step=12.ckpt", "epoch=0-step=6.ckpt"]
    if name not in files:
        (tmp_path / files[0]).rename(tmp_path / name)
        files[0] = name
    for number, file in enumerate(files):
        os.utime(tmp_path / file, (10 + number, 10 + number))
    os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / "step=99.ckpt").write_bytes((tmp_path / name).read_bytes()[:-100])
    (tmp_path / "step=98.ckpt").mkdir()  # sharded, and killed
    (tmp_path / "step=98.ckpt" / "__0_0.distcp").touch()
    for file, time in (("step=99.ckpt", 1.2e9), ("step=98.ckpt/__0_0.distcp", 1.1e9)):
        os.utime(tmp_path / file, (time, time))
    begin = 12 if name == files[0] else 6
    again = Net()
    with collected_warnings() as said:
        run(tmp_path, net=again, shuffle=False)
    assert said[2:] == [f"the run continues from {tmp_path}/{name}, saved by Lightning: {tmp_path} has no step yet"]
    assert said[:2] == [f"{tmp_path}/step={n}.ckpt of Lightning is passed over: it lacks its end" for n in (99, 98)]
    assert again.losses == after(begin, net.losses) and steps_in(tmp_path) == [n for n in (8, 12, 16) if n > begin]
    # Other files have no higher step, or are older.
    assert run(tmp_path, net=Net(), shuffle=False) == after(16, net.losses)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {*files, "step=99.ckpt", "step=98.ckpt"}
    held = DataLoader(data(8, seed=4), batch_size=4)
    found = [
        make(ModelCheckpoint(folder), limit_val_batches=1.0).validate(Net(), held, ckpt_path="last", verbose=False)
        for folder in (tmp_path, shutil.copytree(tmp_path, tmp_path / "files", ignore=shutil.ignore_patterns("step_*")))
    ]
    assert found[0] != found[1]


@on_ranks(1)
def test_files_below_the_folder_are_named(tmp_path: Path) -> None:
    """Lightning writes them there for a metric whose name has a slash; they may be of another run as well."""
    stock = pl.callbacks.ModelCheckpoint(tmp_path, filename="val/{step}", every_n_epochs=1, save_top_k=-1)
    make(stock, max_epochs=1).fit(Net(), loader(False))
    with collected_warnings() as said:
        run(tmp_path, max_epochs=1)
    assert (
        f"{tmp_path}/val/step=6.ckpt is not taken: it is in a folder below; pass its path if it is of this run" in said
    )
    assert run(tmp_path, ckpt_path=str(tmp_path / "val" / "step=6.ckpt"), max_steps=8).keys() == {7, 8}


@on_ranks(1)
def test_a_job_that_changes_back_and_forth(tmp_path: Path) -> None:
    """A file of Lightning's that was written after the newest step, and says a later one, is the newest checkpoint."""
    (tmp_path / "step=3.ckpt").touch()
    with collected_warnings() as said:
        run(tmp_path, ckpt_path=None, max_epochs=1)
    assert len(said) == 1 and "a new run begins" in said[0] and "/step=3.ckpt, from which it could continue" in said[0]
    assert steps_in(tmp_path) == [4]
    for name in ("timestep=99.ckpt", "last.ckpt", "epoch=0-step=4.ckpt"):
        (tmp_path / name).touch()
    assert run(tmp_path, max_epochs=1).keys() == {5, 6}
    stock, net = make(pl.callbacks.ModelCheckpoint(tmp_path, filename="my"), max_epochs=2), Net()
    stock.fit(net, loader(False), ckpt_path=None)
    with collected_warnings() as said:
        run(tmp_path, net=Net(), shuffle=False, checkpoint={"every_n_train_steps": None, "every_n_epochs": 1})
    assert any(line.endswith(f"my.ckpt, saved by Lightning: {tmp_path} has no step above 4") for line in said)
    assert min(run(tmp_path, ckpt_path=step(tmp_path, 4))) == 5
    # It went back: from now on files are older.
    assert steps_in(tmp_path)[:2] == [4, 8]
    shutil.rmtree(tmp_path / "step_00000016"), shutil.rmtree(tmp_path / "step_00000012")
    with collected_warnings() as said:
        run(tmp_path, max_epochs=2)
    assert said == []


@on_ranks(1)
def test_files_of_nothing_but_weights(tmp_path: Path) -> None:
    stock = pl.callbacks.ModelCheckpoint(tmp_path, save_weights_only=True, filename="weights")
    make(stock, max_epochs=1).fit(Net(), loader(False))
    with pytest.raises(
        UsageError, match=r"Lightning has saved .*weights.ckpt without the optimizer, .* has no step: begin"
    ):
        run(tmp_path)


@on_ranks(1)
def test_a_file_with_objects_for_which_fit_is_told_that_it_may_be_unpickled(tmp_path: Path) -> None:
    class Configured(Net):
        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__()
            self.save_hyperparameters("config")

    config = SimpleNamespace(width=8)
    stock, net = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1), Configured(config)
    make(stock, max_epochs=2).fit(net, loader(False))
    (tmp_path / "epoch=1-step=12.ckpt").unlink()
    again = Configured(config)
    make(ModelCheckpoint(tmp_path), max_epochs=2).fit(again, loader(False), ckpt_path="last", weights_only=False)
    assert again.losses == after(6, net.losses)


@on_ranks(1)
def test_evaluations(tmp_path: Path) -> None:
    """In the process of the fit, and in one that has fitted nothing."""
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, save_top_k=1, mode="max")
    trainer, net = make(callback, limit_val_batches=1.0), Net()
    held = DataLoader(data(8, seed=4), batch_size=4)
    trainer.fit(net, loader(), held)
    assert steps_in(tmp_path) == [6, 18] and callback.best_model_path == step(tmp_path, 6)
    best = float(callback.best_model_score or 0)
    last = float(trainer.callback_metrics["val_loss"])
    for one in (trainer, make(ModelCheckpoint(tmp_path, monitor="val_loss", mode="max"), limit_val_batches=1.0)):
        for path, wanted in (("best", best), ("last", last), (step(tmp_path, 6), best)):
            assert one.test(Net(), held, ckpt_path=path, verbose=False) == [{"val_loss": pytest.approx(wanted)}]
            assert one.validate(Net(), held, ckpt_path=path, verbose=False) == [{"val_loss": pytest.approx(wanted)}]
    empty = make(ModelCheckpoint(tmp_path / "empty"))
    with pytest.raises(CheckpointNotFoundError, match="holds no committed step"):
        empty.test(Net(), held, ckpt_path="last")
    with pytest.raises(ValueError, match="not configured to save the best"):
        empty.test(Net(), held, ckpt_path="best")


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "'samples per batch': 8}.*now.*'samples per batch': 4"),
        ({"shuffle": False}, "RandomSampler of 1 ranks.*now.*that of the data set"),
        ({"dataset": data(40)}, "'samples': 48.*now.*'samples': 40"),
    ],
)
@on_ranks(1)
def test_other_data_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    run(tmp_path, max_epochs=1)
    other = DataLoader(**{"dataset": data(), "batch_size": 8, "shuffle": True, **options})
    with pytest.raises(IncompatibleCheckpointError, match=message):
        run(tmp_path, train=other)
    assert min(run(tmp_path, train=other, checkpoint={"skip_batches": False})) == 5


@pytest.mark.parametrize("kind", ["torchdata", "streams"])
@on_ranks(1)
def test_loaders_that_hold_their_position(tmp_path: Path, kind: str) -> None:
    def make_loader() -> Any:
        torch.manual_seed(5)
        if kind == "torchdata":
            return StatefulDataLoader(data(), batch_size=8, shuffle=True)
        sampler = ResumableSampler(data(), global_batch=8, rank=0, ranks=1)
        return ResumableLoader(DataLoader(data(), batch_sampler=sampler))

    wanted = run(None, train=make_loader())
    assert len(set(wanted.values())) == 18
    run(tmp_path, train=make_loader(), checkpoint={"every_n_train_steps": 2})
    for number in (2, 4, 6, 8, 12):
        folder = tmp_path / f"from-{number}"
        assert run(folder, train=make_loader(), ckpt_path=step(tmp_path, number)) == after(number, wanted)


@on_ranks(1)
def test_data_without_a_length(tmp_path: Path) -> None:
    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            rows = data()
            yield from (rows[int(i)] for i in torch.randperm(len(rows)))

    def train(folder: Path | None, **options: Any) -> dict[int, float]:
        return run(folder, train=DataLoader(Rows(), batch_size=8), **options)

    wanted = train(None)
    train(tmp_path)
    for number in (4, 8, 12):
        assert train(tmp_path / f"from-{number}", ckpt_path=step(tmp_path, number)) == after(number, wanted)
    with pytest.raises(UsageError, match=r"StatefulDataLoader has no length.*limit_train_batches"):
        run(tmp_path / "stateful", train=StatefulDataLoader(Rows(), batch_size=8))


@on_ranks(1)
def test_data_loaders_that_begin_again(tmp_path: Path) -> None:
    """The shorter of two loaders begins again in an epoch, in an order that it draws then."""

    class Two(Net):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch[0], index) + super().training_step(batch[1], index)

    def loaders(shuffle: bool) -> Any:
        return [loader(), loader(shuffle, batch_size=16)]

    wanted = run(None, net=Two(), train=loaders(False))
    run(tmp_path, net=Two(), train=loaders(False))
    assert run(tmp_path / "on", net=Two(), train=loaders(False), ckpt_path=step(tmp_path, 4)) == after(4, wanted)
    run(tmp_path / "random", net=Two(), train=loaders(True), max_epochs=1)
    with pytest.raises(IncompatibleCheckpointError, match="of 3 batches, has begun again before batch 4"):
        run(tmp_path / "random", net=Two(), train=loaders(True))


# --- what is in a step ------------------------------------------------------------------------------------------------


class Extended(Net):
    """Has a state of its own, and edits what is saved."""

    def __init__(self, edit: str = "") -> None:
        super().__init__()
        self.edit, self.seen, self.calls = edit, None, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls += 1
        checkpoint["own"] = {"words": ("a", 1), "tensor": torch.arange(3)}
        if self.edit == "save":
            del checkpoint["state_dict"]["layers.0.weight"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["own"]["words"]
        assert torch.equal(checkpoint["state_dict"]["layers.3.bias"], self.layers[3].bias)
        if self.edit == "load":
            checkpoint["state_dict"]["layers.0.weight"] = torch.zeros(8, 6)


@on_ranks(1)
def test_hooks_of_the_module(tmp_path: Path) -> None:
    net = Extended()
    run(tmp_path, net=net, max_epochs=1)
    assert net.calls == len(steps_in(tmp_path)) == 1
    again = Extended()
    run(tmp_path, net=again)
    assert again.seen == ("a", 1)
    with pytest.raises(UsageError, match=r"on_load_checkpoint .* has changed 'layers.0.weight'"):
        run(tmp_path, net=Extended("load"))
    with pytest.raises(CheckpointError, match=r"on_save_checkpoint .* has changed 'layers.0.weight'"):
        run(tmp_path / "other", net=Extended("save"))
    assert steps_in(tmp_path / "other") == []


@on_ranks(1)
def test_one_file_of_a_module_with_an_extra_state(tmp_path: Path) -> None:
    class WithExtraState(Net):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return {"scales": [1, 2], "history": torch.arange(3)}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    run(tmp_path, net=WithExtraState(), max_epochs=1)
    export_ckpt(tmp_path / "step_00000004", tmp_path / "x.ckpt")
    seen = WithExtraState.load_from_checkpoint(tmp_path / "x.ckpt").seen
    assert seen["scales"] == [1, 2] and torch.equal(seen["history"], torch.arange(3))


@on_ranks(1)
def test_one_file_of_a_module_that_compiles_itself(tmp_path: Path) -> None:
    class Compiled(Net):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.layers = torch.compile(self.layers, backend="eager")

    net = Compiled()
    run(tmp_path, net=net, max_epochs=1)
    export_ckpt(tmp_path / "step_00000004", tmp_path / "x.ckpt")
    assert Compiled.load_from_checkpoint(tmp_path / "x.ckpt").state_dict().keys() == net.state_dict().keys()
    assert min(run(tmp_path, net=Compiled())) == 5


@on_ranks(1)
def test_one_file_of_lightning(tmp_path: Path) -> None:
    net = Extended()
    net.save_hyperparameters({"dropout": 0.0, "interval": "epoch"})
    run(tmp_path, net=net, max_epochs=1, checkpoint={"every_n_train_steps": 6})
    export_ckpt(tmp_path / "step_00000006", tmp_path / "x.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.hparams.interval == "epoch"
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), net.parameters(), strict=True))
    assert [p.name for p in tmp_path.glob("x.ckpt*")] == ["x.ckpt"]
    with pytest.raises(CheckpointNotFoundError):
        export_ckpt(tmp_path / "step_00000007", tmp_path / "y.ckpt")
    assert not list(tmp_path.glob("y*"))


# --- averaged weights -------------------------------------------------------------------------------------------------


def average(**options: Any) -> Any:
    return pl.callbacks.EMAWeightAveraging(**{"decay": 0.7, **options})


class Normalized(Net):
    """Has buffers, of which one is an integer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"dropout": 0.2, **options})
        self.layers.insert(1, torch.nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("options", "averaging"),
    [
        ({"validate": True}, {"update_every_n_steps": 2}),
        ({"validate": True, **EPOCHS}, {"update_every_n_steps": 0, "update_starting_at_epoch": 0}),
        ({"validate": True, "checkpoint": {"every_n_train_steps": 6}, **STEPS_ONLY}, {"use_buffers": False}),
        ({"validate": True, "val_check_interval": 5, "accumulate_grad_batches": 3, **EPOCHS}, {}),
        ({"checkpoint": {"save_options": SaveOptions(staging="background")}}, {"update_starting_at_step": 5}),
    ],
)
@on_ranks(1)
def test_averaged_weights(tmp_path: Path, options: dict[str, Any], averaging: dict[str, Any]) -> None:
    """Losses, and the averages at the end, are those of a run without a stop."""

    def train(folder: Path | None, **more: Any) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        net = Normalized()
        losses = run(folder, net=net, callbacks=[average(**averaging)], **{**options, **more})
        return losses, net.state_dict()

    wanted, averages = train(None)
    losses, weights = train(tmp_path)
    assert losses == wanted and all(map(torch.equal, averages.values(), weights.values()))
    assert len(steps_in(tmp_path)) > 2
    for number in steps_in(tmp_path):
        got, weights = train(tmp_path / f"from-{number}", ckpt_path=step(tmp_path, number))
        assert [*got.items()] == [*wanted.items()][len(wanted) - len(got) :]
        assert len(got) < len(wanted)
        if got:
            assert all(map(torch.equal, averages.values(), weights.values()))


@on_ranks(1)
def test_what_a_step_holds_of_averaged_weights(tmp_path: Path) -> None:
    """The averages are the model for evaluations, "best" and exports."""
    held = DataLoader(data(8, seed=4), batch_size=4)
    callback = average()
    checkpoints = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_epochs=1, save_top_k=-1)
    trainer, net = make(checkpoints, callbacks=[callback], limit_val_batches=1.0), Normalized()
    trainer.fit(net, loader(), held)
    best = float(checkpoints.best_model_score)
    plain = make(ModelCheckpoint(tmp_path, monitor="val_loss"), limit_val_batches=1.0)
    for one in (trainer, plain, make(ModelCheckpoint(tmp_path, monitor="val_loss"), callbacks=[average()])):
        for evaluate in (one.test, one.validate):
            got = evaluate(Normalized(), held, ckpt_path=checkpoints.best_model_path, verbose=False)
            assert not got or got == [{"val_loss": pytest.approx(best)}]
    last = step(tmp_path, 18)
    with bytecheckpoint.open(last) as checkpoint:
        names = {key for key in checkpoint if key.startswith("model/")}
        assert {key.replace("model/", "current_model/") for key in names} <= {*checkpoint} and len(names) == 9
        assert all(torch.equal(checkpoint[f"model/{name}"][...], one) for name, one in net.state_dict().items())
        assert not torch.equal(checkpoint["current_model/layers.0.weight"][...], net.layers[0].weight)
    export_ckpt(last, tmp_path / "x.ckpt")
    assert torch.equal(Normalized.load_from_checkpoint(tmp_path / "x.ckpt").layers[0].weight, net.layers[0].weight)
    assert not {"_swap_models", "_copy_average_to_current"} & vars(callback).keys()


@on_ranks(1)
def test_averages_begin_and_end(tmp_path: Path) -> None:
    """With a step of a run that averaged nothing, both begin with its weights; without the callback, the averages do."""
    nets: dict[str, Normalized] = {}

    def train(name: str, callbacks: Any, **options: Any) -> dict[int, float]:
        nets[name] = Normalized()
        return run(tmp_path / name, net=nets[name], callbacks=callbacks, **options)

    wanted = train("plain", [])
    assert train("on", [average()], ckpt_path=step(tmp_path / "plain", 8)) == after(8, wanted)
    again = train("again", [average()], ckpt_path=step(tmp_path / "on", 12))
    assert again == after(12, wanted)
    assert torch.equal(nets["again"].layers[0].weight, nets["on"].layers[0].weight)
    assert not torch.equal(nets["again"].layers[0].weight, nets["plain"].layers[0].weight)
    off = train("off", [], ckpt_path=step(tmp_path / "on", 12))
    assert off.keys() == again.keys() and off != again


@on_ranks(1)
def test_the_only_save_of_averaged_weights_is_at_the_end(tmp_path: Path) -> None:
    """save_last saves before the averages take the place of the weights in training."""
    wanted = run(None, net=Normalized(), callbacks=[average()])
    options: dict[str, Any] = {"checkpoint": {"every_n_train_steps": 100, "save_last": True}, "callbacks": [average()]}
    run(tmp_path, net=Normalized(), max_epochs=1, **options)
    assert run(tmp_path, net=Normalized(), **options) == after(6, wanted)


@pytest.mark.parametrize("own", [True, False])
@on_ranks(1)
def test_averages_at_the_end_wait_for_the_copy(tmp_path: Path, own: bool) -> None:
    """The last step is being copied in the background when a callback changes the weights."""

    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.large = torch.nn.Parameter(torch.zeros(16 << 20))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.large.grad = torch.ones_like(self.large)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    callback = average() if own else pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)
    checkpoint: dict[str, Any] = {"every_n_train_steps": 12, "save_options": SaveOptions(staging="background")}
    run(tmp_path, net=Large(), callbacks=[callback], checkpoint=checkpoint, max_epochs=2)
    with bytecheckpoint.open(tmp_path / "step_00000012") as saved:
        assert len(saved["model/large"][...].unique()) == 1


@on_ranks(1)
def test_averages_that_a_step_lacks(tmp_path: Path) -> None:
    left_out = SaveOptions(exclude=["current_model/layers.0.*"])
    run(tmp_path, max_epochs=1, callbacks=[average()], checkpoint={"save_options": left_out})
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks current_model/layers.0.(weight|bias) \(2 names"):
        run(tmp_path, callbacks=[average()])


@on_ranks(1)
def test_hooks_that_change_averaged_weights(tmp_path: Path) -> None:
    class Editing(Extended):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.edit == "load":
                checkpoint["state_dict"]["layers.0.weight"] = torch.zeros(8, 6)

    run(tmp_path, net=Editing(), callbacks=[average()], max_epochs=1)
    for edit in ("save", "load"):
        with pytest.raises(CheckpointError, match=rf"on_{edit}_checkpoint .* has changed 'layers.0.weight'"):
            run(tmp_path, net=Editing(edit), callbacks=[average()])


@on_ranks(1)
def test_averages_of_lightning(tmp_path: Path) -> None:
    """A file of Lightning's with averages continues; steps of nothing but weights hold the averages."""
    stock = pl.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    trainer, net = make(stock, callbacks=[average()]), Normalized()
    trainer.fit(net, loader(False))
    options: dict[str, Any] = {"callbacks": [average()], "shuffle": False, "checkpoint": {"save_weights_only": True}}
    again = Normalized(dropout=0.0)
    run(tmp_path, net=again, ckpt_path=str(tmp_path / "epoch=0-step=6.ckpt"), **options)
    with bytecheckpoint.open(tmp_path / "step_00000016") as checkpoint:
        assert {key.partition("/")[0] for key in checkpoint} == {"model", "lightning"}
        assert not torch.equal(checkpoint["model/layers.0.weight"][...], again.layers[0].weight)


@on_ranks(1)
def test_averages_that_are_refused(tmp_path: Path) -> None:
    for callbacks, strategy, message in [
        ([average(), pl.callbacks.WeightAveraging()], "auto", "EMAWeightAveraging and WeightAveraging both average"),
        ([average()], "fsdp2", "averages whole weights, and ModelParallelStrategy shards them"),
    ]:
        with pytest.raises(UsageError, match=message):
            make(ModelCheckpoint(tmp_path), strategy, callbacks=callbacks).fit(Net(), loader())


@on_ranks(1)
def test_a_large_tensor_is_exported_in_pieces(tmp_path: Path) -> None:
    """Export a tensor of more than 32 MiB."""

    class Large(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(9 << 20, dtype=torch.float32).reshape(-1, 1024))

    net = Large()
    run(tmp_path, net=net, max_epochs=1, checkpoint={"every_n_train_steps": 6})
    export_ckpt(tmp_path / "step_00000006", tmp_path / "x.ckpt")
    found = torch.load(tmp_path / "x.ckpt")["state_dict"]
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())


@on_ranks(1)
def test_a_step_holds_everything(tmp_path: Path) -> None:
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=50)

    class Module(pl.LightningDataModule):
        seen: Any = None

        def train_dataloader(self) -> Any:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"note": (1, "x")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["note"]

    options: dict[str, Any] = {"validate": True, "callbacks": [stopping], "checkpoint": {"every_n_train_steps": 6}}
    run(tmp_path, **options)
    with bytecheckpoint.open(tmp_path / "step_00000012") as checkpoint:
        assert {key.partition("/")[0] for key in checkpoint} == {"model", "optimizer", "lightning", "rng"}
    again = pl.callbacks.EarlyStopping("val_loss", patience=50)
    run(tmp_path, **{**options, "callbacks": [again]})
    assert again.state_dict() == stopping.state_dict() and float(again.best_score) < 10

    module = Module()
    make(ModelCheckpoint(tmp_path / "module", save_last=True), max_epochs=1).fit(Net(), datamodule=module)
    make(ModelCheckpoint(tmp_path / "module"), max_epochs=2).fit(Net(), datamodule=module, ckpt_path="last")
    assert module.seen == (1, "x")


@dataclasses.dataclass
class Settings:
    """Hyperparameters of a class of the user."""

    width: int = 3


@on_ranks(1)
def test_hyperparameters(tmp_path: Path) -> None:
    """Refuse hyperparameters that cannot be stored when the training begins."""

    def net(value: Any) -> Net:
        made = Net()
        made.save_hyperparameters({"value": value})
        return made

    run(tmp_path, net=net(Settings(5)), max_epochs=1)
    assert run(tmp_path, net=net(Settings(5))).keys() >= {5}
    for value, message in [(len, "builtin_function"), (torch.nn.Linear(2, 2), r"a Linear cannot be stored.*'value'")]:
        with pytest.raises(UsageError, match=message):
            run(tmp_path / "other", net=net(value))
    assert not steps_in(tmp_path / "other")


@on_ranks(1)
def test_configurations_of_omegaconf(tmp_path: Path) -> None:
    """Hydra makes them. One of its own keeps its interpolations, a part of another has their values."""
    from omegaconf import OmegaConf

    create = OmegaConf.create
    config = create({**Net().hparams, "width": 2, "net": {"name": "a", "width": "${width}"}})

    class Configured(Net):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    for number, given in enumerate([config, {"config": config.net, "list": create([1, "x"])}]):
        folder = tmp_path / str(number)
        run(folder, net=Configured(given), max_epochs=1)
        assert run(folder, net=Configured(given)).keys() >= {5}
        export_ckpt(max(folder.glob("step_*")), folder / "e.ckpt")
        found = torch.load(folder / "e.ckpt", weights_only=False)
        assert found["hyper_parameters"] == Configured(given).hparams
        assert type(found["hyper_parameters"]) is found.get("hparams_type", dict)


@on_ranks(1)
def test_only_the_weights(tmp_path: Path) -> None:
    run(tmp_path, checkpoint={"save_weights_only": True})
    with bytecheckpoint.open(tmp_path / "step_00000008") as checkpoint:
        assert {key.partition("/")[0] for key in checkpoint} == {"model", "lightning"}
    make(ModelCheckpoint(tmp_path)).test(Net(), DataLoader(data(8), batch_size=4), ckpt_path="last", verbose=False)
    with pytest.raises(CheckpointError, match="optimizer"):
        run(tmp_path)


@on_ranks(1)
def test_manual_optimization(tmp_path: Path) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.2)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                loss = super().training_step(batch, index)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            first, *_, last = self.layers
            return torch.optim.AdamW(first.parameters(), lr=0.05), torch.optim.SGD(
                last.parameters(), 0.01, momentum=0.9
            )

    wanted = run(None, net=Two())
    assert run(tmp_path, net=Two()) == wanted
    assert steps_in(tmp_path) == [4, 8, 12, 16, 20, 24, 28, 32, 36]
    for number in (8, 12, 24):
        got = run(tmp_path / f"from-{number}", net=Two(), ckpt_path=step(tmp_path, number))
        assert got == after(number // 2, wanted)


# --- what is kept -----------------------------------------------------------------------------------------------------


def train_with_values(
    folder: Path, values: list[float], ckpt_path: str = "last", callbacks: Any = (), **options: Any
) -> ModelCheckpoint:
    """Train an epoch of one step for each value of the metric."""

    class Valued(Net):
        def on_train_epoch_end(self) -> None:
            self.log("value", values[self.current_epoch])

    callback = ModelCheckpoint(folder, **{"monitor": "value", **options})
    trainer = make(callback, callbacks=callbacks, max_epochs=len(values), limit_train_batches=1)
    trainer.fit(Valued(), loader(), ckpt_path=ckpt_path)
    return callback


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "options", "steps", "best"),
    [
        ([3, 1, 2, 1, 4], {"save_top_k": 1}, [2], 2),
        ([3, 1, 2, 1, 4], {"save_top_k": 1, "save_last": True}, [2, 5], 2),
        ([3, 1, 2, 1, 4], {"save_top_k": 2, "save_last": "link"}, [2, 4, 5], 2),
        ([3, 1, 2, 1, 4], {"save_top_k": -1}, [1, 2, 3, 4, 5], 2),
        ([3, 1, 2, 1, 4], {"save_top_k": 0, "save_last": True}, [5], 0),
        ([3, 1, 2, 1, 4], {"save_top_k": 1, "mode": "max", "save_last": True}, [5], 5),
        ([NAN, NAN, 2, 3], {"save_top_k": 1, "save_last": True}, [3, 4], 3),
        ([NAN, NAN, NAN], {"save_top_k": 1, "save_last": True}, [1, 3], 1),
        ([1, INF, 3], {"save_top_k": 1, "save_last": True, "mode": "max"}, [2, 3], 2),
        ([3, 1, 2], {"save_top_k": 0}, [], 0),
    ],
)
@on_ranks(1)
def test_the_best_and_the_last(
    tmp_path: Path, values: list[float], options: dict[str, Any], steps: list[int], best: int
) -> None:
    """Keep the steps that Lightning keeps; best_model_path is never that of a deleted step."""
    callback = train_with_values(tmp_path / "own", values, **options)
    assert steps_in(tmp_path / "own") == steps
    if best:
        assert callback.best_model_path == step(tmp_path / "own", best)
    stopped = tmp_path / "stopped"
    for count in range(1, len(values) + 1):  # the same, in a job for each epoch
        callback = train_with_values(stopped, values[:count], **options)
        assert not best or Path(callback.best_model_path).is_dir() or not steps_in(stopped)
    if options.get("save_last"):
        assert steps_in(stopped) == steps
        assert not best or callback.best_model_path == step(stopped, best)


@on_ranks(1)
def test_the_best_of_a_run_that_goes_back(tmp_path: Path) -> None:
    train_with_values(tmp_path, [3, 1, 2], save_top_k=2, save_last=True)
    assert steps_in(tmp_path) == [2, 3]
    callback = train_with_values(tmp_path, [3, 1, 5, 4], step(tmp_path, 2), save_top_k=2, save_last=True)
    assert steps_in(tmp_path) == [2, 4] and callback.best_model_path == step(tmp_path, 2)
    callback = train_with_values(tmp_path, [3, 1, 6], step(tmp_path, 2), save_top_k=2, save_last=True)
    assert steps_in(tmp_path) == [2, 3] and callback.best_model_path == step(tmp_path, 2)
    assert callback.best_k_models.keys() == {step(tmp_path, 2), step(tmp_path, 3)}


def train_pair(folder: Path, values: list[float], last: int) -> list[ModelCheckpoint]:
    """Train epochs of one step up to the `last` one with two callbacks, for the best steps and for every fifth."""
    best = ModelCheckpoint(folder, monitor="value", save_top_k=2, save_last=True)
    options: dict[str, Any] = {"monitor": None, "every_n_train_steps": 5, "save_top_k": -1, "callbacks": [best]}
    return [best, train_with_values(folder, values[:last], **options)]


@on_ranks(1)
def test_two_callbacks(tmp_path: Path) -> None:
    """Each keeps its own selection, counts only what was saved for it, and a step is saved once for both."""
    values = [3, 1, 2, 5, 0, 6, 2, 7, 8, 9]
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults().install(patch)
        commits: list[int] = []
        faults.add("publish", name="metadata.parquet", times=-1, before=lambda: commits.append(1))
        found = train_pair(tmp_path / "one", values, 10)
    assert len(commits) == 10 and steps_in(tmp_path / "one") == [2, 5, 10]
    for count in range(1, 11):  # the same, in a job for each epoch
        again = train_pair(tmp_path / "jobs", values, count)
    assert steps_in(tmp_path / "jobs") == [2, 5, 10]
    for root, (best, fifth) in (("one", found), ("jobs", again)):
        assert best.best_model_path == step(tmp_path / root, 5) and best.last_model_path == step(tmp_path / root, 10)
        assert fifth.best_model_path == fifth.last_model_path == step(tmp_path / root, 10)
        assert {*best.best_k_models} == {step(tmp_path / root, 2), step(tmp_path / root, 5)}


@on_ranks(1)
def test_two_callbacks_become_one(tmp_path: Path) -> None:
    """Steps that were saved for another callback are no candidates, and stay."""
    train_pair(tmp_path, [4, 3, 9, 9, 0, 8], 6)
    assert steps_in(tmp_path) == [2, 5, 6]
    callback = train_with_values(tmp_path, [9] * 7, every_n_train_steps=7, monitor=None, save_top_k=1)
    assert steps_in(tmp_path) == [2, 5, 6, 7] and callback.best_model_path == step(tmp_path, 7)
    fresh = ModelCheckpoint(tmp_path, monitor="value", save_top_k=2)
    assert fresh.best_model_path == step(tmp_path, 5)
    train_with_values(tmp_path, [9] * 8, keep=2, save_last=True)
    assert steps_in(tmp_path) == [7, 8]


@on_ranks(1)
def test_two_callbacks_at_the_end(tmp_path: Path) -> None:
    """A run that ends in the middle of an epoch, which one callback saves behind the batch and one behind the epoch."""
    ends = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=1)
    run(tmp_path, max_epochs=-1, max_steps=8, callbacks=[ends], checkpoint={"filename": "{epoch}"})
    assert steps_in(tmp_path) == [4, 8] and ends.last_model_path == step(tmp_path, 8)
    assert sum(name.startswith("saved for") for name in ends.steps.manager.latest().metrics) == 2
    again = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=1)
    run(tmp_path, callbacks=[again])
    assert steps_in(tmp_path) == [4, 8, 12, 16, 18] and again.last_model_path == step(tmp_path, 18)


@on_ranks(1)
def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """save_last makes no second copy, and what is due at several places is one save."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults().install(patch)
        commits: list[int] = []
        faults.add("publish", name="metadata.parquet", times=-1, before=lambda: commits.append(1))
        options = {"every_n_train_steps": 6, "save_last": True, "monitor": "val_loss"}
        run(tmp_path, validate=True, val_check_interval=3, checkpoint=options)
    assert steps_in(tmp_path) == [6, 12, 18] and len(commits) == 3


@on_ranks(1)
def test_an_interval_of_time(tmp_path: Path) -> None:
    """Gradients that are being accumulated are in no checkpoint, so none is saved there."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    checkpoint = {"every_n_train_steps": None, "train_time_interval": timedelta(0)}
    wanted = run(None, **options)
    assert run(tmp_path, checkpoint=checkpoint, **options) == wanted
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    got = run(tmp_path / "on", ckpt_path=step(tmp_path, 1), checkpoint=checkpoint, **options)
    assert got == after(4, wanted)


# --- the end of a job -------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_signal_without_preemption(tmp_path: Path) -> None:
    """Lightning ends the fit, and the newest step stays the last one."""
    with pytest.raises(SystemExit):
        run(tmp_path, at={9: notify}, checkpoint={"every_n_train_steps": 2})
    assert steps_in(tmp_path)[-1] == 8


# --- what is refused --------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_refusals(tmp_path: Path) -> None:
    for options, message in [
        ({"dirpath": None}, "dirpath=None"),
        ({"save_on_exception": True}, "save_on_exception=True"),
        ({"kept": 3}, "unknown argument 'kept'"),
    ]:
        with pytest.raises(UsageError, match=message):
            ModelCheckpoint(**{"dirpath": tmp_path, **options})
    for other, message in [
        (
            ModelCheckpoint(tmp_path / "b", monitor="x"),
            "has a ModelCheckpoint too, which is Lightning's or has another",
        ),
        (
            pl.callbacks.ModelCheckpoint(tmp_path, monitor="x"),
            "has a ModelCheckpoint too, which is Lightning's or has an",
        ),
        (
            ModelCheckpoint(tmp_path, monitor="x", save_weights_only=True),
            "save_weights_only=False .*, and True of the fi",
        ),
        (ModelCheckpoint(tmp_path, monitor="x", overlap="skip"), ""),
    ]:
        trainer = make(ModelCheckpoint(tmp_path), callbacks=[other])
        with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
            trainer.test(Net(), DataLoader(data(8), batch_size=4), verbose=False)
    trainer = make(ModelCheckpoint(tmp_path))
    trainer.loggers = [type("Logger", (pl.loggers.CSVLogger,), {"_log_model": True})(tmp_path)]
    with pytest.raises(UsageError, match=r"Logger\(log_model="):
        trainer.fit(Net(), loader())
    trainer = make(ModelCheckpoint(tmp_path))
    trainer.strategy.__class__ = type("DeepSpeedStrategy", (type(trainer.strategy),), {})
    with pytest.raises(UsageError, match="DeepSpeedStrategy is not supported"):
        trainer.fit(Net(), loader())
    assert not steps_in(tmp_path)


@on_ranks(1)
def test_fast_dev_run(tmp_path: Path) -> None:
    run(tmp_path, fast_dev_run=True)
    assert not steps_in(tmp_path)
