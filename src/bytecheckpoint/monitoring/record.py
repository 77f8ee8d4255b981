"""Describe one operation of one rank, as a message to rank 0."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping

import msgspec
import numpy as np

from bytecheckpoint.handles import LoadReport, SaveReport
from bytecheckpoint.tracing.operation import Operation

__all__ = [
    "LEVELS",
    "ROW",
    "RankRecord",
    "error_text",
    "make_record",
    "path_without_secrets",
    "step_of",
    "without_secrets",
]

#: Levels of rows: a rank's whole operation, one of its phases, the sum of all spans of one name, one span, one tensor
#: whose copies drifted apart by rounding.
LEVELS = ("rank", "phase", "total", "span", "drift")
#: One row. `name`, `phase` and `subject` are indices of strings; `begin` is seconds since the operation began.
ROW = np.dtype(
    [
        ("level", "<u1"), ("failed", "<u1"), ("name", "<u2"), ("phase", "<u2"), ("subject", "<u2"),
        ("begin", "<f4"), ("seconds", "<f4"), ("count", "<i8"), ("nbytes", "<i8"),
    ]
)  # fmt: skip

_STEP = re.compile(r"step[_-]?([0-9]{1,18})/*$")
#: A password may hold a "/"; a port does not begin one.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s'\"]+|[^/\s:@'\"]+:(?!\d{1,5}/)[^\s'\"]*)@")
#: The same with a password; without one, as in abfs://container@account, the part before the "@" is no secret.
_PASSWORD = re.compile(r"(?<=://)[^/\s:@'\"]*:(?:[^/\s'\"]*|(?!\d{1,5}/)[^\s'\"]*)@")
#: The query of a URL; some libraries write "url: /bucket/key?X-Amz-Signature=...".
_QUERY = re.compile(r"((?:://|\burl: ?)[^\s'\"?]*)\?[^\s'\"]*")
_TOKEN = re.compile(r"(?i)\b(bearer|authorization['\"]?:\s*['\"]?\w+)\s+[\w.~+/-]{8,}=*")
#: "password=...", "X-Amz-Signature=...", "X-ClickHouse-Key: ...", which errors quote from connections and requests.
_NAMED = re.compile(
    r"(?i)((?:password|passwd|secret|token|signature|\bsig|(?:access|account|api|secret)[_-]?key)=|"
    r"\bx-[\w-]{1,40}(?:key|token)['\"]?:\s?)['\"]?[^\s'\",;&)]+"
)
#: Most characters of an error. The rank's log has the rest.
_LONGEST_ERROR = 4000
#: Most tensors whose drift is described; strings of a record have numbers of 16 bits.
_MOST_DRIFTED = 10_000


class RankRecord(msgspec.Struct, frozen=True, array_like=True):
    """A report of one rank about one operation.

    Attributes:
        kind: "save" or "load".
        number: count of operations of this kind, equal on all ranks.
        path: path of the checkpoint, without credentials.
        step: training step; None if unknown.
        began: seconds since 1970, by this machine's clock.
        rank: number of the rank.
        host: name of the rank's machine.
        mesh: coordinate of the rank by mesh dimension.
        attempt: number of attempts: a load starts again if another job replaces the checkpoint.
        error: error of the rank, "" for a success.
        stage: phase that failed.
        seconds: time from the call to the end.
        blocking_seconds: time for which the caller waited.
        nbytes: number of bytes written to the storage, or read from it.
        strings: strings that the rows refer to.
        rows: array of `ROW`, as bytes.
    """

    kind: str
    number: int
    path: str
    step: int | None
    began: float
    rank: int
    host: str
    mesh: dict[str, int]
    attempt: int
    error: str
    stage: str
    seconds: float
    blocking_seconds: float
    nbytes: int
    strings: list[str]
    rows: bytes


def path_without_secrets(path: str) -> str:
    """Return the path of a checkpoint without password and query. It stays usable, as no storage takes these."""
    return _QUERY.sub(r"\1", _PASSWORD.sub("", path))


def without_secrets(text: str) -> str:
    """Return `text` without user names, passwords and queries of URLs, and without passwords and tokens of requests."""
    text = _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))
    return _NAMED.sub(r"\1...", _TOKEN.sub(r"\1 ...", text))


def error_text(error: BaseException) -> str:
    """Return an error as one line of limited length, without secrets."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()  # file names need not be UTF-8
    ending = " ..." if len(text) > _LONGEST_ERROR else ""
    return without_secrets(" ".join(text[:_LONGEST_ERROR].split())) + ending


def step_of(path: str) -> int | None:
    """Return the training step in the name of a checkpoint's folder; None if there is none."""
    found = _STEP.search(path)
    return int(found[1]) if found else None


def make_record(
    operation: Operation,
    rank: int,
    host: str,
    mesh: Mapping[str, int],
    outcome: SaveReport | LoadReport | BaseException,
    limit: int,
) -> RankRecord:
    """Describe an operation that has ended.

    Args:
        operation: this rank's part of the operation.
        rank: number of this rank.
        host: name of this rank's machine.
        mesh: coordinate of this rank by mesh dimension.
        outcome: report of the operation, or the error that ended it.
        limit: most spans to describe; the longest are chosen.
    """
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    spans = operation.longest_spans()
    if len(spans) > limit:
        shortest = sorted((s.seconds for s in spans), reverse=True)[limit - 1] if limit else np.inf
        spans = [s for s in spans if s.seconds >= shortest][:limit]
    ends = [part.begin + part.seconds for part in operation.phases]

    def phase_at(moment: float) -> str:
        place = bisect.bisect_right(ends, moment)
        return operation.phases[place].name if place < len(ends) else operation.phase

    rows: list[tuple[float | int, ...]] = [
        (level, part.failed, number(part.name), number(phase_at(part.begin + part.seconds / 2)), number(part.subject),
         part.begin - operation.begin, part.seconds, 1, part.nbytes)
        for level, parts in ((1, operation.phases), (3, spans)) for part in parts
    ]  # fmt: skip
    rows += [
        (2, 0, number(name), number(""), number(""), 0.0, total.seconds, total.times, total.nbytes)
        for name, total in operation.totals().items()
    ]
    path, error, seconds, blocking, nbytes = operation.path, "", operation.seconds(), 0.0, 0
    if isinstance(outcome, BaseException):
        error = error_text(outcome)
    else:
        path, seconds = outcome.path, outcome.total_seconds
        if isinstance(outcome, SaveReport):
            blocking, nbytes = outcome.blocking_seconds, outcome.bytes_written
            most = sorted(outcome.replica_drift.items(), key=lambda item: -item[1])[:_MOST_DRIFTED]
            rows += [
                (4, 0, number("replica drift"), number("commit"), number(name), 0.0, 0.0, max(1, round(part * 1e9)), 0)
                for name, part in most
                if rank == 0  # all ranks have the same ones
            ]
        else:
            blocking, nbytes = seconds, outcome.bytes_read  # the caller of a load waits for all of it
    return RankRecord(
        kind=operation.kind,
        number=operation.number,
        path=path_without_secrets(path),
        step=operation.step if operation.step is not None else step_of(path),
        began=operation.began,
        rank=rank,
        host=host,
        mesh=dict(mesh),
        attempt=operation.attempt,
        error=error,
        stage=operation.phase if error else "",
        seconds=seconds,
        blocking_seconds=blocking,
        nbytes=nbytes,
        strings=[without_secrets(text) for text in numbers],
        rows=np.array(rows, ROW).tobytes(),
    )
