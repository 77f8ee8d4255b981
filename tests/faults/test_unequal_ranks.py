"""Ranks that need very different times: others wait for a slow one as long as it makes progress, not for a hung one."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointTimeoutError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.liveness import busy
from bytecheckpoint.tuning import tuned
from tests.support.coded import load_step, states
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.ranks import attempt, load_all, outcomes, save_all, succeeded
from tests.support.socket_world import SocketWorld
from tests.support.variants import crossed
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(100)
ROWS = 6000


@pytest.mark.parametrize(("mode", "slow"), crossed(list(MODES), [1, 0], every=2))
def test_a_slow_writer_is_waited_for(tmp_path: Path, faults: Faults, slow: int, mode: str) -> None:
    """Each call of its storage takes less than the time limit, all together several limits; planned anew and cached."""
    bytecheckpoint.configure(write_threads=1, chunk_bytes=1 << 20)
    world = ThreadWorld(3)
    faults.add("write", rank=slow, before=lambda: time.sleep(0.7), times=-1)
    for step in (1, 2):
        begun = time.monotonic()
        succeeded(save_all(world, tmp_path / "s", step, rows=ROWS, faults=faults, timeout=1.0, **MODES[mode]))
        assert time.monotonic() - begun > 2.5
    assert load_step(tmp_path / "s", rows=ROWS) == 2


def test_a_slow_reader_is_waited_for(tmp_path: Path, faults: Faults) -> None:
    bytecheckpoint.configure(read_threads=1, chunk_bytes=1 << 20)
    world = ThreadWorld(3)
    succeeded(save_all(world, tmp_path / "s", 1, rows=ROWS))
    faults.add("read_into", rank=1, before=lambda: time.sleep(0.7), times=-1)
    begun = time.monotonic()
    assert load_all(world, tmp_path / "s", rows=ROWS, faults=faults, timeout=1.0) == [1, 1, 1]
    assert time.monotonic() - begun > 2.5


@pytest.mark.parametrize("moment", ["send", "recv"])
@pytest.mark.parametrize("step", ["first", "report"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_a_rank_waits_for_the_others(tmp_path: Path, rank: int, step: str, moment: str) -> None:
    """The next save works, as in a notebook."""
    world = ThreadWorld(2)

    def one(collective: Collective) -> Any:
        call = getattr(collective, moment)

        def interrupted(other: int, tag: str, *args: Any, **options: Any) -> Any:
            if tag.endswith((step, f"{step}/reply")):
                vars(collective).pop(moment)
                raise KeyboardInterrupt
            return call(other, tag, *args, **options)

        if collective.rank == rank:
            setattr(collective, moment, interrupted)
        try:
            return bytecheckpoint.save(tmp_path / "s", states(collective.rank, 2, 1, ROWS), timeout=30)
        except KeyboardInterrupt:
            return "interrupted"

    begun = time.monotonic()
    got = outcomes(world, one)
    assert got[rank] == "interrupted"
    if (step, moment) != ("report", "recv"):  # that one may be committed
        assert "KeyboardInterrupt" in str(got[1 - rank])
    succeeded(save_all(world, tmp_path / "s", 2, rows=ROWS))
    assert time.monotonic() - begun < 25


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_after_the_commit_removes_no_committed_file(tmp_path: Path, rank: int, cached: bool) -> None:
    """The rank has the news of the commit and is interrupted before its save returns."""
    world, step = ThreadWorld(2), 2 if cached else 1
    if cached:
        succeeded(save_all(world, tmp_path / "s", 1, rows=ROWS))

    def one(collective: Collective) -> Any:
        recv = collective.recv

        def interrupted(other: int, tag: str, *args: Any, **options: Any) -> Any:
            message = recv(other, tag, *args, **options)
            if tag.endswith("first/reply" if cached else "report/reply"):
                vars(collective).pop("recv")
                raise KeyboardInterrupt
            return message

        if collective.rank == rank:
            collective.recv = interrupted  # type: ignore[method-assign]
        try:
            return bytecheckpoint.save(tmp_path / "s", states(collective.rank, 2, step, ROWS), timeout=30)
        except KeyboardInterrupt:
            return "interrupted"

    assert outcomes(world, one)[rank] == "interrupted"
    assert load_step(tmp_path / "s", rows=ROWS) == step
    succeeded(save_all(world, tmp_path / "s", 5, rows=ROWS))
    assert load_step(tmp_path / "s", rows=ROWS) == 5


@pytest.mark.parametrize("cached", [False, True])
def test_a_rank_that_prepares_while_the_others_save(tmp_path: Path, cached: bool) -> None:
    world = ThreadWorld(3)
    if cached:
        succeeded(save_all(world, tmp_path / "s", 1, rows=ROWS))

    def one(collective: Collective) -> None:
        own = states(collective.rank, 3, 2, ROWS)
        if collective.rank == 1:
            bytecheckpoint.prepare(own, timeout=30).result(60)
        else:
            bytecheckpoint.save(tmp_path / "s", own, timeout=30)

    begun = time.monotonic()
    for error in outcomes(world, one):
        assert "prepare was called on rank 1, save on ranks 0, 2: make the same calls on all" in str(error)
    assert time.monotonic() - begun < 25
    succeeded(save_all(world, tmp_path / "s", 3, rows=ROWS))


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_loads_from_a_tier_while_the_others_do_not(tmp_path: Path, odd: int) -> None:
    """Every rank raises an error with both paths, long before the time limit."""
    world, path = ThreadWorld(3), tmp_path / "s"
    succeeded(save_all(world, path, 1, rows=ROWS))

    def one(collective: Collective) -> Any:
        own = states(collective.rank, 3, 2, ROWS)
        return bytecheckpoint.load(f"tier+file://{path}" if collective.rank == odd else path, own, timeout=30)

    with tuned(call_check=0.5):
        got = outcomes(world, one)
    for error in got:
        assert isinstance(error, UsageError), error
        assert f" at {path}" in str(error) and f" at tier+file://{path}" in str(error), error
    assert load_step(path, rows=ROWS) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_loads_while_the_others_save(tmp_path: Path, odd: int, mode: str) -> None:
    """Every rank raises an error that names the odd one, long before the time limit."""
    world = ThreadWorld(3)
    succeeded(save_all(world, tmp_path / "s", 1, rows=ROWS))

    def one(collective: Collective) -> Any:
        own = states(collective.rank, 3, 2, ROWS)
        if collective.rank == odd:
            return bytecheckpoint.load(tmp_path / "s", own, timeout=600)
        return bytecheckpoint.save(tmp_path / "t", own, timeout=600, **MODES[mode]).result(60)

    begun = time.monotonic()
    with tuned(call_check=0.5):
        got = outcomes(world, one)
    for rank, error in enumerate(got):
        assert isinstance(error, UsageError), error
        assert "make the same calls on all" in str(error) and (f"rank {odd} is in load 1" in str(error) or rank == odd)
    assert time.monotonic() - begun < 60
    assert load_step(tmp_path / "s", rows=ROWS) == 1


@pytest.mark.parametrize("tree", [False, True])
def test_one_of_many_ranks_in_another_call(tmp_path: Path, tree: bool) -> None:
    """Over sockets, eight ranks to a machine: another path, another step, a load."""
    rows = 64
    machines = [rank // 8 for rank in range(64)]

    def one(collective: Collective, number: int, odd: dict[str, Any]) -> Any:
        own = states(collective.rank, 64, number, rows)
        options: dict[str, Any] = {"path": tmp_path / f"s{number}", "step": number, "timeout": 600}
        options |= odd if collective.rank == 63 else {}
        call = options.pop("call", bytecheckpoint.save)
        if call is bytecheckpoint.load:
            return bytecheckpoint.load(options["path"], own, timeout=600)
        return call(options.pop("path"), own, **options)

    odd_calls: list[tuple[dict[str, Any], str]] = [
        ({"path": tmp_path / "other"}, r"ranks save to different paths: rank 63 to .*/other, the others to .*/s1; "),
        ({"step": 7}, "rank 63"),
        ({"call": bytecheckpoint.load}, "rank 63: load of .*/s3"),  # the failure before has the ranks meet
    ]
    with SocketWorld(machines, tree=tree) as world, tuned(call_check=1.0):
        begun = time.monotonic()
        for number, (odd, message) in enumerate(odd_calls, 1):
            *others, of_63 = outcomes(world, functools.partial(one, number=number, odd=odd))
            assert isinstance(of_63, CheckpointError)
            for error in others:
                assert isinstance(error, CheckpointError) and re.search(message, str(error)), error
        assert time.monotonic() - begun < 90


# --- in processes -----------------------------------------------------------------------------------------------------


def exchange_with(work: Callable[[Collective], None], timeout: float) -> tuple[str, float]:
    """Rank 0 waits for all, all wait for rank 0; return what this rank got, and after how many seconds."""
    collective = current()
    name = f"unequal/{work.__name__}"  # a world uses no tag twice
    collective.barrier(f"{name}/start", timeout=30)
    begun = time.monotonic()
    if collective.rank == 2:
        work(collective)
    got = attempt(collective.all_gather, name, b"%d" % collective.rank, timeout=timeout)
    return (str(got) if isinstance(got, Exception) else "all"), time.monotonic() - begun


def work_for_long(_: Collective) -> None:
    for _ in range(8):
        with busy(5.0):
            time.sleep(0.5)


def do_something_else(collective: Collective) -> None:
    """A rank in another call than the others: they wait for each other."""
    attempt(collective.recv, 0, "another call", timeout=1.0)
    time.sleep(5)


def sleep(_: Collective) -> None:
    time.sleep(6)


def test_a_busy_process_is_waited_for(worlds: Worlds) -> None:
    for got, seconds in worlds.run(4, exchange_with, work_for_long, 1.0):
        assert got == "all" and 3.5 < seconds < 40


@pytest.mark.parametrize("work", [sleep, do_something_else])
def test_a_hung_process_is_not(worlds: Worlds, work: Callable[[Collective], None]) -> None:
    results = worlds.run(4, exchange_with, work, 1.0)
    for rank in (0, 1, 3):
        got, seconds = results[rank]
        assert "from rank 2 within 1 s" in got, "every rank knows which one hangs"
        assert seconds < 30


def test_ranks_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    """One rank saves, the other one loads."""

    def one(collective: Collective) -> Any:
        return attempt(collective.recv, 1 - collective.rank, "something", timeout=1.0)

    begun = time.monotonic()
    got = ThreadWorld(2).run(one, timeout=30)
    assert all(isinstance(error, CheckpointTimeoutError) for error in got)
    assert time.monotonic() - begun < 20
