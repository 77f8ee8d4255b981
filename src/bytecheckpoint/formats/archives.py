"""The containers of `torch.save`: zip files, read by their central directory, and the files before torch 1.6.

Everything that a container says is checked before memory is taken for it. Only ranges are read: two for the directory and
one for each member.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile

__all__ = ["StoredMember", "ZipEntry", "is_zip", "local_header_end", "locate", "read_directory", "read_member"]

_LOCAL, _CENTRAL, _END, _END64, _LOCATOR64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LOCAL_BYTES, _CENTRAL_BYTES, _END_BYTES, _END64_BYTES, _LOCATOR64_BYTES = 30, 46, 22, 56, 20
#: Bytes at the end of the file that are read first: the directory of a file with some hundred members.
_TAIL: Final = 64 << 10
#: Largest directory: one of a million members.
_MOST_DIRECTORY: Final = 128 << 20
#: Bytes of a local header that are read: torch pads up to 64 bytes before the data.
_HEADER_READ: Final = 30 + 64 + 192
_STORED, _DEFLATED = 0, 8
#: Largest member that is read whole.
_MOST_MEMBER: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One member as the central directory describes it.

    Attributes:
        name: name of the member.
        header: first byte of its local header.
        stored: bytes in the file.
        size: bytes of the content.
        method: number of the compression, 0 for none.
        crc: CRC32 of the content.
    """

    name: str
    header: int
    stored: int
    size: int
    method: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A member: its bytes lie in the file as they are, or deflated.

    Attributes:
        offset: first byte of the content.
        size: bytes of the content.
        crc: CRC32 of the content; None where the container has none.
        deflated: bytes of the deflated content in the file; 0 if it is not deflated.
    """

    offset: int
    size: int
    crc: int | None
    deflated: int = 0


def is_zip(first_bytes: bytes) -> bool:
    """Return whether a file that begins so is a zip file."""
    return first_bytes[:4] == _LOCAL


def read_directory(file: RangedFile) -> dict[str, ZipEntry]:
    """Read the central directory of a zip file; the members, by name without the folder that has the file's name.

    Raises:
        CorruptCheckpointError: the directory is damaged, members overlap or lie outside of the file.
        IncompatibleCheckpointError: the directory is too large, or a member is encrypted.
    """
    tail_start = max(file.size - _TAIL, 0)
    tail = file.read(tail_start, file.size - tail_start)
    end = tail.rfind(_END)
    if end < 0 or end + _END_BYTES > len(tail):
        raise file.damaged("it begins as a zip file and has no directory at its end: it was cut short")
    disk, first_disk, _, count, size, offset = struct.unpack_from("<HHHHII", tail, end + 4)
    at_end = tail_start + end
    if disk or first_disk not in {0, 0xFFFF}:
        raise file.damaged("it is a part of a zip file of several parts")
    locator = end - _LOCATOR64_BYTES
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR64:
        (at_end,) = struct.unpack_from("<Q", tail, locator + 8)
        record = file.read(at_end, _END64_BYTES)
        if record[:4] != _END64:
            raise file.damaged("its zip64 record is not where its locator says")
        count, size, offset = struct.unpack_from("<QQQ", record, 32)
    if offset + size > at_end or count * _CENTRAL_BYTES > size:
        raise file.damaged(f"its directory of {count} members in {size} bytes from byte {offset} does not fit into it")
    if size > _MOST_DIRECTORY:
        raise IncompatibleCheckpointError(f"{file.label}: its directory has {size} bytes, more than {_MOST_DIRECTORY}")
    inside = offset >= tail_start
    data = tail[offset - tail_start : offset - tail_start + size] if inside else file.read(offset, size)
    entries = list(_entries(file, data, count))
    _check_places(file, entries, offset)
    root = entries[0].name.partition("/")[0] + "/" if entries else ""
    if not all(entry.name.startswith(root) for entry in entries):
        root = ""
    found = {entry.name.removeprefix(root): entry for entry in entries}
    if len(found) != len(entries):
        raise file.damaged("two of its members have one name")
    return found


def _entries(file: RangedFile, data: bytes, count: int) -> Iterator[ZipEntry]:
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _CENTRAL or at + _CENTRAL_BYTES > len(data):
            raise file.damaged(f"its directory is damaged at byte {at}")
        flags, method, _, _, crc, stored, size, names, extras, comments = struct.unpack_from(
            "<HHHHIIIHHH", data, at + 8
        )
        (header,) = struct.unpack_from("<I", data, at + 42)
        begin = at + _CENTRAL_BYTES
        at = begin + names + extras + comments
        if at > len(data):
            raise file.damaged("its directory ends inside of a member")
        try:
            name = data[begin : begin + names].decode()
        except UnicodeDecodeError:
            raise file.damaged("a member has a name that is no text") from None
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
            raise file.damaged(f"a member is called {name[:200]!r}, which leads out of the file")
        if flags & 0x41:
            raise IncompatibleCheckpointError(f"{file.label}: its member {name!r} is encrypted")
        extra = data[begin + names : begin + names + extras]
        size, stored, header = _zip64(file, name, extra, [size, stored, header])
        if method not in {_STORED, _DEFLATED} or (method == _STORED and stored != size):
            raise file.damaged(f"its member {name!r} has method {method}, {stored} bytes for {size}")
        yield ZipEntry(name, header, stored, size, method, crc)


def _zip64(file: RangedFile, name: str, extra: bytes, numbers: list[int]) -> list[int]:
    """Return the numbers with those replaced that the zip64 field holds: the ones that are all ones."""
    wide = [k for k, number in enumerate(numbers) if number == 0xFFFFFFFF]
    at = 0
    while wide and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * len(wide) and at + 4 + length <= len(extra):
            for place, k in enumerate(wide):
                (numbers[k],) = struct.unpack_from("<Q", extra, at + 4 + 8 * place)
            return numbers
        at += 4 + length
    if wide:
        raise file.damaged(f"the size of its member {name!r} is missing")
    return numbers


def _check_places(file: RangedFile, entries: list[ZipEntry], directory: int) -> None:
    """Check that no two members overlap and that all end before the directory."""
    end, last = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.header):
        if entry.header < end:
            raise file.damaged(f"its members {last!r} and {entry.name!r} overlap")
        end, last = entry.header + _LOCAL_BYTES + len(entry.name.encode()) + entry.stored, entry.name
        if end > directory:
            raise file.damaged(f"its member {entry.name!r} of {entry.stored} bytes lies outside of the file")


def locate(file: RangedFile, entries: Iterable[ZipEntry], *, deflated: bool = False) -> dict[str, StoredMember]:
    """Return where the contents of members lie, by the members' names; one read each.

    Args:
        file: the zip file.
        entries: the members.
        deflated: allow members that are deflated.

    Raises:
        CorruptCheckpointError: a local header differs from the directory, or its content lies outside.
        IncompatibleCheckpointError: a member is deflated.
    """
    wanted = list(entries)
    for entry in wanted:
        if entry.method != _STORED and not deflated:
            raise IncompatibleCheckpointError(
                f"{file.label}: its member {entry.name!r} is deflated, so no range of it can be read: "
                "save the file again by torch.save"
            )
    heads = file.read_many([(e.header, min(_HEADER_READ, file.size - e.header)) for e in wanted])
    found = {}
    for entry, head in zip(wanted, heads, strict=True):
        begin = local_header_end(head, entry.name)
        if begin is None:
            raise file.damaged(f"the header of its member {entry.name!r} is not where the directory says")
        file.part(entry.header + begin, entry.stored)  # raises
        compressed = entry.stored if entry.method != _STORED else 0
        found[entry.name] = StoredMember(entry.header + begin, entry.size, entry.crc, compressed)
    in_order = sorted(zip(wanted, found.values(), strict=True), key=lambda item: item[0].header)
    for (_, before), (entry, _) in pairwise(in_order):
        if before.offset + (before.deflated or before.size) > entry.header:
            raise file.damaged(f"its member {entry.name!r} overlaps the one before")
    return found


def local_header_end(head: bytes, name: str = "") -> int | None:
    """Return the length of the local header that `head` begins with; None if it is no header of that member."""
    if len(head) < _LOCAL_BYTES or head[:4] != _LOCAL:
        return None
    names, extras = struct.unpack_from("<HH", head, 26)
    if name and head[_LOCAL_BYTES : _LOCAL_BYTES + names] != name.encode():
        return None
    return int(_LOCAL_BYTES + names + extras)


def read_member(file: RangedFile, member: StoredMember) -> bytes:
    """Read a member whole, inflate it, and check its CRC32.

    Raises:
        CorruptCheckpointError: the content differs from what was written.
        IncompatibleCheckpointError: the member is too large.
    """
    if member.size > _MOST_MEMBER:
        raise IncompatibleCheckpointError(
            f"{file.label}: its member at byte {member.offset} has {member.size} bytes, more than {_MOST_MEMBER}"
        )
    data = file.read(member.offset, member.deflated or member.size)
    if member.deflated:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = inflater.decompress(data, member.size + 1)
        except zlib.error as error:
            raise file.damaged(f"its member at byte {member.offset} cannot be inflated: {error}") from None
        if len(data) != member.size or not inflater.eof:
            raise file.damaged(f"its member at byte {member.offset} does not have {member.size} bytes")
    if member.crc is not None and zlib.crc32(data) != member.crc:
        raise file.damaged(f"the CRC32 of its member at byte {member.offset} differs")
    return data
