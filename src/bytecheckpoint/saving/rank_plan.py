"""Keep one rank's part of a plan: the files that it writes, and for which values another rank's copy stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.engine.staging import KnownTargets
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.planning.local_table import LocalTable, all_rows
from bytecheckpoint.planning.replicas import group_equal, repeated_rows
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving.capture import CapturedState, Value
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, lay_out_rows
from bytecheckpoint.saving.messages import PlanResponse, unescaped
from bytecheckpoint.saving.rank_assembly import RankAssembly, make_rank_assembly

__all__ = ["AgreedPlan", "RankImage", "RankPlan", "ValueShares", "make_rank_plan"]


@dataclass(frozen=True, slots=True)
class RankImage:
    """The planned shards that one rank writes.

    Attributes:
        rows: numbers of their boxes among the rank's boxes, in file order, int64.
        sources: places of the elements of the image's tensors: number of a shard, and the first and end of its boxes.
        files: files of the shards, with places in the image.
        targets: places of the shards in the staging pool.
    """

    rows: Int64s
    sources: list[tuple[int, int, int]]
    files: list[PlannedFile]
    targets: KnownTargets


@dataclass(frozen=True, slots=True)
class KnownCopies:
    """The copies of one rank's boxes.

    Attributes:
        here: pairs of boxes of this rank that are one box of one tensor.
        elsewhere: numbers of the boxes that other ranks may hold too, int64.
    """

    here: list[tuple[int, int]]
    elsewhere: Int64s


@dataclass(frozen=True, slots=True)
class ValueShares:
    """The values of one rank at the time of the plan.

    Attributes:
        written: keys of the values that this rank writes; other ranks write the others.
        known: keys of all values. A value that is not among them is written.
    """

    written: frozenset[TensorKey]
    known: frozenset[TensorKey]

    def to_write(self, values: Sequence[Value]) -> list[Value]:
        """Return the values that this rank writes."""
        return [value for value in values if value.key in self.written or value.key not in self.known]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of a global plan. It holds for all saves of shards with the same table.

    Attributes:
        name: name of the global plan.
        table: shards that the plan was made for.
        image: planned shards that this rank writes.
        values: values that this rank writes.
        copies: copies of this rank's boxes.
        nbytes: bytes of the tensors that all ranks write.
        spared: bytes of this rank's shards that others write, because they hold the same.
        assembly: cut tensors that this rank joins and writes whole, if all ranks can; None if none are joined.
        compared: True if a save by this plan was committed, so copies on other ranks were compared.
    """

    name: str
    table: LocalTable
    image: RankImage
    values: ValueShares
    copies: KnownCopies
    nbytes: int
    spared: int
    assembly: RankAssembly | None = None
    compared: bool = False

    def forget_targets(self) -> None:
        """Drop the views of the staging pool, which keep its memory alive."""
        self.image.targets.forget()


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """The plan of one save on one rank, and the state that it is for.

    Attributes:
        captured: live objects.
        key: key of the plan in the plan cache.
        plan: this rank's part.
        cached: True if the plan of an earlier save is used.
        layout: on rank 0, JSON that describes how the objects are distributed, and what their configurations say. The plan
            holds for any objects with equal tensors.
    """

    captured: CapturedState
    key: bytes
    plan: RankPlan
    cached: bool
    layout: bytes


def make_rank_plan(captured: CapturedState, table: LocalTable, origin: FileOrigin, response: PlanResponse) -> RankPlan:
    """Lay out the files that the coordinator's response assigns to this rank.

    Args:
        captured: live objects of this rank.
        table: table of its shards.
        origin: origin of the files.
        response: the coordinator's response.
    """
    rows = np.frombuffer(response.rows, np.int64)
    with gc_paused():
        files, sources = lay_out_rows(captured.shards, rows, origin, incremental=captured.incremental)
        moves = response.moves
        assembly = None if moves is None else make_rank_assembly(captured.shards, files, origin, moves)
    nbytes = sum(shard.data.nbytes for shard in captured.shards)
    return RankPlan(
        name=response.plan,
        table=table,
        image=RankImage(rows, sources, files, KnownTargets(len(files))),
        values=ValueShares(
            frozenset(unescaped(value) for value in response.values), frozenset(v.key for v in captured.values)
        ),
        copies=KnownCopies(repeated_rows(group_equal(all_rows([table])[1])), np.frombuffer(response.copied, np.int64)),
        nbytes=response.nbytes,
        spared=nbytes - sum(file.image.nbytes for file in files),
        assembly=assembly,
    )
