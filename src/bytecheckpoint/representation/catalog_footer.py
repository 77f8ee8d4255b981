"""The footer of the catalog's file, and its seal (docs/format.md, sections 3.1 and 3.2)."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.catalog import Catalog, StorageFile

__all__ = [
    "CATALOG_FORMAT_VERSION",
    "FOOTER_KEY",
    "LOCATOR_BYTES",
    "SEAL_BYTES",
    "TILED",
    "Footer",
    "check_parquet_claims",
    "check_seal",
    "damaged",
    "decode_footer",
    "encode_footer",
    "files_of",
    "fingerprints_of",
    "read_locator",
    "seal",
    "tail_start",
]

CATALOG_FORMAT_VERSION: Final = 6
#: Versions whose first group lists tilings.
TILED: Final = (3, 6)
SEAL_BYTES: Final = 32
FOOTER_KEY: Final = b"bytecheckpoint"

_SEAL_MAGIC = b"bytecheckpoint"
_NAME_BYTES = len(_SEAL_MAGIC) + 2
_VERSIONS = {version: f"{version:02}".encode() for version in range(1, CATALOG_FORMAT_VERSION + 1)}
_PARQUET_MAGIC = b"PAR1"
#: Before the seal of a catalog in groups: offset, length and hash of the index, and a hash of all this and the footer.
LOCATOR_BYTES: Final = 48
_PLACE = struct.Struct("<QQ")

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class _FileColumns(msgspec.Struct):
    """The table of files by columns; one value stands for a column of equal values."""

    count: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    name: str | list[str]
    state: str | list[str] = msgspec.field(name="kind")
    rank: int | list[int]
    size: _Natural | list[_Natural]
    data_offset: _Natural | list[_Natural]
    header_sum: _Sum | list[_Sum]
    block_bytes: _Natural | list[_Natural]
    generation: str | list[str]
    format: str | list[str]
    stored: _Natural | list[_Natural] = 0


#: Names of the columns in `StorageFile` and in the footer.
_FILE_COLUMNS = list(zip(_FileColumns.__struct_fields__, _FileColumns.__struct_encode_fields__, strict=True))[1:]


class Footer(msgspec.Struct):
    """The package's own part of the Parquet footer."""

    version: int
    files: _FileColumns
    sums: dict[str, str]
    aliases: dict[str, dict[str, str]]
    info: dict[str, Any]
    fingerprints: str = ""


# Makes msgspec analyse the type at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
msgspec.json.Decoder(Footer)


def seal(parquet: memoryview, index: bytes = b"", version: int = 1) -> bytes:
    """Insert the seal between the pages and the footer, where it moves no offset that the footer holds.

    Args:
        parquet: the file without seal.
        index: index of a catalog in groups; empty for a catalog of version 1.
        version: version of the catalog.
    """
    (length,) = struct.unpack("<I", parquet[-8:-4])
    pages, footer = parquet[: -8 - length], parquet[-8 - length :]
    name = _SEAL_MAGIC + _VERSIONS[version]
    locator = b""
    if index:
        locator = _PLACE.pack(len(pages), len(index)) + xxhash.xxh3_128_digest(index)
        locator += _hash(locator, name, footer)
    return b"".join((pages, index, locator, name, _hash(pages, index, locator, name, footer), footer))


def check_seal(data: bytes) -> None:
    """Check the hash of the whole file, and its version.

    Raises:
        CorruptCheckpointError: a byte was changed, removed or added.
        IncompatibleCheckpointError: a newer version of the format wrote the file.
    """
    view = memoryview(data)
    if data[:4] != _PARQUET_MAGIC:
        raise damaged("it is not a Parquet file, so not a catalog")
    seal_at = _seal_place(view, len(data))
    hash_at, end = seal_at + _NAME_BYTES, seal_at + SEAL_BYTES
    name = data[seal_at:hash_at]
    if not name.startswith(_SEAL_MAGIC):
        raise damaged("it is a Parquet file without a catalog's seal: another program's, or its end is damaged")
    if _hash(view[:seal_at], name, view[end:]) != data[hash_at:end]:
        raise damaged("its bytes do not match its seal")
    version = name.removeprefix(_SEAL_MAGIC)
    if version not in _VERSIONS.values():
        raise _newer(version.decode("ascii", "replace"))


