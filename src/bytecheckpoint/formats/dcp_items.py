"""The items of DCP: each is a zip file of torch.save, of one tensor or plain value, at any byte of a larger file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.formats.archives import is_zip, local_header_end, read_directory
from bytecheckpoint.formats.decoded import BytesReader, Decoded
from bytecheckpoint.formats.files import RangedFile, open_file, read_in_parallel
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.meanings import StorageRef, StoredTensor
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.formats.torch_save import read_object, unpickle
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major
from bytecheckpoint.storage import Storage

__all__ = ["ItemReader", "checked_boxes", "decompressed", "same_items"]

#: Bytes of an item that are read; its head is shorter, unless another program than torch wrote it.
_HEAD: Final = 1024
_PIECE: Final = 1 << 20
#: Member of an item that says how it was made.
_SERIALIZATION: Final = ".data/serialization_id"
_DESCRIPTOR = b"PK\x07\x08"


def _head_of(data: bytes) -> bytes | None:
    """Return the head of an item, up to the content of its storage; None if it has another form than torch's."""
    last = data.rfind(b"PK\x03\x04", 0, max(data.find(b"/data/0"), 0))
    end = local_header_end(data[last:]) if last > 0 else None
    return None if end is None or last + end > len(data) or local_header_end(data) is None else data[: last + end]


def _value_of(file: RangedFile, head: bytes) -> object:
    """Return the value that the head of an item describes. Raises CorruptCheckpointError: its CRC32 differs."""
    value, stop = unpickle(file, head, local_header_end(head) or 0, {})
    crc = struct.pack("<I", zlib.crc32(head[local_header_end(head) : stop]))
    if head[stop : stop + 4] != _DESCRIPTOR or head[stop + 4 : stop + 8] != crc:
        raise file.damaged("the CRC32 of an item's pickle differs")
    return value


def _check(file: RangedFile, value: object, dtype: str, shape: tuple[int, ...]) -> None:
    if type(value) is not StoredTensor or (value.dtype, value.shape) != (dtype, shape):
        found = f"{value.dtype} {list(value.shape)}" if type(value) is StoredTensor else "no tensor"
        raise file.damaged(f"an item holds {found}, not {dtype} {list(shape)} as the metadata says")


