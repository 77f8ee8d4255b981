"""Plan which rank joins the boxes of each tensor of one state, so that a tensor of its files lies whole in one of them.

The tensors of the files are those of the state, or those of another program that consist of parts of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from bytecheckpoint.planning.balance import assign
from bytecheckpoint.planning.file_order import FileOrder
from bytecheckpoint.planning.file_tensors import FileTensors, whole_tensors
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.planning.local_table import TensorRecord
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.boxes import BoxTable, Int64s, is_one_run, row_major
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.storage_file import ViewTensor
from bytecheckpoint.tuning import tuning

__all__ = ["Assembly", "RankMoves", "plan_assembly"]


class RankMoves(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of an assembly: int64 columns as bytes. Pieces of the same sender, owner and round are in order.

    A piece is a part of a staged box whose elements follow each other there. Offsets count from those of the written box.

    Attributes:
        state: escaped name of the state.
        ndim: number d of columns of offsets, and of lengths.
        rows: (shard of this rank, offsets, lengths) of each box of the state that it writes, in file order, [m, 1 + 2 d];
            -1 - k for a box of tensor k of `others`.
        kept: (place among the rank's planned rows, first byte there, number among `rows`, offsets, lengths) of each piece
            that stays here, [n, 3 + 2 d].
        sent: (place among the rank's planned rows, first byte there, bytes, owner, round) of each piece that another rank
            writes, [n, 5].
        received: (sender, round, number among `rows`, offsets, lengths) of each piece of another rank, [n, 3 + 2 d].
        named: tensors of another program that the last of `rows` make up, in file order.
        others: tensors, with their shapes, of which the rank holds nothing and writes boxes.
    """

    state: str
    ndim: int
    rows: bytes
    kept: bytes
    sent: bytes
    received: bytes
    named: tuple[ViewTensor, ...] = ()
    others: tuple[tuple[TensorRecord, tuple[int, ...]], ...] = ()

    def columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return `rows`, `kept`, `sent` and `received` as arrays."""
        widths = (1 + 2 * self.ndim, 3 + 2 * self.ndim, 5, 3 + 2 * self.ndim)
        found = (self.rows, self.kept, self.sent, self.received)
        rows, kept, sent, received = (
            np.frombuffer(data, np.int64).reshape(-1, width) for data, width in zip(found, widths, strict=True)
        )
        return rows, kept, sent, received


@dataclass(frozen=True, slots=True)
class _MovedPieces:
    """The pieces of staged boxes that make up the boxes to write, by owner, then by place in the owner's files.

    Attributes:
        row: row of the plan that each is a part of, int64 [n].
        start, nbytes: first byte in that row, and length, int64 [n].
        holder: rank that stages each, int64 [n].
        owner: rank that writes each, int64 [n].
        round: number of the exchange in which each leaves its rank, int64 [n].
        number: number of the written box of each among those of the state that its owner writes, int64 [n].
        offsets, lengths: place in that box, int64 [n, d].
    """

    row: Int64s
    start: Int64s
    nbytes: Int64s
    holder: Int64s
    owner: Int64s
    round: Int64s
    number: Int64s
    offsets: Int64s
    lengths: Int64s


@dataclass(frozen=True, slots=True)
class Assembly:
    """A plan by which ranks send each other the boxes of a state before they write, so that whole tensors are written.

    Attributes:
        plan: plan of the boxes that ranks stage.
        columns: plan of the rows that they write: in the state the tensors of files, in the other states the same boxes.
        state: escaped name of the state.
        files: tensors of the files of the state.
        written: row of `columns` of each box of `files`, int64 [p].
        pieces: parts of staged boxes that make up these boxes.
        by_holder: places of the pieces, sorted by holder, int64 [n].
    """

    plan: SavePlan
    columns: SavePlan
    state: str
    files: FileTensors
    written: Int64s
    pieces: _MovedPieces
    by_holder: Int64s

    def moves_of(self, rank: int) -> RankMoves:
        """Return the part of one rank."""
        plan, columns, pieces, bounds = self.plan, self.columns, self.pieces, [rank, rank + 1]
        held = self.by_holder[slice(*np.searchsorted(pieces.holder, bounds, sorter=self.by_holder).tolist())]
        owned = np.arange(*np.searchsorted(pieces.owner, bounds).tolist())
        kept, sent = held[pieces.owner[held] == rank], held[pieces.owner[held] != rank]
        received = owned[pieces.holder[owned] != rank]
        mine = np.flatnonzero(columns.rank[self.written] == rank)
        mine = mine[np.argsort(self.written[mine])]
        boxes, local = columns.boxes.take(self.written[mine]), columns.local[self.written[mine]]
        others, number = np.unique(boxes.tensor[local < 0], return_inverse=True)
        local[local < 0] = -1 - number.reshape(-1)
        first = int(np.searchsorted(plan.rank, rank))
        return RankMoves(
            self.state,
            boxes.ndim,
            np.column_stack([local, boxes.offsets, boxes.lengths]).tobytes(),
            _table(kept, pieces.row - first, pieces.start, pieces.number, pieces.offsets, pieces.lengths),
            _table(sent, pieces.row - first, pieces.start, pieces.nbytes, pieces.owner, pieces.round),
            _table(received, pieces.holder, pieces.round, pieces.number, pieces.offsets, pieces.lengths),
            self._named(self.files.tensor[mine]),
            tuple((plan.tensors[t], tuple(plan.shapes[t][: plan.ndims[t]].tolist())) for t in others.tolist()),
        )

    def _named(self, tensor: Int64s) -> tuple[ViewTensor, ...]:
        """Return the tensors of another program among those of written boxes, which are in the order of the files."""
        begins = np.flatnonzero(np.diff(tensor, prepend=-1))
        counts, names, shapes = np.diff(begins, append=len(tensor)), self.files.names, self.files.shapes
        found = zip(tensor[begins].tolist(), counts.tolist(), strict=True)
        return tuple(ViewTensor(names[t], shapes[t], count) for t, count in found if names[t])

    def named_files(self) -> dict[str, int]:
        """Return the number of the file, among those of `columns`, of each tensor of another program."""
        names, first = self.files.names, np.searchsorted(self.files.tensor, np.arange(len(self.files.names)))
        found = self.columns.file[self.written[first]].tolist()
        return {name: file for name, file in zip(names, found, strict=True) if name}


def _table(rows: Int64s, *columns: Int64s) -> bytes:
    """Return some rows of columns."""
    return np.column_stack([column[rows] for column in columns]).tobytes()


def plan_assembly(plan: SavePlan, state: str, world_size: int, files: FileTensors | None = None) -> Assembly | None:
    """Plan how ranks join the boxes of a state. The owner of a tensor is its holder with the fewest bytes to write.

    Args:
        plan: plan of the save.
        state: escaped name of the state.
        world_size: number of ranks.
        files: tensors of the files; None for those of the state.

    Returns:
        The assembly; None if all tensors lie whole without it, or if this plan has none: frozen tensors, whose files later
        saves use again; tiles, which stand for boxes of thousands of ranks.
    """
    tensors, boxes = plan.tensors, plan.boxes
    inside = np.array([t.state == state for t in tensors], bool)[boxes.tensor]
    rows, others = np.flatnonzero(inside), np.flatnonzero(~inside)
    numbers, counts = np.unique(boxes.tensor[rows], return_counts=True)
    if plan.tiles is not None or any(tensors[number].frozen for number in numbers.tolist()):
        return None
    if files is None:
        if (counts < 2).all():
            return None
        files = whole_tensors(plan, numbers)
    parts, item = files.boxes.widened(boxes.ndim), np.array([itemsize(t.dtype) for t in tensors], np.int64)
    by_tensor = rows[np.argsort(boxes.tensor[rows], kind="stable")]
    staged = boxes.take(rows)
    found = intersect(staged, parts)
    # A tensor without elements is that of the first rank that has it.
    empty = np.flatnonzero((parts.lengths == 0).any(axis=1))
    row = np.concatenate([rows[found.left], by_tensor[np.searchsorted(boxes.tensor[by_tensor], parts.tensor[empty])]])
    part = np.concatenate([found.right, empty])
    offsets, lengths = (
        np.concatenate([found.offsets, parts.offsets[empty]]),
        np.concatenate([found.lengths, parts.lengths[empty]]),
    )
    strides = row_major(boxes.lengths)[row]
    # Boxes of file tensors are runs of elements, so each piece is one in the staged box.
    assert (is_one_run(lengths, strides) | (lengths == 0).any(axis=1)).all()
    size = item[boxes.tensor[row]]
    start = np.where(lengths.all(axis=1), ((offsets - boxes.offsets[row]) * strides).sum(axis=1), 0) * size
    nbytes, holder, group = lengths.prod(axis=1) * size, plan.rank[row], files.tensor[part]
    total = np.zeros(len(files.names), np.int64)
    np.add.at(total, group, nbytes)
    load = np.zeros(world_size, np.int64)
    np.add.at(load, plan.rank[others], plan.nbytes[others])
    of_tensor = assign(group, holder, total, world_size, load)
    owner = of_tensor[files.tensor]
    # A shard of the owner describes the tensor that each written box is a part of, if it has one.
    known = boxes.tensor[rows] * world_size + plan.rank[rows]
    order, wanted = np.argsort(known, kind="stable"), parts.tensor * world_size + owner
    first = order[np.minimum(np.searchsorted(known[order], wanted), len(order) - 1)]
    local = np.where(known[first] == wanted, plan.local[rows[first]], -1)
    columns, written = _written(plan, others, files, owner, local, parts.volumes() * item[parts.tensor])

    # Number of each written box among those of the state that its owner writes.
    in_files = np.argsort(written)
    ranks = owner[in_files]
    begin = np.searchsorted(ranks, ranks)
    number, away = np.empty(len(written), np.int64), of_tensor[group] != holder
    number[in_files] = np.arange(len(ranks)) - begin
    # Each owner receives about so many bytes in a round.
    incoming = np.zeros(len(written), np.int64)
    np.add.at(incoming, part[away], nbytes[away])
    before = np.cumsum(incoming[in_files]) - incoming[in_files]
    rounds = np.empty(len(written), np.int64)
    rounds[in_files] = (before - before[begin]) // tuning().assembly_bytes
    moved = np.flatnonzero((nbytes > 0) | ~away)
    moved = moved[np.lexsort((row[moved], number[part[moved]], owner[part[moved]]))]
    at = part[moved]
    pieces = _MovedPieces(
        row=row[moved],
        start=start[moved],
        nbytes=nbytes[moved],
        holder=holder[moved],
        owner=owner[at],
        round=rounds[at],
        number=number[at],
        offsets=(offsets - parts.offsets[part])[moved],
        lengths=lengths[moved],
    )
    by_holder = np.argsort(pieces.holder, kind="stable")
    return Assembly(plan, columns, state, files, written, pieces, by_holder)


def _written(
    plan: SavePlan, others: Int64s, files: FileTensors, owner: Int64s, local: Int64s, nbytes: Int64s
) -> tuple[SavePlan, Int64s]:
    """Return the plan of the rows that are written, and the row there of each box of the tensors of files.

    Args:
        plan: plan of the staged boxes.
        others: rows of the other states, which stay as they are.
        files: tensors that are written whole.
        owner: rank that writes each of their boxes, [p].
        local: a shard of this rank that is a box of the same tensor, -1 for none, [p].
        nbytes: bytes of each of these boxes, [p].
    """
    order = FileOrder(plan.tensors)
    boxes = BoxTable.concat([plan.boxes.take(others), files.boxes])
    rank = np.concatenate([plan.rank[others], owner])
    # Tensors with names of another program lie in files without others.
    apart = np.array([bool(name) for name in files.names], bool)[files.tensor]
    none = np.zeros(len(others), np.int64)
    apart, tensor = np.concatenate([none > 0, apart]), np.concatenate([none, files.tensor])
    place = order.place[boxes.tensor]
    rows = np.lexsort((tensor, place, apart, order.state[boxes.tensor], rank))
    boxes, rank, apart, tensor = boxes.take(rows), rank[rows], apart[rows], tensor[rows]
    sizes = np.concatenate([plan.nbytes[others], nbytes])[rows]
    inside = apart & np.append(False, (tensor[1:] == tensor[:-1]) & (rank[1:] == rank[:-1]))
    laid = order.files(rank, boxes.tensor, sizes, apart | order.frozen[boxes.tensor], inside)
    found = list(zip(rank[laid.first].tolist(), laid.state, laid.part.tolist(), strict=True))
    # A rank keeps its files, which the headers of all of them name.
    staged = zip(plan.file_rank.tolist(), plan.file_state, plan.file_part.tolist(), strict=True)
    known = {*found}
    found += [file for file in staged if file not in known]
    columns = replace(
        plan,
        boxes=boxes,
        rank=rank,
        local=np.concatenate([plan.local[others], local])[rows],
        file=laid.file,
        offset=laid.offset,
        nbytes=sizes,
        file_rank=np.array([file[0] for file in found], np.int64),
        file_state=[file[1] for file in found],
        file_part=np.array([file[2] for file in found], np.int64),
    )
    written = np.empty(len(rows), np.int64)
    written[rows] = np.arange(len(rows))
    return columns, written[len(others) :]
