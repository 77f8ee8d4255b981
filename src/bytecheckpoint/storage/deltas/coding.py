"""Encode a run of bytes as its difference from an earlier content, and find the changed elements in it.

A *segment* is a run of bytes of one file, inside of one tensor's box or of the header. It is stored as its changed elements
(gaps between their positions, and the bits that changed), as all changed bits, or whole, whichever is smallest.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.fingerprints import mixed

__all__ = [
    "INDEX",
    "LONGEST_CHAIN",
    "MAGIC",
    "PREFIX_BYTES",
    "SEGMENT_BYTES",
    "WHOLE",
    "Changes",
    "DeltaHead",
    "Encoded",
    "apply_segment",
    "changes_of",
    "check_payload",
    "decode_prefix",
    "encode_head",
    "encode_segment",
    "held_sum",
]

MAGIC: Final = b"bcdelta1"
#: Bytes before the payloads: the magic, then offset, length and xxh3_64 of the head, each 8 bytes, little-endian.
PREFIX_BYTES: Final = 64
#: Most versions that build on each other: each is some calls deep on the stack of a reader.
LONGEST_CHAIN: Final = 100
#: Longest segment.
SEGMENT_BYTES: Final = 1 << 20

SPARSE, DENSE, WHOLE = 1, 2, 3
#: One row for each segment: first byte in the decoded file, length, kind, bytes of an element, first byte and length of the
#: payload, number of changed elements, `held_sum` of their positions, xxh3_64 of the payload.
INDEX: Final = np.dtype(
    [
        ("start", "<i8"),
        ("nbytes", "<i4"),
        ("kind", "u1"),
        ("unit", "u1"),
        ("at", "<i8"),
        ("length", "<i4"),
        ("count", "<i4"),
        ("held", "<u8"),
        ("sum", "<u8"),
    ]
)
_UNITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}
#: Shares of changed elements from which all bits are tried too, and beyond which positions are not tried.
_TRY_DENSE, _ONLY_DENSE = 0.2, 0.5
#: A payload that saves less is not worth its decoding.
_WORTH = 0.95

_codec = pa.Codec("zstd", compression_level=1)


class DeltaHead(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description at the end of a file of differences.

    Attributes:
        size: bytes of the decoded file.
        base: name of the earlier file from the folder of the run, as "step_00000041/model/rank-...", or "" for none.
        index: rows of `INDEX`, by their first byte. What no segment covers is as in the base.
        moved: True if the file holds other boxes than the base, or at other places: no segment changes a tensor then.
    """

    size: int
    base: str
    index: bytes
    moved: bool = False

    def segments(self) -> NDArray[np.void]:
        """Return the rows of the index."""
        return np.frombuffer(self.index, INDEX)


class Encoded(NamedTuple):
    """An encoded segment.

    Attributes:
        kind: SPARSE, DENSE or WHOLE.
        payload: its bytes.
        changed: number of changed elements; all of a WHOLE one count.
        held: `held_sum` of their positions.
    """

    kind: int
    payload: bytes
    changed: int
    held: int


class Changes(NamedTuple):
    """Changed elements of a segment.

    Attributes:
        places: first byte of each in the segment, ascending, int64 [n].
        bits: bits to flip, or the new elements if `whole`; unsigned integers of an element's size, [n].
        whole: True if `bits` are the new elements.
    """

    places: Int64s
    bits: NDArray[np.unsignedinteger]
    whole: bool


def held_sum(places: Int64s) -> int:
    """Return a sum of pseudo-random numbers of elements' places modulo 2**64: equal for equal sets of places."""
    return int(mixed(places.astype(np.uint64)).sum(dtype=np.uint64))


def encode_segment(old: NDArray[np.uint8], new: NDArray[np.uint8], unit: int) -> Encoded | None:
    """Encode new bytes by their difference from old ones of the same number; return None if they are equal.

    Args:
        old: bytes before, whose number is a multiple of `unit`.
        new: bytes now.
        unit: bytes of an element: 1, 2 or 4.
    """
    before, now = old.view(_UNITS[unit]), new.view(_UNITS[unit])
    flipped = before ^ now
    changed = np.flatnonzero(flipped != 0)
    if not len(changed):
        return None
    share = len(changed) / len(now)
    tried = []
    if share < _ONLY_DENSE:
        tried.append((SPARSE, _sparse_payload(changed, flipped[changed])))
    if share > _TRY_DENSE:
        tried.append((DENSE, _compressed(_planes(flipped))))
    kind, payload = min(tried, key=lambda one: len(one[1]))
    if len(payload) > _WORTH * len(new):
        return encode_whole(new, unit)
    return Encoded(kind, payload, len(changed), held_sum(changed * unit))


