"""Describe the progress of a running save or load."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TypedDict, cast

import msgspec

from bytecheckpoint.monitoring.record import path_without_secrets, step_of
from bytecheckpoint.tracing.operation import Operation

__all__ = ["OperationProgress", "RankColumns", "RankProgress", "make_progress"]

#: Totals whose bytes count as progress.
_MOVING = {"save": ("write",), "load": ("read", "exchanged")}


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of one rank in one operation.

    Attributes:
        kind, number, path, step, rank, host: identity, the same as in `RankRecord`.
        phase: current phase; "done" after the rank's report.
        seconds: time since the operation began.
        done: number of bytes moved.
        planned: number of bytes to move; 0 until it is known.
    """

    kind: str
    number: int
    path: str
    step: int | None
    rank: int
    host: str
    phase: str
    seconds: float
    done: int
    planned: int


class RankColumns(TypedDict):
    """Columns of `RankProgress`, by name."""

    rank: list[int]
    host: list[str]
    phase: list[str]
    seconds: list[float]
    done: list[int]
    planned: list[int]


class OperationProgress(msgspec.Struct, frozen=True):
    """The progress of all ranks that have sent theirs.

    Attributes:
        operation: id of the operation.
        kind, path, step, world_size: identity, the same as in `OperationRecord`.
        began: beginning of the operation, in seconds since 1970.
        time: time of this description, in seconds since 1970.
        ended: True if the operation has ended.
        ranks: columns with one value per rank.
    """

    operation: str
    kind: str
    path: str
    step: int | None
    world_size: int
    began: float
    time: float
    ended: bool
    ranks: RankColumns

    @classmethod
    def of(cls, ranks: Sequence[RankProgress], operation: str, world_size: int, *, ended: bool) -> OperationProgress:
        """Join the progress of several ranks in one operation."""
        first, now = ranks[0], time.time()
        columns = cast(
            RankColumns, {name: [getattr(rank, name) for rank in ranks] for name in RankColumns.__annotations__}
        )
        began = now - max(rank.seconds for rank in ranks)
        return cls(operation, first.kind, first.path, first.step, world_size, began, now, ended, columns)

    @property
    def done(self) -> int:
        """Number of bytes that all ranks have moved."""
        return sum(self.ranks["done"])

    @property
    def planned(self) -> int:
        """Number of bytes to move, of the ranks that know theirs."""
        return sum(self.ranks["planned"])

    @property
    def furthest_behind(self) -> int:
        """Place of the rank that has moved the smallest part of its bytes."""
        done, planned = self.ranks["done"], self.ranks["planned"]
        return min(range(len(done)), key=lambda place: done[place] / max(planned[place], 1))

    @property
    def seconds_left(self) -> float:
        """Seconds that the slowest rank needs for the rest at its speed so far; infinite if a rank has moved nothing."""
        ranks = self.ranks
        parts = zip(ranks["seconds"], ranks["done"], ranks["planned"], strict=True)
        left = [
            seconds * (all_bytes / done - 1) if done else math.inf
            for seconds, done, all_bytes in parts
            if all_bytes > done
        ]
        return max(left, default=0.0)


def make_progress(operation: Operation, rank: int, host: str) -> RankProgress:
    """Describe the progress of this rank."""
    path = path_without_secrets(operation.path)
    moved = sum(operation.total(name).nbytes for name in _MOVING[operation.kind])
    done = min(moved, operation.planned_bytes or moved)  # repeated requests and headers count, too
    step = operation.step if operation.step is not None else step_of(path)
    return RankProgress(
        operation.kind, operation.number, path, step, rank, host,
        operation.phase, operation.seconds(), done, operation.planned_bytes,
    )  # fmt: skip