@dataclass
class _Forms:
    """The forms of the heads of items; many items have one.

    Attributes:
        values: value of each form, a tensor or anything else that an item may hold.
        starts: byte of an item at which its storage begins, for each form.
    """

    values: list[Any] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, file: RangedFile, begin: int, size: int, data: bytes) -> tuple[bytes, int]:
        """Return the head that the first bytes of an item have, b"" for another form than torch's, and its form."""
        if (head := _head_of(data)) is None:
            whole = read_object(file.part(begin, size))
            self.values.append(value := whole.value)
            self.starts.append(whole.storages[value.storage.key].offset if type(value) is StoredTensor else 0)
            return b"", len(self.values) - 1
        if head not in self._known:
            self._known[head] = len(self.values)
            self.values.append(_value_of(file, head))
            self.starts.append(len(head))
        return head, self._known[head]

    def columns(self, ndim: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first byte of the tensor of each form, its span in bytes, and its strides, -1 after the last one."""
        first = [start + value.start for start, value in zip(self.starts, self.values, strict=True)]
        strides = np.full((len(first), ndim), -1, np.int64)
        for row, value in zip(strides, self.values, strict=True):
            row[: len(value.strides)] = value.strides
        return np.array(first, np.int64), np.array([value.span for value in self.values], np.int64), strides


class ItemReader:
    """The reader of the items of one checkpoint."""

    def __init__(self, storage: Storage, columns: ForeignColumns, made: Mapping[str, Decoded]) -> None:
        self._storage = storage
        self._columns, self._made = columns, made
        self._names = [file.name for file in columns.files]
        self._sizes = np.array([file.size for file in columns.files], np.int64)

    def rows(self, boxes: BoxTable, file: NDArray[np.int32], begin: Int64s, size: Int64s) -> RowColumns:
        """Return the rows of tensor items, given the box, file, first byte and size of each; one request for each at most.

        Raises:
            CorruptCheckpointError: a head differs from the metadata, or from its CRC32.
        """
        self._check_inside(file, begin, size)
        first, strides = begin.copy(), row_major(boxes.lengths)
        chosen = np.flatnonzero(boxes.volumes() > 0)
        kind, forms = self._kinds(boxes.take(chosen)), _Forms()
        form = np.empty(len(chosen), np.int64)
        for opened, places in self._by_file(file[chosen]):
            rows = chosen[places]
            ranges = list(zip(begin[rows].tolist(), np.minimum(size[rows], _HEAD).tolist(), strict=True))
            usual: dict[int, tuple[bytes, int]] = {}  # most items have the head of another one of their kind
            numbers: list[int] = []
            for row, of, data in zip(rows.tolist(), kind[places].tolist(), opened.read_many(ranges), strict=True):
                head, number = usual.get(of, (b"", -1))
                if not head or not data.startswith(head):
                    head, number = forms.add(opened, int(begin[row]), int(size[row]), data)
                    tensor = int(boxes.tensor[row])
                    shape = tuple(boxes.lengths[row, : len(self._columns.shapes[tensor])].tolist())
                    _check(opened, forms.values[number], self._columns.dtypes[tensor], shape)
                    usual[of] = head, number
                numbers.append(number)
            form[places] = numbers
        start, span, steps = forms.columns(boxes.ndim)
        short = chosen[start[form] + span[form] > size[chosen]]
        for opened, _ in self._by_file(file[short[:1]]):
            raise opened.damaged(f"the item at byte {begin[short[0]]} is shorter than its tensor")
        first[chosen] += start[form]
        strides[chosen] = np.where(steps[form] < 0, strides[chosen], steps[form])
        return RowColumns(boxes, file, first, strides)

    def _kinds(self, boxes: BoxTable) -> Int64s:
        """Return a number for each box, equal for equal lengths and dtypes."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self._columns.dtypes))}
        kind = np.array([numbers[name] for name in self._columns.dtypes], np.int64)[boxes.tensor]
        for column in (*boxes.lengths.T, np.array([*map(len, self._columns.shapes)], np.int64)[boxes.tensor]):
            found, place = np.unique(column, return_inverse=True)
            _, kind = np.unique(kind * len(found) + place, return_inverse=True)
        return kind

    def values(self, places: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Return the plain values of items, of which file, first byte and size are given."""
        file, begin, size = np.array(places, np.int64).reshape(-1, 3).T
        self._check_inside(file, begin, size)
        values: list[Any] = [None] * len(places)
        for opened, chosen in self._by_file(file):
            ranges = list(zip(begin[chosen].tolist(), size[chosen].tolist(), strict=True))
            for k, (at, length), data in zip(chosen.tolist(), ranges, opened.read_many(ranges), strict=True):
                refs: dict[str, StorageRef] = {}
                start = local_header_end(data)
                if start is not None and data[30:start].partition(b"FB")[0].endswith(b"/data.pkl"):
                    values[k], _ = unpickle(opened, data, start, refs)
                if refs or start is None:
                    found = read_object(opened.part(at, length), f"{k}/")
                    values[k] = found.value
                    stored = {key: (int(file[k]), at + m.offset) for key, m in found.storages.items()}
                    self._columns.places.update(stored)
        return values

    def _check_inside(self, file: NDArray[Any], begin: Int64s, size: Int64s) -> None:
        outside = (begin < 0) | (size < 0) | (size > self._sizes[file] - begin) if len(file) else np.zeros(0, np.bool_)
        if outside.any():
            item = np.argmax(outside)
            first, stop, name = int(begin[item]), int(begin[item]) + int(size[item]), self._names[int(file[item])]
            text = f"it has {self._sizes[file[item]]} bytes, and the metadata says that an item has bytes {first} to {stop}"
            raise CorruptCheckpointError(f"{self._storage.url}/{name} is damaged: {text}", file=name)

    def _by_file(self, file: NDArray[Any]) -> Iterator[tuple[RangedFile, Int64s]]:
        """Open each file in turn; yield it with the numbers of its items."""
        order = np.argsort(file, kind="stable")
        bounds = np.flatnonzero(np.diff(file[order])) + 1
        for chosen in np.split(order, bounds) if len(file) else []:
            name = self._names[int(file[chosen[0]])]
            if (content := self._made.get(name)) is not None:
                yield RangedFile(self._storage, name, BytesReader(content.size, content.decode)), chosen
                continue
            with open_file(self._storage, name) as opened:
                yield opened, chosen


def same_items(storage: Storage, places: Sequence[tuple[str, int, int]]) -> bool:
    """Return whether items hold the same: those of torch by the CRC32s of their members, others by all their bytes.

    Args:
        storage: folder of the checkpoint.
        places: file, first byte and length of each item.
    """
    contents: list[object] = []
    for name, begin, length in places:
        with open_file(storage, name) as file:
            part = file.part(begin, length)
            if not is_zip(part.read(0, min(length, 4))):
                content = xxhash.xxh3_128()
                for start in range(0, length, _PIECE):
                    content.update(part.read(start, min(_PIECE, length - start)))
                contents.append(content.digest())
                continue
            members = read_directory(part).items()
        sums = {member: (info.file_size, info.CRC) for member, info in members if member != _SERIALIZATION}
        if any(size and not crc for size, crc in sums.values()):
            return False  # torch saved without sums
        contents.append(sums)
    return all(content == contents[0] for content in contents)


def decompressed(storage: Storage, places: Sequence[tuple[str, int, int, int]]) -> list[Decoded]:
    """Return the contents of items that zstd has compressed.

    Their sizes stand nowhere: each item is decompressed once for that.

    Args:
        storage: folder of the checkpoint.
        places: file, first byte, length and most bytes of the content of each item.

    Raises:
        CorruptCheckpointError: an item is damaged, or has more content than its tensor.
    """
    import pyarrow as pa

    def stream(place: tuple[str, int, int, int]) -> Iterator[bytes]:
        name, begin, length, most = place
        with open_file(storage, name) as file:
            try:
                data = pa.input_stream(pa.BufferReader(file.read(begin, length)), compression="zstd")
                while piece := data.read(_PIECE):
                    most -= len(piece)
                    if most < 0:
                        raise file.damaged(f"the item at byte {begin} is larger than the metadata says")
                    yield piece
            except OSError as error:
                raise file.damaged(f"the item at byte {begin} cannot be decompressed ({error})") from error

    def content(place: tuple[str, int, int, int]) -> Decoded:
        return Decoded(sum(map(len, stream(place))), lambda: b"".join(stream(place)))

    return read_in_parallel(storage, content, places)


def checked_boxes(
    columns: ForeignColumns,
    tensor: Sequence[int],
    offsets: Sequence[tuple[int, ...]],
    lengths: Sequence[tuple[int, ...]],
) -> BoxTable:
    """Return the boxes of the rows: each lies inside its tensor, and those of a tensor have as many elements as it has."""
    shapes = [columns.shapes[number] for number in tensor]
    if not [*map(len, shapes)] == [*map(len, offsets)] == [*map(len, lengths)]:
        raise ValueError("a box has another number of dimensions than its tensor")
    whole = BoxTable.build(range(len(columns.shapes)), columns.shapes, columns.shapes)
    boxes = BoxTable.build(tensor, offsets, lengths, whole.ndim)
    limit = whole.lengths[boxes.tensor]
    inside = (boxes.offsets >= 0) & (boxes.lengths >= 0) & (boxes.lengths <= limit - boxes.offsets)
    volume = np.prod(whole.lengths.astype(np.float64), axis=1)
    if (whole.lengths < 0).any() or (volume >= 2.0**62).any() or not inside.all():
        raise ValueError("a box lies outside of its tensor")
    have = np.bincount(boxes.tensor, np.prod(boxes.lengths.astype(np.float64), axis=1), len(volume))
    if len(wrong := np.flatnonzero(have != volume)):
        name = columns.keys[int(wrong[0])].fqn
        raise ValueError(f"the parts of {name!r} have {have[wrong[0]]:.0f} of {volume[wrong[0]]:.0f} elements")
    return boxes
