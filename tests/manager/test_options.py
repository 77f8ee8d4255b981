"""Options of a run against the arguments of `save` and `load`."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import bytecheckpoint
from bytecheckpoint import LoadOptions, SaveOptions
from bytecheckpoint.errors import UsageError


def test_options_are_the_arguments_that_stay_in_a_run() -> None:
    saving = inspect.signature(bytecheckpoint.save).parameters
    loading = inspect.signature(bytecheckpoint.load).parameters
    own = {"path", "states", "process_group", "timeout"}  # of one call, or of the settings
    assert SaveOptions().arguments().keys() == saving.keys() - own - {"step"}
    assert LoadOptions().arguments().keys() == loading.keys() - own - {"layout"}  # steps of a run have its own names
    assert {field.name for field in fields(SaveOptions)} == SaveOptions().arguments().keys() | {
        "on_error",
        "on_commit",
        "full_every",
    }


def test_defaults_are_those_of_the_calls() -> None:
    saving = {name: p.default for name, p in inspect.signature(bytecheckpoint.save).parameters.items()}
    loading = {name: p.default for name, p in inspect.signature(bytecheckpoint.load).parameters.items()}
    differing = {name for name, value in SaveOptions().arguments().items() if saving[name] != value}
    assert differing == {"async_checkpoint"}
    assert all(loading[name] == value for name, value in LoadOptions().arguments().items())


def test_bad_options() -> None:
    with pytest.raises(UsageError, match="on_error='ignore': use 'raise' or 'warn'"):
        SaveOptions(on_error="ignore")  # type: ignore[arg-type]
