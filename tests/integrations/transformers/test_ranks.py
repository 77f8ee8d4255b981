"""Trainer with `attach` on two ranks: the best step, and resumes at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bytecheckpoint.integrations.transformers import attach
from tests.integrations.conformance import after, collected_warnings
from tests.integrations.transformers.jobs import FSDP2, make, model, run
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_another_number_of_ranks(worlds: Worlds, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """With the samples of a step kept by accumulated gradients."""
    before, now = sizes
    options: dict[str, Any] = {"max_steps": 12, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 4}
    accumulated = {1: {"gradient_accumulation_steps": 2}, 2: {}}
    wanted = worlds.run(before, run, tmp_path / "whole", attached=False, **options, **accumulated[before])[0]
    worlds.run(before, train_until, tmp_path / "run", 8, **options, **accumulated[before])
    got = worlds.run(now, run, tmp_path / "run", "auto", **options, **accumulated[now])[0]
    assert got == pytest.approx(after(8, wanted), rel=1e-5)
    assert steps_in(tmp_path / "run") == [4, 8, 12]


def train_until(folder: Path, step: int, **options: Any) -> None:
    trainer, _ = make(folder, {step: lambda: setattr(trainer.control, "should_training_stop", True)}, **options)
    attach(trainer)
    trainer.train("auto")


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_job_that_runs_is_switched(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    """From what Trainer itself has saved, whole or sharded, at the same number of ranks; then at another one."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", **(FSDP2 if layout == "fsdp2" else {})}
    wanted = worlds.run(2, run, tmp_path / "whole", attached=False, dropout=0.2, **options)
    worlds.run(2, run, tmp_path / "run", attached=False, dropout=0.2, max_steps=8, **options)
    got = worlds.run(2, run, tmp_path / "run", "auto", dropout=0.2, max_steps=10, save_steps=5, **options)
    assert got == [{step: losses[step] for step in (9, 10)} for losses in wanted]
    assert steps_in(tmp_path / "run") == [10]
    got = worlds.run(1, run, tmp_path / "run", "auto", lr_scheduler_type="constant")
    assert got[0].keys() == {11, 12}


def adapters_and_norms(folder: Path, resume: Any = None, **options: Any) -> list[str]:
    """Train adapters of PEFT together with norms of the base model under FSDP2; return the warnings."""
    import peft

    net = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    with collected_warnings() as said:
        run(folder, resume, net=net, **options)
    return said


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_adapters_in_sharded_folders_of_trainer(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """The sharded ones hold the adapters alone, the whole ones everything."""
    options = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "state_dict_type": kind}}
    worlds.run(2, adapters_and_norms, tmp_path, attached=False, max_steps=4, **options)
    for said in worlds.run(2, adapters_and_norms, tmp_path, "auto", max_steps=5, **options):
        lost = [line for line in said if "does not hold" in line]
        assert len(lost) == (kind == "SHARDED_STATE_DICT") and not any("lora" in line for line in lost)


@on_ranks(2)
def test_the_best_step_on_all_ranks(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    trainer, _ = make(tmp_path, **options)
    attach(trainer)
    trainer.train()
    dist.barrier()
    assert steps_in(tmp_path) == sorted({trainer.state.best_global_step, 12})
    weights = [p.sum().item() for p in trainer.model.parameters()]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (weights, trainer.state.best_model_checkpoint))
    assert found[0] == found[1] and found[0][1].endswith(f"step_{trainer.state.best_global_step:08d}")


def best_weights(folder: Path, **options: Any) -> list[float]:
    """Train with another best step than the last one; return the sums of the weights at the end."""
    trainer, _ = make(
        folder, eval_strategy="steps", eval_steps=4, metric_for_best_model="loss", load_best_model_at_end=True,
        save_total_limit=1, max_steps=12, lr_scheduler_type="cosine", **options,
    )  # fmt: skip
    attach(trainer)
    trainer.train()
    assert trainer.state.best_global_step == 4
    return [float(w.full_tensor().sum() if isinstance(w, DTensor) else w.sum()) for w in trainer.model.parameters()]


def test_the_best_step_of_sharded_weights(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, best_weights, tmp_path / "one")[0]
    found = worlds.run(2, best_weights, tmp_path / "fsdp2", **FSDP2)
    assert found[0] == found[1] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
