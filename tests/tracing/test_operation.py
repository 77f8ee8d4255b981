"""Operations: which thread belongs to which, and what they count."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.collectives.transport.serving import Service
from bytecheckpoint.concurrency import Workers, parallel_map, wait_for_call
from bytecheckpoint.liveness import counts_as_progress, not_counted_as_progress
from bytecheckpoint.retries import RetryBudget
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing.wrappers import FaultRule, FaultyStorage, RetryingStorage
from bytecheckpoint.tracing.operation import Operation, bind_operation, count_retries, pause, retries_so_far
from bytecheckpoint.world import SaveQueue
from tests.support.coded import states, step_of
from tests.support.settings import undisturbed

DOWN = StorageUnavailableError("down")


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults."""
    with undisturbed():
        yield


def by_workers(count: Callable[..., Any]) -> None:
    workers = Workers(1, "test")
    workers.submit(count, 1).result(10)
    workers.shutdown()


def by_parallel_map(count: Callable[..., Any]) -> None:
    both = threading.Barrier(2)  # so each of the two threads takes one
    parallel_map(
        lambda _: (both.wait(10), threading.current_thread().name != "MainThread" and count(1)), [0, 1], 2, "t"
    )


def by_background(count: Callable[..., Any]) -> None:
    queue = SaveQueue()
    queue.submit(count)
    queue.drain()
    queue.close()


def by_coordination(count: Callable[..., Any]) -> None:
    queue = SaveQueue()
    queue.coordinate(count)
    queue.close()


def by_service(count: Callable[..., Any]) -> None:
    sent = threading.Event()
    service = Service(lambda _: (count(), np.zeros(1, np.uint8))[1], lambda *_: sent.set(), lambda *_: None)
    thread = threading.Thread(target=lambda: service.submit(type("R", (), {"content": b"", "size": 1})()))  # type: ignore[arg-type]
    thread.start()
    assert sent.wait(10)
    service.close()


every_pool = pytest.mark.parametrize(
    "elsewhere",
    [by_workers, by_parallel_map, lambda c: wait_for_call(c, 10.0), by_background, by_coordination, by_service],
    ids=["Workers", "parallel_map", "wait_for_call", "background", "coordination", "Service"],
)


@every_pool
def test_every_pool_carries_the_operation(elsewhere: Callable[[Callable[..., Any]], None]) -> None:
    operation = Operation("save", "/x")
    with operation.running():
        elsewhere(count_retries)
    elsewhere(count_retries)  # of nobody, also if a thread is used again
    assert operation.retries == 1
    assert retries_so_far() == {}


@every_pool
def test_every_pool_knows_what_counts_as_no_activity(elsewhere: Callable[[Callable[..., Any]], None]) -> None:
    found: list[bool] = []

    def look(*_: object) -> None:
        found.append(counts_as_progress())

    with not_counted_as_progress():
        elsewhere(look)
    elsewhere(look)
    assert found == [False, True]


def test_pauses_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    operation = Operation("load", "/x")
    with operation.running(), caplog.at_level(logging.INFO):
        attempts = RetryBudget(60.0)
        assert attempts.pause() and attempts.pause()
        pause(0.01)
        assert not RetryBudget(0.0).pause()
        assert not caplog.records
        operation.end()
        Operation("load", "/y").end()
    assert operation.retries == 3
    assert 0.05 + 0.1 + 0.01 <= operation.retry_seconds < 5.0
    (record,) = caplog.records
    assert "the load from /x repeated 3 requests, and waited 0." in record.message
    assert operation.take()["totals"]["retry"].times == 3 and not operation.take()["totals"]


def test_an_error_passes_and_leaves_no_operation() -> None:
    def fail() -> None:
        count_retries()
        raise DOWN

    operation = Operation("save", "/x")
    with operation.running(), pytest.raises(StorageUnavailableError):
        wait_for_call(bind_operation(fail), 10.0)
    assert operation.retries == 1 and retries_so_far() == {}


@pytest.mark.parametrize("mode", ["blocking", "background"])
def test_a_save_and_a_load_at_once_do_not_mix(tmp_path: Path, mode: str) -> None:
    """The save retries before, during and after a load, which retries too."""
    bytecheckpoint.configure(writer="thread")
    held, loaded = threading.Event(), threading.Event()
    writes = [FaultRule("write", DOWN, times=3), FaultRule("list", DOWN, times=2, before=held.set, hold=loaded)]
    reads = [FaultRule("read_into", DOWN, times=4), FaultRule("open", DOWN)]
    path = str(tmp_path / "step")
    first = bytecheckpoint.save(path, states(step=1)).result()
    assert (first.retries, first.retry_seconds) == (0, 0.0)
    saved = RetryingStorage(FaultyStorage(resolve(str(tmp_path / "other")), writes), 60.0)
    handle = bytecheckpoint.save(saved, states(step=2), async_checkpoint=True, staging=mode)
    assert held.wait(60)
    target = states()
    report = bytecheckpoint.load(RetryingStorage(FaultyStorage(resolve(path), reads), 60.0), target)
    loaded.set()
    assert step_of(target) == 1
    written = handle.result(60)
    assert [rule.hits for rule in (*writes, *reads)] == [3, 2, 4, 1]
    assert (written.retries, report.retries) == (5, 5)
    assert 0.05 * 5 <= written.retry_seconds < written.total_seconds * 4  # several threads wait at once
    assert report.retry_seconds >= 0.05 * 5


def test_a_failed_save_counts_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bytecheckpoint.configure(writer="thread")
    storage = RetryingStorage(FaultyStorage(resolve(str(tmp_path)), [FaultRule("write", DOWN, times=-1)]), 0.3)
    with caplog.at_level(logging.INFO), pytest.raises(StorageUnavailableError, match=r"down \(\d+ attempts"):
        bytecheckpoint.save(storage, states(step=1))
    assert sum("repeated" in r.message for r in caplog.records) == 1


def test_pauses_grow_at_random_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that failed together do not come back together."""
    pauses: list[list[float]] = [[] for _ in range(20)]
    for waited in pauses:
        monkeypatch.setattr("bytecheckpoint.retries.pause", waited.append)
        attempts = RetryBudget(1000.0)
        assert all(attempts.pause() for _ in range(8))
    for number, column in enumerate(zip(*pauses, strict=True)):
        longest = min(0.1 * 2**number, 3.0)
        assert all(longest / 2 <= seconds <= longest for seconds in column)
        assert len(set(column)) > 10
    monkeypatch.undo()
    begun, attempts = time.monotonic(), RetryBudget(0.4)
    while attempts.pause():
        pass
    assert 0.4 <= time.monotonic() - begun < 10.0 and attempts.exhausted
