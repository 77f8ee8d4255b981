"""System calls that fail, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from bytecheckpoint.storage.testing.fault_rule import FaultRule

__all__ = ["Fail", "failing"]

Fail = Callable[..., FaultRule]


def failing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    fits: Callable[..., bool] = lambda *_: True,
    *,
    owner: Any = os,
    times: int = -1,
    **options: Any,
) -> FaultRule:
    """Let a function fail with an errno; return the rule, which counts the failures.

    Args:
        monkeypatch: fixture of the test.
        name: name of the function.
        code: errno of the error.
        fits: predicate of the positional arguments of the calls that fail; by default all fail.
        owner: module of the function.
        times: number of calls that fail; -1: all.
        **options: see `FaultRule`; with `lose` the call is carried out before the error.
    """
    real, rule = getattr(owner, name), FaultRule(lambda args: fits(*args), times=times, **options)

    def call(*args: Any, **keywords: Any) -> Any:
        hit = rule.hit(args)
        result = None if hit and not rule.lose else real(*args, **keywords)
        if hit:
            raise OSError(code, os.strerror(code))
        return result

    monkeypatch.setattr(owner, name, call)
    return rule
