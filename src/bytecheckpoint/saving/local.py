"""One rank's side of a plan: which of its shards go where in which file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from ..engine.staging import ImageFile, KnownTargets, dense, flat_bytes
from ..planning.save_plan import LocalTable, file_bounds
from ..representation.catalog import VALUES_SLOT
from ..representation.checksums import block_bytes
from ..representation.names import file_stem, storage_file_name, values_file_name
from ..representation.shards import LiveShard, LiveState, TensorKey
from ..representation.storage_file import HeaderTemplate, StoredEntry, build_header

__all__ = [
    "LocalPlan",
    "PlannedFile",
    "Value",
    "content_digest",
    "lay_out_rows",
    "lay_out_values",
    "signature",
    "split",
]

_ALIGN = 4096


@dataclass(slots=True)
class Value:
    """A value that is compared by content: a tree of plain values, or a tensor that may differ between ranks."""

    key: TensorKey
    data: torch.Tensor
    dtype: str
    merged: bool
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.data.numel() * self.data.element_size()


@dataclass(slots=True)
class PlannedFile:
    """One storage file of this rank.

    Attributes:
        kind: the kind that it holds.
        part: part number; counts values files by themselves.
        values: holds values, not planned shards.
        header: all but generation and sums.
        image: where the data section stands in the image, with the tensors' places.
    """

    kind: str
    part: int
    values: bool
    header: HeaderTemplate
    image: ImageFile


@dataclass(slots=True)
class LocalPlan:
    """What this rank does whenever its shards look as they did when the plan was made.

    Attributes:
        name: of the global plan.
        rows: indexes of the shards that it writes, in file order.
        files: the files, with places in the image.
        write_values: keys of the values that it writes; others are written by another rank.
        known_values: keys that the plan says anything about; a value that it does not know is written.
        table: the shards that the plan was made for.
        layout: how the objects are distributed, on rank 0.
    """

    name: str
    rows: list[int]
    files: list[PlannedFile]
    write_values: set[TensorKey]
    known_values: set[TensorKey]
    table: LocalTable
    layout: dict[str, Any] | None = None
    targets: KnownTargets = field(default_factory=KnownTargets)


def split(states: Sequence[LiveState]) -> tuple[list[LiveShard], list[Value]]:
    """Separate what (key, box) identifies from what is compared by content."""
    shards: list[LiveShard] = []
    values: list[Value] = []
    for state in states:
        for shard in state.shards:
            if shard.by_content:
                values.append(_value(shard.key, shard.data, shard.dtype, merged=False))
            else:
                shards.append(shard)
        if state.tree is not None:
            tree = torch.frombuffer(bytearray(state.tree), dtype=torch.uint8)
            values.append(_value(TensorKey(state.kind, "", VALUES_SLOT), tree, "uint8", merged=state.merged))
    return shards, values


def _value(key: TensorKey, data: torch.Tensor, dtype: str, *, merged: bool) -> Value:
    data = dense(data.detach().cpu())
    return Value(key, data, dtype, merged, content_digest(data, dtype))


def content_digest(data: torch.Tensor, dtype: str) -> bytes:
    """Digest of a dense CPU tensor's dtype, shape and bytes."""
    digest = xxhash.xxh3_128(f"{dtype}{tuple(data.shape)}".encode())
    digest.update(flat_bytes(data).numpy())
    return digest.digest()


def signature(table: LocalTable) -> bytes:
    """Equal for tables that lead to the same plan."""
    digest = xxhash.xxh3_128()
    for part in (*table.tensors, table.ndims, table.boxes):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _section(start: int, sizes: Sequence[int], shards: list[int]) -> ImageFile:
    lengths = np.asarray(sizes, np.int64)
    total = int(lengths.sum())
    return ImageFile(start, total, shards, np.cumsum(lengths) - lengths, lengths)


def _header(
    entries: Sequence[StoredEntry], kind: str, rank: int, world_size: int, generation: str, siblings: Sequence[str]
) -> HeaderTemplate:
    """The header of a file whose data section `entries` tile."""
    length = entries[-1].byte_offset + entries[-1].byte_length
    return build_header(
        entries,
        kind=kind,
        rank=rank,
        world_size=world_size,
        generation=generation,
        data_length=length,
        block_bytes=block_bytes(length),
        siblings=siblings,
    )


def lay_out_rows(
    shards: Sequence[LiveShard], rows: Sequence[int], *, rank: int, world_size: int, generation: str
) -> list[PlannedFile]:
    """The files of this rank's part of the plan.

    Args:
        shards: this rank's shards.
        rows: indexes into them, in the order of the plan.
        rank: of this process.
        world_size: number of ranks.
        generation: any; files get theirs when a header is rendered.
    """
    files: list[PlannedFile] = []
    position = 0
    bounds = file_bounds([shards[i].key.kind for i in rows])
    stems = [file_stem(storage_file_name(kind, rank, generation, part)) for kind, part, _, _ in bounds]
    for kind, part, first, last in bounds:
        entries = []
        sizes = []
        offset = 0
        for i in rows[first:last]:
            shard = shards[i]
            size = shard.data.numel() * shard.data.element_size()
            entries.append(
                StoredEntry(
                    shard.key,
                    shard.dtype,
                    shard.global_shape,
                    shard.offsets,
                    shard.lengths,
                    shard.aliases,
                    shard.requires_grad,
                    -1,
                    offset,
                    size,
                )
            )
            sizes.append(size)
            offset += size
        section = _section(position, sizes, list(range(first, last)))
        header = _header(entries, kind, rank, world_size, generation, stems)
        files.append(PlannedFile(kind, part, False, header, section))
        position += -(-offset // _ALIGN) * _ALIGN
    return files


def lay_out_values(
    values: Sequence[Value],
    *,
    first: int,
    position: int,
    part: int,
    rank: int,
    world_size: int,
    generation: str,
    siblings: Sequence[str] = (),
) -> tuple[list[PlannedFile], list[tuple[int, int]], int]:
    """The files of the values that this rank writes in one save.

    Args:
        values: what to write.
        first: index of the first of them among the image's tensors.
        position: byte of the image where they begin; a multiple of 4096.
        part: part number of the files.
        rank: of this process.
        world_size: number of ranks.
        generation: of this save.
        siblings: `names.file_stem` of the rank's other files.

    Returns:
        The files; for each value (its file, byte offset in the data section); the end of the image.
    """
    files: list[PlannedFile] = []
    places: dict[int, tuple[int, int]] = {}
    by_kind: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        by_kind.setdefault(value.key.kind, []).append(index)
    stems = [*siblings, *(file_stem(values_file_name(kind, rank, generation, part)) for kind in by_kind)]
    for kind, members in by_kind.items():
        members.sort(key=lambda i: (-values[i].data.element_size(), values[i].dtype, i))
        entries = []
        offset = 0
        for i in members:
            value = values[i]
            shape = tuple(value.data.shape)
            entries.append(
                StoredEntry(
                    value.key, value.dtype, shape, (0,) * len(shape), shape, (), False, rank, offset, value.nbytes
                )
            )
            places[i] = (len(files), offset)
            offset += value.nbytes
        sizes = [values[i].nbytes for i in members]
        section = _section(position, sizes, [first + i for i in members])
        header = _header(entries, kind, rank, world_size, generation, stems)
        files.append(PlannedFile(kind, part, True, header, section))
        position += -(-offset // _ALIGN) * _ALIGN
    return files, [places[i] for i in range(len(values))], position
