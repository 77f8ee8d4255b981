"""Define the messages of a save (docs/architecture.md, "A save"): plain records in msgpack; nothing is pickled.

A rank sends a message to the coordinator and gets one reply. The type of the reply decides the rank's next step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.failures import Failure
from bytecheckpoint.frameworks.selection import SelectionReport
from bytecheckpoint.planning.assembly import RankMoves
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.shards import TensorKey

__all__ = [
    "MIXED_PLANS",
    "NEXT_STEP",
    "AssemblyReply",
    "AssemblyRequest",
    "CommitFacts",
    "CommitResult",
    "DescribeRequest",
    "FileRecord",
    "Key",
    "PlanDescription",
    "PlanRequest",
    "PlanResponse",
    "RankChecks",
    "RankMessage",
    "RankSamples",
    "Reply",
    "RewriteRequest",
    "SamplesRequest",
    "SaveFailed",
    "SaveStep",
    "ValueRecord",
    "ValuesRequest",
    "WriteReport",
    "decode",
    "encode",
    "escaped",
    "reply_tag",
    "tag",
    "unescaped",
]

MIXED_PLANS = (
    "ranks follow different save plans: their states changed in ways that do not belong together, or some rank left "
    "out a save; the next save plans anew"
)

#: Escaped name of a state, FQN and slot.
Key = tuple[str, str, str]


class SaveStep(StrEnum):
    """The steps in which a rank sends a message, each at most once in a save."""

    #: The first message: an `AssemblyRequest` or a `WriteReport` if a cached plan told the rank what to stage or to write,
    #: else a `PlanRequest`.
    FIRST = "first"
    #: A `PlanDescription`, after a `DescribeRequest`.
    DESCRIPTION = "description"
    #: A `WriteReport`, after a `PlanResponse` or a `RewriteRequest`; an `AssemblyRequest` before it, if the plan has one.
    REPORT = "report"
    #: A `WriteReport`, after an `AssemblyReply`.
    ASSEMBLY = "assembly"
    #: The `RankSamples`, after a `SamplesRequest`.
    SAMPLES = "samples"
    #: A second `WriteReport`, after a `ValuesRequest`.
    VALUES = "values"


class ValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """A value that may differ between ranks.

    Attributes:
        key: name of its state, FQN and slot.
        digest: xxh3-128 of dtype, shape and bytes.
        dtype: name of its dtype in torch.
        shape: shape of a tensor.
        merged: True if the values of ranks complement each other (optimizer and module trees), so each distinct one is
            stored once. Otherwise each rank's own value is stored, unless all are equal.
        file: index of the file that holds it among the reporting rank's files, -1 if this rank did not write it.
        offset: byte offset in that file's data section.
        nbytes: length in bytes.
        parts: number of the parts of its state, if it is one of them or the tree beside them, else 0. Ranks that hold a
            part must hold the same, and together they must hold all parts.
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
    """A finished, durable storage file, with the fields of `StorageFile` in the catalog.

    Attributes:
        name: name in the checkpoint.
        state: escaped name of the state that it holds.
        part: part number; files of values are counted separately.
        values: True if it holds values.
        size: length in bytes.
        data_offset: byte at which its data section begins.
        header_sum: checksum of the header.
        block_bytes: length of a checksum block.
        sums: checksums of the blocks, uint64, and fingerprints of the boxes by their place if they are wanted, uint64
            [boxes, 2], as bytes.
    """

    name: str
    state: str
    part: int
    values: bool
    size: int
    data_offset: int
    header_sum: int
    block_bytes: int
    sums: tuple[bytes, bytes]


# --- from a rank to the coordinator ---------------------------------------------------------------------------------


