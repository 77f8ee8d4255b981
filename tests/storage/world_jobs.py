"""Jobs for the ranks of real processes, on storages that they find by the environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bytecheckpoint
from tests.support.interchange.families import Family
from tests.support.real_frameworks import assert_losses
from tests.support.tiny_model import source_values, target_values
from tests.support.torch_layouts import build
from tests.support.worlds import Worlds

__all__ = ["check_members", "job", "replace", "resume", "run"]


def run(worlds: Worlds, size: int, module: str, name: str, *args: Any) -> list[Any]:
    """A function of tests.MODULE on `size` ranks, which find the storages that this process finds; what each returned."""
    prefixes = ("HADOOP_", "AWS_", "AZURE_", "DS_")
    variables = {key: value for key, value in os.environ.items() if key.startswith(prefixes)}
    return worlds.run(size, job, variables, module, name, *args, timeout=240)


def job(variables: Mapping[str, str], module: str, name: str, *args: Any) -> Any:
    """A function of tests.MODULE, with these variables in the environment."""
    os.environ.update(variables)
    return getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_members(worlds: Worlds, root: str, notes: Path, family: Family, names: Sequence[str]) -> None:
    """Save with each member of a family, and load with each what all of them saved; compare states and losses.

    Args:
        worlds: worlds of processes.
        root: folder of the checkpoints, on a server.
        notes: local folder for what the runs expect.
        family: the family.
        names: the members; the first one runs in one process.
    """
    members = [family.member(name) for name in names]
    module = "support.interchange.jobs"
    after: dict[str, list[float]] = {}
    for member in members:
        start = f"{root}/{names[0]}.start" if after else None
        args: tuple[Any, ...] = (member, start, f"{root}/{member.name}", str(notes))
        after[member.name] = run(worlds, member.size, module, "save", *args)[0]["after"]
    for member in members:
        for rank, found in enumerate(run(worlds, member.size, module, "load_all", member, members, root, str(notes))):
            for source in names:
                problems = found[source]["problems"][:3]
                assert not problems, f"{source} to {member.name}, rank {rank}: {problems}"
                assert_losses(found[source]["losses"], after[source], family.tolerance)


def replace(layout: str, path: str, times: int) -> list[float]:
    """Train and save to one path again and again, asynchronously and not; the losses of the next steps."""
    trainer = build(layout, source_values)
    for number in range(times):
        trainer.train(1)
        handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=number % 2 == 0)
        handle.result(90)
    return trainer.train(3)


def resume(layout: str, path: str) -> list[float]:
    """Load into another model; the losses of the next steps."""
    trainer = build(layout, target_values)
    bytecheckpoint.load(path, trainer.states())
    return trainer.train(3)
