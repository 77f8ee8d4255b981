"""The global save plan: which rank writes which box, and where (ByteCheckpoint, sections 3.3 and 4.1).

Every rank describes its shards as a `LocalTable`. The coordinator joins all tables, assigns each replicated box to its
least loaded holder, and lays out the files. All data are columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.planning.balance import assign
from bytecheckpoint.planning.coverage import first_gap, not_tiled
from bytecheckpoint.planning.replicas import group_equal
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import escape
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.tuning import tuning

__all__ = ["LocalTable", "SavePlan", "TensorRecord", "all_rows", "describe", "file_bounds", "plan_save"]


class LocalTable(msgspec.Struct, frozen=True):
    """The shards of one rank as columns; row i is the rank's i-th shard.

    Attributes:
        tensors: one `TensorRecord` for each shard in msgpack, in pieces: one for each run of shards of one kind. Ranks that
            hold the same tensors of a kind send the same bytes, which the coordinator decodes once.
        ndims: number of dimensions of each row, int32 [n] as bytes.
        boxes: global shape, offsets and lengths of row after row, `3 * ndims[i]` numbers each, int64 as bytes.
        repeats: number of rows that each record stands for, int64 as bytes; empty if each stands for one.
    """

    tensors: tuple[bytes, ...]
    ndims: bytes
    boxes: bytes
    repeats: bytes = b""


class TensorRecord(msgspec.Struct, array_like=True, frozen=True):
    """A tensor's properties in the catalog, without its boxes. Names are escaped (`names.escape`) for messages."""

    kind: str
    fqn: str
    slot: str
    dtype: str
    requires_grad: bool
    device: str
    aliases: tuple[str, ...]

    @property
    def key(self) -> TensorKey:
        """The key of the tensor, escaped."""
        return TensorKey(self.kind, self.fqn, self.slot)


def describe(shards: Sequence[LiveShard]) -> LocalTable:
    """Return the table of one rank's shards."""
    pieces = []
    for kind, run in groupby(shards, lambda s: s.key.kind):
        name = escape(kind)
        records = [
            TensorRecord(
                name,
                escape(s.key.fqn),
                escape(s.key.slot),
                s.dtype,
                s.requires_grad,
                s.data.device.type,
                tuple(map(escape, s.aliases)),
            )
            for s in run
        ]
        pieces.append(msgspec.msgpack.encode(records))
    ndims = np.fromiter((len(s.global_shape) for s in shards), np.int32, len(shards))
    rows = np.fromiter((s.rows for s in shards), np.int64, len(shards))
    if (rows == 1).all():
        return LocalTable(tuple(pieces), ndims.tobytes(), _box_numbers(shards, 3 * int(ndims.sum())))
    boxes = [_fragment_numbers(s) if s.fragments else _box_numbers([s], 3 * len(s.global_shape)) for s in shards]
    return LocalTable(tuple(pieces), np.repeat(ndims, rows).tobytes(), b"".join(boxes), rows.tobytes())


def _box_numbers(shards: Sequence[LiveShard], count: int) -> bytes:
    numbers = (x for s in shards for part in (s.global_shape, s.offsets, s.lengths) for x in part)
    return np.fromiter(numbers, np.int64, count).tobytes()


def _fragment_numbers(shard: LiveShard) -> bytes:
    found = shard.fragments
    assert found is not None
    shapes = np.broadcast_to(np.array(shard.global_shape, np.int64), found.offsets.shape)
    return np.concatenate([shapes, found.offsets, found.lengths], axis=1).tobytes()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of all ranks. Its rows are stored shards, sorted by rank, kind, part, then place in the file.

    Attributes:
        tensors: every distinct tensor.
        shapes: global shape of each tensor, padded with 1, int64 [t, d].
        ndims: number of dimensions of each tensor, int64 [t].
        boxes: box of each row; `boxes.tensor` numbers `tensors`.
        rank: the rank that writes each row, int64 [n].
        local: index of each row among the shards of the rank that writes it, int64 [n].
        file: number of each row's file, int64 [n].
        offset: byte offset of each row in its file's data section, int64 [n].
        nbytes: bytes of each row, int64 [n].
        file_rank: the rank that writes each file, int64 [f].
        file_kind: kind of each file, [f].
        file_part: part number of each file (a rank splits a file of very many tensors), int64 [f].
        aliases: further names of tied tensors: kind -> alias -> FQN.
    """

    tensors: list[TensorRecord]
    shapes: Int64s
    ndims: Int64s
    boxes: BoxTable
    rank: Int64s
    local: Int64s
    file: Int64s
    offset: Int64s
    nbytes: Int64s
    file_rank: Int64s
    file_kind: list[str]
    file_part: Int64s
    aliases: dict[str, dict[str, str]]

    def locals_of(self, rank: int) -> Int64s:
        """Return the indexes of the shards that `rank` writes, in file order."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1])  # rows are sorted by rank
        return self.local[low:high]


