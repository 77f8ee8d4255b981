"""The header of a storage file as bytes: laid out once per plan, filled in for every save."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

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
    StoredFragments,
    ViewTensor,
    safetensors_keys,
    tensor_name,
)

__all__ = ["HeaderTemplate", "build_header"]


class _Places(NamedTuple):
    """Places of the fields that differ from save to save: the first byte of each, and the whole range of the last."""

    generation: int
    files: int
    own_sum: int
    sums: int
    adopted: slice


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
    _places: _Places

    def render(
        self, sums: NDArray[np.uint64], generation: str | None = None, files: int = 0, adopted: Sequence[str] = ()
    ) -> bytes:
        """Return the bytes of the header.

        Args:
            sums: sum of each block of the data section, shape [blocks].
            generation: 24 hex digits; by default the generation of the template.
            files: number of files that the rank has in this save, 0 when it is not known.
            adopted: names of those of them that earlier saves wrote.

        Returns:
            Exactly `data_offset` bytes.
        """
        assert sums.shape == (self.blocks,), f"{self.blocks} sums expected, got {sums.shape}"
        text, at = bytearray(self._text), self._places
        if generation is not None:
            _check_generation(generation)
            text[at.generation : at.generation + GENERATION_LENGTH] = generation.encode()
        text[at.files : at.files + COUNT_DIGITS] = f"{files:0{COUNT_DIGITS}}".encode()
        text[at.sums : at.sums + SUM_DIGITS * self.blocks] = sums.astype(">u8").tobytes().hex().encode()
        if (width := at.adopted.stop - at.adopted.start) > 0:
            text[at.adopted] = _name_list(adopted).ljust(width)
        own = xxhash.xxh3_64_hexdigest(text)
        text[at.own_sum : at.own_sum + SUM_DIGITS] = own.encode()
        return bytes(text)


def build_header(
    entries: Sequence[StoredEntry | StoredFragments],
    *,
    state: str,
    rank: int,
    world_size: int,
    generation: str,
    data_length: int,
    block_bytes: int,
    siblings: Sequence[str] = (),
    adoptable: Sequence[str] = (),
    named: Sequence[ViewTensor] = (),
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> HeaderTemplate:
    """Lay out the header of the file that holds `entries`.

    Args:
        entries: entries and fragments in file order, which tile the data section. Sorted by item size, largest first,
            each entry is aligned to its item size.
        state: name of the state that the file belongs to.
        rank: the rank that writes it.
        world_size: number of ranks that save.
        generation: 24 hex digits.
        data_length: size of the data section in bytes.
        block_bytes: size of a checksum block, from `checksums.block_bytes`.
        siblings: `names.file_stem` of all files that the same rank is known to write in the same save.
        adoptable: `names.file_stem` of those that may be files of earlier saves, whose names the header must hold then.
        named: tensors of another program that the entries make up, in file order; () if the entries have their own names.
        max_header_bytes: largest header that is allowed.

    Raises:
        UsageError: the header would be longer than `max_header_bytes`.
    """
    _check_generation(generation)
    table, records = _described(entries, data_length)
    if named:
        table = _table_of(named, entries)
    blocks = block_count(data_length, block_bytes)
    text = bytearray(8)  # for the length of the header
    text += b'{"__metadata__":{"format":"pt"'
    # Fields of fixed width come first: their places depend only on the text before them.
    _add_field(text, "version", str(FILE_FORMAT_VERSION if named else 1))
    self_at = _add_field(text, "self", "0" * SUM_DIGITS)
    generation_at = _add_field(text, "generation", generation)
    files_at = _add_field(text, "files", "0" * COUNT_DIGITS)
    _add_field(text, "rank", str(rank))
    _add_field(text, "world_size", str(world_size))
    _add_field(text, "block_bytes", str(block_bytes))
    sums_at = _add_field(text, "sums", "0" * (SUM_DIGITS * blocks))
    _add_field(text, "kind", escape(state))
    _add_field(text, "siblings", msgspec.json.encode(siblings).decode())
    adopted = slice(0, 0)
    if adoptable:
        width = len(_name_list([f"{stem}.{generation}.safetensors" for stem in adoptable]))
        begin = _add_field(text, "adopted", " " * width)
        adopted = slice(begin, begin + width)
    _add_field(text, "entries", f"[{records}]")
    text += b"}"
    text += f",{table}}}".encode() if table else b"}"
    text += b" " * (-len(text) % DATA_ALIGNMENT)
    if len(text) - 8 > max_header_bytes:
        raise UsageError(
            f"the names of {len(entries)} tensors of {state!r} on rank {rank} make a file header of {len(text)} bytes, "
            f"safetensors allows {max_header_bytes}: spread the tensors over more files, or shorten their names"
        )
    struct.pack_into("<Q", text, 0, len(text) - 8)
    return HeaderTemplate(
        data_offset=len(text),
        data_length=data_length,
        block_bytes=block_bytes,
        blocks=blocks,
        _text=bytes(text),
        _places=_Places(generation_at, files_at, self_at, sums_at, adopted),
    )


def _name_list(names: Sequence[str]) -> bytes:
    """Return names of files as JSON inside of a JSON string, without its quotes."""
    return msgspec.json.encode(msgspec.json.encode(names).decode())[1:-1]


def _add_field(text: bytearray, name: str, value: str) -> int:
    """Append a field of this package to the metadata in `text`; return the place of the value."""
    text += f',"{METADATA_PREFIX}{name}":'.encode()
    place = len(text) + len('"')
    text += msgspec.json.encode(value)
    return place


def _described(entries: Sequence[StoredEntry | StoredFragments], data_length: int) -> tuple[str, str]:
    """Describe entries as JSON, without the outer brackets.

    Returns:
        The members of the table that every safetensors file has, and the records of the facts that this table lacks.
    """
    fragments = [e for e in entries if isinstance(e, StoredFragments)]
    plain = [e for e in entries if isinstance(e, StoredEntry)]
    keys = safetensors_keys(plain)
    begins = tuple(f"{tensor_name(e.key)}[" for e in fragments)
    if len(set(begins)) < len({e.key for e in fragments}) or any(key.startswith(begins) for key in keys):
        # A key may be equal to another one, and needs a number.
        plain = [p for e in entries for p in (e.entries() if isinstance(e, StoredFragments) else (e,))]
        entries, keys = plain, safetensors_keys(plain)
    if not _is_ascii(plain, keys):  # rare; to escape 50,000 names costs as much as the rest of this function
        keys = list(map(escape, keys))
        plain = list(map(_escaped, plain))
    tables: list[str] = []
    records: list[str] = []
    end = first = 0
    for many, run in groupby(entries, lambda e: isinstance(e, StoredFragments)):
        found = list(run)
        if many:
            for e in found:
                assert isinstance(e, StoredFragments) and e.byte_offset == end, f"{e.key} follows the entry before"
                tables.append(_fragments_table(e))
                records.append(_fragments_records(e))
                end += e.byte_length
            continue
        part = slice(first, first + len(found))
        table, end = _safetensors_table(plain[part], keys[part], end)
        tables.append(msgspec.json.encode(table)[1:-1].decode())
        records.append(_records(plain[part])[1:-1])
        first += len(found)
    assert end == data_length, f"entries hold {end} bytes, not {data_length}"
    return ",".join(tables), ",".join(records)


def _safetensors_table(
    entries: Sequence[StoredEntry], keys: Sequence[str], end: int
) -> tuple[dict[str, SafetensorsEntry], int]:
    """Describe the tensors from byte `end` on as every safetensors file does, by key; return that with their end."""
    table: dict[str, SafetensorsEntry] = {}
    for key, entry in zip(keys, entries, strict=True):
        start, end = end, end + entry.byte_length
        assert entry.byte_offset == start, f"{key} starts at {entry.byte_offset}, the entry before ends at {start}"
        dtype = entry.dtype
        table[key] = SafetensorsEntry(safetensors_code(dtype) or "U8", stored_shape(dtype, entry.lengths), (start, end))
    return table, end


def _table_of(named: Sequence[ViewTensor], entries: Sequence[StoredEntry | StoredFragments]) -> str:
    """Describe tensors of another program, which consist of these entries, as the members of a JSON object."""
    table: dict[str, SafetensorsEntry] = {}
    first = start = 0
    for tensor in named:
        parts = entries[first : first + tensor.entries]
        first, end = first + tensor.entries, start + sum(entry.byte_length for entry in parts)
        code = safetensors_code(parts[0].dtype)
        assert code is not None and tensor.name not in table, f"{tensor.name} is no name for {parts[0].dtype}"
        table[tensor.name] = SafetensorsEntry(code, tensor.shape, (start, end))
        start = end
    assert first == len(entries), f"{first} of {len(entries)} entries have names"
    return msgspec.json.encode(table)[1:-1].decode()


def _fragments_table(entry: StoredFragments) -> str:
    """Describe fragments as `_safetensors_table` does, as the members of a JSON object."""
    name = _literal(escape(tensor_name(entry.key)))[:-1]
    box = ",".join(["%d:%d"] * len(entry.global_shape))
    code = _literal(safetensors_code(entry.dtype) or "U8")
    member = f'{name}[{box}]":{{"dtype":{code},"shape":[{_numbers(entry)}],"data_offsets":[%d,%d]}}'
    ends = np.cumsum(entry.sizes) + entry.byte_offset
    # Of a dtype without a code, the last dimension counts bytes.
    unit = np.array(stored_shape(entry.dtype, (1,) * len(entry.global_shape)), np.int64)
    bounds = np.stack([entry.offsets, entry.offsets + entry.lengths], axis=2).reshape(len(ends), -1)
    return _filled(member, [bounds, entry.lengths * unit, (ends - entry.sizes)[:, None], ends[:, None]])


def _fragments_records(entry: StoredFragments) -> str:
    """Describe fragments as `_records` does, as the items of a JSON array."""
    before = [*map(escape, entry.key), entry.dtype, entry.global_shape]
    after = [list(map(escape, entry.aliases)), entry.requires_grad, -1]
    numbers = _numbers(entry)
    return _filled(
        f"{_literal(before)[:-1]},[{numbers}],[{numbers}],{_literal(after)[1:]}", [entry.offsets, entry.lengths]
    )


def _numbers(entry: StoredFragments) -> str:
    return ",".join(["%d"] * len(entry.global_shape))


def _literal(value: object) -> str:
    """Return `value` as JSON, for `_filled`."""
    return msgspec.json.encode(value).decode().replace("%", "%%")


def _filled(pattern: str, columns: list[NDArray[np.int64]]) -> str:
    """Fill a pattern with the numbers of each row, and join the results by commas: one call for all rows."""
    rows = np.concatenate(columns, axis=1)
    return ",".join([pattern] * len(rows)) % tuple(rows.ravel().tolist())


def _records(entries: Sequence[StoredEntry]) -> str:
    """Describe the entries by what a safetensors file has no place for, as JSON."""
    records = [
        EntryRecord(*e.key, e.dtype, e.global_shape, e.offsets, e.lengths, e.aliases, e.requires_grad, e.owner)
        for e in entries
    ]
    return msgspec.json.encode(records).decode()


def _is_ascii(entries: Sequence[StoredEntry], keys: list[str]) -> bool:
    return "".join(keys).isascii() and all(e.key.state.isascii() and "".join(e.aliases).isascii() for e in entries)


def _escaped(entry: StoredEntry) -> StoredEntry:
    return replace(entry, key=TensorKey(*map(escape, entry.key)), aliases=tuple(map(escape, entry.aliases)))


def _check_generation(generation: str) -> None:
    assert len(generation) == GENERATION_LENGTH and generation.isascii(), f"bad generation {generation!r}"
