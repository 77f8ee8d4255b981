"""Check and change the objects of a tool that is attached to this package."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import Cadence, CheckpointManager, LoadOptions, Preemption, SaveOptions
from bytecheckpoint.manager.rules import Retention, StepInfo

__all__ = [
    "ManagerArguments", "Mixin", "check_has", "differences", "patch", "refuse_checkpoints_of_tool", "refuse_newer",
    "subclass", "subclass_in_place",
]  # fmt: skip

#: Base of classes with methods that override those of a tool. The tool's class follows it, so `super()` may be anything.
Mixin: Any = object


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

    @classmethod
    def of(
        cls, root: str | os.PathLike[str], keep: Any, default: Any, cadence: Cadence, preemption: Preemption | None,
        save_options: SaveOptions | None, load_options: LoadOptions | None,
    ) -> Self:  # fmt: skip
        """Return the arguments of a user, where None stands for a default.

        Args:
            root: folder or URL of the run.
            keep: the user's `Retention`, or its first argument.
            default: rules that follow from the tool's own arguments, for keep=None.
            cadence: times of saves.
            preemption: notice that the job is about to stop.
            save_options: options of all saves.
            load_options: options of all loads.
        """
        retention = keep if isinstance(keep, Retention) else Retention(default if keep is None else keep)
        return cls(root, retention, cadence, preemption, save_options or SaveOptions(), load_options or LoadOptions())

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


def subclass_in_place(thing: Any, mixin: type, of_tool: type) -> None:
    """Monkey-patch an object: give it a subclass of its own class, with other methods in the place of the tool's.

    The object keeps its identity and is still an instance of its class. If that is a subclass of the tool's, its overrides
    come first, and their calls of `super()` reach the new methods. Other objects of that class do not change. Callbacks and
    hooks of the tools come too late or know too little for this.

    Args:
        thing: object of the tool.
        mixin: class with the new methods, whose own calls of `super()` reach those of the tool.
        of_tool: class of the tool.
    """
    own, changed = type(thing), subclass(mixin, of_tool)
    thing.__class__ = changed if own is of_tool else subclass(own, changed, own)


def subclass(first: type, second: type, named: type | None = None) -> type:
    """Return a subclass of two classes with the name of one of them, by default of the second."""
    named = named or second
    return type(named.__name__, (first, second), {"__module__": named.__module__, "__qualname__": named.__qualname__})


def patch(stack: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Monkey-patch a method of an object until a stack ends."""
    vars(owner)[name] = function
    stack.callback(vars(owner).pop, name, None)


def refuse_newer(manager: CheckpointManager, step: int, remedy: str) -> None:
    """Refuse to begin a run before the end of the run in its folder, whose steps would count as the newest ones.

    Args:
        manager: manager of the run that begins.
        step: step at which the run begins.
        remedy: advice for the error.

    Raises:
        UsageError: there is a newer step; raised on all ranks.
    """
    newest = manager.ask_rank_0(manager.latest, StepInfo | None)
    if newest is not None and newest.step > step:
        raise UsageError(f"{manager.root} holds a run up to step {newest.step}: {remedy}")


def refuse_checkpoints_of_tool(
    manager: CheckpointManager, tool: str, find: Callable[[], tuple[int, str] | None], remedy: str
) -> None:
    """Refuse to continue behind checkpoints that the tool itself has saved: a run would train its last steps again.

    Args:
        manager: manager of the run.
        tool: name of the tool, for the error.
        find: function that returns the step and the path of the tool's newest checkpoint, or None. Rank 0 calls it.
        remedy: advice for the error, with {path} for that path.

    Raises:
        UsageError: the tool has saved a newer step than the newest one of the run; raised on all ranks.
    """

    def look() -> str:
        found = find()
        latest = manager.latest() if found else None
        own = -1 if latest is None else latest.step
        if found is None or found[0] <= own:
            return ""
        ends = "has no step" if own < 0 else f"ends with step {own}"
        advice = remedy.format(path=repr(found[1]))
        return f"{tool} itself has saved {found[1]}, and the run in {manager.root} {ends}: {advice}"

    if message := manager.ask_rank_0(look, str):
        raise UsageError(message)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the differences between a checkpoint's facts and those of this run; return "" if there are none."""
    return "; ".join(f"{saved.get(name)} {name}, now {own[name]}" for name in own if saved.get(name) != own[name])
