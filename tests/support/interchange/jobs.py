"""Jobs of the ranks of the interchange matrix."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.comparisons import report_problems
from tests.support.interchange.runs import Member, Settings, TrainingRun
from tests.support.real_frameworks import AFTER, BEFORE, state_differences

__all__ = ["AFTER", "load_all", "save"]

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
        bytecheckpoint.save(f"{path}.start", run.states())
    else:
        problems = load(run, member.framework, start, cast=bool(member.low))
        assert not problems, problems
    before = run.train(BEFORE - 1)
    run.feed.take_notes()
    expected, settings = run.full_state(), settings_of_all_ranks(run.settings())
    if dist.get_rank() == 0:
        torch.save((expected, settings), f"{notes}/{member.name}.pt")
    handle = bytecheckpoint.save(path, run.states(), framework=member.framework, async_checkpoint=True)
    after = run.train(AFTER)
    handle.result(120)
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
