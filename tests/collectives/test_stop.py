"""Ranks at work hear of the failure of another one."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError, CheckpointReplacedError, StorageError
from bytecheckpoint.failures import Cancellation


def outcomes(world: ThreadWorld, failing: dict[int, Exception], urgent: tuple[type[CheckpointError], ...] = ()) -> Any:
    """Let some ranks fail at once, and the others work until they hear of it; return what each rank raised."""

    def one(collective: Collective) -> str:
        cancel = Cancellation()

        def work() -> None:
            if collective.rank in failing:
                raise failing[collective.rank]
            cancel.future.result(60)

        with pytest.raises(Exception) as raised, StopSignal(collective, "t", cancel) as signal:  # noqa: PT011
            Agreement(collective, "t", 60.0, urgent=urgent, stop=signal).part("inner").agree("s", work, len)
        return f"{type(raised.value).__name__}: {raised.value}"

    return world.run(one, timeout=100)


@pytest.mark.parametrize("failing", range(4))
def test_ranks_at_work_hear_of_a_failure(failing: int) -> None:
    world = ThreadWorld(4)
    got = outcomes(world, {failing: StorageError("gone")})
    others = f"StorageError: rank {failing}: gone"
    assert got == ["StorageError: gone" if rank == failing else others for rank in range(4)]
    assert all(rank.inbox._messages == {} and rank.inbox._handlers == {} for rank in world.ranks)


def test_all_ranks_fail_at_once() -> None:
    world = ThreadWorld(4)
    got = outcomes(world, {rank: StorageError(str(rank)) for rank in range(4)})
    assert all(each.startswith("StorageError: ") for each in got)
    assert all(rank.inbox._messages == {} and rank.inbox._handlers == {} for rank in world.ranks)


def test_an_urgent_failure_that_comes_after_the_first() -> None:
    failing = {1: StorageError("gone"), 2: CheckpointReplacedError("replaced")}
    got = outcomes(ThreadWorld(4), failing, urgent=(CheckpointReplacedError,))
    assert all("CheckpointReplacedError: " in each for each in got)


def test_a_failure_that_is_no_error_of_this_package_is_raised_as_it_is() -> None:
    got = outcomes(ThreadWorld(3), {0: StorageError("gone"), 1: ZeroDivisionError("own")})
    assert got[1] == "ZeroDivisionError: own"
