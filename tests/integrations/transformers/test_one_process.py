"""Trainer with `attach`, in one process: what is saved, what is kept, and equal losses after kills."""

from __future__ import annotations

import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.integrations.transformers import attach
from bytecheckpoint.manager import Latest
from tests.integrations.conformance import after, collected_warnings, notify
from tests.integrations.transformers.jobs import STEPS_PER_EPOCH, make, run, samples
from tests.support.runs import steps_in
from tests.support.worlds import on_ranks


@pytest.mark.parametrize("step", [4, STEPS_PER_EPOCH, 8])
@on_ranks(1)
def test_losses_and_random_numbers_go_on(tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, at its end, and in a later one, with dropout and accumulated gradients."""
    options: dict[str, Any] = {
        "dropout": 0.2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "save_steps": step,
    }  # fmt: skip
    wanted = run(tmp_path / "whole", attached=False, **options)
    trainer, _ = make(
        tmp_path / "run", {step + 1: lambda: setattr(trainer.control, "should_training_stop", True)}, **options
    )
    attach(trainer)
    trainer.train()
    assert steps_in(tmp_path / "run") == [step]
    assert run(tmp_path / "run", True, **options) == after(step, wanted)


@on_ranks(1)
def test_arguments_of_train(tmp_path: Path) -> None:
    wanted = run(tmp_path, "auto")  # begins
    assert steps_in(tmp_path) == [4, 8, 12] and not list(tmp_path.glob("checkpoint-*"))
    for resume in (None, False, tmp_path / "step_00000008", str(tmp_path / "step_00000004")):
        with pytest.raises(UsageError, match=r"holds a run up to step 12: pass resume_from_checkpoint='auto'"):
            run(tmp_path, resume)
    assert run(tmp_path, tmp_path / "step_00000012") == {}
    branch = {"attached": {"root": tmp_path / "branch"}}
    assert run(tmp_path, str(tmp_path / "step_00000008"), **branch) == after(8, wanted)
    assert steps_in(tmp_path / "branch") == [12]
    with pytest.raises(CheckpointNotFoundError, match="holds no committed step"):
        run(tmp_path / "other", True)
    assert run(tmp_path / "other", "auto") == wanted


@on_ranks(1)
def test_a_checkpoint_of_trainer_itself(tmp_path: Path) -> None:
    """The way from Trainer's own checkpoints."""
    wanted = run(tmp_path, attached=False, dropout=0.2)
    root = tmp_path / "new"
    resume = str(tmp_path / "checkpoint-4")
    assert run(tmp_path, resume, attached={"root": root}, dropout=0.2) == after(4, wanted)
    assert steps_in(root) == [8, 12]
    assert (tmp_path / "checkpoint-8").is_dir()


@pytest.mark.parametrize("elsewhere", [False, True])
@on_ranks(1)
def test_a_job_that_runs_is_switched(tmp_path: Path, elsewhere: bool) -> None:
    """It goes on behind Trainer's last checkpoint, whichever folder holds the steps of this package, and twice."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "dropout": 0.2}
    wanted = run(tmp_path / "whole", attached=False, **options)
    run(tmp_path, attached=False, max_steps=8, **options)
    options["attached"] = {"root": tmp_path / "steps"} if elsewhere else True
    root = tmp_path / "steps" if elsewhere else tmp_path
    (tmp_path / "checkpoint-16").mkdir()  # of a killed save
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text('{"global')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoint-*/*")}
    with collected_warnings() as said:
        assert run(tmp_path, "auto", max_steps=10, save_steps=5, **options) == {9: wanted[9], 10: wanted[10]}
    assert [line.split("checkpoint-")[1] for line in said] == [
        "20 of Trainer is passed over: it lacks a whole trainer_state.json",
        "16 of Trainer is passed over: it lacks a whole trainer_state.json",
        f"8, saved by Trainer: {root} has no step yet",
    ]
    assert steps_in(root) == [10]
    assert run(tmp_path, True, save_total_limit=1, **options) == {11: wanted[11], 12: wanted[12]}
    assert steps_in(root) == [12]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoint-*/*")}
    for path in root.glob("step_*"):
        shutil.rmtree(path)
    with collected_warnings() as said:
        run(tmp_path, max_steps=1, **options)
    assert any("a new run begins, although Trainer itself has saved" in line for line in said)


@on_ranks(1)
def test_a_model_of_other_names_in_its_files(tmp_path: Path) -> None:
    """Trainer itself leaves such weights as they are, with a warning."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def net(seed: int) -> Any:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=1, num_local_experts=2, **sizes))

    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    wanted = run(tmp_path, attached=False, net=net(1), **options)
    shutil.rmtree(tmp_path / "checkpoint-8"), shutil.rmtree(tmp_path / "checkpoint-12")
    assert run(tmp_path, "auto", net=net(2), **options) == after(4, wanted)
    best = net(3)
    run(tmp_path / "best", attached=False, net=net(1), max_steps=4, **options)
    run(tmp_path / "best", "auto", net=best, max_steps=4, **options)
    bytecheckpoint.load(tmp_path / "best/checkpoint-4", {"model": (again := net(4))}, layout="auto")
    assert all(map(torch.equal, best.state_dict().values(), again.state_dict().values()))


@on_ranks(1)
def test_a_folder_of_nothing_but_weights(tmp_path: Path) -> None:
    """Trainer itself would go on with a new optimizer without a word."""
    run(tmp_path, attached=False, save_only_model=True)
    with pytest.raises(
        UsageError, match=r"Trainer has saved .*checkpoint-12 without the optimizer, .* has no step: begin"
    ):
        run(tmp_path, "auto")
    assert run(tmp_path, "auto", num_train_epochs=3, save_only_model=True).keys() == set(range(13, 19))
    with pytest.raises(UsageError, match=r"checkpoint-8 lacks the optimizer, so Trainer would begin with a new"):
        run(tmp_path, str(tmp_path / "checkpoint-8"), attached={"root": tmp_path / "branch"})


@on_ranks(1)
def test_a_folder_without_schedule_or_random_numbers(tmp_path: Path) -> None:
    """Without a schedule Trainer loads no optimizer, and without random numbers it draws others, without a word."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "dropout": 0.2}
    wanted = run(tmp_path, attached=False, **options)
    (tmp_path / "checkpoint-12" / "scheduler.pt").unlink()
    with pytest.raises(UsageError, match=r"checkpoint-12 lacks the schedule"):
        run(tmp_path, tmp_path / "checkpoint-12", **options)
    with collected_warnings() as said:
        assert run(tmp_path, "auto", max_steps=9, **options) == {9: wanted[9]}
    assert said[0].endswith("checkpoint-12 of Trainer is passed over: it lacks the schedule")
    (tmp_path / "checkpoint-8" / "rng_state.pth").unlink()
    with collected_warnings() as said:
        run(tmp_path, tmp_path / "checkpoint-8", attached={"root": tmp_path / "branch"}, max_steps=9, **options)
    assert any("checkpoint-8 has no rng_state.pth: dropout" in line for line in said)
    for name in ("rng_state.pth", "pytorch_model.bin", "model.safetensors"):
        file = tmp_path / "checkpoint-8" / name
        if not file.exists():
            torch.save({"w": torch.ones(4)}, file)
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(UsageError, match=rf"checkpoint-8 lacks a whole {name}: a save was killed"):
            run(tmp_path, tmp_path / "checkpoint-8", attached={"root": tmp_path / "other"}, **options)
        file.unlink()
    for number in (4, 8):
        (tmp_path / f"checkpoint-{number}" / "scheduler.pt").unlink()
    shutil.rmtree(tmp_path / "step_00000009", ignore_errors=True)
    with pytest.raises(UsageError, match=r"has saved .*checkpoint-12 without the schedule, .* has no step: begin"):
        run(tmp_path, "auto", **options)


@on_ranks(1)
def test_a_job_is_switched_back_and_forth(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant"}
    run(tmp_path, "auto", max_steps=4, **constant)
    wanted = run(tmp_path, attached=False, **constant)
    with collected_warnings() as said:
        assert run(tmp_path, "auto", num_train_epochs=3, **constant).keys() == set(range(13, 19))
    assert [line.partition("checkpoint-")[2] for line in said] == [
        f"12, saved by Trainer: {tmp_path} has no step above 4"
    ]
    assert steps_in(tmp_path) == [4, 16, 18]
    for step in (16, 18):
        shutil.rmtree(tmp_path / f"step_{step:08d}")
    # A run that has gone back stays behind the folders that are older than its newest step.
    assert run(tmp_path, str(tmp_path / "step_00000004"), max_steps=8, **constant).keys() == {5, 6, 7, 8}
    with collected_warnings() as said:
        assert run(tmp_path, "auto", **constant) == after(8, wanted)
    assert len(said) == 1 and "continues from step 8" in said[0] and said[0].endswith("is older, with a higher step")
    assert steps_in(tmp_path) == [4, 8, 12]
    assert run(tmp_path, "auto", **constant) == {}


@on_ranks(1)
def test_the_best_folder_of_trainer(tmp_path: Path) -> None:
    """The best weights may lie in a folder that Trainer has saved before the job was switched."""
    options: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss", "load_best_model_at_end": True,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    stock, _ = make(tmp_path / "whole", **options)
    stock.train()
    run(tmp_path, attached=False, max_steps=8, **options)
    for _ in range(2):  # from Trainer's folder, and from a step
        trainer, _ = make(tmp_path, **options)
        attach(trainer)
        trainer.train("auto")
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
        assert all(map(torch.equal, stock.model.state_dict().values(), trainer.model.state_dict().values()))


@on_ranks(1)
def test_a_checkpoint_of_trainer_behind_the_newest_step(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant"}
    run(tmp_path, "auto", max_steps=4, **constant)
    wanted = run(tmp_path, attached=False, **constant)
    assert run(tmp_path, str(tmp_path / "checkpoint-8"), **constant) == after(8, wanted)
    assert steps_in(tmp_path) == [4, 12]


@on_ranks(1)
def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    options: dict[str, Any] = {
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=100)], "eval_strategy": "steps", "eval_steps": 4,
        "metric_for_best_model": "loss", "lr_scheduler_type": "cosine",
    }  # fmt: skip
    trainer, _ = make(tmp_path, **options)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attach(trainer)
    trainer.train()
    scaler = torch.amp.GradScaler("cpu")
    bytecheckpoint.load(tmp_path / "step_00000008", {"scaler": scaler})
    assert scaler.get_scale() == 8.0
    with bytecheckpoint.open(tmp_path / "step_00000008") as checkpoint:
        states = {key.partition("/")[0] for key in checkpoint}
    assert states >= {"model", "optimizer", "rng", "trainer"}

    again, _ = make(tmp_path, **options)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    attach(again)
    again.train("auto")
    assert again.state.log_history[:-1] == trainer.state.log_history[:-1]  # but for the line about the end
    assert again.state.best_metric == trainer.state.best_metric
    assert again.state.best_global_step == trainer.state.best_global_step
    assert again.state.best_model_checkpoint == trainer.state.best_model_checkpoint
    stopping = [c for c in again.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    assert [c.early_stopping_patience for c in stopping] == [100]
    assert again.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()
    assert again.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"]
    assert again.accelerator.scaler.state_dict() == trainer.accelerator.scaler.state_dict()


@on_ranks(1)
def test_only_the_model(tmp_path: Path) -> None:
    run(tmp_path, save_only_model=True)
    with bytecheckpoint.open(tmp_path / "step_00000008") as checkpoint:
        assert {key.partition("/")[0] for key in checkpoint} == {"model", "trainer", "huggingface"}
    with pytest.raises(CheckpointError, match="optimizer"):
        run(tmp_path, "auto")


# --- other data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 4}, "8 samples per step, now 4"),
        ({"gradient_accumulation_steps": 2}, "8 samples per step, now 16"),
        ({"data_seed": 7}, "42 data seed, now 7"),
    ],
)
@on_ranks(1)
def test_other_data_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trainer, _ = make(tmp_path, max_steps=4)
    attach(trainer)
    trainer.train()
    trainer, _ = make(tmp_path, **options)
    attach(trainer)
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(IncompatibleCheckpointError, match=message):
        trainer.train("auto")
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert run(tmp_path, "auto", ignore_data_skip=True, **options)


@on_ranks(1)
def test_data_without_a_length(tmp_path: Path) -> None:
    class Texts(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from samples(200)

    def train(folder: Path, steps: int, attached: bool = True) -> dict[int, float]:
        trainer, losses = make(folder, max_steps=steps, lr_scheduler_type="constant", dropout=0.2)
        trainer.train_dataset = Texts()
        if attached:
            attach(trainer)
        trainer.train("auto" if attached else None)
        return losses.found

    wanted = train(tmp_path / "whole", 12, attached=False)
    train(tmp_path / "run", 8)
    assert train(tmp_path / "run", 12) == after(8, wanted)


@on_ranks(1)
def test_batches_that_shrink(tmp_path: Path) -> None:
    """Trainer begins anew with smaller batches where memory is short."""
    trainer, losses = make(tmp_path, auto_find_batch_size=True, max_steps=8)
    compute_loss = trainer.compute_loss

    def too_large(model: Any, inputs: Any, **options: Any) -> Any:
        if len(inputs["input_ids"]) > 4 and trainer.state.global_step > 1:
            raise RuntimeError("CUDA out of memory.")
        return compute_loss(model, inputs, **options)

    trainer.compute_loss = too_large
    attach(trainer)
    trainer.train("auto")
    assert steps_in(tmp_path) == [4, 8] and trainer._train_batch_size <= 4
    found = run(tmp_path, "auto", per_device_train_batch_size=trainer._train_batch_size, max_steps=10)
    assert list(found) == [9, 10] and losses.found


# --- what is kept -----------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_the_limit_and_the_best_step(tmp_path: Path) -> None:
    """Keep the steps that Trainer keeps, the best and the newest; the best weights are loaded at the end."""
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "num_train_epochs": 3,
    }  # fmt: skip
    stock, _ = make(tmp_path / "stock", **options)
    stock.train()
    trainer, losses = make(tmp_path / "own", **options)
    checkpoints = attach(trainer)
    (tmp_path / "own" / "checkpoint-1").mkdir(parents=True)  # of an earlier run
    trainer.train()
    assert losses.saved == list(range(2, 19, 2))
    best = stock.state.best_global_step
    assert trainer.state.best_global_step == best < 18, "the best step is not the last one"
    assert trainer.state.best_model_checkpoint == f"{checkpoints.manager.root}/step_{best:08d}"
    assert steps_in(tmp_path / "own") == sorted({best, 18})
    assert sorted(p.name for p in (tmp_path / "stock").glob("checkpoint-*")) == sorted(
        [f"checkpoint-{best}", "checkpoint-18"]
    )
    assert (tmp_path / "own" / "checkpoint-1").is_dir()
    for name, value in stock.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    assert trainer.args.save_total_limit == 2


@pytest.mark.parametrize(
    ("strategy", "wanted"), [("no", []), ("epoch", [6, 12]), ("best", [2, 4]), ("steps", [5, 10, 12])]
)
@on_ranks(1)
def test_strategies(tmp_path: Path, strategy: str, wanted: list[int]) -> None:
    options: dict[str, Any] = {"save_strategy": strategy, "save_steps": 5}
    if strategy == "best":
        options |= {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    run(tmp_path, **options)
    assert steps_in(tmp_path) == wanted


@on_ranks(1)
def test_further_times_and_rules(tmp_path: Path) -> None:
    run(tmp_path, attached={"every": 3, "keep": [Latest(2)]})
    assert steps_in(tmp_path) == [9, 12]


@pytest.mark.parametrize(("interval", "saves"), [(timedelta(microseconds=1), True), (timedelta(hours=1), False)])
@on_ranks(1)
def test_saves_by_the_clock(tmp_path: Path, interval: timedelta, saves: bool) -> None:
    run(tmp_path, attached={"every": interval}, save_strategy="no")
    assert bool(steps_in(tmp_path)) == saves


# --- subclasses and callbacks -----------------------------------------------------------------------------------------


@on_ranks(1)
def test_overrides_of_a_subclass_run(tmp_path: Path) -> None:
    called: list[str] = []
    trainer, _ = make(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4, max_steps=8)
    stock: Any = type(trainer)

    class Own(stock):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            called.append(f"save {self.state.global_step}")
            super()._save_checkpoint(model, trial)

        def _load_best_model(self) -> None:
            super()._load_best_model()
            called.append(f"best {self.state.best_model_checkpoint}")

        def _save_rng_state(self, output_dir: str) -> None:
            raise AssertionError

    trainer.__class__ = Own
    with collected_warnings() as said:
        attach(trainer)
    assert ["Own._save_rng_state is not called for steps" in line for line in said] == [True]
    trainer.train()
    assert steps_in(tmp_path) == [4, 8]
    assert called == ["save 4", "save 8", f"best {trainer.state.best_model_checkpoint}"]


@on_ranks(1)
def test_an_override_that_saves_nothing(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    stock: Any = type(trainer)
    trainer.__class__ = type("Own", (stock,), {"_save_checkpoint": lambda *_: None})
    attach(trainer)
    with pytest.raises(UsageError, match=r"nothing is saved at step 4: Own\._save_checkpoint does not call super"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [("WandbCallback", "_log_model", "checkpoint"), ("MLflowCallback", "_log_artifacts", True)],
)
@on_ranks(1)
def test_callbacks_that_upload_folders_of_trainer(tmp_path: Path, name: str, attribute: str, value: Any) -> None:
    from transformers import integrations
    from transformers.integrations.integration_utils import WandbLogModel

    own: Any = type(
        "Mine", (getattr(integrations, name),), {"__init__": lambda self: None, "on_train_begin": lambda *_, **__: None}
    )
    for on in (True, False):
        callback = own()
        callback._initialized = False
        switch = (WandbLogModel(value) if on else WandbLogModel.END) if isinstance(value, str) else on
        setattr(callback, attribute, switch)
        callback.on_train_end = callback.on_log = callback.on_save = callback.on_step_end = lambda *_, **__: None
        trainer, _ = make(tmp_path, callbacks=[callback], max_steps=4)
        attach(trainer)
        if on:
            with pytest.raises(UsageError, match=f"{name} would upload folders checkpoint-N"):
                trainer.train()
        else:
            trainer.train()
    assert steps_in(tmp_path) == [4]


# --- the end of a job -------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_signal_with_jit_checkpoints(tmp_path: Path) -> None:
    """In the middle of an epoch: one last save, no evaluation, no end of an epoch."""
    options: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "enable_jit_checkpoint": True}
    before = signal.getsignal(signal.SIGTERM)
    trainer, losses = make(tmp_path, {3: notify}, **options)
    checkpoints = attach(trainer)
    trainer.train()
    assert checkpoints.preempted and signal.getsignal(signal.SIGTERM) == before
    (step,) = steps_in(tmp_path)
    assert step == trainer.state.global_step == max(losses.found) < STEPS_PER_EPOCH
    assert not any("eval_loss" in entry for entry in trainer.state.log_history)


@on_ranks(1)
def test_final_weights(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    trainer, _ = make(tmp_path / "out", max_steps=3)
    attach(trainer, tmp_path / "steps", hf_weights="last")
    trainer.train()
    assert steps_in(tmp_path / "steps") == [3] and not list((tmp_path / "out").glob("step_*"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("attached", [True, False])
@on_ranks(1)
def test_a_run_that_is_done(tmp_path: Path, attached: bool) -> None:
    """Nothing is trained any more; Trainer itself would take one step more, in the middle of an epoch."""
    run(tmp_path, max_steps=9, attached=attached)
    trainer, losses = make(tmp_path, max_steps=9)
    attach(trainer)
    trainer.train("auto")
    assert losses.found == {} and trainer.state.global_step == 9


# --- what is refused --------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_refusals(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path)
    attach(trainer)
    assert type(trainer).__name__ == "Trainer"
    with pytest.raises(UsageError, match="attached already"):
        attach(trainer)
    with pytest.raises(UsageError, match="hyperparameter_search"):
        trainer.train(trial=object())
    pushing, _ = make(tmp_path)
    pushing.args.push_to_hub = True
    with pytest.raises(UsageError, match="hub_strategy='end'"):
        attach(pushing)
    with pytest.raises(UsageError, match="hf_weights='all'"):
        attach(make(tmp_path)[0], hf_weights="all")

    class Other:
        args = None

    with pytest.raises(UsageError, match=r"a Other of transformers .* has no set_initial_training_values"):
        attach(Other())
