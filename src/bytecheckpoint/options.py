"""Options of all saves and all loads of a run, for managers and integrations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from bytecheckpoint.errors import UsageError

__all__ = ["LoadOptions", "SaveOptions", "takes_one"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of the saves of a run: arguments of `save` that stay the same, and reactions to commits and failures.

    Attributes:
        framework: framework of the states, as for `save`.
        async_checkpoint: True to write in the background, which is the default of a run.
        staging: way of copying the state in an asynchronous save, as for `save`. "auto": "blocking" for two saves, behind
            which a manager checks that nothing changes the state before the next step of an optimizer; then "background".
        check_replicas: comparison of replicated tensors, as for `save`. True stands for "full", False for "off".
        include: patterns of names to save, as for `save`.
        exclude: patterns of names not to save, as for `save`.
        names: parameters and their FQNs, as for `save`.
        metadata: facts for the catalog of each step, as for `save`.
        incremental: use of earlier steps' files with unchanged parameters, as for `save`.
        full_every: number n: of incremental saves, each n-th of a manager shares no file with earlier steps, so that a file
            that is damaged later does not damage all of them; None for none.
        view: files by which another program reads each step as it is, as for `save`.
        on_error: "raise" the failure of a save, once, at the next call; or "warn": log it and continue.
        on_commit: function that rank 0 calls with the `StepInfo` of each step that a manager has committed, or a list of
            functions, such as `LatestLink()`. They run one after the other on a thread of their own, the step stays
            meanwhile, a failure is logged, and the end of the manager waits for them.
    """

    framework: str = "auto"
    async_checkpoint: bool = True
    staging: Literal["auto", "blocking", "background"] = "auto"
    check_replicas: Literal["sampled", "full", "off"] | bool = "sampled"
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    names: Mapping[Any, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    incremental: bool = False
    full_every: int | None = 20
    view: Any = None
    on_error: Literal["raise", "warn"] = "raise"
    on_commit: Callable[[Any], object] | Sequence[Callable[[Any], object]] = ()

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={self.on_error!r}: use 'raise' or 'warn'")
        for function in self.commit_functions:
            if not callable(function) or not takes_one(function):
                raise UsageError(
                    f"on_commit={function!r}: give a function of one argument, a StepInfo, or a list of these"
                )
        if self.staging not in ("auto", "blocking", "background"):
            raise UsageError(f"staging={self.staging!r}: use 'auto', 'blocking' or 'background'")
        every = self.full_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(f"full_every={every!r}: give a whole number of saves from 1 on, or None")

    @property
    def commit_functions(self) -> list[Callable[[Any], object]]:
        """The functions of `on_commit`."""
        given: Any = self.on_commit
        return list(given) if isinstance(given, list | tuple) else [given]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `save` for a save on its own, which is "blocking" if the manager is to decide."""
        found = _values(self)
        del found["on_error"], found["on_commit"], found["full_every"]
        if self.staging == "auto":
            found["staging"] = "blocking"
        return found


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of the loads of a run: arguments of `load` that stay the same.

    Attributes:
        framework: framework of the states, as for `load`.
        overlap_loading: exchange of bytes that several ranks need, as for `load`.
        strict: refusal of missing and unexpected state, for all states or by state, as for `load`.
        cast: conversion of dtypes, as for `load`.
        include: patterns of names to load, as for `load`.
        exclude: patterns of names not to load, as for `load`.
        rename: names of live objects and their names in the checkpoint, as for `load`.
        names: parameters and their FQNs, as for `load`.
        prepare_save: preparation of the next save in the background, as for `load`.
    """

    framework: str = "auto"
    overlap_loading: bool = True
    strict: bool | Mapping[str, bool] = True
    cast: bool = False
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    names: Mapping[Any, Any] | None = None
    prepare_save: bool | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `load`."""
        return _values(self)


def _values(options: SaveOptions | LoadOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def takes_one(function: Callable[..., object]) -> bool:
    """Return whether a function can be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function of C may not say what it takes
        pass
    return True
