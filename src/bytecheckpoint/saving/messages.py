"""What ranks tell each other during a save. Plain records in msgpack; nothing is pickled."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import CheckpointError, PeerLostError, error_from_report, error_report
from ..planning.save_plan import LocalTable
from ..representation.names import escape, unescape
from ..representation.shards import TensorKey

__all__ = [
    "MIXED_PLANS",
    "Answer",
    "Description",
    "Failure",
    "FileRecord",
    "Outcome",
    "Report",
    "Request",
    "ValueRecord",
    "decode",
    "encode",
    "escaped",
    "tag",
    "unescaped",
]

MIXED_PLANS = (
    "ranks follow different save plans: their states changed in ways that do not belong together, or some rank left "
    "out a save; the next save plans anew"
)


class ValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """A value that may differ between ranks: who it is, and what it looks like here.

    Attributes:
        key: (kind, fqn, slot).
        digest: xxh3-128 of dtype, shape and bytes.
        dtype: torch's dtype name.
        shape: its shape.
        merged: ranks' values complement each other (optimizer and module trees), so each distinct one is stored once;
            otherwise each rank's own value is, unless all are equal.
        file: index of the file that holds it among the reporting rank's files, -1 when this rank did not write it.
        offset: byte offset in that file's data section.
        nbytes: its length.
    """

    key: tuple[str, str, str]
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    merged: bool
    file: int = -1
    offset: int = 0
    nbytes: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A rank cannot go on.

    Attributes:
        rank: which one.
        stage: what it was doing.
        error: from `error_report`.
        keep: the catalog of this save may be in place all the same: nobody removes the files that it names.
    """

    rank: int
    stage: str
    error: dict[str, str]
    keep: bool = False

    @staticmethod
    def of(rank: int, stage: str, error: BaseException, *, keep: bool = False) -> Failure:
        """The failure that `error` is on `rank` in `stage`."""
        return Failure(rank, stage, error_report(error), keep)

    def as_error(self) -> CheckpointError:
        """The same error on the rank that hears of it."""
        return error_from_report(self.error, prefix=f"rank {self.rank}, {self.stage}: ")


class Request(msgspec.Struct, frozen=True, tag="request"):
    """First message of a rank that has no plan: what it holds.

    Attributes:
        url: where the checkpoint goes.
        table: its shards.
        values: its values.
        digests: with check_replicas, uint64 content hash of every row as bytes.
        dry: only plan (`prepare`).
    """

    url: str
    table: LocalTable
    values: list[ValueRecord]
    digests: bytes = b""
    dry: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What the coordinator decided for one rank.

    Attributes:
        plan: identity of the global plan.
        rows: int64 indexes of the shards that the rank writes, in file order, as bytes.
        values: keys of the values that the rank writes.
        differences: with check_replicas, keys of tensors whose copies differ.
        why_anew: to a rank that has written by a plan of its own: why it must write again.
    """

    plan: str
    rows: bytes
    values: list[tuple[str, str, str]]
    differences: list[str] = []
    why_anew: str = ""


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A finished, durable storage file."""

    name: str
    kind: str
    part: int
    values: bool
    size: int
    data_offset: int
    header_sum: int
    block_bytes: int
    sums: bytes


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A rank's files are durable.

    Attributes:
        url: where the checkpoint goes.
        plan: the global plan that the rank followed.
        files: what it wrote.
        values: all its values, written or not.
    """

    url: str
    plan: str
    files: list[FileRecord]
    values: list[ValueRecord]


class Description(msgspec.Struct, frozen=True, tag="description"):
    """What a rank holds and what of it this save has written, told where the coordinator does not know the plan.

    Attributes:
        table: its shards.
        rows: int64 indexes of the shards that it wrote, in file order, as bytes.
    """

    table: LocalTable
    rows: bytes


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """Last message of the coordinator, or a question before it.

    Attributes:
        describe: not the end yet: the rank is to send a `Description`, and goes on waiting.
        write_values: not the end yet: keys of values that the rank must still write, because they no longer equal
            the copy that was to stand for them; the rank reports once more.
    """

    describe: bool = False
    write_values: list[tuple[str, str, str]] = []


_Message = Request | Answer | Report | Description | Outcome | Failure
_decoder = msgspec.msgpack.Decoder(_Message)


def escaped(key: TensorKey) -> tuple[str, str, str]:
    """A key as it travels: Python strings may hold what UTF-8 may not."""
    return escape(key.kind), escape(key.fqn), escape(key.slot)


def unescaped(key: tuple[str, str, str]) -> TensorKey:
    """The inverse of `escaped`."""
    return TensorKey(*map(unescape, key))


def encode(message: Any) -> bytes:
    """`message` as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Any:
    """The message that `encode` made."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PeerLostError(f"another rank sent what is not a message of this version: {error}") from error


def tag(sequence: int, step: str) -> str:
    """Tag of one step of save number `sequence`."""
    return f"save/{sequence}/{step}"
