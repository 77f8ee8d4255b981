"""Storage files: safetensors files whose metadata describes each entry exactly (docs/format.md, section 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import MAX_DIMS
from bytecheckpoint.representation.shards import TensorKey

__all__ = [
    "COUNT_DIGITS",
    "DATA_ALIGNMENT",
    "FILE_FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "METADATA_PREFIX",
    "SUM_DIGITS",
    "EntryRecord",
    "SafetensorsEntry",
    "StoredEntry",
    "StoredFragments",
    "ViewTensor",
    "safetensors_keys",
    "tensor_name",
]

FILE_FORMAT_VERSION: Final = 2
"""Newest version of a file's header: that of a file with the names of another program. Other files have version 1."""
DATA_ALIGNMENT: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000
"""Largest header that safetensors accepts."""

METADATA_PREFIX: Final = "bytecheckpoint."
SUM_DIGITS: Final = 16
COUNT_DIGITS: Final = 8

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Dims = Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=MAX_DIMS)]


class SafetensorsEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry as safetensors describes it."""

    dtype: str
    shape: _Dims
    data_offsets: tuple[_Natural, _Natural]


class EntryRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry as `__metadata__` describes it: a JSON array in this order, strings escaped."""

    state: str
    fqn: str
    slot: str
    dtype: str
    global_shape: _Dims
    offsets: _Dims
    lengths: _Dims
    aliases: tuple[str, ...]
    requires_grad: bool
    owner: int


class ViewTensor(NamedTuple):
    """A tensor of another program, whose bytes are some entries of a storage file that follow each other.

    Attributes:
        name: name by which that program finds it in the file.
        shape: its shape.
        entries: number of the entries.
    """

    name: str
    shape: tuple[int, ...]
    entries: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One box of one tensor in a storage file.

    Attributes:
        key: the tensor.
        dtype: torch's name of the dtype without "torch.".
        global_shape: shape of the whole tensor.
        offsets: first coordinate of the box, one per dimension.
        lengths: extent of the box, one per dimension.
        aliases: further FQNs of the same tensor, without `key.fqn`.
        requires_grad: flag of the whole tensor.
        owner: the rank whose own value the tensor is, or -1 when all ranks share it.
        byte_offset: first byte, relative to the data section.
        byte_length: number of bytes: volume of the box times item size.
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    owner: int = -1
    byte_offset: int = 0
    byte_length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoredFragments:
    """Many boxes of one tensor that follow each other in a storage file, as columns.

    Attributes:
        key, dtype, global_shape, aliases, requires_grad: facts of the tensor, as in `StoredEntry`; all ranks share it.
        offsets: first coordinate of each box, int64 [n, d].
        lengths: extent of each box, int64 [n, d].
        byte_offset: first byte of the first box, relative to the data section.
        sizes: bytes of each box, int64 [n].
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    offsets: Int64s
    lengths: Int64s
    aliases: tuple[str, ...]
    requires_grad: bool
    byte_offset: int
    sizes: Int64s

    @property
    def byte_length(self) -> int:
        """Bytes of all boxes."""
        return int(self.sizes.sum())

    def entries(self) -> Iterator[StoredEntry]:
        """Iterate over the boxes as entries."""
        offset = self.byte_offset
        boxes = (self.offsets.tolist(), self.lengths.tolist(), self.sizes.tolist())
        for offsets, lengths, size in zip(*boxes, strict=True):
            box = (tuple(offsets), tuple(lengths))
            yield StoredEntry(
                self.key, self.dtype, self.global_shape, *box, self.aliases, self.requires_grad, -1, offset, size
            )
            offset += size


def tensor_name(key: TensorKey) -> str:
    """Return the safetensors key of a whole tensor."""
    _, fqn, slot = key
    return f"state/{fqn}/{slot}" if slot and fqn else fqn or slot


def safetensors_keys(entries: Sequence[StoredEntry]) -> list[str]:
    """Return the safetensors keys of `entries`, in order and all different.

    The key of a whole tensor is its FQN ("state/<fqn>/<slot>" with a slot). The key of a part also holds the box:
    "layers.0.weight[0:512,1024:2048]". A key that is taken or reserved gets "#2", "#3", ... appended. The file holds
    the keys escaped (`names.escape`).
    """
    keys: list[str] = []
    taken: dict[str, int] = {"__metadata__": 1}
    for entry in entries:
        key = tensor_name(entry.key)
        if entry.lengths != entry.global_shape:
            box = ",".join([f"{o}:{o + n}" for o, n in zip(entry.offsets, entry.lengths, strict=True)])
            key = f"{key}[{box}]"
        if key in taken:
            plain, count = key, taken[key]
            while key in taken:
                count += 1
                key = f"{plain}#{count}"
            taken[plain] = count
        taken[key] = 1
        keys.append(key)
    return keys
