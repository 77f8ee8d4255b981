"""The messages of a save (docs/architecture.md, "A save"). Plain records in msgpack; nothing is pickled.

A rank sends a message to the coordinator and gets one reply to it. What the reply asks for decides the rank's next step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from bytecheckpoint.errors import CheckpointError, PeerLostError, error_from_report, error_report
from bytecheckpoint.frameworks.selection import SelectionReport
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.shards import TensorKey

__all__ = [
    "MIXED_PLANS",
    "NEXT_STEP",
    "CommitResult",
    "DescribeRequest",
    "Failure",
    "FileRecord",
    "Key",
    "PlanDescription",
    "PlanRequest",
    "PlanResponse",
    "RankMessage",
    "Reply",
    "RewriteRequest",
    "SaveStep",
    "ValueRecord",
    "ValuesRequest",
    "WriteReport",
    "decode",
    "encode",
    "escaped",
    "failed_tag",
    "reply_tag",
    "stop_tag",
    "tag",
    "unescaped",
]

MIXED_PLANS = (
    "ranks follow different save plans: their states changed in ways that do not belong together, or some rank left "
    "out a save; the next save plans anew"
)

#: An escaped (state, FQN, slot).
Key = tuple[str, str, str]


class SaveStep(StrEnum):
    """The steps in which a rank sends a message, each at most once in a save."""

    #: The first message: a `WriteReport` if a cached plan told the rank what to write, else a `PlanRequest`.
    FIRST = "first"
    #: A `PlanDescription`, after a `DescribeRequest`.
    DESCRIPTION = "description"
    #: A `WriteReport`, after a `PlanResponse` or a `RewriteRequest`.
    REPORT = "report"
    #: A second `WriteReport`, after a `ValuesRequest`.
    VALUES = "values"


class ValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """A value that may differ between ranks.

    Attributes:
        key: (state, fqn, slot).
        digest: xxh3-128 of dtype, shape and bytes.
        dtype: torch's dtype name.
        shape: its shape.
        merged: ranks' values complement each other (optimizer and module trees), so each distinct one is stored once.
            Otherwise each rank's own value is stored, unless all are equal.
        file: index of the file that holds it among the reporting rank's files, -1 when this rank did not write it.
        offset: byte offset in that file's data section.
        nbytes: its length.
        parts: for a part of a state, and for the tree beside the parts, the number of the state's parts: ranks that hold
            it must hold the same, and together they must hold all parts. 0 for any other value.
    """

    key: Key
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    merged: bool
    file: int = -1
    offset: int = 0
    nbytes: int = 0
    parts: int = 0


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A finished, durable storage file, as the catalog will describe it (`StorageFile`); `sums` are its block sums."""

    name: str
    state: str
    part: int
    values: bool
    size: int
    data_offset: int
    header_sum: int
    block_bytes: int
    sums: bytes


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Tells that a rank, or the coordinator, cannot go on.

    Attributes:
        rank: the rank that failed.
        stage: what it was doing.
        error: from `error_report`.
        undecided: the catalog of this save may be in place all the same, so nobody removes the files that it names.
        repeats: the rank raised the failure of an earlier save.
    """

    rank: int
    stage: str
    error: dict[str, str]
    undecided: bool = False
    repeats: bool = False

    @staticmethod
    def of(rank: int, stage: str, error: BaseException, *, undecided: bool = False) -> Failure:
        """Describe `error`, which was raised on `rank` in `stage`."""
        return Failure(rank, stage, error_report(error), undecided, bool(getattr(error, "repeats", "")))

    def as_error(self) -> CheckpointError:
        """Make the error that the receiving rank raises."""
        error = error_from_report(self.error, prefix=f"rank {self.rank}, {self.stage}: ")
        error.repeats = "elsewhere" if self.repeats else ""
        return error


# --- from a rank to the coordinator ---------------------------------------------------------------------------------


class PlanRequest(msgspec.Struct, frozen=True, tag="plan-request"):
    """Asks for a plan; describes what a rank without a cached plan holds.

    Attributes:
        url: where the checkpoint goes.
        table: the rank's shards.
        values: its values.
        dry: only plan (`prepare`); the rank sends no report.
        host: equal for ranks of one machine (`Collective.host`).
        selection: what the rank saves of its states.
    """

    url: str
    table: LocalTable
    values: list[ValueRecord]
    dry: bool = False
    host: str = ""
    selection: SelectionReport = SelectionReport()


class PlanDescription(msgspec.Struct, frozen=True, tag="plan-description"):
    """Describes a rank's shards, and which of them it has written by a plan that the coordinator does not remember.

    Attributes:
        table: the rank's shards.
        rows: int64 indexes of the shards that it wrote, in file order, as bytes.
    """

    table: LocalTable
    rows: bytes


class WriteReport(msgspec.Struct, frozen=True, tag="write-report"):
    """Reports that a rank's files are durable.

    Attributes:
        url: where the checkpoint goes.
        plan: the name of the global plan that the rank followed.
        files: the files that it wrote.
        values: all its values, written or not.
        steps: training steps that its states belong to, by name.
        optimizer_steps: float64 of `steps_of_shards` as bytes.
        selection: what the rank saved of its states.
        check_replicas: the argument of the save.
        digests: uint64 of `copies`, one for each of the rank's shards, as bytes; none where nothing is compared.
    """

    url: str
    plan: str
    files: list[FileRecord]
    values: list[ValueRecord]
    steps: dict[str, int] = {}
    optimizer_steps: bytes = b""
    selection: SelectionReport = SelectionReport()
    check_replicas: bool | None = None
    digests: bytes = b""


# --- from the coordinator to a rank ---------------------------------------------------------------------------------


class PlanResponse(msgspec.Struct, frozen=True, tag="plan-response"):
    """Gives a rank its part of a new plan. The rank writes that and reports.

    Attributes:
        plan: the name of the global plan.
        rows: int64 indexes of the shards that the rank writes, in file order, as bytes.
        values: keys of the values that the rank writes.
        local_ranks: how many ranks of the world are on the rank's machine; 0 if not all ranks asked for a plan.
        nbytes: bytes of the tensors that all ranks write.
    """

    plan: str
    rows: bytes
    values: list[Key]
    local_ranks: int = 0
    nbytes: int = 0


class DescribeRequest(msgspec.Struct, frozen=True, tag="describe-request"):
    """Asks a rank that has written by an unknown plan for its `PlanDescription`."""


class RewriteRequest(msgspec.Struct, frozen=True, tag="rewrite-request"):
    """Asks a rank to remove its files, to write by another plan and to report again.

    Attributes:
        plan: what the rank writes now.
        reason: why the removed files are of no use.
    """

    plan: PlanResponse
    reason: str


class ValuesRequest(msgspec.Struct, frozen=True, tag="values-request"):
    """Asks a rank to write more values, which no longer equal the copy that stood for them, and to report again.

    Attributes:
        keys: keys of the values.
    """

    keys: list[Key]


class CommitResult(msgspec.Struct, frozen=True, tag="commit-result"):
    """Tells a rank that the checkpoint is committed; the save is over."""


RankMessage = PlanRequest | PlanDescription | WriteReport
Reply = PlanResponse | DescribeRequest | RewriteRequest | ValuesRequest | CommitResult
#: The step that each reply asks a rank for.
NEXT_STEP: dict[type[Any], SaveStep] = {
    PlanResponse: SaveStep.REPORT,
    DescribeRequest: SaveStep.DESCRIPTION,
    RewriteRequest: SaveStep.REPORT,
    ValuesRequest: SaveStep.VALUES,
}
_decoder = msgspec.msgpack.Decoder(RankMessage | Reply | Failure)


def tag(number: int, step: SaveStep) -> str:
    """Name the message that a rank sends in one step of save `number`."""
    return f"save/{number}/{step}"


def reply_tag(number: int, step: SaveStep) -> str:
    """Name the coordinator's reply to that message."""
    return f"save/{number}/{step}/reply"


def failed_tag(number: int) -> str:
    """Name the message by which a rank that fails in save `number` interrupts the coordinator's wait for others."""
    return f"save/{number}/failed"


def stop_tag(number: int) -> str:
    """Name the message by which the coordinator interrupts ranks that still write."""
    return f"save/{number}/stop"


def encode(message: RankMessage | Reply | Failure) -> bytes:
    """Encode a message for another rank."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Any:
    """Decode what `encode` made.

    Raises:
        PeerLostError: it is no message of this version.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PeerLostError(f"another rank sent what is not a message of this version: {error}") from error


def escaped(key: TensorKey) -> Key:
    """Escape a key for a message: Python strings may hold what UTF-8 may not."""
    return escape(key.state), escape(key.fqn), escape(key.slot)


def unescaped(key: Key) -> TensorKey:
    """Invert `escaped`."""
    return TensorKey(*map(unescape, key))
