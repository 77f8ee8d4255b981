"""How far a save or load is that still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict, cast

import msgspec

from bytecheckpoint.monitoring.record import path_without_secrets, step_of
from bytecheckpoint.tracing.operation import Operation

__all__ = ["OperationProgress", "RankColumns", "RankProgress", "make_progress"]

#: Totals that bring an operation forward.
_MOVING = {"save": ("write",), "load": ("read", "exchanged")}


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far one rank is.

    Attributes:
        kind, number, path, step, rank, host: as in `RankRecord`.
        phase: what it does; "done" when it has reported.
        seconds: since it began.
        done: bytes moved.
        planned: bytes to move; 0 until that is known.
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
    """How far all ranks are that have said so.

    Attributes:
        operation: its id, as in `OperationRecord`.
        kind, path, step, world_size: as there.
        began, time: when it began, and when this was so; seconds since 1970.
        ended: it does not run any more.
        ranks: a value per rank in each column.
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
        """Join what ranks have said of one operation."""
        first, now = ranks[0], time.time()
        columns = cast(
            RankColumns, {name: [getattr(rank, name) for rank in ranks] for name in RankColumns.__annotations__}
        )
        began = now - max(rank.seconds for rank in ranks)
        return cls(operation, first.kind, first.path, first.step, world_size, began, now, ended, columns)

    @property
    def done(self) -> int:
        """Bytes moved by all ranks."""
        return sum(self.ranks["done"])

    @property
    def planned(self) -> int:
        """Bytes to move, of the ranks that know theirs."""
        return sum(self.ranks["planned"])


def make_progress(operation: Operation, rank: int, host: str) -> RankProgress:
    """Describe how far this rank is."""
    path = path_without_secrets(operation.path)
    done = sum(operation.total(name).nbytes for name in _MOVING[operation.kind])
    step = operation.step if operation.step is not None else step_of(path)
    return RankProgress(
        operation.kind, operation.number, path, step, rank, host,
        operation.phase, operation.seconds(), done, operation.planned_bytes,
    )  # fmt: skip