def all_rows(tables: Sequence[LocalTable]) -> tuple[list[TensorRecord], BoxTable]:
    """Return every distinct tensor, and the boxes of all ranks' rows, rank after rank."""
    tensors, row_tensor = _join_tensors(tables)
    return tensors, _boxes(tables, np.concatenate(row_tensor))[2]


def plan_save(tables: Sequence[LocalTable], fixed: Mapping[int, Int64s] | None = None) -> SavePlan:
    """Plan a save: assign each distinct box to one rank and lay out the files.

    Args:
        tables: the table of each rank, at least one.
        fixed: rank -> the indexes of the shards that it has already written by an older plan. The other ranks write
            the remaining boxes.

    Raises:
        IncompatibleCheckpointError: ranks disagree about a tensor's shape or dtype, or their boxes leave a hole in a
            tensor or overlap without being equal.
    """
    tensors, row_tensor = _join_tensors(tables)
    counts = [len(t) for t in row_tensor]
    row_rank = np.repeat(np.arange(len(tables)), counts)
    row_local = np.concatenate([np.arange(c) for c in counts])
    tensor = np.concatenate(row_tensor)
    row_shape, row_ndim, boxes = _boxes(tables, tensor)
    shapes, ndims = _shapes_of(tensors, tensor, row_shape, row_ndim, row_rank)

    element = np.array([itemsize(t.dtype) for t in tensors], np.int64)
    group = group_equal(boxes)
    volume = boxes.volumes()
    nbytes = volume * element[tensor]
    written = _written(group, row_rank, row_local, nbytes, len(tables), fixed or {})
    _check_cover(tensors, shapes, ndims, boxes.take(written), volume[written], row_tensor)

    kinds = sorted({t.kind for t in tensors})
    kind_code = np.array([kinds.index(t.kind) for t in tensors], np.int64)
    rows = written[_file_order(tensors, row_rank[written], tensor[written])]
    rank, kind = row_rank[rows], kind_code[tensor[rows]]
    part = _parts(rank, kind)
    file, offset, start = _lay_out(rank, kind, part, nbytes[rows])
    aliases: dict[str, dict[str, str]] = {}
    for record in tensors:
        for alias in record.aliases:
            aliases.setdefault(record.kind, {})[alias] = record.fqn
    return SavePlan(
        tensors=tensors,
        shapes=shapes,
        ndims=ndims,
        boxes=boxes.take(rows),
        rank=rank,
        local=row_local[rows],
        file=file,
        offset=offset,
        nbytes=nbytes[rows],
        file_rank=rank[start],
        file_kind=[kinds[k] for k in kind[start]],
        file_part=part[start],
        aliases=aliases,
    )


def _written(
    group: Int64s,
    row_rank: Int64s,
    row_local: Int64s,
    nbytes: Int64s,
    world_size: int,
    fixed: Mapping[int, Int64s],
) -> Int64s:
    """Return the rows to write, ascending: one row of each group of equal boxes, held by its least loaded holder."""
    groups = int(group.max(initial=-1)) + 1
    group_bytes = np.zeros(groups, np.int64)
    group_bytes[group] = nbytes
    if fixed:
        may_write = _may_write(fixed, group, row_rank, row_local)
        owner = np.full(groups, -1, np.int64)
        present, compact = np.unique(group[may_write], return_inverse=True)
        owner[present] = assign(compact.reshape(-1), row_rank[may_write], group_bytes[present], world_size)
        written = np.flatnonzero(may_write & (owner[group] == row_rank))
    else:
        owner = assign(group, row_rank, group_bytes, world_size)
        written = np.flatnonzero(owner[group] == row_rank)
    # A rank may hold a box in two rows (a tensor in two modules of a list); the first row is written.
    written_group = group[written]
    first = np.empty(groups, np.int64)
    first[written_group[::-1]] = written[::-1]
    kept: Int64s = written[first[written_group] == written]
    return kept


