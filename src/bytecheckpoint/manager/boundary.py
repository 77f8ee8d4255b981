"""Agreement of all ranks on one step boundary, for acts that any rank may ask for at any time.

A signal, a clock or a failure reaches ranks at different moments, and a collective at every step would cost too much. So
a rank that wants something tells rank 0, which asks all ranks how far they are. From its answer on a rank stops at its
next boundary, until rank 0 says where to act: at the first boundary that no rank has passed. Threads in the background
answer, so the stop lasts for one exchange of messages. Nothing is sent at other steps. A rank that has left or is lost is
not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.threads import start

__all__ = ["Boundaries"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds between two calls of `poll`.
_POLL_SECONDS = 1.0


class Boundaries:
    """One rank's part. Use as a context manager; every rank makes one with the same tag.

    Args:
        collective: the ranks.
        tag: names the conversation; never used twice in one world.
        timeout: seconds to wait for the other ranks at a boundary.
        poll: called about once a second in the background; returns what to request, or "". None: nothing is polled.

    Attributes:
        left: the ranks that took part no more when the last acts were agreed on; equal on all ranks that do these acts.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float, poll: Callable[[], str] | None = None) -> None:
        self._collective, self._tag, self._timeout, self._poll = collective, tag, timeout, poll
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # `put` is safe in a signal handler
        self._changed = threading.Condition()
        self._step = -1
        self._undecided: set[int] = set()  # rounds
        self._acts: dict[int, tuple[set[str], set[int]]] = {}  # by step: what to do, and the ranks that had left
        self._requested: set[str] = set()  # by this rank
        self._alone = False  # rank 0 is lost
        self.left: frozenset[int] = frozenset()
        # Of rank 0:
        self._round = 0
        self._asking = False
        self._wanted: set[str] = set()
        self._answers: dict[int, int] = {}
        self._left: set[int] = set()  # ranks that have left or are lost
        self._decided = -1  # the boundary of the round before
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-boundaries", daemon=True)
        self._ended = threading.Event()

    def __enter__(self) -> Boundaries:
        def hear(payload: bytes) -> None:
            self._news.put(msgspec.msgpack.decode(payload))

        def lose(rank: int, _: str) -> None:
            self._news.put(["left", rank])

        self._end_watch = self._collective.watch(self._tag, hear, lose)
        start(self._thread)
        if self._poll is not None:  # in a thread of its own, since a function that hangs must not keep answers back
            start(
                threading.Thread(target=self._poll_often, args=(self._poll,), name="bytecheckpoint-poll", daemon=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._send(0, ["left", self._collective.rank])
        if self._collective.rank:  # rank 0 serves the others until they have left too
            self._news.put(["end"])
            self._thread.join(self._timeout)

    def request(self, act: str) -> None:
        """Ask for an act of all ranks; safe in a signal handler. The same act is asked for once until it happens."""
        self._news.put(["request", act])

    def reach(self, step: int) -> set[str]:
        """Say that this rank is at a boundary; return what all ranks do there.

        Args:
            step: number of the boundary; ascends, and is the same on all ranks.
        """
        with self._changed:
            self._step = step
            if not self._changed.wait_for(lambda: not self._undecided, self._timeout):
                _log.warning(
                    "rank %d goes on after %g s without an answer of rank 0", self._collective.rank, self._timeout
                )
                self._undecided.clear()
            due = [self._acts.pop(at) for at in [*self._acts] if at <= step]
            if due:
                self.left = frozenset().union(*(left for _, left in due))
            return {act for acts, _ in due for act in acts}

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            message = self._news.get()
            if message[0] != "end":
                self._on_message(*message)
            if message[0] == "end" or len(self._left) == self._collective.world_size:
                self._end_watch()
                with self._changed:
                    self._undecided.clear()
                    self._changed.notify_all()
                return

    def _poll_often(self, poll: Callable[[], str]) -> None:
        before = ""
        while not self._ended.wait(_POLL_SECONDS):
            try:
                act = poll()
            except Exception as error:  # noqa: BLE001  of the caller's function
                _log.warning("the function that tells of a preemption failed: %r", error)
                continue
            if act and act != before:
                self.request(act)
            before = act

    def _on_message(self, kind: str, *values: Any) -> None:
        if kind == "request":
            self._requested.add(*values)
            if self._alone:
                self._act_alone()
            else:
                self._send(0, ["want", *values])
        elif kind == "want":
            self._wanted.add(*values)
            self._ask()
        elif kind == "ask":
            (number,) = values
            with self._changed:
                self._undecided.add(number)
                step = self._step
            self._send(0, ["at", number, self._collective.rank, step])
        elif kind == "at":
            number, rank, step = values
            if number == self._round:
                self._answers[rank] = step
                self._decide()
        elif kind == "left" and self._collective.rank == 0:
            self._left.add(*values)
            self._decide()
        elif kind == "left" and values == (0,):
            self._alone = True
            self._act_alone()
        elif kind == "act":
            number, step, acts, left = values
            with self._changed:
                self._undecided.discard(number)
                self._add_acts(step, acts, left)

    def _add_acts(self, step: int, acts: Collection[str], left: Collection[int]) -> None:
        known = self._acts.setdefault(step, (set(), set()))
        known[0].update(acts)
        known[1].update(left)
        self._requested.difference_update(acts)
        self._changed.notify_all()

    def _act_alone(self) -> None:
        """Wait for no decision, because rank 0 is lost; do what this rank has asked for at its next boundary."""
        with self._changed:
            self._undecided.clear()
            self._changed.notify_all()
            if self._requested:
                self._add_acts(self._step + 1, {*self._requested}, {0})

    def _ask(self) -> None:
        """Begin a round, unless one is under way. Runs on rank 0."""
        if self._asking:
            return
        self._asking = True
        self._round += 1
        self._send_each(self._present(), ["ask", self._round])
        self._decide()  # perhaps all have left

    def _decide(self) -> None:
        """End the round when all ranks that are present have answered. Runs on rank 0."""
        if not self._asking or len(self._answers) + len(self._left) < self._collective.world_size:
            return
        present = self._present()
        if not present <= self._answers.keys():  # one has answered and left
            return
        # Not before a boundary that is decided already: a rank that acts there, and leaves, answers no more.
        step = max(self._decided, *(self._answers[rank] + 1 for rank in present), 1)
        self._send_each(present, ["act", self._round, step, sorted(self._wanted), sorted(self._left)])
        self._asking, self._wanted, self._answers, self._decided = False, set(), {}, step

    def _present(self) -> set[int]:
        """Return the ranks that take part. Takes long in a large world."""
        return {*range(self._collective.world_size)} - self._left

    def _send(self, rank: int, message: list[Any]) -> None:
        self._send_each({rank}, message)

    def _send_each(self, ranks: set[int], message: list[Any]) -> None:
        if self._collective.rank in ranks:
            self._news.put(message)
        if others := ranks - {self._collective.rank}:
            with contextlib.suppress(CheckpointError):  # the training notices a lost rank
                self._collective.send_each(self._tag, dict.fromkeys(others, msgspec.msgpack.encode(message)))