class PlanRequest(msgspec.Struct, frozen=True, tag="plan-request"):
    """Asks for a plan, and describes the shards and values of a rank without a cached plan.

    Attributes:
        url: escaped URL of the checkpoint.
        table: shards of the rank; if `form` is given, only its place.
        values: values of the rank.
        dry: True if the rank only plans (`prepare`) and sends no report.
        host: name of the machine, equal for ranks that share it (`Collective.host`).
        selection: selected part of the rank's states.
        form: `LocalTable.form_digest` of a table whose columns the coordinator asks one of the ranks for that send it.
        whole: escaped name of the state whose tensors are to lie whole in files; "" if none are.
    """

    url: str
    table: LocalTable
    values: list[ValueRecord]
    dry: bool = False
    host: str = ""
    selection: SelectionReport = SelectionReport()
    form: bytes = b""
    whole: str = ""


class AssemblyRequest(msgspec.Struct, frozen=True, tag="assembly-request"):
    """Reports that a rank has staged its boxes, and can join cut tensors with the other ranks.

    Attributes:
        plan: name of the global plan that the rank followed.
        ready: True if it has the memory.
    """

    plan: str
    ready: bool


class PlanDescription(msgspec.Struct, frozen=True, tag="plan-description"):
    """Describes a rank's shards, and which of them it has written by a plan that the coordinator does not remember.

    Attributes:
        table: shards of the rank.
        rows: int64 indexes of the shards that it wrote, in file order, as bytes; none before a plan.
    """

    table: LocalTable
    rows: bytes


class RankChecks(msgspec.Struct, frozen=True):
    """Facts of one rank that the coordinator compares with those of the other ranks before the commit.

    Attributes:
        steps: training steps that the rank's states belong to, by escaped name.
        optimizer_steps: float64 of `steps_of_shards` as bytes.
        check_replicas: argument of the save.
        rows: int64 numbers of the rank's boxes that are compared with copies on other ranks, as bytes.
        digests: uint64 digest of each of these boxes as bytes (`copies`).
        drift: relative difference between copies on this rank by escaped name of the tensor.
        streams: number of streams of each state of which the rank has none, by escaped name.
    """

    steps: dict[str, int] = {}
    optimizer_steps: bytes = b""
    check_replicas: str = "sampled"
    rows: bytes = b""
    digests: bytes = b""
    drift: dict[str, float] = {}
    streams: dict[str, int] = {}


class CommitFacts(msgspec.Struct, frozen=True):
    """Facts that only rank 0 reports, for the commit.

    Attributes:
        replaces: version of the catalog that was there before rank 0 wrote its first byte, "" for none.
        layout: JSON that describes how the objects are distributed.
    """

    replaces: str = ""
    layout: bytes = b"{}"


class WriteReport(msgspec.Struct, frozen=True, tag="write-report"):
    """Reports that a rank's files are durable.

    Attributes:
        url: escaped URL of the checkpoint.
        plan: name of the global plan that the rank followed.
        files: files that it wrote.
        values: all its values, written or not.
        selection: selected part of the rank's states.
        checks: facts that all ranks compare.
        commit: facts for the commit, from rank 0.
        encoded: stored bytes of the files that are kept as differences, by name.
        whole: True if the rank has joined cut tensors, so that its files are those of the plan's assembly.
    """

    url: str
    plan: str
    files: list[FileRecord]
    values: list[ValueRecord]
    selection: SelectionReport = SelectionReport()
    checks: RankChecks = RankChecks()
    commit: CommitFacts | None = None
    encoded: dict[str, int] = {}
    whole: bool = False


class RankSamples(msgspec.Struct, frozen=True, tag="rank-samples"):
    """Gives elements of a rank's boxes, after a `SamplesRequest`.

    Attributes:
        data: bytes of the elements, box after box.
        lengths: bytes of each box's elements, int64 as bytes.
    """

    data: bytes
    lengths: bytes


# --- from the coordinator to a rank ---------------------------------------------------------------------------------


class PlanResponse(msgspec.Struct, frozen=True, tag="plan-response"):
    """Gives a rank its part of a new plan. The rank writes that part and reports.

    Attributes:
        plan: name of the global plan.
        rows: int64 indexes of the shards that the rank writes, in file order, as bytes.
        copied: int64 indexes of the shards that other ranks may hold too, as bytes.
        values: keys of the values that the rank writes.
        local_ranks: number of the world's ranks on the rank's machine; 0 if not all ranks asked for a plan.
        nbytes: bytes of the tensors that all ranks write.
        moves: the rank's part in joining cut tensors; None if none are joined.
    """

    plan: str
    rows: bytes
    copied: bytes
    values: list[Key]
    local_ranks: int = 0
    nbytes: int = 0
    moves: RankMoves | None = None


