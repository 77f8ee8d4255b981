"""The tables in which ranks describe their shards, and how the coordinator joins them. All data are columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.names import escape
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = [
    "LocalTable",
    "TensorRecord",
    "all_rows",
    "axes_of",
    "describe",
    "factored",
    "join_boxes",
    "join_tensors",
    "place_of",
    "row_count",
]


class LocalTable(msgspec.Struct, frozen=True):
    """The shards of one rank as columns; row i is the rank's i-th shard.

    Attributes:
        tensors: one `TensorRecord` for each shard in msgpack, in pieces: one for each run of shards of one state. Ranks
            that hold the same tensors of a state send the same bytes, which the coordinator decodes once.
        ndims: number of dimensions of each row, int32 [n] as bytes.
        boxes: global shape, offsets and lengths of row after row, `3 * ndims[i]` numbers each, int64 as bytes.
        repeats: number of rows that each record stands for, int64 as bytes; empty if each stands for one.
        axes: axis of `place` for each number among the offsets, -1 for none, int32 as bytes; empty if there is no axis.
        place: place of the rank along each axis, int64 as bytes. An offset with an axis is 0 in `boxes`; the true one is
            the place along its axis times the length in that dimension.
    """

    tensors: tuple[bytes, ...]
    ndims: bytes
    boxes: bytes
    repeats: bytes = b""
    axes: bytes = b""
    place: bytes = b""

    def form(self) -> LocalTable:
        """Return the table without the rank's place, which equals that of ranks at other places of a mesh."""
        return msgspec.structs.replace(self, place=b"")

    def form_digest(self) -> bytes:
        """Hash the form (xxh3-128)."""
        state = xxhash.xxh3_128()
        for part in (*self.tensors, self.ndims, self.boxes, self.repeats, self.axes):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def nbytes(self) -> int:
        """Return the number of bytes of all columns."""
        return sum(map(len, (*self.tensors, self.ndims, self.boxes, self.repeats, self.axes, self.place)))


class TensorRecord(msgspec.Struct, array_like=True, frozen=True):
    """A tensor's properties in the catalog, whether its file may be used again, and who writes it; without its boxes.

    Names are escaped (`names.escape`) for messages.
    """

    state: str
    fqn: str
    slot: str
    dtype: str
    requires_grad: bool
    device: str
    aliases: tuple[str, ...]
    frozen: bool = False
    from_lowest: bool = False

    @property
    def key(self) -> TensorKey:
        """The key of the tensor, escaped."""
        return TensorKey(self.state, self.fqn, self.slot)


