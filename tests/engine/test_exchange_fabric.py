"""The trees by which chunks pass between machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.engine.exchange_fabric import tree_of


@given(st.integers(1, 300))
def test_every_holder_receives_once_from_one_that_has_it(count: int) -> None:
    holders = [f"rank {n}" for n in range(count)]
    received = {holders[0]: -1}
    sends: list[tuple[int, str, str]] = []
    for position, holder in enumerate(holders):
        parent, children = tree_of(position, holders)
        assert (parent is None) == (position == 0)
        sends += [(stage, holder, child) for stage, child in children]
        for stage, child in children:
            assert tree_of(holders.index(child), holders)[0] == (stage, holder)
    for stage, source, target in sorted(sends):
        assert received[source] < stage
        assert target not in received
        received[target] = stage
    assert len(received) == count
    assert max(received.values()) < count.bit_length()
    assert len({(stage, source) for stage, source, _ in sends}) == len(sends), "one send per stage"
