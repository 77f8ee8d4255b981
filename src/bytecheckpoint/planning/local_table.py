"""The tables in which ranks describe their shards, and how the coordinator joins them. All data are columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.names import escape
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["LocalTable", "TensorRecord", "all_rows", "describe", "join_boxes", "join_tensors"]


class LocalTable(msgspec.Struct, frozen=True):
    """The shards of one rank as columns; row i is the rank's i-th shard.

    Attributes:
        tensors: one `TensorRecord` for each shard in msgpack, in pieces: one for each run of shards of one state. Ranks
            that hold the same tensors of a state send the same bytes, which the coordinator decodes once.
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

    state: str
    fqn: str
    slot: str
    dtype: str
    requires_grad: bool
    device: str
    aliases: tuple[str, ...]

    @property
    def key(self) -> TensorKey:
        """The key of the tensor, escaped."""
        return TensorKey(self.state, self.fqn, self.slot)


def describe(shards: Sequence[LiveShard]) -> LocalTable:
    """Return the table of one rank's shards."""
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


def all_rows(tables: Sequence[LocalTable]) -> tuple[list[TensorRecord], BoxTable]:
    """Return every distinct tensor, and the boxes of all ranks' rows, rank after rank."""
    tensors, row_tensor = join_tensors(tables)
    return tensors, join_boxes(tensors, tables, row_tensor)[2]


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
    tensors: Sequence[TensorRecord], tables: Sequence[LocalTable], row_tensor: Sequence[Int64s]
) -> tuple[Int64s, Int64s, BoxTable]:
    """Return every tensor's global shape (padded with 1) and number of dimensions, and the boxes of all rows.

    Table after table: columns of all ranks' messages, and of the shapes in them, would take more than the boxes do.

    Raises:
        IncompatibleCheckpointError: rows of a tensor differ in its shape.
    """
    row_ndims = [np.frombuffer(table.ndims, np.int32) for table in tables]
    width = max([1, *(int(of_rank.max(initial=0)) for of_rank in row_ndims)])
    rows = sum(map(len, row_ndims))
    boxes = BoxTable(np.empty(rows, np.int64), np.zeros((rows, width), np.int64), np.ones((rows, width), np.int64))
    shapes, ndims = np.ones((len(tensors), width), np.int64), np.full(len(tensors), -1, np.int64)
    end = 0
    for rank, (table, of_rank, tensor) in enumerate(zip(tables, row_ndims, row_tensor, strict=True)):
        begin, end = end, end + len(of_rank)
        boxes.tensor[begin:end] = tensor
        flat = np.frombuffer(table.boxes, np.int64)
        ends = 3 * np.cumsum(of_rank, dtype=np.int64)
        given = np.ones((len(of_rank), width), np.int64)
        alike = len(of_rank) > 0 and of_rank.min() == of_rank.max()  # as usual: quicker than to look for all
        for count in filter(None, np.unique(of_rank[: 1 if alike else None]).tolist()):
            at = np.flatnonzero(of_rank == count)
            numbers = flat.reshape(-1, 3 * count) if len(at) == len(of_rank) else flat[_spans(ends[at], 3 * count)]
            given[at, :count] = numbers[:, :count]
            boxes.offsets[begin + at, :count] = numbers[:, count : 2 * count]
            boxes.lengths[begin + at, :count] = numbers[:, 2 * count :]
        new = ndims[tensor] < 0
        shapes[tensor[new]], ndims[tensor[new]] = given[new], of_rank[new]
        differs = (ndims[tensor] != of_rank) | (shapes[tensor] != given).any(axis=1)
        if differs.any():
            raise _shape_error(tensors, shapes, ndims, tensor, given, of_rank, int(differs.argmax()), rank)
    return shapes, ndims, boxes


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
