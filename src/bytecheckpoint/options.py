"""Options of all saves and all loads of a run, for managers and integrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from bytecheckpoint.errors import UsageError

__all__ = ["LoadOptions", "SaveOptions"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of the saves of a run: arguments of `save` that stay the same, and the reaction to a failure.

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
        on_error: "raise" the failure of a save, once, at the next call; or "warn": log it and continue.
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
    on_error: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={self.on_error!r}: use 'raise' or 'warn'")
        if self.staging not in ("auto", "blocking", "background"):
            raise UsageError(f"staging={self.staging!r}: use 'auto', 'blocking' or 'background'")
        every = self.full_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(f"full_every={every!r}: give a whole number of saves from 1 on, or None")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `save` for a save on its own, which is "blocking" if the manager is to decide."""
        found = _values(self)
        del found["on_error"], found["full_every"]
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