def _may_write(fixed: Mapping[int, Int64s], group: Int64s, row_rank: Int64s, row_local: Int64s) -> Mask:
    """Return which rows may be chosen although some ranks have already written theirs."""
    allowed = np.ones(len(group), bool)
    done = np.zeros(len(group), bool)
    for rank, rows in fixed.items():
        of_rank = row_rank == rank
        allowed[of_rank] = False
        done |= of_rank & np.isin(row_local, rows)
    taken = np.zeros(int(group.max(initial=-1)) + 1, bool)
    taken[group[done]] = True
    return np.where(taken[group], done, allowed)


def _file_order(tensors: Sequence[TensorRecord], rank: Int64s, tensor: Int64s) -> Int64s:
    """Return the stable permutation that sorts rows by (rank, kind, item size descending, dtype)."""
    sort_keys = [(t.kind, -itemsize(t.dtype), t.dtype) for t in tensors]
    place = {key: i for i, key in enumerate(sorted(set(sort_keys)))}
    places = np.array([place[key] for key in sort_keys], np.int64)
    return np.argsort(rank * len(place) + places[tensor], kind="stable")


def _join_tensors(tables: Sequence[LocalTable]) -> tuple[list[TensorRecord], list[NDArray[np.int64]]]:
    """Return every distinct tensor, and for each rank the tensor number of each of its rows."""
    tensors: list[TensorRecord] = []
    number_of: dict[TensorKey, int] = {}
    seen: dict[bytes, NDArray[np.int64]] = {}
    decode = msgspec.msgpack.Decoder(list[TensorRecord]).decode

    def numbers_of(piece: bytes, rank: int) -> NDArray[np.int64]:
        numbers = []
        for record in decode(piece):
            number = number_of.setdefault(record.key, len(tensors))
            if number == len(tensors):
                tensors.append(record)
            elif tensors[number].dtype != record.dtype:
                raise IncompatibleCheckpointError(
                    f"{record.key} is {record.dtype} on rank {rank} and {tensors[number].dtype} elsewhere; "
                    f"one tensor has one dtype"
                )
            elif set(record.aliases) - set(tensors[number].aliases):
                merged = tuple(dict.fromkeys((*tensors[number].aliases, *record.aliases)))
                tensors[number] = msgspec.structs.replace(tensors[number], aliases=merged)
            numbers.append(number)
        return np.array(numbers, np.int64)

    rows = []
    for rank, table in enumerate(tables):
        parts = []
        for piece in table.tensors:
            if piece not in seen:
                seen[piece] = numbers_of(piece, rank)
            parts.append(seen[piece])
        found = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        rows.append(np.repeat(found, np.frombuffer(table.repeats, np.int64)) if table.repeats else found)
    return tensors, rows


def _boxes(tables: Sequence[LocalTable], tensor: Int64s) -> tuple[Int64s, Int64s, BoxTable]:
    """Return the global shape of every row (padded with 1), its number of dimensions, and its box."""
    ndims = np.concatenate([np.frombuffer(t.ndims, np.int32) for t in tables]).astype(np.int64)
    flat = np.concatenate([np.frombuffer(t.boxes, np.int64) for t in tables])
    width = max(int(ndims.max(initial=0)), 1)
    begin = np.cumsum(3 * ndims) - 3 * ndims
    parts = [np.full((len(ndims), width), padding, np.int64) for padding in (1, 0, 1)]
    for count in range(1, width + 1):
        rows = np.flatnonzero(ndims == count)
        if len(rows) == len(ndims):
            numbers = flat.reshape(-1, 3 * count)
        else:
            numbers = flat[begin[rows][:, None] + np.arange(3 * count)]
        for which, part in enumerate(parts):
            part[rows, :count] = numbers[:, which * count : (which + 1) * count]
    return parts[0], ndims, BoxTable(tensor, parts[1], parts[2])


