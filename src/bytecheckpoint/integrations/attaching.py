"""Check and change the objects of a tool that is attached to this package."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import Cadence, CheckpointManager, LoadOptions, Preemption, Retention, SaveOptions

__all__ = ["ManagerArguments", "check_has", "differences", "refuse_newer", "retention_of_tool", "subclass_in_place"]


@dataclass(frozen=True)
class ManagerArguments:
    """Arguments of the `CheckpointManager` of a tool's training.

    Attributes:
        root: folder or URL of the run.
        retention: steps to keep.
        cadence: times of saves beside those of the tool.
        preemption: notice that the job is about to stop.
        save_options: options of all saves.
        load_options: options of all loads.
    """

    root: str | os.PathLike[str]
    retention: Retention
    cadence: Cadence
    preemption: Preemption | None
    save_options: SaveOptions
    load_options: LoadOptions

    def manager(self, states: MutableMapping[str, Any]) -> CheckpointManager:
        """Return a new manager of these live objects."""
        return CheckpointManager(
            self.root, states, every=self.cadence, keep=self.retention, preemption=self.preemption,
            save_options=self.save_options, load_options=self.load_options,
        )  # fmt: skip


def check_has(thing: Any, names: Collection[str], package: str, remedy: str) -> None:
    """Check that an object of a tool has all attributes that this package uses.

    Args:
        thing: object of the tool.
        names: names of its attributes.
        package: name of the tool's module, for the error.
        remedy: advice for the error.

    Raises:
        UsageError: an attribute is missing.
    """
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        version = importlib.import_module(package).__version__
        raise UsageError(f"a {type(thing).__name__} of {package} {version} has no {missing[0]}: {remedy}")


def retention_of_tool(keep: Any, default: Any = None) -> Retention:
    """Return the steps to keep for a tool.

    Args:
        keep: the user's `Retention`, or its first argument; None for the default.
        default: rules that follow from the tool's own arguments.
    """
    if isinstance(keep, Retention):
        return keep
    return Retention(default if keep is None else keep)


def subclass_in_place(thing: Any, mixin: type) -> None:
    """Monkey-patch an object: give it a subclass of its own class, which overrides methods.

    The object keeps its identity and is still an instance of its class, which may be the user's subclass of the tool's.
    Other objects of that class do not change. Callbacks and hooks of the tools come too late or know too little for this.

    Args:
        thing: object of the tool.
        mixin: class whose methods come before those of the object's class.
    """
    own = type(thing)
    thing.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__})


def refuse_newer(manager: CheckpointManager, step: int, remedy: str) -> None:
    """Refuse to begin a run before the end of the run in its folder, whose steps would count as the newest ones.

    Args:
        manager: manager of the run that begins.
        step: step at which the run begins.
        remedy: advice for the error.

    Raises:
        UsageError: there is a newer step; raised on all ranks.
    """

    def newest_step() -> int:
        latest = manager.latest()
        return -1 if latest is None else latest.step

    newest = manager.ask_rank_0(newest_step)
    if newest > step:
        raise UsageError(f"{manager.root} holds a run up to step {newest}: {remedy}")


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the differences between a checkpoint's facts and those of this run; return "" if there are none."""
    return "; ".join(f"{saved.get(name)} {name}, now {own[name]}" for name in own if saved.get(name) != own[name])
