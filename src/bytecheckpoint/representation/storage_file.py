"""The header of a storage file: a real safetensors file that also holds the exact facts about each of its entries.

docs/format.md specifies the layout. Writing and reading of the bytes themselves is not done here.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.checksums import block_count
from bytecheckpoint.representation.dtypes import from_safetensors_code, itemsize, safetensors_code, stored_shape
from bytecheckpoint.representation.names import GENERATION_LENGTH, escape, unescape
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.stored_entries import StoredEntry, entry_names

__all__ = [
    "DATA_ALIGNMENT",
    "ENTRIES_FIELD",
    "FILE_FORMAT_VERSION",
    "MAX_ENTRIES_PER_FILE",
    "MAX_HEADER_BYTES",
    "METADATA_PREFIX",
    "HeaderTemplate",
    "StorageHeader",
    "StoredEntry",
    "build_header",
    "entry_names",
    "header_needs",
    "parse_header",
]

FILE_FORMAT_VERSION: Final = 1
DATA_ALIGNMENT: Final = 4096
MAX_HEADER_BYTES: Final = 100_000_000  # safetensors refuses longer headers
# Ordinary names take 200 to 400 bytes of header per entry; the planner splits files by this count, and
# `build_header` refuses the rest, so that names of thousands of characters meet an error and not a broken file.
MAX_ENTRIES_PER_FILE: Final = 100_000

METADATA_PREFIX: Final = "bytecheckpoint."
ENTRIES_FIELD: Final = METADATA_PREFIX + "entries"
_SUM_DIGITS = 16
_COUNT_DIGITS = 8


_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Dims = tuple[_Natural, ...]


class _Tensor(msgspec.Struct, frozen=True, gc=False):
    """An entry as safetensors knows it."""

    dtype: str
    shape: _Dims
    data_offsets: tuple[_Natural, _Natural]


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry as it is: a JSON array in this order."""

    kind: str
    fqn: str
    slot: str
    dtype: str
    global_shape: _Dims
    offsets: _Dims
    lengths: _Dims
    aliases: tuple[str, ...]
    requires_grad: bool
    owner: int


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """The header of a storage file, but for what is known late: generation, checksums, how many files the rank writes.

    A cached plan keeps the template and renders it again for every save.

    Attributes:
        data_offset: size of the header, and first byte of the data section; a multiple of 4096.
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
        """The header's bytes.

        Args:
            sums: shape [blocks], the sum of each block of the data section.
            generation: 24 hex digits, by default those that the template was built with.
            files: how many files the rank writes in this save, as far as it knows; 0 when it does not.

        Returns:
            Exactly `data_offset` bytes.
        """
        assert sums.shape == (self.blocks,), f"{self.blocks} sums expected, got {sums.shape}"
        text = bytearray(self._text)
        if generation is not None:
            _check_generation(generation)
            text[self._generation_at : self._generation_at + GENERATION_LENGTH] = generation.encode()
        text[self._files_at : self._files_at + _COUNT_DIGITS] = f"{files:0{_COUNT_DIGITS}}".encode()
        text[self._sums_at : self._sums_at + _SUM_DIGITS * self.blocks] = sums.astype(">u8").tobytes().hex().encode()
        own = xxhash.xxh3_64_hexdigest(text)
        text[self._self_at : self._self_at + _SUM_DIGITS] = own.encode()
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
) -> HeaderTemplate:
    """The header of the file that holds `entries`, which tile its data section in the order given.

    Args:
        entries: in file order, without holes; sort by item size, descending, so that each is aligned to its own.
        kind: the kind that the file belongs to.
        rank: the rank that writes it.
        world_size: number of ranks that save.
        generation: 24 hex digits.
        data_length: size of the data section in bytes.
        block_bytes: size of a checksum block, from `checksums.block_bytes`.
        siblings: `names.file_stem` of the files that the same rank writes in the same save, as far as they are known.

    Raises:
        UsageError: the header would be longer than safetensors allows.
    """
    _check_generation(generation)
    names = entry_names(entries)
    if not _is_ascii(entries, names):  # rare, and escaping 50,000 names costs as much as all the rest
        names = list(map(escape, names))
        entries = [_escaped(entry) for entry in entries]
    table: dict[str, _Tensor] = {}
    end = 0
    for name, entry in zip(names, entries, strict=True):
        start, end = end, end + entry.byte_length
        assert entry.byte_offset == start, f"{name} starts at {entry.byte_offset}, the one before ends at {start}"
        dtype = entry.dtype
        table[name] = _Tensor(safetensors_code(dtype) or "U8", stored_shape(dtype, entry.lengths), (start, end))
    rows = [
        _Row(*e.key, e.dtype, e.global_shape, e.offsets, e.lengths, e.aliases, e.requires_grad, e.owner)
        for e in entries
    ]
    assert end == data_length, f"entries hold {end} bytes, not {data_length}"
    blocks = block_count(data_length, block_bytes)
    # The fields of fixed width come first, so that their places follow from the text before them alone.
    text = bytearray(8)
    text += b'{"__metadata__":{"format":"pt",'
    text += f'"{METADATA_PREFIX}version":"{FILE_FORMAT_VERSION}","{METADATA_PREFIX}self":"'.encode()
    self_at = len(text)
    text += b"0" * _SUM_DIGITS + f'","{METADATA_PREFIX}generation":"'.encode()
    generation_at = len(text)
    text += f'{generation}","{METADATA_PREFIX}files":"'.encode()
    files_at = len(text)
    text += b"0" * _COUNT_DIGITS
    text += f'","{METADATA_PREFIX}rank":"{rank}","{METADATA_PREFIX}world_size":"{world_size}",'.encode()
    text += f'"{METADATA_PREFIX}block_bytes":"{block_bytes}","{METADATA_PREFIX}sums":"'.encode()
    sums_at = len(text)
    text += b"0" * (_SUM_DIGITS * blocks) + f'","{METADATA_PREFIX}kind":'.encode() + msgspec.json.encode(escape(kind))
    text += f',"{METADATA_PREFIX}siblings":'.encode() + msgspec.json.encode(msgspec.json.encode(siblings).decode())
    text += f',"{ENTRIES_FIELD}":'.encode() + msgspec.json.encode(msgspec.json.encode(rows).decode()) + b"}"
    body = msgspec.json.encode(table)
    text += b"," + body[1:] if table else b"}"
    text += b" " * (-len(text) % DATA_ALIGNMENT)
    if len(text) - 8 > MAX_HEADER_BYTES:
        raise UsageError(
            f"the names of {len(entries)} tensors of {kind!r} on rank {rank} make a file header of {len(text)} bytes, "
            f"safetensors allows {MAX_HEADER_BYTES}: spread the tensors over more files, or shorten their names"
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


def _is_ascii(entries: Sequence[StoredEntry], names: list[str]) -> bool:
    return "".join(names).isascii() and all(e.key.kind.isascii() and "".join(e.aliases).isascii() for e in entries)


def _escaped(entry: StoredEntry) -> StoredEntry:
    return replace(entry, key=TensorKey(*map(escape, entry.key)), aliases=tuple(map(escape, entry.aliases)))


def _check_generation(generation: str) -> None:
    assert len(generation) == GENERATION_LENGTH and generation.isascii(), f"bad generation {generation!r}"


@dataclass(frozen=True, slots=True)
class StorageHeader:
    """What the header of a safetensors file says.

    Attributes:
        entries: in the order in which they lie in the file; they tile the data section.
        data_offset: first byte of the data section.
        data_length: size of the data section; the file ends where it ends.
        kind, rank, world_size, generation: as the file was written with; "model", 0, 1, "" for a foreign file.
        block_bytes: size of a checksum block; 0 for a foreign file, which has no sums.
        sums: shape [blocks], uint64.
        files: how many files the rank had to write in this save when the header was written; 0 when it does not say.
        siblings: `names.file_stem` of those that were known when the file was laid out, this one included.
        foreign: True when the file was not written by this package; each entry is then a whole tensor.
        metadata: `__metadata__` of a foreign file, as it stands; empty for our own.
    """

    entries: tuple[StoredEntry, ...]
    data_offset: int
    data_length: int
    kind: str
    rank: int
    world_size: int
    generation: str
    block_bytes: int
    sums: NDArray[np.uint64]
    files: int
    siblings: tuple[str, ...]
    foreign: bool
    metadata: Mapping[str, str]


_decode_tensor = msgspec.json.Decoder(_Tensor).decode
_NUMBER = re.compile(r"[0-9]{1,18}")
_HEX = re.compile(r"[0-9a-f]*")


def header_needs(first_bytes: bytes, *, file: str = "") -> int:
    """How many bytes from the start of the file `parse_header` needs, as far as `first_bytes` tell: at least 8.

    Read that many and ask again, until the answer is no more than what was read.

    Raises:
        CorruptCheckpointError: the length of the header is not possible.
    """
    if len(first_bytes) < 8:
        return 8
    (length,) = struct.unpack_from("<Q", first_bytes)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _damaged(file, f"its header length of {length} bytes is not possible")
    return 8 + int(length)


def parse_header(first_bytes: bytes, *, file: str = "") -> StorageHeader:
    """The header of a safetensors file, ours or anyone's.

    Args:
        first_bytes: the file's first `header_needs` bytes, or more.
        file: the file's name, for messages.

    Raises:
        CorruptCheckpointError: the header is cut short, damaged, or contradicts itself.
        IncompatibleCheckpointError: it was written by a newer version, or holds a dtype that torch does not have.
    """
    needs = header_needs(first_bytes, file=file)
    if len(first_bytes) < needs:
        raise _damaged(file, f"it ends inside its header, after {len(first_bytes)} of {needs} bytes")
    text = first_bytes[:needs]
    try:
        raw = msgspec.json.decode(text[8:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: _decode_tensor(value) for name, value in raw.items()}
        if any(METADATA_PREFIX in name for name in metadata):
            return _parse_own(text, metadata, tensors, file)
        return _parse_foreign(needs, metadata, tensors, file)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, f"its header cannot be read ({error})") from error
    except UsageError as error:  # a dtype that is not in the table
        raise IncompatibleCheckpointError(f"storage file {file!r}: {error}") from error


def _parse_own(text: bytes, metadata: dict[str, str], tensors: dict[str, _Tensor], file: str) -> StorageHeader:
    stated = metadata.get(METADATA_PREFIX + "self", "")
    at = text.find(f'"{METADATA_PREFIX}self":"{stated}"'.encode()) + len(METADATA_PREFIX) + 8
    blanked = xxhash.xxh3_64(text[:at])
    blanked.update(b"0" * _SUM_DIGITS)
    blanked.update(text[at + _SUM_DIGITS :])
    if blanked.hexdigest() != stated:
        raise _damaged(file, "its header does not match the header's own checksum")
    version = _number(metadata, "version", file)
    if version > FILE_FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"storage file {file!r} has format version {version}, this package reads up to {FILE_FORMAT_VERSION}: "
            "upgrade it"
        )
    rows = msgspec.json.decode(metadata.get(ENTRIES_FIELD, ""), type=list[_Row])
    if len(rows) != len(tensors):
        raise _damaged(file, f"it lists {len(tensors)} tensors and describes {len(rows)}")
    entries = []
    end = 0
    for row, (name, tensor) in zip(rows, tensors.items(), strict=True):
        dtype, shape, offsets, lengths = row.dtype, row.global_shape, row.offsets, row.lengths
        start, end = end, end + _byte_length(dtype, lengths)
        entries.append(
            StoredEntry(
                key=TensorKey(unescape(row.kind), unescape(row.fqn), unescape(row.slot)),
                dtype=dtype,
                global_shape=shape,
                offsets=offsets,
                lengths=lengths,
                aliases=tuple(map(unescape, row.aliases)),
                requires_grad=row.requires_grad,
                owner=row.owner,
                byte_offset=start,
                byte_length=end - start,
            )
        )
        inside = len(shape) == len(offsets) == len(lengths) and all(
            o + n <= size for o, n, size in zip(offsets, lengths, shape, strict=True)
        )
        code = safetensors_code(dtype) or "U8"
        if not inside or (tensor.dtype, tensor.shape) != (code, stored_shape(dtype, lengths)):
            raise _damaged(file, f"the two descriptions of tensor {name!r} differ")
        if tensor.data_offsets != (start, end):
            raise _damaged(file, f"tensor {name!r} does not lie where the one before ends")
    if entry_names(entries) != list(map(unescape, tensors)):
        raise _damaged(file, "the names of its tensors differ from their description")
    block_bytes = _number(metadata, "block_bytes", file)
    sums = metadata.get(METADATA_PREFIX + "sums", "")
    generation = metadata.get(METADATA_PREFIX + "generation", "")
    if block_bytes == 0 or len(sums) != _SUM_DIGITS * block_count(end, block_bytes) or not _HEX.fullmatch(sums):
        raise _damaged(file, "its checksums do not fit its data")
    if len(generation) != GENERATION_LENGTH or not _HEX.fullmatch(generation):
        raise _damaged(file, f"its generation {generation[:80]!r} is not one")
    return StorageHeader(
        entries=tuple(entries),
        data_offset=len(text),
        data_length=end,
        kind=unescape(metadata.get(METADATA_PREFIX + "kind", "")),
        rank=_number(metadata, "rank", file),
        world_size=_number(metadata, "world_size", file),
        generation=generation,
        block_bytes=block_bytes,
        sums=np.frombuffer(bytes.fromhex(sums), ">u8").astype(np.uint64),
        # Both are absent in the files of the first writers.
        files=_number({METADATA_PREFIX + "files": "0"} | metadata, "files", file),
        siblings=msgspec.json.decode(metadata.get(METADATA_PREFIX + "siblings", "[]"), type=tuple[str, ...]),
        foreign=False,
        metadata={},
    )


def _parse_foreign(data_offset: int, metadata: dict[str, str], tensors: dict[str, _Tensor], file: str) -> StorageHeader:
    entries = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        dtype = from_safetensors_code(tensor.dtype)
        if dtype is None:
            raise IncompatibleCheckpointError(
                f"storage file {file!r}: torch has no dtype for the {tensor.dtype!r} of tensor {name!r}"
            )
        shape = tensor.shape
        if tensor.dtype == "F4":  # counted in elements; torch counts the bytes that hold two each
            if not shape or shape[-1] % 2:
                raise _damaged(file, f"tensor {name!r} of packed pairs has the odd shape {list(shape)}")
            shape = (*shape[:-1], shape[-1] // 2)
        start, end = end, end + _byte_length(dtype, shape)
        if tensor.data_offsets != (start, end):
            raise _damaged(file, f"tensor {name!r} does not lie where the one before ends, or has another size")
        key = TensorKey("model", name)
        entries.append(
            StoredEntry(key, dtype, shape, (0,) * len(shape), shape, byte_offset=start, byte_length=end - start)
        )
    return StorageHeader(
        entries=tuple(entries),
        data_offset=data_offset,
        data_length=end,
        kind="model",
        rank=0,
        world_size=1,
        generation="",
        block_bytes=0,
        sums=np.zeros(0, np.uint64),
        files=0,
        siblings=(),
        foreign=True,
        metadata=metadata,
    )


def _byte_length(dtype: str, lengths: tuple[int, ...]) -> int:
    return itemsize(dtype) * math.prod(lengths)


def _number(metadata: dict[str, str], name: str, file: str) -> int:
    text = metadata.get(METADATA_PREFIX + name, "")
    if not _NUMBER.fullmatch(text):
        raise _damaged(file, f"its {name} {text[:80]!r} is not a number")
    return int(text)


def _damaged(file: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"storage file {file!r} is damaged: {what}; fall back to an older step", file=file)
