"""Let all ranks act at the same step boundary, although any rank may ask for an act at any time.

A signal, a clock or a failure reaches ranks at different moments, and a collective at every step would cost too much. So a
rank that wants an act sends a request to rank 0, which asks all ranks for their step. A rank that has answered stops at its
next boundary until rank 0 has chosen the boundary of the act: the first one that no rank has passed. Background threads
answer, so the stop lasts for one exchange of messages. Nothing is sent at other steps, and nobody waits for a rank that has
left or is lost. A rank that loses rank 0 decides for itself.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.threads import start

__all__ = ["Act", "Boundaries", "Committed", "SaveDue", "StopJob", "Usurped"]

_log = logging.getLogger("bytecheckpoint")


# --- acts -------------------------------------------------------------------------------------------------------------


class SaveDue(msgspec.Struct, frozen=True, tag=True):
    """Save, because the clock of rank 0 says so."""


class StopJob(msgspec.Struct, frozen=True, tag=True):
    """Save for the last time, because the job is to stop."""


class Usurped(msgspec.Struct, frozen=True, tag=True):
    """Fail, because another job manages the folder.

    Attributes:
        reason: message of the error to raise.
    """

    reason: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Report a committed step.

    Attributes:
        step: number of the step.
    """

    step: int


Act: TypeAlias = SaveDue | StopJob | Usurped | Committed


class Boundaries:
    """One rank's part in the agreement. Use it as a context manager; every rank makes one with the same tag.

    Args:
        collective: ranks that act together.
        tag: name of the conversation, never used twice in one world.
        timeout: seconds to wait for the other ranks at a boundary.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self._collective, self._tag, self._timeout = collective, tag, timeout
        self._inbox: queue.SimpleQueue[_Message | Act | None] = queue.SimpleQueue()  # `put` is safe in a signal handler
        self._member = _Member()
        self._leader = _Leader(range(collective.world_size), self._send) if collective.rank == 0 else None
        self._requested: set[Act] = set()  # by this rank, and not decided yet
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-boundaries", daemon=True)

    @property
    def left(self) -> frozenset[int]:
        """Ranks that had left when the last acts were decided; equal on all ranks that do these acts."""
        return self._member.left

    def __enter__(self) -> Boundaries:
        self._end_watch = self._collective.watch(
            self._tag,
            lambda payload: self._inbox.put(_decoder.decode(payload)),
            lambda rank, _: self._inbox.put(_Left(rank)),
        )
        start(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._send({0}, _Left(self._collective.rank))
        if self._collective.rank != 0:  # rank 0 serves the others until they have left too
            self._inbox.put(None)
            self._thread.join(self._timeout)

    def request(self, act: Act) -> None:
        """Ask for an act of all ranks, once until it happens; safe in a signal handler."""
        self._inbox.put(act)

    def reach(self, step: int) -> set[Act]:
        """Return the acts of all ranks at a boundary.

        Args:
            step: number of the boundary, ascending and the same on all ranks.
        """
        acts = self._member.reach(step, self._timeout)
        if acts is None:
            _log.warning(
                "rank %d continues after %g s without an answer of rank 0", self._collective.rank, self._timeout
            )
            acts = self._member.reach(step, 0.0)
        return acts or set()

    def _run(self) -> None:
        """Answer messages until this rank has left, and on rank 0 all others too. Runs on a thread of its own."""
        while (message := self._inbox.get()) is not None:
            self._handle(message)
            if self._collective.rank == 0 and self._leader is not None and self._leader.alone:
                break
        self._end_watch()
        self._member.release()

    def _handle(self, message: _Message | Act) -> None:
        rank, leader = self._collective.rank, self._leader
        decides = 0 if leader is None else rank
        match message:
            case _Ask(round_):
                self._send({decides}, _At(round_, rank, self._member.answer(round_)))
            case _Decided(round_, step, acts, left):
                self._requested.difference_update(acts)
                self._member.decided(round_, step, acts, left)
            case _Want(act) if leader is not None:
                leader.want(act)
            case _At(round_, other, step) if leader is not None:
                leader.answered(round_, other, step)
            case _Left(other) if leader is not None:
                leader.leaves(other)
            case _Left(0):  # this rank now decides for itself
                self._member.release()
                self._leader = _Leader((0, rank), self._send)
                self._leader.leaves(0)
                for act in self._requested:
                    self._leader.want(act)
            case SaveDue() | StopJob() | Usurped() | Committed():
                self._requested.add(message)
                self._send({decides}, _Want(message))

    def _send(self, ranks: Collection[int], message: _Message) -> None:
        if self._collective.rank in ranks:
            self._inbox.put(message)
        if others := set(ranks) - {self._collective.rank}:
            with contextlib.suppress(CheckpointError):  # the training notices a lost rank
                self._collective.send_each(self._tag, dict.fromkeys(others, msgspec.msgpack.encode(message)))


# --- messages ---------------------------------------------------------------------------------------------------------


class _Want(msgspec.Struct, frozen=True, tag=True):
    """Request of a rank to rank 0."""

    act: Act


class _Ask(msgspec.Struct, frozen=True, tag=True):
    """Question of rank 0 to all ranks: which boundary have you reached?"""

    round: int


class _At(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to rank 0."""

    round: int
    rank: int
    step: int


