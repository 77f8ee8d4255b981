"""One rank's connection to the coordinator during one save."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bytecheckpoint.collectives import Collective
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.saving.messages import (
    NEXT_STEP,
    Failure,
    PlanRequest,
    RankMessage,
    Reply,
    SaveStep,
    decode,
    encode,
    failed_tag,
    reply_tag,
    stop_tag,
    tag,
)

__all__ = ["CoordinatorChannel"]

_log = logging.getLogger("bytecheckpoint")


class CoordinatorChannel:
    """Sends a rank's messages to the coordinator and waits for the replies.

    Args:
        collective: the ranks of the save.
        number: number of the save.

    Attributes:
        expected: the step of the message that the coordinator expects from this rank; None while this rank waits for a
            reply, and at the end.
        undecided: this rank has sent a message and had no reply, so the save may be committed or not.
        stopped: what another rank failed with while this one was at work.
        on_stop: called with that, on the transport's thread; must return at once.
    """

    def __init__(self, collective: Collective, number: int) -> None:
        self.expected: SaveStep | None = SaveStep.FIRST
        self.undecided = False
        self.stopped: CheckpointError | None = None
        self.on_stop: Callable[[CheckpointError], None] = lambda _: None
        self._collective = collective
        self._number = number
        self._asked: SaveStep | None = None  # the step of a message that has no reply yet
        self._end_watch = collective.watch(stop_tag(number), self._stop)

    def _stop(self, payload: bytes) -> None:
        failure = decode(payload)
        assert isinstance(failure, Failure)
        self.stopped = failure.as_error()
        self.on_stop(self.stopped)

    def close(self) -> None:
        """End the part of this rank in the save."""
        self._end_watch()
        self.on_stop = lambda _: None
        if self.stopped is not None:
            for step in SaveStep:
                self._collective.forget(reply_tag(self._number, step))

    def ask(self, message: RankMessage, timeout: float) -> Reply:
        """Send the message of the expected step and wait for the reply.

        Args:
            message: what to send.
            timeout: seconds to wait.

        Raises:
            CheckpointError: what another rank or the coordinator failed with.
            CheckpointTimeoutError, PeerLostError: no reply came.
        """
        step = self.expected
        assert step is not None, "the coordinator expects no message"
        self.undecided = True
        self.expected, self._asked = None, step  # first, as an interrupt may come at any moment
        self._collective.send(0, tag(self._number, step), encode(message))
        reply: Reply | Failure = decode(self._collective.recv(0, reply_tag(self._number, step), timeout=timeout))
        self.undecided = isinstance(reply, Failure) and reply.undecided
        ends_with_plan = isinstance(message, PlanRequest) and message.dry
        self.expected = None if ends_with_plan else NEXT_STEP.get(type(reply))
        self._asked = None
        if isinstance(reply, Failure):
            raise reply.as_error()
        return reply

    def fail(self, stage: str, error: BaseException) -> bool:
        """Report that this rank cannot go on, if the coordinator expects a message from it or will after its reply.

        Args:
            stage: what this rank was doing.
            error: the reason.

        Returns:
            Whether the coordinator expected a message. If not, the failure came from the coordinator or from the wait.
            The coordinator is interrupted if it waits for other ranks.
        """
        if (self.expected is None and self._asked is None) or self.stopped is not None:
            return False
        failure = Failure.of(self._collective.rank, stage, error)
        try:
            self._collective.send(0, failed_tag(self._number), encode(failure))
        except CheckpointError as lost:
            _log.warning("save %d: the failure cannot be reported to the coordinator: %s", self._number, lost)
        return self.expected is not None
