"""Check the arguments of the public calls.

A wrong argument on one rank must fail the call on all ranks. So these checks run where a rank reports its failures to the
others. The timeout is needed before that: a wrong one is replaced, and its error is raised with the other checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Strict
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.layouts.layout import Layout, find_all, find_or_read
from bytecheckpoint.settings import Settings, settings

__all__ = [
    "check_flags",
    "check_layout",
    "check_metadata",
    "check_rename",
    "check_selection",
    "check_states",
    "check_strict",
    "checked",
    "settings_with_timeout",
    "value_of",
]

_T = TypeVar("_T")


def checked(check: Callable[[], _T]) -> _T | Exception:
    """Return the result of `check`, or the exception that it raises: all ranks raise that of a wrong argument together."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  raised by `value_of`
        return error


def value_of(result: _T | Exception) -> _T:
    """Return a result of `checked`, or raise the exception that stands for it."""
    if isinstance(result, Exception):
        raise result
    return result


def settings_with_timeout(timeout: float | None) -> tuple[Settings, UsageError | None]:
    """Return the settings in force with this timeout, and the error of a wrong timeout, which is then left out.

    The call must raise that error on all ranks.
    """
    if timeout is None:
        return settings(), None
    try:
        return replace(settings(), timeout=timeout), None
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


def check_strict(strict: object) -> Strict:
    """Return `strict`, unless it is neither a bool nor a mapping of states to bools."""
    if isinstance(strict, Mapping):
        for state, value in strict.items():
            if not isinstance(state, str):
                raise UsageError(
                    f"strict= has the key {state!r}: give the names of states, such as {{'scheduler': False}}"
                )
            check_flags(**{f"strict[{state!r}]": value})
        return dict(strict)
    check_flags(strict=strict)
    return bool(strict)


def check_selection(include: object, exclude: object) -> NameSelection:
    """Return the selection of `include` and `exclude`, unless they are no sequences of patterns."""
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if patterns is None:
            continue
        if isinstance(patterns, str | bytes) or not isinstance(patterns, Iterable):
            raise UsageError(f"{argument}={patterns!r}: give a list of patterns, such as ['model/*']")
    included = None if include is None else _patterns("include", include)
    if included == []:
        raise UsageError("include=[] selects nothing: leave it out, or give patterns, such as ['model/*']")
    return NameSelection(included, [] if exclude is None else _patterns("exclude", exclude))


def _patterns(argument: str, patterns: Any) -> list[str]:
    found = list(patterns)
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise UsageError(f"{argument}= has {pattern!r}: give patterns over names, such as 'model/*'")
    return list(dict.fromkeys(found))


def check_rename(rename: object) -> Callable[[str], str] | None:
    """Return `rename` as a function of a live name, unless it is no function and no mapping of prefixes."""
    if rename is None or (callable(rename) and not isinstance(rename, Mapping)):
        return rename
    if not isinstance(rename, Mapping):
        raise UsageError(f"rename={rename!r}: give a dict, prefix here -> prefix in the checkpoint, or a function")
    for here, there in rename.items():
        if not isinstance(here, str) or not isinstance(there, str):
            raise UsageError(f"rename= maps {here!r} to {there!r}: give prefixes of names, such as 'model/encoder.'")
        state, slash, _ = here.partition("/")
        if not slash or not there.startswith(f"{state}/"):
            raise UsageError(
                f"rename= maps {here!r} to {there!r}: both begin with the same state, as in 'model/encoder.': 'model/'. An "
                "object loads another state of the checkpoint under that state's name, as in {'ema': model}"
            )
    prefixes = sorted(rename.items(), key=lambda item: len(item[0]), reverse=True)

    def renamed(name: str) -> str:
        for here, there in prefixes:
            if name.startswith(here):
                return str(there) + name[len(here) :]
        return name

    return renamed


def check_layout(layout: object) -> tuple[Layout, ...] | Literal["auto"] | None:
    """Return the layouts that an argument names: built-in ones, or files; "auto" stands for itself.

    Raises:
        UsageError: there is none.
    """
    if layout is None:
        return None
    if isinstance(layout, str):
        return "auto" if layout == "auto" else find_all(layout)
    found: list[Layout] = []
    for item in layout if isinstance(layout, list | tuple) else (layout,):
        if not isinstance(item, Layout | str | os.PathLike):
            raise UsageError(
                f"layout={layout!r}: give the name of a layout, a file, a bytecheckpoint.layouts.Layout, or several"
            )
        found.append(item if isinstance(item, Layout) else find_or_read(os.fspath(item)))
    if not found:
        raise UsageError(f"layout={layout!r} names no layout: give one, or None")
    return tuple(found)


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
