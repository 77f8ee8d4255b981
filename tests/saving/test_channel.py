"""One rank's messages in a save: their order, failures, and its knowledge of the commit."""

from __future__ import annotations

import pytest

from bytecheckpoint import CheckpointTimeoutError, PeerLostError, StorageError
from bytecheckpoint.collectives import SingleProcess
from bytecheckpoint.failures import Failure
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.messages import (
    CommitResult,
    DescribeRequest,
    PlanDescription,
    PlanResponse,
    Reply,
    RewriteRequest,
    SaveFailed,
    SaveStep,
    ValuesRequest,
    WriteReport,
    decode,
    encode,
    reply_tag,
    tag,
)

TABLE = LocalTable((), b"", b"")
REPORT = WriteReport("url", "plan", [], [])
PLAN = PlanResponse("plan", b"", b"", [])
FAILURE = Failure("StorageError", "no space", rank=3, stage="write")


class Play:
    """A channel whose coordinator's replies are put in before the rank asks."""

    def __init__(self, timeout: float = 5.0) -> None:
        self.collective = SingleProcess()
        self.channel = CoordinatorChannel(self.collective, 7, timeout)

    def reply(self, step: SaveStep, message: Reply) -> None:
        self.collective.send(0, reply_tag(7, step), encode(message))

    def received(self, step: SaveStep) -> object:
        return decode(self.collective.recv(0, tag(7, step), timeout=5))


def test_the_longest_way_through_a_save() -> None:
    """A cached plan that nobody remembers, other shards, other values: each step is taken once."""
    play = Play()
    steps = [
        (SaveStep.FIRST, REPORT, DescribeRequest()),
        (SaveStep.DESCRIPTION, PlanDescription(TABLE, b""), RewriteRequest(PLAN, "why")),
        (SaveStep.REPORT, REPORT, ValuesRequest([("extra_states", "x", "")])),
        (SaveStep.VALUES, REPORT, CommitResult()),
    ]
    for step, message, reply in steps:
        play.reply(step, reply)
        assert play.channel.ask(message) == reply
        assert play.received(step) == message
        assert play.channel.may_be_committed is isinstance(reply, CommitResult)


def test_a_failure_names_rank_and_stage_and_cancels_the_save() -> None:
    play = Play()
    raised = play.channel.fail("plan", StorageError("no permission"))
    assert type(raised) is StorageError and str(raised) == "rank 0, plan: no permission"
    with pytest.raises(StorageError, match="rank 0, plan: no permission"):
        play.channel.stop.cancel.raise_if_set()
    interrupt = KeyboardInterrupt()
    assert play.channel.fail("plan", interrupt) is interrupt
    play.channel.close()


@pytest.mark.parametrize("unknown", [False, True])
def test_a_failed_commit_may_leave_a_catalog(unknown: bool) -> None:
    play = Play()
    failure = Failure("StorageError", "no answer", rank=0, stage="commit")
    play.reply(SaveStep.FIRST, SaveFailed(failure, commit_unknown=unknown))
    with pytest.raises(StorageError, match="rank 0, commit: no answer") as raised:
        play.channel.ask(REPORT)
    assert play.channel.may_be_committed is unknown
    assert str(play.channel.fail("commit", raised.value)) == "rank 0, commit: no answer", "named once"
    play.channel.close()


def test_the_first_failure_is_raised_in_place_of_its_consequences() -> None:
    play = Play()
    play.channel.stop.cancel.set(FAILURE)  # of another rank
    assert str(play.channel.fail("write", StorageError("stopped"))) == "rank 3, write: no space"
    play.channel.close()


def test_the_failure_of_an_earlier_save_stays_as_it_is() -> None:
    play = Play()
    error = FAILURE.as_repeated()
    assert play.channel.fail("call", error) is error and error.repeats == "here"
    assert play.channel.stop.cancel.failure is not None and play.channel.stop.cancel.failure.repeats


@pytest.mark.parametrize("step", [SaveStep.FIRST, SaveStep.DESCRIPTION])
def test_without_a_reply_the_save_may_be_committed(step: SaveStep) -> None:
    play = Play(timeout=0.1)
    if step is SaveStep.DESCRIPTION:
        play.reply(SaveStep.FIRST, DescribeRequest())
        play.channel.ask(REPORT)
    with pytest.raises(CheckpointTimeoutError):
        play.channel.ask(PlanDescription(TABLE, b"") if step is SaveStep.DESCRIPTION else REPORT)
    assert play.channel.may_be_committed


def test_a_message_of_another_version() -> None:
    with pytest.raises(PeerLostError, match="not a message of this version"):
        decode(b"\x81\xa4type\xa1a")
