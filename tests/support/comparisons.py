"""Comparisons of states and of checkpoints, bit for bit and type for type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import bytecheckpoint

__all__ = [
    "assert_complete",
    "assert_same",
    "assert_same_checkpoints",
    "differences",
    "report_problems",
    "saved_tensors",
    "wrong_entries",
]

_REPORTED = ("missing", "unexpected", "cast")


def differences(expected: Mapping[Any, Any], got: Mapping[Any, Any]) -> list[str]:
    """Return the differences of two states, each of which begins with its key."""
    wrong = [f"{key} is missing" for key in expected.keys() - got.keys()]
    wrong += [f"{key} is unexpected" for key in got.keys() - expected.keys()]
    for key in expected.keys() & got.keys():
        want, have = expected[key], got[key]
        if isinstance(want, torch.Tensor):
            same = isinstance(have, torch.Tensor) and want.dtype == have.dtype and torch.equal(want, have)
        else:
            same = want == have
        if not same:
            wrong.append(f"{key}: {have} instead of {want}")
    return wrong


def assert_same(expected: Mapping[Any, Any], got: Mapping[Any, Any]) -> None:
    """Fail unless two states are equal."""
    wrong = differences(expected, got)
    assert not wrong, wrong[:5]


def report_problems(report: bytecheckpoint.LoadReport, fields: Iterable[str] = _REPORTED) -> list[str]:
    """Return what a load reports in these fields."""
    return [f"{name}: {found}" for name in fields if (found := getattr(report, name))]


def assert_complete(report: bytecheckpoint.LoadReport, fields: Iterable[str] = _REPORTED) -> None:
    """Fail if a load reports anything in these fields."""
    problems = report_problems(report, fields)
    assert not problems, problems


def saved_tensors(path: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by key."""
    with bytecheckpoint.open(path) as saved:
        entries = {key: saved[key] for key in saved}
        return {key: entry[...] for key, entry in entries.items() if isinstance(entry, bytecheckpoint.Entry)}


def assert_same_checkpoints(first: Any, second: Any, *, more_than: int = 50) -> None:
    """Fail unless two checkpoints hold the same tensors, and more of them than `more_than`."""
    expected = saved_tensors(first)
    assert len(expected) > more_than
    assert_same(expected, saved_tensors(second))


def wrong_entries(path: str, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the keys of `expected` that an opened checkpoint lacks, or whose tensors differ."""
    with bytecheckpoint.open(path) as checkpoint:
        return [k for k, v in expected.items() if k not in checkpoint or not torch.equal(checkpoint[k][...], v)]
