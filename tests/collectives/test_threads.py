"""Worlds of threads: lost ranks, relayed answers, and what `run` raises."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld, current, use
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError


def test_time_out_names_every_missing_rank_and_the_tag() -> None:
    world = ThreadWorld(4)
    world.rank(2).gather("plan", b"", timeout=1)
    started = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match=r"rank 0.*'plan'.*ranks 1, 3 within 0\.12 s"):
        world.rank(0).gather("plan", b"", timeout=0.1234567)
    assert time.monotonic() - started < 10
    # The message of rank 2 was not lost with the failure: the operation can be repeated.
    for rank in (1, 3):
        world.rank(rank).send(0, "plan", b"")
    assert world.rank(0).gather("plan", b"", timeout=1) == [b""] * 4


def test_a_killed_rank_sends_and_receives_nothing() -> None:
    world = ThreadWorld(3)
    world.rank(2).send(0, "before", b"kept")
    world.kill(2)
    world.rank(2).send(0, "after", b"dropped")
    assert world.rank(0).recv(2, "before", timeout=1) == b"kept"
    with pytest.raises(CheckpointTimeoutError, match="rank 2"):
        world.rank(0).recv(2, "after", timeout=0.1)
    with pytest.raises(PeerLostError):
        world.rank(2).recv(0, "any", timeout=60)


def test_a_kill_that_is_noticed_ends_waits_at_once() -> None:
    world = ThreadWorld(3)
    threading.Timer(0.2, lambda: world.kill(2, silent=False)).start()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="lost rank 2"):
        world.rank(0).gather("g", b"", timeout=60)  # though rank 1 is missing too, and comes first
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("silent", [True, False])
def test_what_fails_on_rank_0_fails_every_rank_at_once(silent: bool) -> None:
    """Only rank 0 learns that rank 2 ended; rank 1 waits for rank 0, and must not wait for an hour."""
    world = ThreadWorld(3)
    world.kill(2, silent=silent)
    error = CheckpointTimeoutError if silent else PeerLostError

    def body(c: Collective) -> None:
        for operation in (lambda **limit: c.all_gather("g", b"", **limit), lambda **limit: c.barrier("b", **limit)):
            with pytest.raises(error, match="rank 2") as caught:
                operation(timeout=0.2 if c.rank == 0 else 3600)
            assert ("rank 0, " in str(caught.value)) == (c.rank == 1)

    threads = [threading.Thread(target=body, args=(world.rank(rank),)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [9, 10, 30, 75])
def test_a_long_answer_for_all_is_relayed_from_rank_to_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = np.random.default_rng(1).bytes(300_000)
    sent = [0] * size

    def body(c: Collective) -> bytes:
        send = c.send

        def counted(to: int, tag: str, payload: bytes) -> None:
            sent[c.rank] += len(payload)
            send(to, tag, payload)

        monkeypatch.setattr(c, "send", counted)
        return c.gather_scatter("c", b"", lambda payloads: [answer] * len(payloads), timeout=30)

    assert ThreadWorld(size).run(body, timeout=60) == [answer] * size
    assert max(sent) < 8 * len(answer) + 20 * size


@pytest.mark.parametrize("dead", [1, 11])
def test_a_rank_that_dies_during_a_relay_is_an_error_in_time(dead: int) -> None:
    world = ThreadWorld(12)
    seen: list[int] = []

    def decide(payloads: list[bytes]) -> list[bytes]:
        world.kill(dead, silent=False)
        return [bytes(300_000)] * len(payloads)

    def body(c: Collective) -> None:
        try:
            c.gather_scatter("c", b"", decide, timeout=1)
        except (CheckpointTimeoutError, PeerLostError):
            seen.append(c.rank)

    world.run(body, timeout=20)
    below = range(9, 12) if dead == 1 else [11]
    assert {dead, *below} <= set(seen)


def test_run_raises_the_first_error_and_notes_the_others() -> None:
    def body(c: Collective) -> None:
        if c.rank == 1:
            raise ValueError("first")
        with pytest.raises(CheckpointTimeoutError):
            c.recv(1, "never", timeout=0.1)
        raise KeyError(c.rank)

    with pytest.raises(ValueError, match="first") as caught:
        ThreadWorld(3).run(body, timeout=10)
    assert sum("raised KeyError" in note for note in caught.value.__notes__) == 2
    with pytest.raises(CheckpointTimeoutError, match=r"\[1\] of 2"):
        ThreadWorld(2).run(lambda c: time.sleep(c.rank * 0.5), timeout=0.1)


def test_use_is_per_thread_and_nests() -> None:
    outer, inner = SingleProcess(), SingleProcess()
    seen: list[Collective] = []
    with use(outer):
        with use(inner):
            assert current() is inner
        assert current() is outer
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen[0] is current() is not outer


def test_losses_are_reported() -> None:
    """Those of the past too, until the watch ends."""
    world = ThreadWorld(4)
    reported: dict[int, str] = {}
    world.kill(1, silent=False)
    end = world.ranks[3].watch_losses(reported.__setitem__)
    world.kill(2, silent=False)
    end()
    world.kill(0, silent=False)
    assert sorted(reported) == [1, 2] and all(reported.values())
