"""The header of a safetensors file read back and checked, whether this package or another program wrote it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.checksums import block_count, is_block_size
from bytecheckpoint.representation.dtypes import from_safetensors_code, itemsize, safetensors_code, stored_shape
from bytecheckpoint.representation.names import GENERATION_LENGTH, unescape
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import (
    FILE_FORMAT_VERSION,
    MAX_HEADER_BYTES,
    METADATA_PREFIX,
    SUM_DIGITS,
    EntryRecord,
    SafetensorsEntry,
    StoredEntry,
    safetensors_keys,
)

__all__ = ["StorageHeader", "content_of_header", "header_bytes_needed", "parse_header"]

# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_decode_tensor = msgspec.json.Decoder(SafetensorsEntry).decode
_decode_records = msgspec.json.Decoder(list[EntryRecord]).decode
_NUMBER = re.compile(r"[0-9]{1,18}")
_HEX = re.compile(r"[0-9a-f]*")
#: Fields of a header that say something of the save that wrote the file, and nothing of its tensors.
_OF_SAVE = [METADATA_PREFIX + name for name in ("self", "generation", "files", "siblings", "adopted", "sums")]


@dataclass(frozen=True, slots=True)
class StorageHeader:
    """The content of a safetensors file's header.

    Attributes:
        entries: entries in file order; they tile the data section.
        data_offset: first byte of the data section.
        data_length: size of the data section, which ends the file.
        state, rank, world_size, generation: facts of the save that wrote the file; "model", 0, 1, "" for a foreign file.
        block_bytes: size of a checksum block; 0 for a foreign file, which has no sums.
        sums: sum of each block, shape [blocks], uint64.
        files: number of files that the rank has in this save; 0 when the header does not hold it.
        siblings: `names.file_stem` of all files that the rank was known to write, this file included.
        adopted: names of the rank's files in this save that earlier saves wrote.
        names: names of the tensors of another program that the entries make up; empty if the entries have their own names.
        foreign: True when another program wrote the file; each entry is then a whole tensor.
        metadata: `__metadata__` of a foreign file, unchanged; empty for a file of this package.
    """

    entries: tuple[StoredEntry, ...]
    data_offset: int
    data_length: int
    state: str
    rank: int
    world_size: int
    generation: str
    block_bytes: int
    sums: NDArray[np.uint64]
    files: int
    siblings: tuple[str, ...]
    adopted: tuple[str, ...]
    names: tuple[str, ...]
    foreign: bool
    metadata: Mapping[str, str]


def header_bytes_needed(first_bytes: bytes, *, file: str = "") -> int:
    """Return how many bytes from the start of the file `parse_header` needs.

    The result is 8 while `first_bytes` is shorter than 8 bytes; call again with 8 bytes for the final number.

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
    """Parse and check the header of any safetensors file.

    Args:
        first_bytes: the first `header_bytes_needed` bytes of the file, or more.
        file: name of the file, for messages.

    Raises:
        CorruptCheckpointError: the header is cut short, damaged, or contradicts itself.
        IncompatibleCheckpointError: a newer version wrote the header, or it holds a dtype that torch does not have.
    """
    needs = header_bytes_needed(first_bytes, file=file)
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
    except UsageError as error:  # an unknown dtype
        raise IncompatibleCheckpointError(f"storage file {file!r}: {error}") from error


