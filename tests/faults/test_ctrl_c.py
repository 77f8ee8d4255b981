"""Ctrl-C anywhere in a save or load: it is a KeyboardInterrupt, and the next calls work."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.concurrency import wait_for_call
from bytecheckpoint.threads import wait_for_any
from tests.support.settings import undisturbed

PACKAGE = str(Path(bytecheckpoint.__file__).parent)


class InterruptedAt:
    """Raises KeyboardInterrupt at the entry of one function of the package, for `sys.setprofile`.

    Attributes:
        left: functions that are entered before it.
        where: the function, "" before it is entered.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not self.where and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
                raise KeyboardInterrupt


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is closed
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", ["save", "async", "load"])
def test_ctrl_c_at_the_entry_of_every_function(tmp_path: Path, call: str, stride: int) -> None:
    states = {"model": {"w": torch.arange(100.0)}, "extra_states": {"a": 1}}

    def save(asynchronous: bool) -> None:
        bytecheckpoint.save(tmp_path / "s", states, async_checkpoint=asynchronous).result(30)

    def work() -> object:
        return bytecheckpoint.load(tmp_path / "s", states) if call == "load" else save(call == "async")

    with undisturbed():
        bytecheckpoint.configure(writer="thread", timeout=20.0)
        save(True)
        for number in range(0, 100_000, stride):
            interrupt = InterruptedAt(number)
            sys.setprofile(interrupt)
            try:
                work()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if not interrupt.where:
                break
            begun = time.monotonic()
            save(False)
            assert bytecheckpoint.load(tmp_path / "s", states).missing == (), interrupt.where
            assert time.monotonic() - begun < 10, interrupt.where
        assert number > 5 * stride


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise, also in tests that a shell runs in the background: it lets them ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("seconds", [None, 20.0])
def test_ctrl_c_while_a_call_is_waited_for(seconds: float | None, ctrl_c: None) -> None:
    """By a real signal, many times: `Condition.wait` makes it "release unlocked lock" once in some hundreds."""
    never: Future[None] = Future()
    stopped: Future[None] = Future()
    end = threading.Event()

    def wait_until(number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.002 + 0.0005 * (number % 4), signal.pthread_kill, (main, signal.SIGINT)).start()
        if number % 2:
            wait_for_any([never, stopped], seconds)
        else:
            wait_for_call(lambda: end.wait(20), 20.0, stopped=stopped)

    for number in range(200):
        with pytest.raises(KeyboardInterrupt):
            wait_until(number)
    end.set()
