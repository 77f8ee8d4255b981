"""Plan which rank joins the boxes of each cut tensor of one state, so that the tensor lies whole in one file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from bytecheckpoint.planning.balance import assign
from bytecheckpoint.planning.file_order import FileOrder
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.tuning import tuning

__all__ = ["Assembly", "RankMoves", "plan_assembly"]


class RankMoves(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of an assembly: int64 columns as bytes. Boxes of the same sender, owner and round are in order.

    Attributes:
        state: escaped name of the state.
        ndim: number d of columns of offsets, and of lengths.
        rows: box of this rank in each tensor of the state that it writes, [tensors], in file order.
        kept: (place among the rank's planned rows, tensor among `rows`) of each box that stays here, [n, 2].
        sent: (place among the rank's planned rows, owner, round) of each box that another rank joins, [n, 3].
        received: (sender, round, tensor among `rows`, offsets, lengths) of each box of another rank, [n, 3 + 2 d].
    """

    state: str
    ndim: int
    rows: bytes
    kept: bytes
    sent: bytes
    received: bytes

    def columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return `rows`, `kept`, `sent` and `received` as arrays."""
        widths = (1, 2, 3, 3 + 2 * self.ndim)
        found = (self.rows, self.kept, self.sent, self.received)
        rows, kept, sent, received = (
            np.frombuffer(data, np.int64).reshape(-1, width) for data, width in zip(found, widths, strict=True)
        )
        return rows[:, 0], kept, sent, received


@dataclass(frozen=True, slots=True)
class Assembly:
    """A plan by which ranks send each other the boxes of a state before they write, so that whole tensors are written.

    Attributes:
        plan: plan of the boxes that ranks stage.
        columns: plan of the tensors that they write: in the state whole ones, in the other states the same boxes.
        state: escaped name of the state.
        row: row of `plan` of each box of the state, int64 [n], by owner, then by place of the tensor in the owner's files.
        holder: rank that stages each of these boxes, int64 [n].
        owner: rank that writes the tensor of each of these boxes, int64 [n].
        round: number of the exchange in which each box leaves its rank, int64 [n].
        tensor: number of the tensor of each box among those of the state that its owner writes, int64 [n].
        by_holder: places of these boxes, sorted by holder, int64 [n].
    """

    plan: SavePlan
    columns: SavePlan
    state: str
    row: Int64s
    holder: Int64s
    owner: Int64s
    round: Int64s
    tensor: Int64s
    by_holder: Int64s

    def moves_of(self, rank: int) -> RankMoves:
        """Return the part of one rank."""
        plan, columns, bounds = self.plan, self.columns, [rank, rank + 1]
        holder = self.holder
        first = int(np.searchsorted(plan.rank, rank))
        held = self.by_holder[slice(*np.searchsorted(holder, bounds, sorter=self.by_holder).tolist())]
        owned = np.arange(*np.searchsorted(self.owner, bounds).tolist())
        kept, sent = held[self.owner[held] == rank], held[self.owner[held] != rank]
        received = owned[holder[owned] != rank]
        written = np.arange(*np.searchsorted(columns.rank, bounds).tolist())
        state = [columns.tensors[number].state == self.state for number in columns.boxes.tensor[written].tolist()]
        boxes = plan.boxes.take(self.row[received])
        received_columns = [holder[received], self.round[received], self.tensor[received], boxes.offsets, boxes.lengths]
        return RankMoves(
            self.state,
            boxes.ndim,
            columns.local[written[np.array(state, bool)]].tobytes(),
            np.column_stack([self.row[kept] - first, self.tensor[kept]]).tobytes(),
            np.column_stack([self.row[sent] - first, self.owner[sent], self.round[sent]]).tobytes(),
            np.column_stack(received_columns).tobytes(),
        )


def plan_assembly(plan: SavePlan, state: str, world_size: int) -> Assembly | None:
    """Plan how ranks join the boxes of a state. The owner of a tensor is its holder with the fewest bytes to write.

    Args:
        plan: plan of the save.
        state: escaped name of the state.
        world_size: number of ranks.

    Returns:
        The assembly; None if no tensor of the state is cut, or if this plan has none: frozen tensors, whose files later
        saves use again, and tiles, which stand for boxes of thousands of ranks.
    """
    tensors, boxes = plan.tensors, plan.boxes
    inside = np.array([t.state == state for t in tensors], bool)[boxes.tensor]
    rows, others = np.flatnonzero(inside), np.flatnonzero(~inside)
    numbers, group, counts = np.unique(boxes.tensor[rows], return_inverse=True, return_counts=True)
    if plan.tiles is not None or (counts < 2).all() or any(tensors[number].frozen for number in numbers.tolist()):
        return None
    holder = plan.rank[rows]
    nbytes = np.zeros(len(numbers), np.int64)
    np.add.at(nbytes, group, plan.nbytes[rows])
    load = np.zeros(world_size, np.int64)
    np.add.at(load, plan.rank[others], plan.nbytes[others])
    owner = assign(group, holder, nbytes, world_size, load)
    owned = np.flatnonzero(owner[group] == holder)
    first = np.empty(len(numbers), np.int64)  # a row of the owner
    first[group[owned][::-1]] = rows[owned][::-1]

    columns = _written(plan, others, numbers, owner, plan.local[first], nbytes)
    # Numbers of the tensors among those of the state that their owner writes.
    of_state = np.array([t.state == state for t in tensors], bool)[columns.boxes.tensor]
    written, ranks = columns.boxes.tensor[of_state], columns.rank[of_state]
    place = np.empty(len(tensors), np.int64)
    place[written] = np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
    # Each owner receives about so many bytes in a round.
    incoming = np.zeros(len(tensors), np.int64)
    away = owner[group] != holder
    np.add.at(incoming, boxes.tensor[rows[away]], plan.nbytes[rows[away]])
    before = np.cumsum(incoming[written]) - incoming[written]
    number = np.empty(len(tensors), np.int64)
    number[written] = (before - before[np.searchsorted(ranks, ranks)]) // tuning().assembly_bytes
    moved = (plan.nbytes[rows] > 0) | ~away
    rows, group = rows[moved], group[moved]
    tensor = boxes.tensor[rows]
    order = np.lexsort((rows, place[tensor], owner[group]))
    rows, tensor = rows[order], tensor[order]
    holder = plan.rank[rows]
    return Assembly(
        plan=plan,
        columns=columns,
        state=state,
        row=rows,
        holder=holder,
        owner=owner[group[order]],
        round=number[tensor],
        tensor=place[tensor],
        by_holder=np.argsort(holder, kind="stable"),
    )


def _written(plan: SavePlan, others: Int64s, numbers: Int64s, owner: Int64s, local: Int64s, nbytes: Int64s) -> SavePlan:
    """Return the plan of the written tensors.

    Args:
        plan: plan of the staged boxes.
        others: rows of the other states, which stay as they are.
        numbers: numbers of the tensors that are written whole, [m].
        owner: rank that writes each of these, [m].
        local: a shard of this rank that is a box of it, [m].
        nbytes: bytes of each of these, [m].
    """
    order = FileOrder(plan.tensors)
    whole = BoxTable(numbers, np.zeros_like(plan.shapes[numbers]), plan.shapes[numbers])
    boxes = BoxTable.concat([plan.boxes.take(others), whole])
    rank = np.concatenate([plan.rank[others], owner])
    rows = np.argsort(rank * len(plan.tensors) + order.place[boxes.tensor], kind="stable")
    boxes, rank = boxes.take(rows), rank[rows]
    sizes = np.concatenate([plan.nbytes[others], nbytes])[rows]
    laid = order.files(rank, boxes.tensor, sizes)
    files = list(zip(rank[laid.first].tolist(), laid.state, laid.part.tolist(), strict=True))
    # A rank keeps the number of its files, which the headers of all of them name.
    staged = zip(plan.file_rank.tolist(), plan.file_state, plan.file_part.tolist(), strict=True)
    found = {*files}
    files += [file for file in staged if file not in found]
    return replace(
        plan,
        boxes=boxes,
        rank=rank,
        local=np.concatenate([plan.local[others], local])[rows],
        file=laid.file,
        offset=laid.offset,
        nbytes=sizes,
        file_rank=np.array([file[0] for file in files], np.int64),
        file_state=[file[1] for file in files],
        file_part=np.array([file[2] for file in files], np.int64),
    )
