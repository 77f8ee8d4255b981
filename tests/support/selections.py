"""Loads of a part of the states, checked name by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from tests.support.comparisons import assert_same

__all__ = ["assert_part_loaded"]


def assert_part_loaded(
    saved: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], pattern: str, *, joined: bool = False
) -> None:
    """Fail unless what matches `pattern` is as saved, and everything else as it was before the load.

    Args:
        saved: full state of the run that saved, by the keys of `bytecheckpoint.open`.
        before: full state of the other run before the load.
        after: its full state after the load.
        pattern: pattern of the keys that the load selected.
        joined: several parameters share one step.
    """
    names = {name for name in before if not (joined and name.endswith("/step"))}
    taken = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    assert names - taken, "the pattern leaves something out"
    expected = {name: (saved if name in taken else before)[name] for name in names}
    assert_same(expected, {name: after[name] for name in names})
