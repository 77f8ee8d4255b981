"""torchtitan with `CheckpointManager`, in one process: what each option does, and equal losses after kills."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.tools import export
from tests.integrations.conformance import collected_warnings, noted_saves
from tests.integrations.torchtitan.jobs import (
    STEPS,
    after,
    config_of,
    make,
    run,
    run_noting_random,
    steps_in,
    train,
)
from tests.support.faulty_storage import Faults
from tests.support.worlds import on_ranks

FULL = {"last_save_model_only": False}


def weights(trainer: Any) -> list[torch.Tensor]:
    """Return copies of the local weights."""
    return [p.to_local().clone() if hasattr(p, "to_local") else p.clone() for p in trainer.model_parts[0].parameters()]


@pytest.mark.parametrize(
    ("mode", "copies"),
    [("disabled", "synchronous"), ("async", "blocking"), ("async_with_pinned_mem", "background")],
)
@on_ranks(1)
def test_modes(tmp_path: Path, mode: str, copies: str) -> None:
    wanted = run(tmp_path / "whole", checkpoint={"enable": False})
    options = {"async_mode": mode, "interval": 2, **FULL}
    with noted_saves() as handles:
        assert run(tmp_path, checkpoint=options) == wanted
    assert [handle.result(60).staging for handle in handles[:5]] == [copies] * 5
    assert steps_in(tmp_path) == [2, 4, 6, 8, 10, 12]
    for step in (12, 10, 8):  # each as it was at its step, not as the next steps have left it
        assert run(tmp_path, checkpoint={**options, "load_step": step}) == after(step, wanted)
    assert run(tmp_path, checkpoint=options, steps=14).keys() == {13, 14}


@on_ranks(1)
def test_a_loader_with_workers(tmp_path: Path) -> None:
    """Also at a step at which its workers take no snapshot."""
    wanted = run_noting_random(tmp_path / "whole", checkpoint={"enable": False}, workers=2)
    options = {"interval": 5, **FULL}
    run(tmp_path, steps=7, checkpoint=options, workers=2)
    assert run_noting_random(tmp_path, checkpoint=options, workers=2) == after(7, wanted)
    with pytest.raises(IncompatibleCheckpointError, match="set num_workers as it was"):
        run(tmp_path, steps=14, checkpoint=options, workers=1)


@on_ranks(1)
def test_options_on_the_command_line(tmp_path: Path) -> None:
    import tyro

    arguments = [
        "--interval",
        "7",
        "--folder",
        "s3://bucket/run",
        "--async_mode",
        "disabled",
        "--preemption_grace",
        "60",
    ]
    found = tyro.cli(type(config_of()), args=arguments)
    assert (found.interval, found.folder, found.async_mode, found.preemption_grace) == (
        7, "s3://bucket/run", "disabled", 60.0,
    )  # fmt: skip


@on_ranks(1)
def test_a_checkpoint_holds_everything(tmp_path: Path) -> None:
    """torchtitan's container of optimizers is an Optimizer without a state: those inside are saved."""
    run(tmp_path)
    with bytecheckpoint.open(tmp_path / "checkpoint" / "step_00000008") as checkpoint:
        keys = set(checkpoint)
    assert {key.partition("/")[0] for key in keys} >= {"model", "optimizer", "lr_scheduler", "train_state", "rng"}
    assert "optimizer/state/layers.0.attention.qkv_linear.wqkv.weight/exp_avg" in keys
    trainer = make(tmp_path, steps=STEPS, checkpoint={"load_step": 8})
    trainer.checkpointer.load(8)
    assert trainer.step == 8 and trainer.ntokens_seen == 8 * 4 * 8
    assert trainer.lr_schedulers.schedulers[0].last_epoch == 8
    (rate,) = trainer.lr_schedulers.schedulers[0].get_last_lr()
    assert trainer.optimizers.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    trainer.close()


@on_ranks(1)
def test_an_export_is_loaded_by_torchtitan(tmp_path: Path) -> None:
    """Its own manager takes model, optimizers, schedule and counters; the data begin anew."""
    run(tmp_path / "ours", steps=8, checkpoint=FULL)
    step = tmp_path / "ours" / "checkpoint" / "step_00000008"
    export(step, tmp_path / "theirs" / "checkpoint" / "step-8", format="torchtitan")
    options = {"exclude_from_loading": ["dataloader"], "load_step": 8, **FULL}
    wanted = run(tmp_path / "ours", checkpoint=options)
    assert wanted.keys() == {9, 10, 11, 12}
    assert run(tmp_path / "theirs", checkpoint={"stock": True, **options}) == wanted
    with bytecheckpoint.open(tmp_path / "theirs" / "checkpoint" / "step-8") as found:
        assert {"model/norm.weight", "optimizer/state/norm.weight/exp_avg", "train_state/step"} <= set(found)


