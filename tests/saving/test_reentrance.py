"""Calls from inside a call, by signal handlers and hooks: refused at once, on all ranks, and the next save works."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.calls import SharedLock
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.lazy import lazy
from bytecheckpoint.storage.remote import ClientCache
from bytecheckpoint.world import world_of
from tests.support.coded import load_step, states
from tests.support.modes import MODES
from tests.support.variants import crossed, quick

pytestmark = pytest.mark.timeout(60)


class Hooked:
    """An object whose state_dict calls something first."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"w": torch.arange(3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.call()


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Returns a function that sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda action: signal.signal(signal.SIGUSR1, lambda *_: action())
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("verb", "outer"), crossed(["save", "load", "prepare"], [*MODES, "load"]))
def test_a_hook_that_calls_back_is_refused_at_once(tmp_path: Path, verb: str, outer: str) -> None:
    bytecheckpoint.save(tmp_path / "1", {"model": Hooked(lambda: None)})
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: bytecheckpoint.save(tmp_path / "inner", states(step=9)),
        "load": lambda: bytecheckpoint.load(tmp_path / "1", states(step=0)),
        "prepare": lambda: bytecheckpoint.prepare(states(step=9)),
    }
    hooked = {"model": Hooked(calls[verb])}

    def call() -> None:
        if outer == "load":
            bytecheckpoint.load(tmp_path / "1", hooked)
        else:
            bytecheckpoint.save(tmp_path / "2", hooked, **MODES[outer]).result(60)

    outer_verb, begun = "load" if outer == "load" else "save", time.monotonic()
    with pytest.raises(
        UsageError, match=f"{verb} was called inside of {outer_verb}, by a signal handler, a done-callback"
    ):
        call()
    assert time.monotonic() - begun < 30
    assert not (tmp_path / "inner").exists() and not (tmp_path / "2" / "metadata.parquet").exists()
    bytecheckpoint.save(tmp_path / "3", states(step=3), **MODES.get(outer, {})).result(60)
    assert load_step(tmp_path / "3") == 3


@pytest.mark.parametrize("inside_of", [0, 1])
def test_a_refused_call_takes_no_number(tmp_path: Path, inside_of: int) -> None:
    """Only one rank makes it: the next saves and loads of all ranks still belong together."""

    def one(collective: Collective) -> str:
        refused: list[str] = []

        def inner() -> None:
            for call in (bytecheckpoint.save, bytecheckpoint.load):
                with pytest.raises(UsageError, match="Preemption") as error:
                    call(tmp_path / "inner", states(collective.rank, 2, 9))
                refused.append(str(error.value))

        hook = inner if collective.rank == inside_of else (lambda: None)
        outer = {"model": Hooked(hook), "rank": {"rank": collective.rank}}
        bytecheckpoint.save(tmp_path / "outer", outer, timeout=30).result(60)
        bytecheckpoint.save(tmp_path / "next", states(collective.rank, 2, 3), timeout=30).result(60)
        bytecheckpoint.load(tmp_path / "next", states(collective.rank, 2, 0), timeout=30)
        return "".join(refused)

    refused = ThreadWorld(2).run(one, timeout=150)
    assert refused[1 - inside_of] == ""
    assert "save was called inside of save" in refused[inside_of] and "load was called" in refused[inside_of]
    assert not (tmp_path / "inner").exists()


# --- done-callbacks ---------------------------------------------------------------------------------------------------


def held_back(collective: Collective) -> threading.Event:
    """Hold the background halves of saves back until the event is set."""
    gate = threading.Event()
    world_of(collective).saves.submit(lambda: assert_set(gate))
    return gate


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(60)


