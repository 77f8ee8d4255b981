"""One rank's side of the save protocol: what it may send next, and what it knows about the commit."""

from __future__ import annotations

import pytest

from bytecheckpoint import CheckpointError, CheckpointTimeoutError, PeerLostError, StorageError
from bytecheckpoint.collectives import InterruptedWaitError, SingleProcess
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.messages import (
    CommitResult,
    DescribeRequest,
    Failure,
    PlanDescription,
    PlanRequest,
    PlanResponse,
    Reply,
    RewriteRequest,
    SaveStep,
    ValuesRequest,
    WriteReport,
    decode,
    encode,
    failed_tag,
    reply_tag,
    stop_tag,
    tag,
)

TABLE = LocalTable((), b"", b"")
REPORT = WriteReport("url", "plan", [], [])
PLAN = PlanResponse("plan", b"", [])


class Play:
    """A channel whose coordinator's replies are put in before the rank asks."""

    def __init__(self) -> None:
        self.collective = SingleProcess()
        self.channel = CoordinatorChannel(self.collective, 7)

    def reply(self, step: SaveStep, message: Reply | Failure) -> None:
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
        assert play.channel.expected is step
        play.reply(step, reply)
        assert play.channel.ask(message, 5) == reply
        assert play.received(step) == message
        assert not play.channel.undecided
    assert play.channel.expected is None


@pytest.mark.parametrize("dry", [False, True])
def test_after_a_plan_a_report_is_expected_except_of_prepare(dry: bool) -> None:
    play = Play()
    play.reply(SaveStep.FIRST, PLAN)
    play.channel.ask(PlanRequest("url", TABLE, [], dry=dry), 5)
    assert play.channel.expected is (None if dry else SaveStep.REPORT)
    assert play.channel.fail("write", ValueError("broken")) is not dry


def test_a_failure_goes_to_the_coordinator_whatever_it_waits_for() -> None:
    play = Play()
    assert play.channel.fail("plan", StorageError("no permission"))
    with pytest.raises(InterruptedWaitError) as interrupted:
        play.collective.collect([0], tag(7, SaveStep.REPORT), timeout=5, unless=failed_tag(7))
    failure = decode(interrupted.value.payload)
    assert isinstance(failure, Failure) and failure.stage == "plan"
    error = failure.as_error()
    assert type(error) is StorageError and str(error) == "rank 0, plan: no permission"


@pytest.mark.parametrize("undecided", [False, True])
def test_what_a_failed_commit_leaves_open(undecided: bool) -> None:
    play = Play()
    play.reply(SaveStep.FIRST, Failure.of(0, "commit", StorageError("no answer"), undecided=undecided))
    with pytest.raises(StorageError, match="rank 0, commit: no answer"):
        play.channel.ask(REPORT, 5)
    assert play.channel.undecided is undecided
    assert not play.channel.fail("commit", ValueError()), "the coordinator waits for nothing more"


def test_the_failure_of_another_rank_stops_this_one() -> None:
    play = Play()
    heard: list[CheckpointError] = []
    play.channel.on_stop = heard.append
    play.collective.send(0, stop_tag(7), encode(Failure.of(3, "write", StorageError("no space"))))
    assert heard == [play.channel.stopped] and str(heard[0]) == "rank 3, write: no space"
    assert not play.channel.fail("write", ValueError()), "the coordinator knows"
    play.channel.close()


@pytest.mark.parametrize("step", [SaveStep.FIRST, SaveStep.DESCRIPTION])
def test_without_a_reply_the_save_may_be_committed(step: SaveStep) -> None:
    play = Play()
    if step is SaveStep.DESCRIPTION:
        play.reply(SaveStep.FIRST, DescribeRequest())
        play.channel.ask(REPORT, 5)
    with pytest.raises(CheckpointTimeoutError):
        play.channel.ask(PlanDescription(TABLE, b"") if step is SaveStep.DESCRIPTION else REPORT, 0.01)
    assert play.channel.undecided


def test_a_message_of_another_version() -> None:
    with pytest.raises(PeerLostError, match="not a message of this version"):
        decode(b"\x81\xa4type\xa1a")
