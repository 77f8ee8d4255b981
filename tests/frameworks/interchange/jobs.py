"""What the ranks of the interchange matrix run."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from tests.frameworks.deepspeed.jobs import differences
from tests.frameworks.interchange.runs import Member, Run, Settings

BEFORE, AFTER = 3, 5
#: What no optimizer has main weights of, so that only the precision of the model is left of it.
UNTRAINED = {"model/positions", "model/temperature", "model/embedding.position_embeddings.weight"}


def begin(member: Member) -> Run:
    """A fresh run; one process has a process group, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return member.make()


def kinds_of(path: str) -> set[str]:
    with bytecheckpoint.open(path) as saved:
        return {key.partition("/")[0] for key in saved}


def load(run: Run, framework: str, path: str, *, cast: bool) -> list[str]:
    """Load what of the run's states is in the checkpoint; what the report complains of."""
    saved = kinds_of(path)
    states = {kind: value for kind, value in run.states().items() if kind in saved}
    report = bytecheckpoint.load(path, states, framework=framework, cast=cast)
    run.loaded(states)
    wrong = [f"{n}: {x}" for n in ("missing", "unexpected") if (x := getattr(report, n))]
    return wrong + [f"cast: {key}" for key in report.cast if not cast or key not in UNTRAINED]


def everywhere(settings: Settings) -> Settings:
    """The settings of all ranks' parameters."""
    found: list[Settings] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, settings)
    return {name: value for of_rank in found for name, value in of_rank.items()}


def save(member: Member, start: str | None, path: str, notes: str) -> dict[str, Any]:
    """Train from the start, save while training goes on, and note the whole of what was saved.

    Args:
        member: the layout.
        start: a checkpoint; None: this is the run that makes it.
        path: where to save.
        notes: a folder of this machine.
    """
    run = begin(member)
    if start is None:
        run.train(1)
        bytecheckpoint.save(f"{path}.start", run.states())
    else:
        problems = load(run, member.framework, start, cast=bool(member.low))
        assert not problems, problems
    before = run.train(BEFORE - 1)
    expected, settings = run.whole(), everywhere(run.settings())
    if dist.get_rank() == 0:
        torch.save((expected, settings), f"{notes}/{member.name}.pt")
    handle = bytecheckpoint.save(path, run.states(), framework=member.framework, async_checkpoint=True)
    after = run.train(AFTER)
    handle.result(120)
    return {"before": before, "after": after}


def load_all(member: Member, sources: Sequence[Member], folder: str, notes: str) -> dict[str, dict[str, Any]]:
    """Load what every source saved in `folder`; per source: what is wrong, and the losses that follow."""
    found: dict[str, dict[str, Any]] = {}
    run: Run | None = None
    for source in sources:
        path = f"{folder}/{source.name}"
        losses: list[float] = []
        # A fresh run has no state yet; one that has trained on has all of it, and it is wrong.
        run = begin(member) if run is None or len(found) % 3 == 0 else run
        try:
            # Buffers and frozen parameters are in the precision of the model.
            framework = "auto" if len(found) % 2 else member.framework
            problems = load(run, framework, path, cast=member.low != source.low)
            expected, settings = torch.load(f"{notes}/{source.name}.pt")
            problems += differences(expected, run.whole())
            for name, got in run.settings().items():
                if settings.get(name) != got:
                    problems.append(f"settings of {name}: {got} instead of {settings.get(name)}")
            losses = run.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
            run = None
        found[source.name] = {"problems": problems, "losses": losses}
    return found
