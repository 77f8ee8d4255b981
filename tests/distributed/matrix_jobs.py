"""The jobs that the ranks of the layout matrix run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from tests.distributed.layouts import WORLD_SIZE, Trainer, build
from tests.support.tiny_model import Gpt, fill_by_coordinates, initialise, names_of

BEFORE, AFTER = 3, 5

# Initial parameters of a run that saves, and of a run that loads.
source_values = partial(initialise, seed=1)
target_values = partial(initialise, seed=2)


def save_all(layout: str, folder: str) -> dict[str, Any]:
    """Save a trained state, asynchronously while training goes on, and a state of coordinates."""
    trainer = build(layout, source_values)
    before = trainer.train(BEFORE)
    handle = bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states(), async_checkpoint=True)
    after = trainer.train(AFTER)
    report = handle.result(60)
    filled = build(layout, fill_by_coordinates)
    filled.fill_optimizer()
    bytecheckpoint.save(f"{folder}/coordinates/{layout}", filled.states())
    return {"before": before, "after": after, "written": report.bytes_written}


def load_all(layout: str, sources: Sequence[str], folder: str) -> dict[str, dict[str, Any]]:
    """Load what every source layout saved; return problems and the next losses, by source."""
    filled = build(layout, fill_by_coordinates)
    filled.fill_optimizer()
    expected = filled.snapshot()
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        losses: list[float] = []
        try:
            fresh = build(layout, target_values)
            report = bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
            problems = differences(expected, fresh.snapshot()) + report_problems(report)
            resumed = build(layout, target_values)
            resumed.step()  # so that state, schedule and counters exist already, with other values
            bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
            problems += wrong_extra(resumed, source)
            losses = resumed.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


def differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Return the differences of two snapshots, bit for bit and type for type."""
    wrong = [f"{key} is missing" for key in expected.keys() - got.keys()]
    wrong += [f"{key} is unexpected" for key in got.keys() - expected.keys()]
    for key in expected.keys() & got.keys():
        want, have = expected[key], got[key]
        if isinstance(want, torch.Tensor):
            if not isinstance(have, torch.Tensor) or want.dtype != have.dtype or not torch.equal(want, have):
                wrong.append(f"{key}: {have} instead of {want}")
        elif want != have:
            wrong.append(f"{key}: {have} instead of {want}")
    return wrong


def report_problems(report: bytecheckpoint.LoadReport) -> list[str]:
    """Return what a load reports as missing, unexpected or cast."""
    return [f"{name}: {keys}" for name in ("missing", "unexpected", "cast") if (keys := getattr(report, name))]


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


def whole_state() -> dict[str, torch.Tensor]:
    """Return all tensors of the state of coordinates, by the keys of `bytecheckpoint.open`."""
    model = Gpt().double()
    fill_by_coordinates(model)
    found = {f"model/{name}": tensor.detach() for name, tensor in names_of(model, tied=False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[f"optimizer/state/{name}/exp_avg"] = parameter.detach() * 2 + 1
            found[f"optimizer/state/{name}/exp_avg_sq"] = parameter.detach() * 4 + 3
    return found


def open_all(sources: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Compare every layout's opened state of coordinates with the whole tensors; return problems by source."""
    expected = whole_state()
    return {source: wrong_entries(f"{folder}/coordinates/{source}", expected) for source in sources}


def wrong_entries(path: str, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the keys of `expected` that an opened checkpoint lacks, or whose tensors differ."""
    with bytecheckpoint.open(path) as checkpoint:
        return [k for k, v in expected.items() if k not in checkpoint or not torch.equal(checkpoint[k][...], v)]