class _Decided(msgspec.Struct, frozen=True, tag=True):
    """Decision of rank 0 for all ranks: which acts at which boundary, and which ranks had left by then."""

    round: int
    step: int
    acts: list[Act]
    left: list[int]


class _Left(msgspec.Struct, frozen=True, tag=True):
    """News that a rank has left, or is lost."""

    rank: int


_Message: TypeAlias = _Want | _Ask | _At | _Decided | _Left
_decoder = msgspec.msgpack.Decoder(_Message)


# --- roles ------------------------------------------------------------------------------------------------------------


class _Leader:
    """Decides for some ranks.

    Args:
        ranks: ranks that the decisions are for.
        send: function that sends a message to ranks.
    """

    def __init__(self, ranks: Collection[int], send: Callable[[Collection[int], _Message], None]) -> None:
        self._ranks, self._send = set(ranks), send
        self._round, self._asking = 0, False
        self._wanted: set[Act] = set()
        self._answers: dict[int, int] = {}  # by rank, in this round
        self._left: set[int] = set()
        self._decided = -1  # the boundary of the round before

    @property
    def alone(self) -> bool:
        """True once all ranks have left."""
        return self._left == self._ranks

    def want(self, act: Act) -> None:
        """Take a request, and begin a round unless one is under way."""
        self._wanted.add(act)
        if not self._asking:
            self._asking = True
            self._round += 1
            self._send(self._ranks - self._left, _Ask(self._round))
            self._decide()  # perhaps all have left

    def answered(self, round_: int, rank: int, step: int) -> None:
        """Take the answer of a rank."""
        if round_ == self._round:
            self._answers[rank] = step
            self._decide()

    def leaves(self, rank: int) -> None:
        """Wait for a rank no more."""
        if rank in self._ranks:
            self._left.add(rank)
            self._decide()

    def _decide(self) -> None:
        """End the round when all ranks that are present have answered."""
        if not self._asking or len(self._answers) + len(self._left) < len(self._ranks):
            return
        present = self._ranks - self._left
        if not present <= self._answers.keys():  # one has answered and left
            return
        # Not before a boundary that is decided already: a rank that acts there, and leaves, answers no more.
        step = max(self._decided, *(self._answers[rank] + 1 for rank in present), 1)
        self._send(present, _Decided(self._round, step, sorted(self._wanted, key=repr), sorted(self._left)))
        self._asking, self._wanted, self._answers, self._decided = False, set(), {}, step


class _Member:
    """Boundaries that this rank has reached, and acts that are decided for later ones.

    Attributes:
        left: ranks that had left when the acts of the last boundary were decided.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._open_rounds: set[int] = set()
        self._acts: dict[int, tuple[set[Act], set[int]]] = {}  # by step: acts, and the ranks that had left
        self.left: frozenset[int] = frozenset()

    def reach(self, step: int, timeout: float) -> set[Act] | None:
        """Return the acts of a boundary; None if the leader does not decide in time."""
        with self._changed:
            self._step = step
            if not self._changed.wait_for(lambda: not self._open_rounds, timeout):
                self._open_rounds.clear()
                return None
            due = [self._acts.pop(at) for at in [*self._acts] if at <= step]
            if due:
                self.left = frozenset().union(*(left for _, left in due))
            return {act for acts, _ in due for act in acts}

    def answer(self, round_: int) -> int:
        """Return the step that this rank has reached. It goes no further until the round is decided."""
        with self._changed:
            self._open_rounds.add(round_)
            return self._step

    def decided(self, round_: int, step: int, acts: Collection[Act], left: Collection[int]) -> None:
        """Note a decision, and let this rank pass its boundary."""
        with self._changed:
            known = self._acts.setdefault(step, (set(), set()))
            known[0].update(acts)
            known[1].update(left)
            self._open_rounds.discard(round_)
            self._changed.notify_all()

    def release(self) -> None:
        """Let this rank pass its boundary without a decision."""
        with self._changed:
            self._open_rounds.clear()
            self._changed.notify_all()