def _seal_place(end: memoryview, size: int) -> int:
    """Return the place of the seal, which the last bytes of a file of `size` bytes show."""
    whole = end[-4:] == _PARQUET_MAGIC and size >= 12 + SEAL_BYTES
    footer_length = struct.unpack("<I", end[-8:-4])[0] if whole else 0
    if not whole or footer_length > size - 12 - SEAL_BYTES:
        raise damaged("its end is missing")
    return size - 8 - int(footer_length) - SEAL_BYTES


def has_seal(size: int, read: Callable[[int, int], bytes]) -> bool:
    """Return whether a file has a catalog's seal, of any version, sound or not.

    Args:
        size: length of the file.
        read: function that returns some bytes of it, by first byte and length.
    """
    try:
        place = _seal_place(memoryview(read(max(size - 8, 0), min(size, 8))), size)
    except CorruptCheckpointError:
        return False
    return read(place, len(_SEAL_MAGIC)) == _SEAL_MAGIC


def tail_start(end: memoryview, size: int) -> int:
    """Return the first byte of the tail, which holds all that `read_locator` needs, from a file's last bytes."""
    return max(_seal_place(end, size) - LOCATOR_BYTES, 0)


def read_locator(tail: memoryview) -> tuple[int, int, bytes] | None:
    """Return offset, length and hash of the index of a catalog in groups, after a check of the tail's own hash.

    Args:
        tail: the bytes from `tail_start` on.

    Returns:
        None for a catalog of another version, which is read whole.

    Raises:
        CorruptCheckpointError: a byte of the tail was changed.
    """
    name = tail[LOCATOR_BYTES : LOCATOR_BYTES + _NAME_BYTES]
    if bytes(name) not in {_SEAL_MAGIC + _VERSIONS[version] for version in range(2, CATALOG_FORMAT_VERSION + 1)}:
        return None
    locator, own = tail[: LOCATOR_BYTES - 16], tail[LOCATOR_BYTES - 16 : LOCATOR_BYTES]
    if _hash(locator, name, tail[LOCATOR_BYTES + SEAL_BYTES :]) != own:
        raise damaged("the bytes of its footer do not match their hash")
    offset, length = _PLACE.unpack(locator[: _PLACE.size])
    return offset, length, bytes(locator[_PLACE.size :])