# --- the last step ----------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_the_last_model(tmp_path: Path) -> None:
    """The last model is no step: a longer training continues from the last full step, and retention counts those only."""
    trainer = make(tmp_path, checkpoint={"export_dtype": "bfloat16", "keep_latest_k": 2})
    train(trainer)
    assert steps_in(tmp_path) == [4, 8]
    last = tmp_path / "checkpoint" / "step-12"
    with bytecheckpoint.open(last) as checkpoint:
        assert {key.partition("/")[0] for key in checkpoint} == {"model"}
        assert checkpoint["model/norm.weight"][:].dtype == torch.bfloat16
    wanted = run(tmp_path / "whole", steps=16, checkpoint={"enable": False})
    assert run(tmp_path, steps=16) == after(8, wanted)

    begun = make(tmp_path / "new", checkpoint={"initial_load_path": str(last)})
    assert begun.checkpointer.load() and begun.step == 0
    for mine, saved in zip(weights(begun), weights(trainer), strict=True):
        assert torch.equal(mine, saved.bfloat16().float())
    begun.close()


@on_ranks(1)
def test_the_last_model_for_hugging_face(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = make(tmp_path, checkpoint={"last_save_in_hf": True})
    train(trainer)
    last = tmp_path / "checkpoint" / "step-12"
    found = {name: value for file in last.glob("*.safetensors") for name, value in load_file(file).items()}
    assert torch.equal(found["model.norm.weight"], trainer.model_parts[0].norm.weight.to_local())
    assert steps_in(tmp_path) == [4, 8]
    begun = make(tmp_path / "new", checkpoint={"initial_load_path": str(last), "initial_load_in_hf": True})
    assert begun.checkpointer.load()
    assert all(map(torch.equal, weights(begun), weights(trainer)))
    begun.close()
    trainer = make(tmp_path / "none", checkpoint={"enable": False})
    with pytest.raises(UsageError, match="last_save_in_hf=True needs a model with a state_dict_adapter"):
        build(trainer, last_save_in_hf=True)


def build(trainer: Any, **options: Any) -> Any:
    """Build a manager for the objects of a trainer, without an adapter."""
    return config_of(**{"folder": "other", **options}).build(
        dataloader=trainer.dataloader, model_parts=trainer.model_parts, optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers, states={"train_state": trainer}, sd_adapter=None,
        base_folder=trainer.config.dump_folder,
    )  # fmt: skip


# --- where to begin ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_only", [True, False])
@pytest.mark.parametrize("stock", [True, False])
@on_ranks(1)
def test_beginning_from_another_run(tmp_path: Path, stock: bool, model_only: bool) -> None:
    """From a step of ours, and from what torchtitan's own manager has saved."""
    wanted = run(tmp_path / "old", checkpoint={"stock": stock, **FULL})
    name = "step-8" if stock else "step_00000008"
    options = {
        "initial_load_path": str(tmp_path / "old" / "checkpoint" / name),
        "initial_load_model_only": model_only,
        "interval": 3,
    }
    got = run(tmp_path / "new", checkpoint=options)
    if model_only:
        assert list(got) == list(range(1, 13)) and got[1] < wanted[1] - 0.1
    else:
        assert got == after(8, wanted)
    # The folder has steps now, and the same options continue from them.
    last = steps_in(tmp_path / "new")[-1]
    assert list(run(tmp_path / "new", checkpoint=options, steps=14)) == list(range(last + 1, 15))


@on_ranks(1)
def test_a_folder_of_torchtitans_own_manager(tmp_path: Path) -> None:
    """A run that changes its manager continues from the newest step of both."""
    wanted = run(tmp_path / "whole", steps=20, checkpoint={"enable": False})
    run(tmp_path, steps=8, checkpoint={"stock": True, **FULL})
    got = run(tmp_path, checkpoint=FULL)
    assert got == {step: wanted[step] for step in range(9, 13)}
    assert steps_in(tmp_path) == [12]
    assert list(run(tmp_path, steps=14, checkpoint=FULL)) == [13, 14]
    got = run(tmp_path, steps=6, checkpoint={"load_step": 4, "load_only": True})
    assert got == {step: wanted[step] for step in (5, 6)}
    run(tmp_path, steps=16, checkpoint={"stock": True, "load_step": 8, **FULL})
    assert list(run(tmp_path, steps=17, checkpoint=FULL)) == [17]


@on_ranks(1)
def test_folders_that_are_passed_over(tmp_path: Path) -> None:
    """Those of killed saves, and torchtitan's last model, from which it cannot continue itself."""
    wanted = run(tmp_path / "whole", steps=14, checkpoint={"enable": False})
    run(tmp_path, steps=10, checkpoint={"stock": True})
    root = tmp_path / "checkpoint"
    (root / "step-12").mkdir()
    shutil.copytree(root / "step-8", root / "step-11")
    (root / "step-11" / "__0_0.distcp").write_bytes(b"")
    with collected_warnings() as said:
        assert run(tmp_path, steps=12, checkpoint=FULL) == {step: wanted[step] for step in range(9, 13)}
    shutil.rmtree(root / "step-11")
    assert said.pop(-3) == f"{root}/step-11 of torchtitan is passed over: it lacks files, or their ends"
    assert said[-3:] == [
        f"{root}/step-12 of torchtitan is passed over: it lacks .metadata",
        f"{root}/step-10 of torchtitan is passed over: it lacks the optimizer",
        f"the run continues from {root}/step-8, saved by torchtitan: {root} has no step yet",
    ], said
    assert run(tmp_path, steps=14, checkpoint={**FULL, "keep_latest_k": 2}) == {13: wanted[13], 14: wanted[14]}
    assert {path.name for path in root.glob("step-*")} == {"step-4", "step-8", "step-10", "step-12"}
    run(tmp_path / "model", steps=2, checkpoint={"stock": True})
    with pytest.raises(UsageError, match=r"step-2 without the optimizer, and .* has no step: begin"):
        run(tmp_path / "model", steps=4)


@on_ranks(1)
def test_a_seed_checkpoint(tmp_path: Path) -> None:
    trainer = make(tmp_path, checkpoint={"create_seed_checkpoint": True})
    seed = weights(trainer)
    trainer.checkpointer.save(0, last_step=True)
    trainer.close()
    assert steps_in(tmp_path) == []
    for step in (-1, 0):
        begun = make(tmp_path, checkpoint={})
        for weight in begun.model_parts[0].parameters():
            torch.nn.init.zeros_(weight)
        assert begun.checkpointer.load(step) and begun.step == 0
        assert all(map(torch.equal, weights(begun), seed))
        begun.close()
    run(tmp_path)
    assert list(run(tmp_path)) == [9, 10, 11, 12], "steps come before the seed"


@on_ranks(1)
def test_steps_to_load(tmp_path: Path) -> None:
    wanted = run(tmp_path, checkpoint=FULL)
    assert run(tmp_path, checkpoint={"load_step": 4, **FULL}) == after(4, wanted)
    for step in (0, 5):
        with pytest.raises(CheckpointNotFoundError):
            run(tmp_path, checkpoint={"load_step": step})


@on_ranks(1)
def test_what_is_not_loaded(tmp_path: Path) -> None:
    wanted = run(tmp_path, steps=8, checkpoint=FULL)
    got = run(tmp_path, checkpoint={"exclude_from_loading": ["train_state", "dataloader"]}, steps=4)
    assert list(got) == [1, 2, 3, 4] and got[1] < wanted[1] - 0.1
    for unknown in ("optimizers", "rngs"):
        with pytest.raises(UsageError, match=f"exclude_from_loading has '{unknown}'"):
            run(tmp_path, checkpoint={"exclude_from_loading": [unknown]})


# --- when to save, and what is kept -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"keep_latest_k": 2}, [4, 8]),
        ({"keep_latest_k": 2, "interval": 2, **FULL}, [10, 12]),
        ({"keep_latest_k": 0, "interval": 1}, list(range(1, 12))),
        ({"enable_first_step_checkpoint": True, **FULL}, [1, 4, 8, 12]),
        ({"interval": 100}, []),
        ({"load_only": True}, []),
        ({"enable": False}, []),
    ],
)
@on_ranks(1)
def test_steps_that_are_saved(tmp_path: Path, options: dict[str, Any], wanted: list[int]) -> None:
    run(tmp_path, checkpoint=options)
    assert steps_in(tmp_path) == wanted
    assert (tmp_path / "checkpoint" / "step-12").exists() == (not {*options} & {"load_only", "enable", *FULL})


