"""A world of N ranks on threads of one process, in which tests run distributed code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import Collective, new_world_id
from bytecheckpoint.collectives.current import use
from bytecheckpoint.collectives.inbox import ASK, InboxCollective
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError
from bytecheckpoint.failures import Cancellation

__all__ = ["ThreadWorld"]

R = TypeVar("R")


class _ThreadRank(InboxCollective):
    """The collective of one rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank, world.size, world.world_id)
        self._world = world

    def send(self, to: int, tag: str, payload: bytes) -> None:
        # Threads cannot be killed, so a killed rank continues to run; its messages must not arrive.
        if self.rank in self._world.killed:
            return
        if self.inbox.closed is not None:
            raise PeerLostError(f"rank {self.rank}: cannot send {tag!r}: {self.inbox.closed}")
        if tag != ASK:
            self._world.ranks[to].inbox.put(self.rank, tag, bytes(payload))
        elif to not in self._world.killed:
            self.inbox.put(to, payload.decode(), self._world.ranks[to].inbox.outlook())

    def collect(
        self,
        sources: Collection[int],
        tag: str,
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        if self.rank in self._world.killed:
            raise PeerLostError(f"rank {self.rank}: was killed")
        return super().collect(sources, tag, timeout=timeout, cancel=cancel)

    def fetch(self, rank: int, tag: str, request: bytes, destination: NDArray[np.uint8], *, timeout: float) -> None:
        if not {rank, self.rank}.isdisjoint(self._world.killed):
            self.recv(rank, f"{tag}/answer", timeout=timeout)  # raises: the answer never comes
        InboxCollective.fetch(self._world.ranks[rank], rank, tag, request, destination, timeout=timeout)


class ThreadWorld:
    """N ranks on threads of one process.

    >>> ThreadWorld(3).run(lambda collective: collective.rank, timeout=5)
    [0, 1, 2]

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.world_id = new_world_id()
        self.killed: set[int] = set()
        self.ranks = [_ThreadRank(self, rank) for rank in range(size)]

    def rank(self, rank: int) -> Collective:
        """Return the collective of one rank."""
        return self.ranks[rank]

    def kill(self, rank: int, *, silent: bool = True) -> None:
        """Drop all messages that `rank` sends from now on, and fail all its waits.

        Args:
            rank: the rank to kill.
            silent: the other ranks are not notified, as with a hung machine. Otherwise their waits for `rank` raise
                `PeerLostError`, as with a process that died.
        """
        self.killed.add(rank)
        self.ranks[rank].inbox.close("this rank was killed")
        if not silent:
            for other in self.ranks:
                other.inbox.mark_lost(rank, "it was killed")

    def run(
        self,
        fn: Callable[..., R],
        *args: Any,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[R]:
        """Call `fn(collective, ...)` on one thread per rank, where `current()` returns that collective.

        Args:
            fn: the work of each rank.
            *args: passed to `fn`.
            timeout: seconds for all ranks together.
            **kwargs: passed to `fn`.

        Returns:
            The results in order of rank.

        Raises:
            BaseException: the first error that any rank raised, with the errors of other ranks as notes.
            CheckpointTimeoutError: the named ranks did not return in time; their threads go on running.
        """
        results: dict[int, R] = {}
        errors: list[tuple[int, BaseException]] = []  # in order of time

        def body(collective: Collective) -> None:
            try:
                with use(collective):
                    results[collective.rank] = fn(collective, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
                errors.append((collective.rank, error))

        threads = [threading.Thread(target=body, args=(c,), name=f"rank-{c.rank}", daemon=True) for c in self.ranks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if errors:
            first_rank, first = errors[0]
            first.add_note(f"raised on rank {first_rank} of {self.size}")
            for rank, error in errors[1:]:
                first.add_note(f"rank {rank} raised {type(error).__name__}: {error}")
            if stuck:
                first.add_note(f"ranks {stuck} did not return within {timeout:g} s")
            raise first
        if stuck:
            raise CheckpointTimeoutError(f"ranks {stuck} of {self.size} did not return within {timeout:g} s")
        return [results[each.rank] for each in self.ranks]