def _hash(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def encode_footer(catalog: Catalog, version: int) -> bytes:
    """Return the table of files and what describes the checkpoint as a whole, as JSON."""
    files = catalog.files
    columns: dict[str, Any] = {stored: [getattr(file, name) for file in files] for name, stored in _FILE_COLUMNS}
    columns["header_sum"] = [f"{value:016x}" for value in columns["header_sum"]]
    packed = {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}
    if not packed["stored"]:
        del packed["stored"]  # no file is kept as differences
    untiled = np.flatnonzero(catalog.untiled).tolist()
    content = {
        "version": version,
        "files": {"count": len(files), **packed},
        "sums": {str(i): catalog.sums(i).astype(">u8").tobytes().hex() for i in untiled if files[i].block_bytes},
        "aliases": {state: dict(names) for state, names in catalog.aliases.items()},
        "info": dict(catalog.info),
    }
    if catalog.fingerprints is not None:
        content["fingerprints"] = base64.b64encode(catalog.fingerprints.astype("<u8").tobytes()).decode()
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def decode_footer(parquet: Any) -> Footer:
    """Return the footer of a Parquet file. Raises errors of the libraries that read it for unreadable content."""
    text = (parquet.metadata.metadata or {}).get(FOOTER_KEY)
    if text is None:
        raise damaged("its footer lacks the table of files")
    content = json.loads(text)
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > CATALOG_FORMAT_VERSION:
        raise _newer(str(version))
    footer = msgspec.convert(content, Footer)
    _check_claims(footer)
    return footer


def _check_claims(footer: Footer) -> None:
    """Check the number of files, which the footer itself bounds, and the facts that readers calculate with.

    Raises:
        CorruptCheckpointError: the table of files has other lengths than it says, or there is no such number of ranks.
    """
    files = footer.files
    columns = [values for name, _ in _FILE_COLUMNS if isinstance(values := getattr(files, name), list)]
    # Files have different names, so one name stands for one file at most.
    if any(len(values) != files.count for values in columns) or (files.count > 1 and isinstance(files.name, str)):
        raise damaged(f"its table of files does not have the {files.count} rows that it claims")
    size = footer.info.get("world_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 31:
        raise damaged("its number of ranks is none")


class _ParquetClaims:
    """The sizes that the footer of a Parquet file states, in Thrift's compact protocol.

    pyarrow ends the process when it shows columns of some malformed footers, so they are read here before it sees them.

    Args:
        footer: bytes of the footer.

    Attributes:
        sums: sum of the integers at each of `_CLAIMS`.
    """

    def __init__(self, footer: memoryview) -> None:
        self.sums = dict.fromkeys(_CLAIMS, 0)
        self._bytes = footer
        self._at = 0
        self._struct(())

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._bytes[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number that is too long")

    def _struct(self, path: tuple[int, ...]) -> None:
        field = 0
        while (head := self._bytes[self._at]) != 0:
            self._at += 1
            if head >> 4:
                field += head >> 4
            else:
                number = self._varint()
                field = (number >> 1) ^ -(number & 1)
            if head & 15 > 2:  # 1 and 2 are the values of a boolean
                self._value(head & 15, (*path, field))
        self._at += 1

    def _value(self, kind: int, path: tuple[int, ...]) -> None:
        if kind in (1, 2, 3):
            self._at += 1
        elif kind in (4, 5, 6):
            number = self._varint()
            if path in self.sums:
                self.sums[path] += number >> 1  # not negative in a sound file
        elif kind == 7:
            self._at += 8
        elif kind == 8:
            length = self._varint()
            self._at += length
        elif kind in (9, 10):
            head = self._bytes[self._at]
            self._at += 1
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._value(head & 15, path)
        elif kind == 12:
            self._struct(path)
        else:
            raise ValueError(f"a value of type {kind}")


#: Fields of Parquet's footer, by their numbers from the outermost structure on: rows of the file and of a row group, values
#: of a column chunk, and their uncompressed size.
_ROWS, _GROUP_ROWS, _VALUES, _SIZES = (3,), (4, 3), (4, 1, 3, 5), (4, 1, 3, 6)
_CLAIMS: Final = (_ROWS, _GROUP_ROWS, _VALUES, _SIZES)
#: Values that a small catalog may hold, those of all columns together.
_MOST_VALUES = 1 << 22


def check_parquet_claims(data: memoryview) -> None:
    """Check that a Parquet file claims no more content than its bytes can hold, before a reader takes memory for it.

    Raises:
        CorruptCheckpointError: it claims more.
        ValueError, IndexError: its footer cannot be read.
    """
    (length,) = struct.unpack("<I", data[-8:-4])
    if length > len(data) - 8:
        raise damaged("its end is missing")
    sums = _ParquetClaims(data[len(data) - 8 - length : len(data) - 8]).sums
    # Equal values take next to no bytes, so a small file may hold many.
    most = max(_MOST_VALUES, 64 * len(data))
    if max(sums[_ROWS], sums[_GROUP_ROWS], sums[_VALUES]) > most or sums[_SIZES] > 16 * most:
        raise damaged(f"it claims {sums[_VALUES]} values of {sums[_SIZES]} bytes, which {len(data)} bytes cannot hold")


def fingerprints_of(footer: Footer, tensors: int) -> NDArray[np.uint64] | None:
    """Return the fingerprints of the first of some tensors, uint64 [p, 2], if there are any.

    Raises:
        CorruptCheckpointError: there are more of them than tensors.
    """
    if not footer.fingerprints:
        return None
    try:
        found = np.frombuffer(base64.b64decode(footer.fingerprints, validate=True), "<u8").astype(np.uint64)
    except ValueError:
        found = np.zeros(0, np.uint64)
    if not 0 < len(found) <= 2 * tensors or len(found) % 2:
        raise damaged(f"it does not have fingerprints of {tensors} tensors")
    return found.reshape(-1, 2)


def files_of(footer: Footer) -> list[StorageFile]:
    """Return the table of files."""

    def column(name: str) -> Sequence[Any]:
        values = getattr(footer.files, name)
        return values if isinstance(values, list) else [values] * footer.files.count

    columns = {name: column(name) for name, _ in _FILE_COLUMNS}
    columns["header_sum"] = [int(text, 16) for text in columns["header_sum"]]
    return [StorageFile(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _newer(version: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"the catalog has format version {version}, this package reads up to {CATALOG_FORMAT_VERSION}: upgrade it"
    )


def damaged(what: str) -> CorruptCheckpointError:
    """Return the error for a catalog whose file is damaged."""
    return CorruptCheckpointError(
        f"catalog 'metadata.parquet' cannot be trusted: {what}; rebuild it with `bytecheckpoint repair`, "
        "or fall back to an older step",
        file="metadata.parquet",
    )