@on_ranks(1)
def test_an_exception_and_a_failed_save(tmp_path: Path) -> None:
    """The exception is not hidden by the failure of the save in flight."""

    def fail() -> None:
        raise ValueError("the loss is odd")

    with pytest.MonkeyPatch.context() as patch:
        Faults().install(patch).add("publish", OSError("no commit"), name="metadata.parquet", times=-1)
        with pytest.raises(ValueError, match="the loss is odd"):
            run(tmp_path, at={5: fail})


# --- what is refused --------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a OwnContainer has a state_dict of its own"):
        make(tmp_path, own_container=True)
    with pytest.raises(UsageError, match="async_mode='thread'"):
        config_of(async_mode="thread")
    with pytest.raises(ValueError, match="at least 2 checkpoint replicas"):
        config_of(keep_latest_k=1)
    trainer = make(tmp_path, checkpoint={"enable": False})
    trainer.checkpointer.save(4)
    assert not trainer.checkpointer.load() and not trainer.checkpointer.preempted
    with pytest.raises(UsageError, match="a state is named 'rng'"):
        config_of().build(
            dataloader=None, model_parts=[], optimizers=trainer.optimizers, lr_schedulers=None, states={"rng": {}},
            sd_adapter=None,
        )  # fmt: skip


@on_ranks(1)
def test_another_kind_of_loader(tmp_path: Path) -> None:
    run(tmp_path, steps=4, checkpoint=FULL)
    with pytest.raises(IncompatibleCheckpointError, match="TokenBufferLoader"):
        run(tmp_path, streams=True)