def describe(shards: Sequence[LiveShard], *, incremental: bool = False) -> LocalTable:
    """Return the table of one rank's shards.

    Args:
        shards: the shards.
        incremental: True to mark frozen parameters, which then lie in files of their own.
    """
    pieces = []
    for state, run in groupby(shards, lambda s: s.key.state):
        name = escape(state)
        records = [
            TensorRecord(
                name,
                escape(s.key.fqn),
                escape(s.key.slot),
                s.dtype,
                s.requires_grad,
                s.data.device.type,
                tuple(map(escape, s.aliases)),
                incremental and s.frozen,
                s.from_lowest,
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


def factored(table: LocalTable) -> LocalTable:
    """Move the place of a rank in its mesh out of the boxes, so that ranks at other places have the same columns.

    A box of length l below the extent s of its tensor, at a multiple of l, is one of n = ceil(s / l) tiles of a grid in
    this dimension. All dimensions with the same number, the same n and the same tile lie along one axis. This finds the
    axes of meshes (FSDP, tensor parallelism) without a question to the framework, and is exact for any other boxes.
    """
    ndims = np.frombuffer(table.ndims, np.int32).astype(np.int64)
    if table.repeats or not len(ndims):
        return table
    numbers = np.frombuffer(table.boxes, np.int64).copy()
    of_row = np.repeat(ndims, ndims)
    dim = np.arange(len(of_row)) - np.repeat(np.cumsum(ndims) - ndims, ndims)
    at = np.repeat(3 * (np.cumsum(ndims) - ndims), ndims) + dim
    shape, offset, length = numbers[at], numbers[at + of_row], numbers[at + 2 * of_row]
    step = np.maximum(length, 1)
    moved = np.flatnonzero((length > 0) & (length < shape) & (offset % step == 0))
    if not len(moved):
        return table
    tiles, place = -(-shape[moved] // step[moved]), offset[moved] // step[moved]
    key = dim[moved]
    for column in (tiles, place):
        values, code = np.unique(column, return_inverse=True)
        key = key * len(values) + code
    _, first, axis = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # axes are numbered as they appear, at any place
    axes = np.full(len(dim), -1, np.int32)
    axes[moved] = np.argsort(order)[axis]
    numbers[(at + of_row)[moved]] = 0
    return msgspec.structs.replace(
        table, boxes=numbers.tobytes(), axes=axes.tobytes(), place=place[first[order]].tobytes()
    )


def row_count(table: LocalTable) -> int:
    """Return the number of rows."""
    return len(table.ndims) // np.dtype(np.int32).itemsize


def place_of(table: LocalTable) -> Int64s:
    """Return the place of the rank along each axis, int64 [a]."""
    return np.frombuffer(table.place, np.int64)


def axes_of(table: LocalTable, width: int) -> Int64s:
    """Return the axis of each row's dimensions, -1 for none, int64 [n, width]."""
    ndims = np.frombuffer(table.ndims, np.int32)
    axes = np.full((len(ndims), width), -1, np.int64)
    if table.axes:
        axes[np.arange(width) < ndims[:, None]] = np.frombuffer(table.axes, np.int32)
    return axes


def all_rows(
    tables: Sequence[LocalTable], chosen: Sequence[Int64s] | None = None
) -> tuple[list[TensorRecord], BoxTable]:
    """Return every distinct tensor, and the boxes of all ranks' rows, or of those chosen of each rank, rank after rank."""
    tensors, row_tensor = join_tensors(tables)
    return tensors, join_boxes(tensors, tables, row_tensor, chosen)[2]


def join_tensors(tables: Sequence[LocalTable]) -> tuple[list[TensorRecord], list[NDArray[np.int64]]]:
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
            elif tensors[number].frozen != record.frozen:
                raise IncompatibleCheckpointError(
                    f"{record.key} is {'' if record.frozen else 'not '}frozen on rank {rank}, unlike elsewhere: an "
                    "incremental save needs one requires_grad for a parameter, and incremental=True on all ranks or on none"
                )
            elif set(record.aliases) - set(tensors[number].aliases):
                merged = tuple(dict.fromkeys((*tensors[number].aliases, *record.aliases)))
                tensors[number] = msgspec.structs.replace(tensors[number], aliases=merged)
            numbers.append(number)
        return np.array(numbers, np.int64)

    rows: list[Int64s] = []
    alike: dict[tuple[bytes, ...], Int64s] = {}  # one column for all ranks that hold the same tensors
    for rank, table in enumerate(tables):
        found = alike.get(table.tensors)
        if found is None:
            for piece in table.tensors:
                if piece not in seen:
                    seen[piece] = numbers_of(piece, rank)
            found = np.concatenate([np.zeros(0, np.int64), *map(seen.__getitem__, table.tensors)])
            alike[table.tensors] = found
        rows.append(np.repeat(found, np.frombuffer(table.repeats, np.int64)) if table.repeats else found)
    return tensors, rows


def join_boxes(
    tensors: Sequence[TensorRecord],
    tables: Sequence[LocalTable],
    row_tensor: Sequence[Int64s],
    chosen: Sequence[Int64s] | None = None,
) -> tuple[Int64s, Int64s, BoxTable]:
    """Return every tensor's global shape (padded with 1) and number of dimensions, and the boxes of all rows.

    Table after table: columns of all ranks' messages, and of the shapes in them, would take more than the boxes do.

    Args:
        tensors: every distinct tensor.
        tables: the table of each rank.
        row_tensor: tensor of each row of each rank.
        chosen: rows of each rank whose boxes to return; None: all.

    Raises:
        IncompatibleCheckpointError: rows of a tensor differ in its shape.
    """
    row_ndims = [np.frombuffer(table.ndims, np.int32) for table in tables]
    width = max([1, *(int(of_rank.max(initial=0)) for of_rank in row_ndims)])
    rows = sum(map(len, row_ndims if chosen is None else chosen))
    boxes = BoxTable(np.empty(rows, np.int64), np.empty((rows, width), np.int64), np.empty((rows, width), np.int64))
    shapes, ndims = np.ones((len(tensors), width), np.int64), np.full(len(tensors), -1, np.int64)
    end = 0
    for rank, (table, of_rank, tensor) in enumerate(zip(tables, row_ndims, row_tensor, strict=True)):
        given, offsets, lengths = _columns(table, of_rank, width)
        new = ndims[tensor] < 0
        shapes[tensor[new]], ndims[tensor[new]] = given[new], of_rank[new]
        differs = (ndims[tensor] != of_rank) | (shapes[tensor] != given).any(axis=1)
        if differs.any():
            raise _shape_error(tensors, shapes, ndims, tensor, given, of_rank, int(differs.argmax()), rank)
        if chosen is not None:
            tensor, offsets, lengths = tensor[chosen[rank]], offsets[chosen[rank]], lengths[chosen[rank]]
        begin, end = end, end + len(tensor)
        boxes.tensor[begin:end], boxes.offsets[begin:end], boxes.lengths[begin:end] = tensor, offsets, lengths
    return shapes, ndims, boxes


def _columns(table: LocalTable, ndims: NDArray[np.int32], width: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return the global shape, the offsets and the lengths of each row, padded to `width`."""
    flat = np.frombuffer(table.boxes, np.int64)
    ends = 3 * np.cumsum(ndims, dtype=np.int64)
    shapes, lengths = np.ones((len(ndims), width), np.int64), np.ones((len(ndims), width), np.int64)
    offsets = np.zeros((len(ndims), width), np.int64)
    alike = len(ndims) > 0 and ndims.min() == ndims.max()  # as usual: quicker than to look for all
    for count in filter(None, np.unique(ndims[: 1 if alike else None]).tolist()):
        at = np.flatnonzero(ndims == count)
        numbers = flat.reshape(-1, 3 * count) if len(at) == len(ndims) else flat[_spans(ends[at], 3 * count)]
        shapes[at, :count] = numbers[:, :count]
        offsets[at, :count] = numbers[:, count : 2 * count]
        lengths[at, :count] = numbers[:, 2 * count :]
    if table.place:
        place = np.append(place_of(table), 0)  # the last one is that of no axis
        offsets += place[axes_of(table, width)] * lengths
    return shapes, offsets, lengths


def _spans(ends: Int64s, length: int) -> Int64s:
    return ends[:, None] + np.arange(-length, 0)


def _shape_error(
    tensors: Sequence[TensorRecord],
    shapes: Int64s,
    ndims: Int64s,
    tensor: Int64s,
    given: Int64s,
    given_ndims: NDArray[np.int32],
    row: int,
    rank: int,
) -> IncompatibleCheckpointError:
    number = int(tensor[row])
    here, elsewhere = tuple(given[row, : given_ndims[row]].tolist()), tuple(shapes[number, : ndims[number]].tolist())
    return IncompatibleCheckpointError(
        f"{tensors[number].key} has global shape {here} on rank {rank} and {elsewhere} elsewhere; give parts of a tensor "
        f"as DTensors, and different tensors different names"
    )
