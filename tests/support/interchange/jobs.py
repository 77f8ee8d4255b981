"""Jobs of the ranks of the interchange matrix."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import tools
from tests.support.comparisons import assert_complete, assert_same, report_problems
from tests.support.interchange.runs import Member, Settings, TrainingRun
from tests.support.real_frameworks import AFTER, BEFORE, state_differences
from tests.support.selections import assert_part_loaded
from tests.support.settings import using

__all__ = ["AFTER", "BEFORE", "load_all", "load_model_alone", "load_part", "save"]

#: Tensors without master weights, which are saved in the precision of the model only.
UNTRAINED = {"model/positions", "model/temperature", "model/embedding.position_embeddings.weight"}


def start_run(member: Member) -> TrainingRun:
    """Return a fresh run; one process gets a process group too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return member.make()


def states_in(path: str) -> set[str]:
    with bytecheckpoint.open(path) as saved:
        return {key.partition("/")[0] for key in saved}


def load(run: TrainingRun, framework: str, path: str, *, cast: bool) -> list[str]:
    """Load those of the run's states that are in the checkpoint; return what the report complains of."""
    saved = states_in(path)
    states = {state: value for state, value in run.states().items() if state in saved}
    report = bytecheckpoint.load(path, states, framework=framework, cast=cast)
    run.loaded(states)
    problems = report_problems(report, ("missing", "unexpected"))
    return problems + [f"cast: {key}" for key in report.cast if not cast or key not in UNTRAINED]


def settings_of_all_ranks(settings: Settings) -> Settings:
    """Return the settings of all ranks' parameters. A collective."""
    found: list[Settings] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, settings)
    return {name: value for of_rank in found for name, value in of_rank.items()}


def save(member: Member, start: str | None, path: str, notes: str) -> dict[str, Any]:
    """Train from the start, save during training, and write down the full state at the save.

    Args:
        member: the layout.
        start: a checkpoint; None: this run makes it.
        path: path of the checkpoint.
        notes: folder for the full state and the settings.
    """
    run = start_run(member)
    if start is None:
        run.train(1)
        with using(fingerprint=True):
            bytecheckpoint.save(f"{path}.start", run.states())
    else:
        problems = load(run, member.framework, start, cast=bool(member.low))
        assert not problems, problems
        if not member.low:
            loaded = tools.fingerprint(run.states()).tensors  # stages of a pipeline hold both names of a tied tensor
            assert all(
                loaded[key] == found for key, found in tools.fingerprint(start).tensors.items() if "model/" in key
            )
    before = run.train(BEFORE - 1)
    run.feed.take_notes()
    expected, settings = run.full_state(), settings_of_all_ranks(run.settings())
    if dist.get_rank() == 0:
        torch.save((expected, settings), f"{notes}/{member.name}.pt")
    live = tools.fingerprint(run.states())
    with using(fingerprint=True):
        handle = bytecheckpoint.save(path, run.states(), framework=member.framework, async_checkpoint=True)
    after = run.train(AFTER)
    assert handle.result(120).fingerprint == live.states
    return {"before": before, "after": after, "fed": run.feed.take_notes()}


def load_all(member: Member, sources: Sequence[Member], folder: str, notes: str) -> dict[str, dict[str, Any]]:
    """Load what each source saved in `folder`; return by source the problems, and losses and data of the next steps."""
    found: dict[str, dict[str, Any]] = {}
    run: TrainingRun | None = None
    for source in sources:
        path = f"{folder}/{source.name}"
        losses: list[float] = []
        fed: Any = None
        # Load into fresh runs, which have no state yet, and into runs that have trained on, whose state is another.
        run = start_run(member) if run is None or len(found) % 3 == 0 else run
        try:
            # Buffers and frozen parameters are in the precision of the model.
            framework = "auto" if len(found) % 2 else member.framework
            problems = load(run, framework, path, cast=member.low != source.low)
            expected, settings = torch.load(f"{notes}/{source.name}.pt")
            problems += state_differences(expected, run.full_state())
            for name, got in run.settings().items():
                if settings.get(name) != got:
                    problems.append(f"settings of {name}: {got} instead of {settings.get(name)}")
            run.feed.take_notes()
            losses = run.train(AFTER)
            fed = run.feed.take_notes()
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
            run = None
        found[source.name] = {"problems": problems, "losses": losses, "fed": fed}
    return found


def load_part(member: Member, pattern: str, path: str) -> None:
    """Save the part of a run that matches `pattern`, and load it into another run, whose rest stays as it is."""
    source, target = start_run(member), start_run(member)
    source.train(2)
    saved = source.full_state()
    handle = bytecheckpoint.save(path, source.states(), include=[pattern], async_checkpoint=True)
    source.train(1)
    handle.result(120)
    with bytecheckpoint.open(path) as checkpoint:
        found = [key for key in checkpoint if key != "optimizer/param_groups"]
    assert found and all(".1." in key for key in found)
    target.train(1)
    before, progress = target.full_state(), target.progress()
    assert_complete(bytecheckpoint.load(path, target.states(), include=[pattern]), ("missing", "unexpected"))
    assert_part_loaded(saved, before, target.full_state(), pattern, joined=member.joins_steps)
    assert target.progress() == progress
    assert all(map(isfinite, target.train(2)))


def load_model_alone(member: Member, pattern: str, path: str) -> None:
    """Load the model without its optimizer, whose master weights follow: the next step rounds them into the model.

    Then load all but the weights that match `pattern`, which keep their master weights.
    """
    source, target = start_run(member), start_run(member)
    source.train(2)
    saved = source.full_state()
    bytecheckpoint.save(path, source.states())
    target.train(1)
    before = target.full_state()
    bytecheckpoint.load(path, target.states(), include=["model/*"])
    after = target.full_state()
    weights = {f"optimizer/state/{key.removeprefix('model/')}/master": key for key in after if key.startswith("model/")}
    masters = {master: weight for master, weight in weights.items() if master in after}
    assert masters
    for master, weight in masters.items():
        assert torch.equal(after[weight], saved[weight])
        assert torch.equal(after[master].to(saved[weight].dtype), saved[weight]), master
    rest = [key for key in after if not key.startswith("model/") and key not in masters]
    assert_same({key: before[key] for key in rest}, {key: after[key] for key in rest})
    target.train(1)
    before = target.full_state()
    bytecheckpoint.load(path, target.states(), exclude=[f"model/{pattern}"])
    after = target.full_state()
    kept = [key for pair in masters.items() for key in pair if fnmatchcase(key, pattern)]
    assert kept
    assert_same({key: before[key] for key in kept}, {key: after[key] for key in kept})