def _shapes_of(
    tensors: list[TensorRecord], tensor: Int64s, row_shape: Int64s, row_ndim: Int64s, row_rank: Int64s
) -> tuple[Int64s, Int64s]:
    """Return every tensor's global shape (padded with 1) and number of dimensions; all its rows must agree."""
    ndims = np.zeros(len(tensors), np.int64)
    ndims[tensor] = row_ndim
    shapes = np.ones((len(tensors), row_shape.shape[1]), np.int64)
    shapes[tensor] = row_shape
    differs = ndims[tensor] != row_ndim
    for agreed, of_row in zip(shapes.T, row_shape.T, strict=True):
        differs |= agreed[tensor] != of_row
    if differs.any():
        row = int(differs.argmax())
        given = tuple(row_shape[row, : row_ndim[row]].tolist())
        agreed_shape = tuple(shapes[tensor[row], : ndims[tensor[row]]].tolist())
        raise IncompatibleCheckpointError(
            f"{tensors[int(tensor[row])].key} has global shape {given} on rank {int(row_rank[row])} and {agreed_shape} "
            f"elsewhere; give parts of a tensor as DTensors, and different tensors different names"
        )
    return shapes, ndims


def _check_cover(
    tensors: list[TensorRecord],
    shapes: Int64s,
    ndims: Int64s,
    boxes: BoxTable,
    volume: Int64s,
    ranks: Sequence[Int64s],
) -> None:
    """Check that the written boxes tile each tensor; a load would find a hole only when the data are lost.

    `ranks` has the tensors of each rank's rows.
    """
    filled = np.zeros(len(tensors), np.int64)
    np.add.at(filled, boxes.tensor, volume)
    total = np.prod(shapes, axis=1)
    wrong = np.flatnonzero(filled != total)
    if len(wrong):
        first = int(wrong[0])
        what = "overlap without being equal" if filled[first] > total[first] else "leave a hole"
        raise IncompatibleCheckpointError(
            f"the shards of {tensors[first].key} on all ranks {what}: {int(filled[first])} elements for a tensor of "
            f"{int(total[first])}; {len(wrong)} tensors are affected{_ranks_without(tensors[first].kind, tensors, ranks)}"
        )
    untiled = not_tiled(shapes, boxes)
    if len(untiled):
        first = int(untiled[0])
        of_tensor, ndim = boxes.tensor == first, int(ndims[first])
        shape = shapes[first, :ndim]
        gap = first_gap(np.zeros_like(shape), shape, boxes.offsets[of_tensor, :ndim], boxes.lengths[of_tensor, :ndim])
        raise IncompatibleCheckpointError(
            f"the shards of {tensors[first].key} on all ranks overlap without being equal and leave a hole elsewhere: the "
            f"first hole (offsets, lengths) is {gap}; {len(untiled)} tensors are affected"
        )


def _ranks_without(kind: str, tensors: list[TensorRecord], ranks: Sequence[Int64s]) -> str:
    """Name the ranks that hold nothing of a kind, if others do: they may have been given other states."""
    of_kind = np.array([t.kind == kind for t in tensors], bool)
    without = [str(rank) for rank, rows in enumerate(ranks) if not of_kind[rows].any()]
    return f"; without anything of {kind!r}: rank {listed(without)} (give all ranks the same states)" if without else ""


def _parts(rank: Int64s, kind: Int64s) -> Int64s:
    """Return the part number of each row: files with too many entries are split."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (kind[1:] != kind[:-1])
    begin = np.flatnonzero(new)
    return (
        np.arange(len(rank)) - np.repeat(begin, np.diff(np.append(begin, len(rank))))
    ) // tuning().max_entries_per_file


def _lay_out(rank: Int64s, kind: Int64s, part: Int64s, nbytes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the file number and offset of each row, and the first row of each file."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (kind[1:] != kind[:-1]) | (part[1:] != part[:-1])
    start = np.flatnonzero(new)
    file = np.cumsum(new) - 1
    before = np.cumsum(nbytes) - nbytes
    return file, before - before[start][file] if len(rank) else before, start


def file_bounds(kinds: Sequence[int] | Int64s) -> list[tuple[int, int, int, int]]:
    """Divide the rows of one rank, in the order of the plan, into files.

    Args:
        kinds: number of each row's kind.

    Returns:
        (kind, part, first row, end row) of each file.
    """
    most = tuning().max_entries_per_file
    column = np.asarray(kinds, np.int64)
    bounds: list[tuple[int, int, int, int]] = []
    ends = [*(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), len(column)] if len(column) else []
    first = 0
    for end in ends:
        for part, begin in enumerate(range(first, end, most)):
            bounds.append((int(column[first]), part, begin, min(begin + most, end)))
        first = end
    return bounds