class AssemblyReply(msgspec.Struct, frozen=True, tag="assembly-reply"):
    """Says whether the ranks join cut tensors. The rank does so or not, writes and reports.

    Attributes:
        join: False if some rank cannot: then each rank writes its own boxes.
    """

    join: bool


class DescribeRequest(msgspec.Struct, frozen=True, tag="describe-request"):
    """Asks a rank for its `PlanDescription`: it has written by an unknown plan, or its table has an unknown form."""


class RewriteRequest(msgspec.Struct, frozen=True, tag="rewrite-request"):
    """Asks a rank to remove its files, to write by another plan and to report again.

    Attributes:
        plan: part of the new plan.
        reason: cause for which the removed files are of no use.
    """

    plan: PlanResponse
    reason: str


class SamplesRequest(msgspec.Struct, frozen=True, tag="samples-request"):
    """Asks a rank for the sampled elements of boxes whose copies differ.

    Attributes:
        rows: int64 numbers of these boxes among those of the rank, as bytes.
    """

    rows: bytes


class ValuesRequest(msgspec.Struct, frozen=True, tag="values-request"):
    """Asks a rank to write more values, which no longer equal the copy that stood for them, and to report again.

    Attributes:
        keys: keys of the values.
    """

    keys: list[Key]


class CommitResult(msgspec.Struct, frozen=True, tag="commit-result"):
    """Reports to a rank that the checkpoint is committed; the save is over.

    Attributes:
        drift: largest relative difference between the copies of a replicated tensor by its escaped name.
        fingerprints: fingerprint of each state by its escaped name, if they are wanted.
        view: `SaveReport.view`.
    """

    drift: dict[str, float] = {}
    fingerprints: dict[str, str] = {}
    view: Literal["", "index", "files"] = ""


class SaveFailed(msgspec.Struct, frozen=True, tag="save-failed"):
    """Reports to a rank that the save has failed; the save is over.

    Attributes:
        failure: the failure.
        commit_unknown: True if the catalog of this save may be in place all the same, so no rank may remove its files.
    """

    failure: Failure
    commit_unknown: bool = False


RankMessage = PlanRequest | PlanDescription | AssemblyRequest | WriteReport | RankSamples
Reply = (
    PlanResponse
    | DescribeRequest
    | AssemblyReply
    | RewriteRequest
    | SamplesRequest
    | ValuesRequest
    | CommitResult
    | SaveFailed
)
#: The step that each reply asks a rank for.
NEXT_STEP: dict[type[Any], SaveStep] = {
    PlanResponse: SaveStep.REPORT,
    DescribeRequest: SaveStep.DESCRIPTION,
    AssemblyReply: SaveStep.ASSEMBLY,
    RewriteRequest: SaveStep.REPORT,
    SamplesRequest: SaveStep.SAMPLES,
    ValuesRequest: SaveStep.VALUES,
}
_decoder = msgspec.msgpack.Decoder(RankMessage | Reply)


def tag(number: int, step: SaveStep) -> str:
    """Name the message that a rank sends in one step of save `number`."""
    return f"save/{number}/{step}"


def reply_tag(number: int, step: SaveStep) -> str:
    """Name the coordinator's reply to that message."""
    return f"save/{number}/{step}/reply"


def encode(message: RankMessage | Reply) -> bytes:
    """Encode a message for another rank."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Any:
    """Decode what `encode` made.

    Raises:
        PeerLostError: it is no message of this version.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerLostError(f"another rank sent what is not a message of this version: {error}") from error


def escaped(key: TensorKey) -> Key:
    """Escape a key for a message: Python strings may hold what UTF-8 may not."""
    return escape(key.state), escape(key.fqn), escape(key.slot)


def unescaped(key: Key) -> TensorKey:
    """Invert `escaped`."""
    return TensorKey(*map(unescape, key))
