"""Check and change the objects of a tool that is attached to this package."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import Cadence, CheckpointManager, LoadOptions, Preemption, SaveOptions
from bytecheckpoint.manager.rules import Retention, StepInfo
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = [
    "OBJECTS", "OPTIMIZER", "SCHEDULE", "CheckpointOfTool", "ManagerArguments", "Mixin", "check_has", "differences",
    "folders_of_tool", "newest_of_tool", "patch", "refuse_newer", "seen_by_all", "subclass", "subclass_in_place",
]  # fmt: skip

_log = logging.getLogger("bytecheckpoint")

#: What a checkpoint lacks that was saved for its weights alone.
OPTIMIZER = "the optimizer"
#: What a checkpoint lacks whose optimizer the tool would not load either.
SCHEDULE = "the schedule"
#: What a checkpoint lacks whose save was killed at its end, or was of a program with other objects.
OBJECTS = "registered objects"

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


@dataclass(frozen=True)
class CheckpointOfTool:
    """A checkpoint that a tool itself has saved.

    Attributes:
        step: number of steps that were done.
        path: address of the file or folder.
        modified: time of its last change, in seconds since 1970; 0.0 if it is not known.
    """

    step: int
    path: str
    modified: float = 0.0


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


def folders_of_tool(root: str, name: re.Pattern[str], last: str) -> list[CheckpointOfTool]:
    """Return the folders in `root` with such a `name`, whose first group is a step, and whose `last` file says the time."""
    storage, found = with_time_limits(resolve(root)), []
    for match in filter(None, map(name.fullmatch, storage.folders())):
        modified = 0.0
        with suppress(FileNotFoundError, UsageError):  # a torn one; a refused name
            modified = storage.stat(f"{match[0]}/{last}").modified
        found.append(CheckpointOfTool(int(match[1] or 0), f"{root}/{match[0]}", modified))
    return sorted(found, key=lambda one: (one.step, one.modified), reverse=True)


def newest_of_tool(
    manager: CheckpointManager, tool: str, find: Callable[[], Iterable[CheckpointOfTool]], lacks: Callable[[str], str]
) -> CheckpointOfTool | None:
    """Return the checkpoint of a tool from which a run continues; None for its own newest step, or a new run.

    The higher step counts. A checkpoint of the tool that is older than the newest step does not: the run has gone back to
    a step before it. Rank 0 decides, and logs its decision.

    Args:
        manager: manager of the run.
        tool: name of the tool.
        find: function that returns the tool's checkpoints, first the one from which the tool itself would continue.
        lacks: function that returns what the checkpoint with a path lacks, one of the constants above where a new run
            should not begin in its place; "" for a complete one. Incomplete ones are passed over, with a warning.

    Raises:
        UsageError: a rank does not see the checkpoint, or all lack one of these; raised on all ranks.
    """

    def choose() -> CheckpointOfTool | None:
        latest, passed = manager.latest(), None
        weights: tuple[str, str] | None = None  # the first one, and what it lacks
        for one in find():
            if latest is not None and (one.step <= latest.step or 0 < one.modified < latest.committed):
                passed = passed or one
            elif missing := lacks(one.path):
                _log.warning("%s of %s is passed over: it lacks %s", one.path, tool, missing)
                weights = weights or ((one.path, missing) if missing in (OPTIMIZER, SCHEDULE, OBJECTS) else None)
            else:
                own = "no step yet" if latest is None else f"no step above {latest.step}"
                _log.warning("the run continues from %s, saved by %s: %s has %s", one.path, tool, manager.root, own)
                return one
        if weights and latest is None:
            raise UsageError(
                f"{tool} has saved {weights[0]} without {weights[1]}, and {manager.root} has no step: begin a new run, "
                "without a resume, with a model that has these weights"
            )
        if latest is not None and passed:
            level, why = (
                (logging.INFO, "has no higher step")
                if passed.step <= latest.step
                else (logging.WARNING, "is older, with a higher step")
            )
            _log.log(level, "the run continues from step %d: %s of %s %s", latest.step, passed.path, tool, why)
        return None

    found = manager.ask_rank_0(choose, CheckpointOfTool | None)
    if found is not None:
        seen_by_all(manager, found.path, lambda: "://" in found.path or os.path.exists(found.path))
    return found


def seen_by_all(manager: CheckpointManager, path: object, look: Callable[[], bool]) -> bool:
    """Return whether all ranks see the checkpoint with a path, as `look` returns it.

    Raises:
        UsageError: some ranks see it, and others do not; raised on all ranks.
    """
    seen = manager.ask_ranks(look)
    if len(set(seen)) > 1:
        raise UsageError(f"rank {seen.index(False)} does not see {path}, which rank {seen.index(True)} would load")
    return bool(seen[0])


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the differences between a checkpoint's facts and those of this run; return "" if there are none."""
    return "; ".join(f"{saved.get(name)} {name}, now {own[name]}" for name in own if saved.get(name) != own[name])
