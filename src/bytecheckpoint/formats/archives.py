"""The containers of `torch.save`: zip files, read by their central directory (`zipfile`), and the files before torch 1.6.

Everything that a container says is checked before memory is taken for it. Only ranges are read: two for the directory and
one for each member.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile

__all__ = ["StoredMember", "is_zip", "local_header_end", "locate", "read_directory", "read_member"]

_LOCAL = b"PK\x03\x04"
_LOCAL_BYTES, _END_BYTES = 30, 22
#: Bytes at the end of the file that are read first: the directory of a file with some hundred members.
_TAIL: Final = 64 << 10
#: Largest directory: one of a million members.
_MOST_DIRECTORY: Final = 128 << 20
#: Bytes of a local header that are read: torch pads up to 64 bytes before the data.
_HEADER_READ: Final = 30 + 64 + 192
#: Largest member that is read whole.
_MOST_MEMBER: Final = 1 << 30


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


def read_directory(file: RangedFile) -> dict[str, ZipInfo]:
    """Read the central directory of a zip file; the members, by name without the folder that has the file's name.

    Raises:
        CorruptCheckpointError: the directory is damaged, members overlap or lie outside of the file.
        IncompatibleCheckpointError: the directory is too large, or a member is encrypted.
    """
    seekable = _Seekable(file)
    try:
        with ZipFile(seekable, metadata_encoding="utf-8") as opened:
            entries, directory, comment = opened.infolist(), opened.start_dir, opened.comment
    except (BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise file.damaged(f"it begins as a zip file and has no sound directory at its end: {error}") from None
    disk, *_, count = struct.unpack_from("<4H", seekable.tail, len(seekable.tail) - _END_BYTES - len(comment) + 4)
    if disk or count not in {len(entries), 0xFFFF}:
        raise file.damaged(f"its directory of {len(entries)} members is a part of one of {count}")
    _check_entries(file, entries, directory)
    root = entries[0].filename.partition("/")[0] + "/" if entries else ""
    if not all(entry.filename.startswith(root) for entry in entries):
        root = ""
    found = {entry.filename.removeprefix(root): entry for entry in entries}
    if len(found) != len(entries):
        raise file.damaged("two of its members have one name")
    return found


class _Seekable(io.BytesIO):
    """A file from which `ZipFile` reads the directory.

    Attributes:
        tail: last bytes of the file, which were read at once.
    """

    def __init__(self, file: RangedFile) -> None:
        super().__init__()
        self._file, self._at = file, 0
        self._start = max(file.size - _TAIL, 0)
        self.tail = file.read(self._start, file.size - self._start)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte, counted from the beginning or the end."""
        if (at := offset + (self._file.size if whence else 0)) < 0:
            raise ValueError(f"it points to byte {at}")
        self._at = at
        return at

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes, fewer at the end of the file."""
        left = max(self._file.size - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MOST_DIRECTORY:
            text = f"its directory has {size} bytes, more than {_MOST_DIRECTORY}"
            raise IncompatibleCheckpointError(f"{self._file.label}: {text}")
        first = self._at - self._start
        self._at += size
        return self.tail[first : first + size] if first >= 0 else self._file.read(self._at - size, size)


def _check_entries(file: RangedFile, entries: Sequence[ZipInfo], directory: int) -> None:
    """Check the names and sizes of members, that no two overlap, and that all end before the directory."""
    end, last = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        name, stored = entry.filename, entry.compress_size
        if entry.orig_filename != name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise file.damaged(f"a member is called {name[:200]!r}, which leads out of the file")
        if entry.flag_bits & 0x41:
            raise IncompatibleCheckpointError(f"{file.label}: its member {name!r} is encrypted")
        plain = entry.compress_type == ZIP_STORED
        if not (plain or entry.compress_type == ZIP_DEFLATED) or (plain and stored != entry.file_size):
            text = f"has method {entry.compress_type}, {stored} bytes for {entry.file_size}"
            raise file.damaged(f"its member {name!r} {text}")
        if entry.header_offset < end:
            raise file.damaged(f"its members {last!r} and {name!r} overlap")
        end, last = entry.header_offset + _LOCAL_BYTES + len(name.encode()) + stored, name
        if end > directory:
            raise file.damaged(f"its member {name!r} of {stored} bytes lies outside of the file")


def locate(file: RangedFile, entries: Iterable[ZipInfo], *, deflated: bool = False) -> dict[str, StoredMember]:
    """Return where the contents of members lie, by the members' names; one read each.

    Raises:
        CorruptCheckpointError: a local header differs from the directory, or its content lies outside.
        IncompatibleCheckpointError: a member is deflated.
    """
    wanted = list(entries)
    for entry in wanted:
        if entry.compress_type != ZIP_STORED and not deflated:
            raise IncompatibleCheckpointError(
                f"{file.label}: its member {entry.filename!r} is deflated, so no range of it can be read: "
                "save the file again by torch.save"
            )
    heads = file.read_many([(e.header_offset, min(_HEADER_READ, file.size - e.header_offset)) for e in wanted])
    found = {}
    for entry, head in zip(wanted, heads, strict=True):
        begin = local_header_end(head, entry.filename)
        if begin is None:
            raise file.damaged(f"the header of its member {entry.filename!r} is not where the directory says")
        begin += entry.header_offset
        file.part(begin, entry.compress_size)  # raises
        compressed = entry.compress_size if entry.compress_type != ZIP_STORED else 0
        found[entry.filename] = StoredMember(begin, entry.file_size, entry.CRC, compressed)
    in_order = sorted(zip(wanted, found.values(), strict=True), key=lambda item: item[0].header_offset)
    for (_, before), (entry, _) in pairwise(in_order):
        if before.offset + (before.deflated or before.size) > entry.header_offset:
            raise file.damaged(f"its member {entry.filename!r} overlaps the one before")
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
