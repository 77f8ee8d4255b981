"""Take part in one save as one rank: send messages to the coordinator, and end the save when a rank fails."""

from __future__ import annotations

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.saving.messages import (
    NEXT_STEP,
    CommitResult,
    RankMessage,
    Reply,
    SaveFailed,
    SaveStep,
    decode,
    encode,
    reply_tag,
    tag,
)

__all__ = ["FOREGROUND_CALL", "CoordinatorChannel"]

#: Stage before the plan, in which a save checks its arguments and captures the caller's objects.
FOREGROUND_CALL = "call"


class CoordinatorChannel:
    """One rank's messages in one save.

    Args:
        collective: ranks of the save.
        number: save number, the same on all ranks.
        timeout: seconds to wait for a reply.

    Attributes:
        number: save number.
        stop: broadcast of a failure to all ranks; its `cancel` is this rank's token of the save.
        may_be_committed: True if a catalog may name the files of this rank: the save is committed, or this rank had no
            reply to its message.
    """

    def __init__(self, collective: Collective, number: int, timeout: float) -> None:
        self.number = number
        self.stop = StopSignal(collective, f"save/{number}", Cancellation())
        self.may_be_committed = False
        self._collective = collective
        self._timeout = timeout
        self._step = SaveStep.FIRST  # of the next message
        self.stop.__enter__()

    def ask(self, message: RankMessage) -> Reply:
        """Send the message of the next step, and return the coordinator's reply.

        Raises:
            CheckpointError: failure of another rank or of the coordinator.
            CheckpointTimeoutError, PeerLostError: no reply came.
        """
        number, step = self.number, self._step
        self.may_be_committed = True  # first, as an interrupt may come at any moment
        self._collective.send(0, tag(number, step), encode(message))
        reply: Reply = decode(self._collective.recv(0, reply_tag(number, step), timeout=self._timeout))
        if isinstance(reply, SaveFailed):
            self.may_be_committed = reply.commit_unknown
            self.stop.cancel.set(reply.failure)
            raise reply.failure.as_error()
        self.may_be_committed = isinstance(reply, CommitResult)
        self._step = NEXT_STEP.get(type(reply), step)
        return reply

    def fail(self, stage: str, error: BaseException) -> BaseException:
        """End the save on all ranks, unless another failure has ended it already.

        Args:
            stage: work of this rank that failed.
            error: its error.

        Returns:
            The error to raise on this rank: that of the rank that failed first, or `error`, with this rank and the stage in
            its message unless it comes from the caller's own objects or arguments.
        """
        first = self.stop.cancel.failure
        if not isinstance(error, CheckpointError):
            self.stop.fail(Failure.of(error, rank=self._collective.rank, stage=stage))
            return error
        if first is not None:
            return first.as_error()
        carried = error.failure
        sent = isinstance(carried, Failure) and carried.rank >= 0  # by another rank, or by an earlier save
        failure = Failure.of(error, rank=self._collective.rank, stage=stage)
        self.stop.fail(failure)
        return error if sent or stage == FOREGROUND_CALL else failure.as_error()

    def close(self) -> None:
        """End this rank's part in the save."""
        failed = self.stop.cancel.failure is not None
        self.stop.__exit__(CheckpointError if failed else None)
        if failed:
            for step in SaveStep:
                self._collective.forget(reply_tag(self.number, step))
