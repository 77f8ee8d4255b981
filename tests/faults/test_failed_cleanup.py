"""Saves that fail while their clean-up fails or hangs too: the handle ends, and the next save works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageError, StorageFullError
from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.tuning import tuned
from tests.support.coded import load_step
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.ranks import check_recovery, save_all, saved
from tests.support.saves import check_folder
from tests.support.variants import crossed

SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


def signalled_at(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    number: signal.Signals,
    before: Callable[[], object] = lambda: None,
    ranks: int = 1,
) -> None:
    """Send a signal to the helper process of a rank, once, right before it gets a request.

    `before` is called when `ranks` ranks have written: rank 0 has looked at the path then, and has not committed.
    """
    call, left, once, written = HelperProcess.call, [number], [before], set[int]()

    def faulty(helper: HelperProcess, record: dict[str, Any], **options: Any) -> dict[str, Any]:
        if record["op"] == "finish":
            written.add(id(helper))
            if len(written) == ranks and once:
                once.pop()()
        if record["op"] == op and left:
            os.kill(helper.pid, left.pop())
            time.sleep(0.1)  # until the kernel has delivered it
        return call(helper, record, **options)

    monkeypatch.setattr(HelperProcess, "call", faulty)


def checked(path: Path, ranks: int, mode: str, work: Callable[[], object] = lambda: None) -> list[CheckpointError]:
    """Save steps 1, 2 (which fails, while `work` has its effect) and 4; return the errors of step 2."""
    world = saved(path, ranks, **MODES[mode])
    work()
    begun = time.monotonic()
    errors = save_all(world, path, 2, **MODES[mode])
    assert time.monotonic() - begun < 15, "the save ends in time"
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    check_recovery(world, path, mode)
    check_folder(str(path))
    return errors


@pytest.mark.parametrize(("number", "mode", "ranks"), crossed(SIGNALS, ["async", "background"], [2, 1]))
def test_the_writer_process_dies_or_stops_when_a_save_that_failed_ends_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, mode: str, ranks: int
) -> None:
    bytecheckpoint.configure(writer="process", timeout=4.0)

    def replace() -> None:
        """Be another job that commits to the same path, so the commit fails."""
        (path / "other").write_bytes((path / CATALOG_NAME).read_bytes())
        os.replace(path / "other", path / CATALOG_NAME)

    with tuned(stopped_calls=1.0, helper_end=1.0):
        errors = checked(path, ranks, mode, lambda: signalled_at(monkeypatch, "abort", number, replace, ranks))
    assert "another" in str(errors[0]), errors


@pytest.mark.parametrize("number", [SIGNALS[0], pytest.param(SIGNALS[1], marks=pytest.mark.slow)], ids=lambda n: n.name)
@pytest.mark.parametrize(("op", "ranks"), crossed(["open", "write", "sums", "finish"], [1, 2]))
def test_the_writer_process_dies_or_stops_at_a_request(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, op: str, ranks: int
) -> None:
    bytecheckpoint.configure(writer="process", timeout=4.0)
    with tuned(stopped_calls=1.0, helper_end=1.0):
        errors = checked(path, ranks, "async", lambda: signalled_at(monkeypatch, op, number))
    assert "the writer process d" in str(errors[0]), errors


@pytest.mark.parametrize(("mode", "ranks", "clean_up"), crossed(list(MODES), [2, 1], ["hangs", "raises"]))
def test_the_storage_refuses_or_hangs_in_the_clean_up(
    path: Path, faults: Faults, mode: str, ranks: int, clean_up: str
) -> None:
    world = saved(path, ranks, **MODES[mode])
    faults.add("write", StorageFullError("no space"), times=-1)
    hold = threading.Event()
    error = None if clean_up == "hangs" else ValueError("a bug of the storage")
    faults.add("delete", error, hold=hold if clean_up == "hangs" else None, times=-1)
    with tuned(stopped_calls=1.0):
        begun = time.monotonic()
        errors = save_all(world, path, 2, faults=faults, **MODES[mode])
        assert time.monotonic() - begun < 10
    hold.set()
    assert all(isinstance(error, StorageFullError | StorageError) for error in errors), errors
    assert load_step(path) == 1
    check_recovery(world, path, mode)