def content_of_header(text: bytes) -> tuple[bytes, str, bytes]:
    """Return what an own file's header says of its tensors, its generation, and the sums of its data.

    Two files with equal tensors and sums hold the same bytes of the same boxes, written by the same rank of as many.

    Args:
        text: the header, as `HeaderTemplate.render` makes it.

    Returns:
        Hash of the description of the tensors, generation, and sums as big-endian uint64.

    Raises:
        CorruptCheckpointError: the header is damaged.
    """
    try:
        raw = msgspec.json.decode(text[8:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        _check_own_sum(text, metadata, "")
        of_save = [metadata.pop(name, "") for name in _OF_SAVE]
        described = msgspec.json.encode([metadata, raw])
        return xxhash.xxh3_128_digest(described), of_save[1], bytes.fromhex(of_save[-1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged("", f"its header cannot be read ({error})") from error


def _parse_own(text: bytes, metadata: dict[str, str], tensors: dict[str, SafetensorsEntry], file: str) -> StorageHeader:
    """Parse the header of a file of this package: first its checksum and version, then the rest."""
    _check_own_sum(text, metadata, file)
    version = _number(metadata, "version", file)
    if version > FILE_FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"storage file {file!r} has format version {version}, this package reads up to {FILE_FORMAT_VERSION}: "
            "upgrade it"
        )
    records = _decode_records(metadata.get(METADATA_PREFIX + "entries", ""))
    entries = _own_entries(records, tensors, file) if version < 2 else _named_entries(records, tensors, file)
    data_length = entries[-1].byte_offset + entries[-1].byte_length if entries else 0
    block_bytes = _number(metadata, "block_bytes", file)
    sums = metadata.get(METADATA_PREFIX + "sums", "")
    generation = metadata.get(METADATA_PREFIX + "generation", "")
    if (
        not is_block_size(block_bytes)
        or len(sums) != SUM_DIGITS * block_count(data_length, block_bytes)
        or not _HEX.fullmatch(sums)
    ):
        raise _damaged(file, "its checksums do not fit its data")
    if len(generation) != GENERATION_LENGTH or not _HEX.fullmatch(generation):
        raise _damaged(file, f"its generation {generation[:80]!r} is not 24 hex digits")
    return StorageHeader(
        entries=tuple(entries),
        data_offset=len(text),
        data_length=data_length,
        state=unescape(metadata.get(METADATA_PREFIX + "kind", "")),
        rank=_number(metadata, "rank", file),
        world_size=_number(metadata, "world_size", file),
        generation=generation,
        block_bytes=block_bytes,
        sums=np.frombuffer(bytes.fromhex(sums), ">u8").astype(np.uint64),
        # The first writers of format version 1 left out both fields.
        files=_number({METADATA_PREFIX + "files": "0"} | metadata, "files", file),
        siblings=msgspec.json.decode(metadata.get(METADATA_PREFIX + "siblings", "[]"), type=tuple[str, ...]),
        adopted=msgspec.json.decode(metadata.get(METADATA_PREFIX + "adopted", "[]"), type=tuple[str, ...]),
        names=() if version < 2 else tuple(tensors),
        foreign=False,
        metadata={},
    )


def _check_own_sum(text: bytes, metadata: dict[str, str], file: str) -> None:
    """Check the header's own checksum, which was taken with zeros in its place."""
    stated = metadata.get(METADATA_PREFIX + "self", "")
    prefix = f'"{METADATA_PREFIX}self":"'
    sum_at = text.find(f'{prefix}{stated}"'.encode()) + len(prefix)
    actual = xxhash.xxh3_64(text[:sum_at])
    actual.update(b"0" * SUM_DIGITS)
    actual.update(text[sum_at + SUM_DIGITS :])
    if actual.hexdigest() != stated:
        raise _damaged(file, "its header does not match the header's own checksum")


def _own_entries(records: list[EntryRecord], tensors: dict[str, SafetensorsEntry], file: str) -> list[StoredEntry]:
    """Return the entries of a file, whose two descriptions must agree: its records and its table of tensors."""
    if len(records) != len(tensors):
        raise _damaged(file, f"it lists {len(tensors)} tensors and describes {len(records)}")
    entries = []
    end = 0
    for record, (name, tensor) in zip(records, tensors.items(), strict=True):
        entry = _own_entry(record, end, file)
        end += entry.byte_length
        code = safetensors_code(entry.dtype) or "U8"
        if (tensor.dtype, tensor.shape) != (code, stored_shape(entry.dtype, entry.lengths)):
            raise _damaged(file, f"the two descriptions of tensor {name!r} differ")
        if tensor.data_offsets != (entry.byte_offset, end):
            raise _damaged(file, f"tensor {name!r} does not start where the tensor before ends")
        entries.append(entry)
    if safetensors_keys(entries) != list(map(unescape, tensors)):
        raise _damaged(file, "the names of its tensors differ from their description")
    return entries


def _named_entries(records: list[EntryRecord], tensors: dict[str, SafetensorsEntry], file: str) -> list[StoredEntry]:
    """Return the entries of a file in which the tensors of another program consist of some of them each."""
    entries: list[StoredEntry] = []
    end = 0
    for name, tensor in tensors.items():
        start = end
        while len(entries) < len(records) and end < tensor.data_offsets[1]:
            entries.append(_own_entry(records[len(entries)], end, file))
            end += entries[-1].byte_length
            if safetensors_code(entries[-1].dtype) != tensor.dtype:
                raise _damaged(file, f"the two descriptions of tensor {name!r} differ")
        if tensor.data_offsets != (start, end) or start == end:
            raise _damaged(file, f"tensor {name!r} is not made of whole boxes that follow the tensor before")
        if _byte_length(entries[-1].dtype, tensor.shape) != end - start:
            raise _damaged(file, f"the two descriptions of tensor {name!r} differ")
    if len(entries) < len(records):
        raise _damaged(file, f"its tensors consist of {len(entries)} boxes, it describes {len(records)}")
    return entries


def _own_entry(record: EntryRecord, start: int, file: str) -> StoredEntry:
    """Return the entry that a record describes, at byte `start` of the data section."""
    shape, offsets, lengths = record.global_shape, record.offsets, record.lengths
    inside = len(shape) == len(offsets) == len(lengths) and all(
        o + n <= size for o, n, size in zip(offsets, lengths, shape, strict=True)
    )
    if not inside:
        raise _damaged(file, f"a box of {record.fqn!r} is not inside of the tensor")
    return StoredEntry(
        key=TensorKey(unescape(record.state), unescape(record.fqn), unescape(record.slot)),
        dtype=record.dtype,
        global_shape=shape,
        offsets=offsets,
        lengths=lengths,
        aliases=tuple(map(unescape, record.aliases)),
        requires_grad=record.requires_grad,
        owner=record.owner,
        byte_offset=start,
        byte_length=_byte_length(record.dtype, lengths),
    )


def _parse_foreign(
    data_offset: int, metadata: dict[str, str], tensors: dict[str, SafetensorsEntry], file: str
) -> StorageHeader:
    entries = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        dtype = from_safetensors_code(tensor.dtype)
        if dtype is None:
            raise IncompatibleCheckpointError(
                f"storage file {file!r}: torch has no dtype for the {tensor.dtype!r} of tensor {name!r}"
            )
        shape = tensor.shape
        if tensor.dtype == "F4":  # the file counts elements; torch counts bytes, which hold two elements each
            if not shape or shape[-1] % 2:
                raise _damaged(file, f"tensor {name!r} of packed pairs has the odd shape {list(shape)}")
            shape = (*shape[:-1], shape[-1] // 2)
        start, end = end, end + _byte_length(dtype, shape)
        if tensor.data_offsets != (start, end):
            raise _damaged(file, f"tensor {name!r} does not start where the tensor before ends, or its size is wrong")
        key = TensorKey("model", name)
        entries.append(
            StoredEntry(key, dtype, shape, (0,) * len(shape), shape, byte_offset=start, byte_length=end - start)
        )
    return StorageHeader(
        entries=tuple(entries),
        data_offset=data_offset,
        data_length=end,
        state="model",
        rank=0,
        world_size=1,
        generation="",
        block_bytes=0,
        sums=np.zeros(0, np.uint64),
        files=0,
        siblings=(),
        adopted=(),
        names=(),
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
