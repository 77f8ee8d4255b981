"""The jobs that the ranks of the layout matrix run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.comparisons import differences, report_problems, wrong_entries
from tests.support.fsdp1_layouts import full_state
from tests.support.tiny_model import fill_by_coordinates, source_values, target_values
from tests.support.torch_layouts import WORLD_SIZE, Trainer, build

#: Training steps before a save, and those whose losses are compared after it: the first loss needs the weights, the
#: second the optimizer's state and settings, the third how both go on.
BEFORE, AFTER = 2, 3


def coordinates(layout: str, step: float | None = None, build: Callable[..., Trainer] = build) -> Trainer:
    """Start a run in a state of coordinates.

    Args:
        layout: the layout.
        step: step of all parameters; None: each has its own.
        build: starts the run.
    """
    trainer = build(layout, fill_by_coordinates)
    trainer.fill_optimizer(step=step)
    return trainer


def save_all(layout: str, folder: str) -> dict[str, Any]:
    """Save a trained state, asynchronously during training, and a state of coordinates."""
    trainer = build(layout, source_values)
    before = trainer.train(BEFORE)
    handle = bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states(), async_checkpoint=True)
    after = trainer.train(AFTER)
    report = handle.result(60)
    bytecheckpoint.save(f"{folder}/coordinates/{layout}", coordinates(layout).states())
    return {"before": before, "after": after, "written": report.bytes_written}


def load_all(layout: str, sources: Sequence[str], folder: str) -> dict[str, dict[str, Any]]:
    """Load what every source layout saved; return problems and the next losses, by source."""
    expected = coordinates(layout).snapshot()
    # `resumed` loads the first source into an optimizer without state, and the others over a state that trained on.
    fresh, resumed = build(layout, target_values), build(layout, target_values)
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        losses: list[float] = []
        try:
            fresh.erase()
            report = bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
            problems = differences(expected, fresh.snapshot()) + report_problems(report)
            resumed.extra |= {"rng": torch.zeros(1), "nested": {"history": []}}
            bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
            problems += wrong_extra(resumed, source)
            losses = resumed.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


def wrong_extra(trainer: Trainer, source: str) -> list[str]:
    """Return the problems of the states beside model and optimizer, after a load of a trained state."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    owner = rank if rank < WORLD_SIZE[source] else 0
    extra = trainer.extra
    nested = extra["nested"]
    wrong = []
    if extra["step"] != BEFORE or nested["history"] != list(range(1, BEFORE + 1)):
        wrong.append(f"extra states: {extra['step']}, {nested['history']}")
    if not torch.equal(extra["rng"], torch.Generator().manual_seed(owner).get_state()):
        wrong.append(f"the random state is not rank {owner}'s")
    if not torch.equal(nested["a", 1]["tensor"], torch.arange(3.0)) or nested["a", 1]["π"] != float("inf"):
        wrong.append(f"nested values: {nested}")
    if trainer.schedule.last_epoch != BEFORE:
        wrong.append(f"the schedule stands at {trainer.schedule.last_epoch}")
    return wrong


def open_all(sources: Sequence[str], folder: str, step: float | None = None) -> dict[str, list[str]]:
    """Compare every layout's opened state of coordinates with that of one process; return problems by source.

    Args:
        sources: the layouts.
        folder: folder of the saved checkpoints.
        step: step of all parameters; None: each has its own.
    """
    expected = full_state(coordinates("one", step))
    return {source: wrong_entries(f"{folder}/coordinates/{source}", expected) for source in sources}
