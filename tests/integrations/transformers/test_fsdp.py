"""Trainer with FSDP2 through accelerate, on the CPU: losses go on, also at another layout and number of ranks.

Accelerate shards on accelerators only; jobs.py pretends that there are some. FSDP1 then fails: it takes no "cpu:0".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from bytecheckpoint.integrations.transformers import attach
from tests.integrations.transformers.jobs import make, run
from tests.support.runs import steps_in
from tests.support.worlds import Worlds

LAYOUTS = {"one": 1, "ddp": 2, "fsdp2": 2}


def options(layout: str) -> dict[str, Any]:
    found: dict[str, Any] = {"max_steps": 12, "lr_scheduler_type": "cosine"}
    if layout == "fsdp2":
        config = {
            "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }  # fmt: skip
        found |= {"fsdp": True, "fsdp_config": config}
    return found


def begin(folder: Path, layout: str) -> None:
    """Train for eight steps."""
    trainer, _ = make(folder, {8: lambda: setattr(trainer.control, "should_training_stop", True)}, **options(layout))
    attach(trainer)
    trainer.train("auto")
    weights = list(trainer.model.parameters())
    assert all(isinstance(w, DTensor) for w in weights) == (layout == "fsdp2")


def go_on(folder: Path, layout: str) -> dict[int, float]:
    return run(folder, "auto", **options(layout))


def best_weights(folder: Path, layout: str) -> list[float]:
    """Train with another best step than the last one; return the sums of the weights at the end."""
    trainer, _ = make(
        folder, eval_strategy="steps", eval_steps=4, metric_for_best_model="loss", load_best_model_at_end=True,
        save_total_limit=1, **options(layout),
    )  # fmt: skip
    attach(trainer)
    trainer.train()
    assert trainer.state.best_global_step == 4
    return [float(w.full_tensor().sum() if isinstance(w, DTensor) else w.sum()) for w in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("before", "now"),
    [("fsdp2", "fsdp2"), ("fsdp2", "one"), ("one", "fsdp2"), ("ddp", "fsdp2"), ("fsdp2", "ddp")],
)
def test_losses_go_on(worlds: Worlds, tmp_path: Path, before: str, now: str) -> None:
    wanted = worlds.run(1, run, tmp_path / "whole", attached=False, **options("one"))[0]
    worlds.run(LAYOUTS[before], begin, tmp_path / "run", before)
    assert steps_in(tmp_path / "run") == [4, 8]
    got = worlds.run(LAYOUTS[now], go_on, tmp_path / "run", now)[0]
    assert got == pytest.approx({step: loss for step, loss in wanted.items() if step > 8}, rel=1e-5)


def test_the_best_step(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, best_weights, tmp_path / "one", "one")[0]
    found = worlds.run(2, best_weights, tmp_path / "fsdp2", "fsdp2")
    assert found[0] == found[1] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
