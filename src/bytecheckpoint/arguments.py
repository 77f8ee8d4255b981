"""Check the arguments of the public calls.

A wrong argument on one rank must fail the call on all ranks. So these checks run where a rank reports its failures to the
others. The timeout is needed before that: a wrong one is replaced, and its error is raised with the other checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

import numpy as np

from bytecheckpoint.calls import refusal
from bytecheckpoint.errors import UsageError
from bytecheckpoint.settings import Settings, settings

__all__ = ["check_flags", "check_metadata", "check_states", "settings_with_timeout"]


def settings_with_timeout(timeout: float | None) -> tuple[Settings, UsageError | None]:
    """Return the settings in force with this timeout, and the error that the call must raise on all ranks, if any.

    That is the refusal of an inner call, or the error of a wrong timeout, which is then left out.
    """
    if timeout is None:
        return settings(), refusal()
    try:
        return replace(settings(), timeout=timeout), refusal()
    except UsageError as error:
        return settings(), UsageError(str(error).replace("settings.timeout", "timeout"))


def check_states(states: object, names: object, *, mutable: bool = False) -> None:
    """Refuse states that are no mapping of names to objects, and names that are no mapping.

    Args:
        states: the argument.
        names: the argument.
        mutable: `states` must be a mutable mapping, because a load replaces values in it.
    """
    if not isinstance(states, MutableMapping if mutable else Mapping) or not states:
        raise UsageError("states must be a non-empty dict of name -> object, such as {'model': model}")
    for name in states:
        if not isinstance(name, str) or not name:
            raise UsageError(f"the name of a state must be a non-empty str, not {name!r}")
    if names is not None and not isinstance(names, Mapping):
        raise UsageError(f"names= is of type {type(names).__name__}: give a dict, parameter -> FQN or FQN -> parameter")


def check_flags(**flags: object) -> None:
    """Refuse flags other than True and False, such as the str "False" of a configuration file, which counts as true."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise UsageError(f"{name}={value!r}: give True or False")


def check_metadata(metadata: object) -> None:
    """Refuse metadata that JSON would not give back unchanged."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata must be a dict of plain JSON, not of type {type(metadata).__name__}")
    try:
        _check_json("metadata", dict(metadata or {}))
    except RecursionError:
        raise UsageError("metadata must be plain JSON: it is nested too deeply, or contains itself") from None


def _check_json(where: str, value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"metadata must be plain JSON: {where} has the key {key!r}, which is no str")
            _check_json("metadata", key)
            _check_json(f"{where}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_json(f"{where}[{position}]", item)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"metadata must be plain JSON: {where} has a lone surrogate, {value!r}") from None
    elif isinstance(value, float) and not math.isfinite(value):
        # Python writes these, but other readers of JSON refuse them.
        raise UsageError(f"metadata must be plain JSON: {where} is {value}; give None or a str")
    elif not (value is None or isinstance(value, bool | int | float)):
        raise UsageError(f"metadata must be plain JSON: {where} is of type {type(value).__name__}")