@pytest.mark.parametrize("scheme", ["", "tier+file://"])
@pytest.mark.parametrize("future", ["staged", "restorable", "committed"])
def test_calls_by_a_done_callback_are_refused_at_once(tmp_path: Path, future: str, scheme: str) -> None:
    """They run in the thread that ends the save, which a save, a preparation or `release_memory` would wait for."""
    refused: list[str] = []
    calls: list[Callable[[], object]] = [
        lambda: bytecheckpoint.save(f"{scheme}{tmp_path}/1", states(step=9), async_checkpoint=True),
        lambda: bytecheckpoint.prepare(states(step=9)),
        lambda: bytecheckpoint.load(tmp_path / "1", states(step=0)),
        bytecheckpoint.release_memory,
    ]

    def call_back(_: object) -> None:
        for call in calls:
            with contextlib.suppress(UsageError):
                call()
                continue
            refused.append("refused")
        over.set()

    over = threading.Event()
    gate = held_back(current())
    handle = bytecheckpoint.save(f"{scheme}{tmp_path}/1", states(step=1), **MODES["background"])
    getattr(handle, future).add_done_callback(call_back)
    gate.set()
    handle.result(60)
    bytecheckpoint.save(tmp_path / "2", states(step=2), **MODES["async"]).result(60)
    assert over.wait(60) and refused == ["refused"] * 4
    assert [load_step(tmp_path / name) for name in ("1", "2")] == [1, 2]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_a_done_callback_raises_reaches_no_save(tmp_path: Path, error: type[BaseException]) -> None:
    def call_back(_: object) -> None:
        raise error

    called = threading.Event()
    gate = held_back(current())
    handle = bytecheckpoint.save(tmp_path / "1", states(step=1), **MODES["background"])
    for future in (handle.staged, handle.restorable, handle.committed):
        future.add_done_callback(call_back)
    handle.committed.add_done_callback(lambda _: called.set())
    gate.set()
    assert handle.result(60).bytes_written
    assert called.wait(60)
    bytecheckpoint.save(tmp_path / "2", states(step=2), **MODES["async"]).result(60)
    assert [load_step(tmp_path / name) for name in ("1", "2")] == [1, 2]


@pytest.mark.parametrize("call", quick(["save", "load", "open"], every=3))
def test_signals_at_any_moment(tmp_path: Path, call: str, on_signal: Any) -> None:
    """A handler that saves, as preemption handlers do, at some hundred moments of each call."""
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1))
    outcomes: list[str] = []

    def handler() -> None:
        try:
            bytecheckpoint.save(tmp_path / "handler", states(step=2))
            outcomes.append("saved")
        except UsageError:
            outcomes.append("refused")

    def work() -> None:
        with contextlib.suppress(UsageError):
            if call == "save":
                bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60)
            elif call == "load":
                bytecheckpoint.load(path, states(step=0))
            else:
                with bytecheckpoint.open(path) as checkpoint:
                    checkpoint["model/w"][...]

    on_signal(handler)
    over = threading.Event()

    end = time.monotonic() + 4

    def disturb() -> None:
        # It ends by itself: on a busy machine the handler may leave the main thread no time between two signals.
        while not over.wait(0.003) and time.monotonic() < end:
            os.kill(os.getpid(), signal.SIGUSR1)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        while time.monotonic() < end:
            work()
    finally:
        over.set()
        disturber.join()
    assert len(outcomes) > 30
    assert call == "open" or "refused" in outcomes
    bytecheckpoint.save(path, states(step=5))
    assert load_step(path) == 5


def test_a_handler_may_use_the_clients_that_its_thread_was_looking_up() -> None:
    cache: ClientCache[str, int] = ClientCache(lambda: 2)
    assert cache.get("a", lambda _: cache.get("b", lambda _: 1) + 1) == 2
    assert len(cache) == 2


def test_a_save_by_a_handler_does_not_wait_for_a_lock_of_the_thread_below(tmp_path: Path) -> None:
    """The threads of the save would wait for the handler's own thread, which reads through `open`."""
    lock = SharedLock()
    with lock, lock, pytest.raises(UsageError, match="save was called inside of a read of a storage"):
        bytecheckpoint.save(tmp_path / "1", states(step=1))
    bytecheckpoint.save(tmp_path / "2", states(step=2))
    assert load_step(tmp_path / "2") == 2


def test_lazy_attributes_hold_no_lock() -> None:
    """`functools.cached_property` of Python 3.11 holds one, for all objects of a class."""

    class Lazy:
        def __init__(self, inner: Lazy | None) -> None:
            self.inner = inner

        @lazy
        def depth(self) -> int:
            if self.inner is None:
                return 0
            with ThreadPoolExecutor(1) as pool:
                return 1 + pool.submit(lambda: self.inner.depth).result(10)  # type: ignore[union-attr]

    outer = Lazy(Lazy(None))
    assert outer.depth == 1
    assert vars(outer)["depth"] == 1
