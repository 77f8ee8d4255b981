"""The header of a storage file as bytes: laid out once per plan, filled in for every save."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.checksums import block_count
from bytecheckpoint.representation.dtypes import safetensors_code, stored_shape
from bytecheckpoint.representation.names import GENERATION_LENGTH, escape
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import (
    COUNT_DIGITS,
    DATA_ALIGNMENT,
    FILE_FORMAT_VERSION,
    MAX_HEADER_BYTES,
    METADATA_PREFIX,
    SUM_DIGITS,
    EntryRecord,
    SafetensorsEntry,
    StoredEntry,
    safetensors_keys,
)

__all__ = ["HeaderTemplate", "build_header"]


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """The header of a storage file without its generation, checksums and count of files.

    A cached plan keeps the template and renders it again for every save.

    Attributes:
        data_offset: size of the header, which is the first byte of the data section; a multiple of 4096.
        data_length: size of the data section in bytes.
        block_bytes: size of a checksum block.
        blocks: number of checksum blocks.
    """

    data_offset: int
    data_length: int
    block_bytes: int
    blocks: int
    _text: bytes = field(repr=False)
    _generation_at: int
    _files_at: int
    _self_at: int
    _sums_at: int

    def render(self, sums: NDArray[np.uint64], generation: str | None = None, files: int = 0) -> bytes:
        """Return the bytes of the header.

        Args:
            sums: sum of each block of the data section, shape [blocks].
            generation: 24 hex digits; by default the generation of the template.
            files: number of files that the rank writes in this save, 0 when it is not known.

        Returns:
            Exactly `data_offset` bytes.
        """
        assert sums.shape == (self.blocks,), f"{self.blocks} sums expected, got {sums.shape}"
        text = bytearray(self._text)
        if generation is not None:
            _check_generation(generation)
            text[self._generation_at : self._generation_at + GENERATION_LENGTH] = generation.encode()
        text[self._files_at : self._files_at + COUNT_DIGITS] = f"{files:0{COUNT_DIGITS}}".encode()
        text[self._sums_at : self._sums_at + SUM_DIGITS * self.blocks] = sums.astype(">u8").tobytes().hex().encode()
        own = xxhash.xxh3_64_hexdigest(text)
        text[self._self_at : self._self_at + SUM_DIGITS] = own.encode()
        return bytes(text)


def build_header(
    entries: Sequence[StoredEntry],
    *,
    kind: str,
    rank: int,
    world_size: int,
    generation: str,
    data_length: int,
    block_bytes: int,
    siblings: Sequence[str] = (),
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> HeaderTemplate:
    """Lay out the header of the file that holds `entries`.

    Args:
        entries: entries in file order, which tile the data section. Sorted by item size, largest first, each entry is
            aligned to its item size.
        kind: the kind that the file belongs to.
        rank: the rank that writes it.
        world_size: number of ranks that save.
        generation: 24 hex digits.
        data_length: size of the data section in bytes.
        block_bytes: size of a checksum block, from `checksums.block_bytes`.
        siblings: `names.file_stem` of all files that the same rank is known to write in the same save.
        max_header_bytes: largest header that is allowed.

    Raises:
        UsageError: the header would be longer than `max_header_bytes`.
    """
    _check_generation(generation)
    keys = safetensors_keys(entries)
    if not _is_ascii(entries, keys):  # rare; to escape 50,000 names costs as much as the rest of this function
        keys = list(map(escape, keys))
        entries = [_escaped(entry) for entry in entries]
    table = _safetensors_table(entries, keys, data_length)
    blocks = block_count(data_length, block_bytes)
    text = bytearray(8)  # for the length of the header
    text += b'{"__metadata__":{"format":"pt"'
    # Fields of fixed width come first: their places depend only on the text before them.
    _add_field(text, "version", str(FILE_FORMAT_VERSION))
    self_at = _add_field(text, "self", "0" * SUM_DIGITS)
    generation_at = _add_field(text, "generation", generation)
    files_at = _add_field(text, "files", "0" * COUNT_DIGITS)
    _add_field(text, "rank", str(rank))
    _add_field(text, "world_size", str(world_size))
    _add_field(text, "block_bytes", str(block_bytes))
    sums_at = _add_field(text, "sums", "0" * (SUM_DIGITS * blocks))
    _add_field(text, "kind", escape(kind))
    _add_field(text, "siblings", msgspec.json.encode(siblings).decode())
    _add_field(text, "entries", _records(entries))
    text += b"}"
    body = msgspec.json.encode(table)
    text += b"," + body[1:] if table else b"}"
    text += b" " * (-len(text) % DATA_ALIGNMENT)
    if len(text) - 8 > max_header_bytes:
        raise UsageError(
            f"the names of {len(entries)} tensors of {kind!r} on rank {rank} make a file header of {len(text)} bytes, "
            f"safetensors allows {max_header_bytes}: spread the tensors over more files, or shorten their names"
        )
    struct.pack_into("<Q", text, 0, len(text) - 8)
    return HeaderTemplate(
        data_offset=len(text),
        data_length=data_length,
        block_bytes=block_bytes,
        blocks=blocks,
        _text=bytes(text),
        _generation_at=generation_at,
        _files_at=files_at,
        _self_at=self_at,
        _sums_at=sums_at,
    )


def _add_field(text: bytearray, name: str, value: str) -> int:
    """Append a field of this package to the metadata in `text`; return the place of the value."""
    text += f',"{METADATA_PREFIX}{name}":'.encode()
    place = len(text) + len('"')
    text += msgspec.json.encode(value)
    return place


def _safetensors_table(
    entries: Sequence[StoredEntry], keys: Sequence[str], data_length: int
) -> dict[str, SafetensorsEntry]:
    """Describe the tensors as every safetensors file does, by key."""
    table: dict[str, SafetensorsEntry] = {}
    end = 0
    for key, entry in zip(keys, entries, strict=True):
        start, end = end, end + entry.byte_length
        assert entry.byte_offset == start, f"{key} starts at {entry.byte_offset}, the entry before ends at {start}"
        dtype = entry.dtype
        table[key] = SafetensorsEntry(safetensors_code(dtype) or "U8", stored_shape(dtype, entry.lengths), (start, end))
    assert end == data_length, f"entries hold {end} bytes, not {data_length}"
    return table


def _records(entries: Sequence[StoredEntry]) -> str:
    """Describe the entries by what a safetensors file has no place for, as JSON."""
    records = [
        EntryRecord(*e.key, e.dtype, e.global_shape, e.offsets, e.lengths, e.aliases, e.requires_grad, e.owner)
        for e in entries
    ]
    return msgspec.json.encode(records).decode()


def _is_ascii(entries: Sequence[StoredEntry], keys: list[str]) -> bool:
    return "".join(keys).isascii() and all(e.key.kind.isascii() and "".join(e.aliases).isascii() for e in entries)


def _escaped(entry: StoredEntry) -> StoredEntry:
    return replace(entry, key=TensorKey(*map(escape, entry.key)), aliases=tuple(map(escape, entry.aliases)))


def _check_generation(generation: str) -> None:
    assert len(generation) == GENERATION_LENGTH and generation.isascii(), f"bad generation {generation!r}"