def encode_whole(new: NDArray[np.uint8], unit: int) -> Encoded:
    """Encode bytes that have no earlier content, or share too little with it."""
    return Encoded(WHOLE, new.tobytes(), len(new) // unit, held_sum(np.arange(0, len(new), unit)))


def _sparse_payload(changed: Int64s, bits: NDArray[np.unsignedinteger]) -> bytes:
    gaps = np.diff(changed, prepend=-1) - 1
    width = next(width for width in _UNITS if int(gaps.max()) < 1 << 8 * width)
    return bytes([width]) + _compressed(_planes(gaps.astype(_UNITS[width])) + _planes(bits))


def _planes(values: NDArray[np.unsignedinteger]) -> bytes:
    """Return the first bytes of all values, then the second ones, and so on: like ones side by side compress well."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1).T.tobytes()


def _from_planes(data: memoryview, unit: int) -> NDArray[np.unsignedinteger]:
    planes = np.frombuffer(data, np.uint8).reshape(unit, -1)
    return np.ascontiguousarray(planes.T).view(_UNITS[unit]).reshape(-1)


def _compressed(data: bytes) -> bytes:
    return bytes(_codec.compress(data, asbytes=True))


def _decompressed(data: memoryview, nbytes: int) -> memoryview:
    try:
        found = memoryview(_codec.decompress(data, decompressed_size=nbytes))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptCheckpointError(f"its payload cannot be decoded: {error}") from error
    if len(found) != nbytes:
        raise CorruptCheckpointError(f"its payload has {len(found)} bytes, not {nbytes}")
    return found


def changes_of(segment: np.void, payload: memoryview) -> Changes:
    """Decode a segment to its changed elements.

    Args:
        segment: row of the index.
        payload: its bytes.

    Raises:
        CorruptCheckpointError: the payload does not hold what the index says.
    """
    unit, count = int(segment["unit"]), int(segment["count"])
    elements = int(segment["nbytes"]) // unit
    if segment["kind"] == SPARSE:
        width = payload[0]
        if width not in _UNITS:
            raise CorruptCheckpointError(f"its gaps cannot have {width} bytes")
        data = _decompressed(payload[1:], count * (width + unit))
        gaps, bits = _from_planes(data[: count * width], width), _from_planes(data[count * width :], unit)
        places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    else:
        whole = segment["kind"] == WHOLE
        data = payload if whole else _decompressed(payload, int(segment["nbytes"]))
        bits = np.frombuffer(data, _UNITS[unit]) if whole else _from_planes(data, unit)
        places = np.arange(elements) if whole else np.flatnonzero(bits != 0)
        bits = bits if whole else bits[places]
    if len(places) != count or (count and places[-1] >= elements) or held_sum(places * unit) != int(segment["held"]):
        raise CorruptCheckpointError("its changed elements are not those that its index counts")
    return Changes(places * unit, bits, bool(segment["kind"] == WHOLE))


def apply_segment(segment: np.void, payload: memoryview, content: NDArray[np.uint8]) -> None:
    """Change the bytes of the base to those of the file, for one whole segment."""
    changes, unit = changes_of(segment, payload), int(segment["unit"])
    found = content.view(_UNITS[unit])
    if changes.whole:
        found[:] = changes.bits
    else:
        found[changes.places // unit] ^= changes.bits


def check_payload(segment: np.void, payload: memoryview) -> None:
    """Check the bytes of a payload.

    Raises:
        CorruptCheckpointError: they are not what was written.
    """
    if len(payload) != int(segment["length"]) or xxhash.xxh3_64_intdigest(payload) != int(segment["sum"]):
        raise CorruptCheckpointError(
            f"its differences for bytes {int(segment['start'])} to {int(segment['start']) + int(segment['nbytes'])} do not "
            "match their checksum"
        )


def encode_head(head: DeltaHead, at: int) -> tuple[bytes, bytes]:
    """Return the head as bytes, which lie at byte `at`, and the prefix of the file."""
    data = msgspec.msgpack.encode(head)
    numbers = np.array([at, len(data), xxhash.xxh3_64_intdigest(data)], "<u8").tobytes()
    return data, (MAGIC + numbers).ljust(PREFIX_BYTES, b"\0")


def decode_prefix(prefix: bytes) -> tuple[int, int, int]:
    """Return offset, length and sum of the head from the prefix of a file.

    Raises:
        CorruptCheckpointError: it is no file of differences.
    """
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise CorruptCheckpointError("it is no file of differences, or was cut")
    offset, length, digest = np.frombuffer(prefix[len(MAGIC) :][:24], "<u8").tolist()
    return offset, length, digest
