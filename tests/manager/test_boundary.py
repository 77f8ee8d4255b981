"""Acts of all ranks at one step boundary, at the request of any rank."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.manager.boundary import Act, Boundaries, Committed, SaveDue, StopJob
from tests.support.processes import wait_until

STEPS = 60


def act_of(collective: Collective, requests: dict[int, list[int]], stride: int, together: bool) -> dict[int, set[Act]]:
    """Pass boundaries at a pace of this rank's own; return what is done at which."""
    pace = random.Random(collective.rank)
    done: dict[int, set[Act]] = {}
    with Boundaries(collective, "boundaries", 30) as boundaries:
        for step in range(0, STEPS * stride, stride):
            if step // stride in requests.get(collective.rank, ()):
                boundaries.request(SaveDue())
                threading.Timer(0.01, boundaries.request, [Committed(step)]).start()
            if acts := boundaries.reach(step):
                done[step] = acts
            if together:
                collective.barrier(f"step {step}", timeout=30)
            time.sleep(pace.random() * 0.01)
        collective.barrier("end", timeout=30)
    return done


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stride", [1, 7])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_act_at_the_same_boundary(size: int, stride: int, together: bool) -> None:
    """Also ranks that run ahead of each other by many steps."""
    requests = {0: [3, 30], size - 1: [4, 20]}
    found = ThreadWorld(size).run(act_of, requests, stride, together, timeout=60)
    assert all(acts == found[0] for acts in found)
    kinds = {type(act) for acts in found[0].values() for act in acts}
    # Ranks that do not wait for each other may have passed all steps before the second request of a busy machine is agreed.
    assert kinds == {SaveDue, Committed} or (kinds == {SaveDue} and not together)


class Recorded:
    """A collective whose messages are counted and can be dropped."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.sent, self.muted = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:
        self.sent += tag == "boundaries"
        if not self.muted:
            self._collective.send_each(tag, payloads)


def test_nothing_is_sent_without_a_request() -> None:
    def run(collective: Collective) -> tuple[dict[int, set[Act]], int]:
        recorded: Any = Recorded(collective)
        return act_of(recorded, {}, 1, False), recorded.sent

    # Each rank but rank 0 reports at the end that it leaves.
    assert ThreadWorld(3).run(run, timeout=60) == [({}, 0), ({}, 1), ({}, 1)]


@pytest.mark.parametrize("how", ["leaves", "is lost", "is lost in the round"])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_gone_holds_nobody_up(gone: int, how: str) -> None:
    world = ThreadWorld(3)
    lost = threading.Event()

    def run(collective: Collective) -> tuple[float, set[Act], frozenset[int]]:
        longest, recorded = 0.0, Recorded(collective)
        with Boundaries(recorded, "boundaries", 30) as boundaries:  # type: ignore[arg-type]
            for step in range(300):
                if collective.rank == gone and step == 5:
                    if how == "leaves":
                        break
                    if how == "is lost in the round":
                        recorded.muted = True  # it answers no more
                        lost.wait(20)
                    world.kill(gone, silent=False)
                    break
                if collective.rank == 1 and step == 20:
                    boundaries.request(SaveDue())
                    threading.Timer(0.3, lost.set).start()
                begun = time.monotonic()
                if acts := boundaries.reach(step):
                    return longest, acts, boundaries.left
                longest = max(longest, time.monotonic() - begun)
                time.sleep(0.01)
        return longest, set(), boundaries.left

    found = world.run(run, timeout=60)
    others = [report for rank, report in enumerate(found) if rank != gone]
    assert all(longest < 15 for longest, _, _ in found)
    # Ranks that know of the loss of rank 0 act alone, so the others do not receive a request.
    alone = gone == 0 and how != "leaves"
    assert [acts for _, acts, _ in others] == ([{SaveDue()}, set()] if alone else [{SaveDue()}] * 2)
    assert others[0][2] == {gone}


def test_a_rank_that_acts_and_leaves_is_not_overtaken() -> None:
    """The other one asks for the same while it has not reached that boundary yet."""
    heard = threading.Event()

    def run(collective: Collective) -> dict[int, set[Act]]:
        with Boundaries(collective, "boundaries", 20) as boundaries:
            if collective.rank:
                boundaries.reach(8)
                boundaries.request(StopJob())
                assert wait_until(lambda: bool(boundaries._member._acts), 20)
                acts = boundaries.reach(9)
                heard.set()
                return {9: acts}
            boundaries.reach(3)
            assert heard.wait(20)
            assert wait_until(lambda: bool(boundaries._leader and boundaries._leader._left), 20)
            boundaries.request(StopJob())
            time.sleep(0.1)
            return {step: acts for step in range(4, 12) if (acts := boundaries.reach(step))}

    assert ThreadWorld(2).run(run, timeout=60) == [{9: {StopJob()}}] * 2
