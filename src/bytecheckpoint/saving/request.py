"""Check the arguments of a save or a preparation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import torch

from bytecheckpoint.arguments import check_flags, check_selection, check_states
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.frameworks.registry import resolve as resolve_framework
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.frameworks.wrappers import unwrap_states
from bytecheckpoint.saving.step_view import StepView, ViewOfSave
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage import resolve as resolve_storage
from bytecheckpoint.tiers.storage import hot_part

__all__ = ["CheckReplicas", "RequestedStates", "SaveMode", "SaveRequest", "check_extent", "check_mode", "check_target"]

#: Extent to which replicated tensors are compared between ranks.
CheckReplicas = Literal["sampled", "full", "off"]


class SaveMode(StrEnum):
    """Steps of a save for which its caller waits."""

    #: All of them.
    SYNCHRONOUS = "synchronous"
    #: Capture, plan and stage.
    BLOCKING = "blocking"
    #: Capture.
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class RequestedStates:
    """The states of one save, and how to read them.

    Attributes:
        framework: adapter.
        objects: live objects by the name of their state.
        names: explicit parameter names.
        selection: selected part of the states.
        view: view for another program to make of them; None for none.
    """

    framework: Framework
    objects: Mapping[str, object]
    names: Mapping[Any, Any] | None
    selection: NameSelection
    view: ViewOfSave | None = None

    @classmethod
    def of(
        cls,
        states: Mapping[str, object],
        framework: str,
        names: Mapping[Any, Any] | None,
        include: Sequence[str] | None,
        exclude: Sequence[str] | None,
        view: StepView | None = None,
    ) -> RequestedStates:
        """Check the arguments of `save` that say what to save.

        Raises:
            UsageError: an argument is wrong.
        """
        check_states(states, names)
        selection = check_selection(include, exclude)
        objects = unwrap_states(states)
        if not isinstance(view, StepView | None):
            raise UsageError(f"view={view!r}: give a HuggingFaceView, or None")
        of_save = None if view is None else view.of(objects, selection)
        return cls(resolve_framework(framework, objects), dict(objects), names, selection, of_save)

    def identity(self) -> tuple[object, ...] | None:
        """Return the identity of the states for the cache of captures; None if they are captured anew each time."""
        if self.selection.active or self.names:
            return None
        return (self.framework.name, *((name, *_identities(value)) for name, value in self.objects.items()))

    def reason_to_block(self) -> str:
        """Return why the states cannot be copied in the background; "" if they can."""
        framework = self.framework
        if "reason_to_block" not in vars(type(framework)):  # an inherited answer knows nothing of the heir's objects
            return f"{framework.name} may change parameters outside of optimizer steps"
        return framework.reason_to_block(self.objects)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The checked arguments of one save.

    Attributes:
        storage: storage of the checkpoint.
        states: states to save.
        settings: settings in force at the call.
        mode: steps for which the caller waits.
        check_replicas: extent to which replicated tensors are compared between ranks.
        metadata: facts of the caller for the catalog.
        steps: training step by name: the one that the caller gave ("step="), or those that his objects show.
        incremental: True if unchanged files of earlier checkpoints may be used again; "full" if only later saves may use
            those of this one.
        why_blocking: reason for which a save that was to copy in the background does not; "" for none.
    """

    storage: Storage
    states: RequestedStates
    settings: Settings
    mode: SaveMode = SaveMode.BLOCKING
    check_replicas: CheckReplicas = "sampled"
    metadata: Mapping[str, Any] | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    incremental: bool | Literal["full"] = False
    why_blocking: str = ""

    @property
    def staging(self) -> str:
        """Way of copying, as in `SaveReport`."""
        return self.mode.value + (f": {self.why_blocking}" if self.why_blocking else "")

    @property
    def step(self) -> int | None:
        """Training step; None if nothing shows it."""
        return next(iter(self.steps.values()), None)


def _identities(value: object) -> list[int]:
    """Return the addresses of the modules or optimizers of a state; none for other states, which may be made for a call."""
    found = value if isinstance(value, list | tuple) else [value]
    return [id(one) for one in found if isinstance(one, torch.nn.Module | torch.optim.Optimizer)]


def check_target(path: str | os.PathLike[str] | Storage, settings: Settings) -> Storage:
    """Return the storage of a checkpoint, with the time limits of the settings.

    Raises:
        CheckpointError: the path leads nowhere.
    """
    storage = hot_part(resolve_storage(path))
    storage.timeout = settings.timeout
    return storage


def check_mode(async_checkpoint: object, staging: object) -> SaveMode:
    """Return the mode that the arguments of `save` name.

    Raises:
        UsageError: an argument is wrong.
    """
    check_flags(async_checkpoint=async_checkpoint)
    if not isinstance(staging, str) or staging not in ("blocking", "background"):
        raise UsageError(f"staging={staging!r}: use 'blocking' or 'background'")
    if async_checkpoint:
        return SaveMode(staging)
    if staging == "background":
        raise UsageError("staging='background' needs async_checkpoint=True")
    return SaveMode.SYNCHRONOUS


def check_extent(argument: object) -> CheckReplicas:
    """Return the argument `check_replicas`, with True and False as short for "full" and "off".

    Raises:
        UsageError: the argument is none of these.
    """
    if isinstance(argument, bool | np.bool_):
        return "full" if argument else "off"
    for known in ("sampled", "full", "off"):
        if isinstance(argument, str) and argument == known:
            return known
    raise UsageError(f"check_replicas={argument!r}: use 'sampled', 'full' (or True), or 'off' (or False)")
