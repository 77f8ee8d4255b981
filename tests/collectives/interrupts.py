"""What every collective must do with interrupted waits, watched and forgotten messages."""

from __future__ import annotations

import threading

import pytest

from bytecheckpoint.collectives import Collective, InterruptedWaitError

__all__ = ["check_interrupts"]


def check_interrupts(c: Collective) -> None:
    """Every rank calls it."""
    heard, come = [], threading.Event()

    def hear(payload: bytes) -> None:
        heard.append(payload)
        come.set()

    end_watch = c.watch("interrupts/watched", hear)
    c.barrier("interrupts/begin", timeout=30)
    if c.rank == 0:
        for rank in range(c.world_size):
            c.send(rank, "interrupts/watched", b"stop %d" % rank)
    assert come.wait(30) and heard == [b"stop %d" % c.rank]
    end_watch()
    last = c.world_size - 1
    if c.rank == last:
        c.send(0, "interrupts/instead", b"no more")
    if c.rank == 0:
        with pytest.raises(InterruptedWaitError) as interrupted:
            c.collect(range(c.world_size), "interrupts/never", timeout=30, unless="interrupts/instead")
        assert interrupted.value.payload == b"no more"
        c.forget("interrupts/never")
    c.barrier("interrupts/interrupted", timeout=30)
    c.send(0, "interrupts/never", b"late")
    c.send(0, "interrupts/after", b"")
    if c.rank == 0:
        c.collect(range(c.world_size), "interrupts/after", timeout=30, unless="interrupts/instead")
        assert not any(c.inbox.has(rank, "interrupts/never") for rank in range(c.world_size))  # type: ignore[attr-defined]
