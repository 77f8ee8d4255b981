"""Assignment of values to writers: pure functions over the ranks' records."""

from __future__ import annotations

import pytest

from bytecheckpoint.saving.messages import Key, ValueRecord
from bytecheckpoint.saving.plans import assign_values, owners_of_values, unwritten_values

SHARED = -1
KEY: Key = ("extra_states", "x", "")
OTHER: Key = ("extra_states", "y", "")


def value(content: str, *, key: Key = KEY, merged: bool = False, file: int = -1) -> ValueRecord:
    return ValueRecord(key, content.encode(), "uint8", (1,), merged, file)


def test_one_rank_writes_what_all_have() -> None:
    values = {rank: [value("same")] for rank in range(3)}
    assert assign_values(values, whole_world=True) == {0: {KEY}, 1: set(), 2: set()}


def test_every_rank_writes_what_differs() -> None:
    values = {0: [value("a")], 1: [value("b")], 2: [value("a")]}
    assert assign_values(values, whole_world=True) == {0: {KEY}, 1: {KEY}, 2: {KEY}}


@pytest.mark.parametrize("merged", [True, False])
def test_a_value_that_some_ranks_lack(merged: bool) -> None:
    """Merged values are stored once for each content; others belong to their rank."""
    values = {0: [value("a", merged=merged)], 1: [value("a", merged=merged)], 2: []}
    assert assign_values(values, whole_world=True) == {0: {KEY}, 1: set() if merged else {KEY}, 2: set()}


def test_some_ranks_cannot_speak_for_all() -> None:
    """Ranks that ask for a plan do not know what the others have."""
    values = {rank: [value("same")] for rank in (1, 2)}
    assert assign_values(values, whole_world=False) == {1: {KEY}, 2: {KEY}}


def test_a_copy_that_no_longer_stands_for_all() -> None:
    written = {0: [value("a", file=0)], 1: [value("b")], 2: [value("a")]}
    assert unwritten_values(written) == {1: {KEY}, 2: {KEY}}
    merged = {0: [value("a", merged=True, file=0)], 1: [value("b", merged=True)], 2: [value("b", merged=True)]}
    assert unwritten_values(merged) == {1: {KEY}}
    assert unwritten_values({0: [value("a", file=0)], 1: [value("a")]}) == {}


def test_owners() -> None:
    same = {0: [value("a", file=0)], 1: [value("a")]}
    assert [(writer, owner) for writer, _, owner in owners_of_values(same, SHARED)] == [(0, SHARED)]
    differs = {0: [value("a", file=0)], 1: [value("b", file=0)]}
    assert [(writer, owner) for writer, _, owner in owners_of_values(differs, SHARED)] == [(0, 0), (1, 1)]
    both = {0: [value("a", file=0)], 1: [value("a", file=0)]}
    assert [(writer, owner) for writer, _, owner in owners_of_values(both, SHARED)] == [(0, SHARED), (1, 1)]
    partly = {0: [value("a", file=0), value("c", key=OTHER, file=0)], 1: [value("a")]}
    assert [(record.key, owner) for _, record, owner in owners_of_values(partly, SHARED)] == [(KEY, SHARED), (OTHER, 0)]
