"""Read documents from text files and JSON Lines files: each line, or each file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.dataloader.sources.base import Document
from bytecheckpoint.dataloader.sources.files import RangeSource, SourceFiles
from bytecheckpoint.dataloader.sources.paths import Paths
from bytecheckpoint.errors import UsageError

__all__ = ["JsonLinesSource", "TextSource"]

_NEWLINE: Final = ord("\n")
_RETURN: Final = ord("\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class TextSource(RangeSource):
    """Lines of UTF-8 files without their ends (LF or CR LF), or whole files. Empty ones are no documents.

    The lines are found once, when the source is made, by one pass over the files; 8 bytes of memory for each.

    Args:
        paths: files; URLs and compressed files need a cache.
        name: name of the source; None for the last component of the (first) path.
        by: unit of a document, "line" or "file".
        shuffle: True for a random order of its own in every epoch.
        errors: treatment of bytes that are not UTF-8, as in `bytes.decode`.
        cache: local folder for copies of files that are compressed or behind a URL of fsspec ("s3://..."), and for the
            places of lines, which are found once then. All processes of a machine may share it.

    Raises:
        UsageError: a file is missing or needs a cache, or there is no document.
    """

    def __init__(
        self,
        paths: Paths,
        name: str | None = None,
        *,
        by: Literal["line", "file"] = "line",
        shuffle: bool = True,
        errors: Literal["strict", "replace", "ignore"] = "strict",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if by not in {"line", "file"}:
            raise UsageError(f"by is {by!r}: give 'line' or 'file'")
        files = SourceFiles(paths, cache)
        self._by = by
        self._errors = errors
        bounds: Iterable[NDArray[np.int64]]
        if by == "line":
            bounds = files.bounds("lines", partial(_line_bounds, files))
        else:
            bounds = (np.array([0, size] if size else [0], np.int64) for size in files.sizes.tolist())
        super().__init__(files, name, shuffle, bounds)

    def _document(self, data: bytes, file: int, start: int) -> str:
        data = data.removeprefix(_BYTE_ORDER_MARK) if self._by == "file" else _line(data)
        try:
            return data.decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{_place(self._files, file, start + error.start)} is not UTF-8 ({error.reason}): "
                "convert the file, or pass errors='replace'"
            ) from None

    def describe(self) -> dict[str, Any]:
        """Return the count, the sizes and samples of the files, and the unit of a document."""
        return {"kind": "text", "by": self._by, "errors": self._errors} | super().describe()


class JsonLinesSource(RangeSource):
    """Values of one field of the JSON objects in the lines of files: text, or a list of integers, which are tokens.

    Args:
        paths: files with one object in each line that is not empty; URLs and compressed files need a cache.
        name: name of the source; None for the last component of the (first) path.
        field: key of the value; None for the whole object.
        shuffle: True for a random order of its own in every epoch.
        cache: local folder, as for `TextSource`.

    Raises:
        UsageError: a file is missing or needs a cache, or there is no document. Reading a line that is no such object
            raises it with the file and the line.
    """

    def __init__(
        self,
        paths: Paths,
        name: str | None = None,
        *,
        field: str | None = "text",
        shuffle: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        files = SourceFiles(paths, cache)
        self._field = field
        self._decoder = _decoder(field)
        super().__init__(files, name, shuffle, files.bounds("lines", partial(_line_bounds, files)))

    def _document(self, data: bytes, file: int, start: int) -> Document:
        try:
            value = self._decoder.decode(_line(data))
        except msgspec.DecodeError as error:
            raise UsageError(f"{_place(self._files, file, start)} is no document: {error}") from None
        if self._field is not None:
            value = value.value
        return np.array(value, np.int64) if isinstance(value, list) else value

    def describe(self) -> dict[str, Any]:
        """Return the count, the sizes and samples of the files, and the field."""
        return {"kind": "jsonl", "field": self._field} | super().describe()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_decoder"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._decoder = _decoder(self._field)


def _decoder(field: str | None) -> msgspec.json.Decoder[Any]:
    """Return a decoder of one field; the others are skipped, which is several times quicker than decoding them."""
    if field is None:
        return msgspec.json.Decoder(dict[str, Any])
    return msgspec.json.Decoder(msgspec.defstruct("Line", [("value", str | list[int])], rename={"value": field}))


def _line_bounds(files: SourceFiles, file: int) -> NDArray[np.int64]:
    """Return the starts of the lines that are not empty, and the size of the file; int64 [lines + 1]."""
    size = int(files.sizes[file])
    start = len(_BYTE_ORDER_MARK) if files.read(file, 0, min(size, 3)) == _BYTE_ORDER_MARK else 0
    bounds: list[NDArray[np.int64]] = []
    offset, before = 0, 0  # the byte before this piece
    for piece in files.pieces(file):
        ends = np.flatnonzero(piece == _NEWLINE)
        if len(ends):
            last = piece[ends - 1]  # the last byte of each line
            if ends[0] == 0:
                last[0] = before
            ends += offset
            starts = np.concatenate(([start], ends[:-1] + 1))
            bounds.append(starts[ends - starts > (last == _RETURN)])
            start = int(ends[-1]) + 1
        offset, before = offset + len(piece), int(piece[-1])
    if size - start > (before == _RETURN):
        bounds.append(np.array([start], np.int64))
    return np.concatenate([*bounds, np.array([size], np.int64)])


def _line(data: bytes) -> bytes:
    """Return the first line of `data`, without its end; empty lines may follow it."""
    return data.partition(b"\n")[0].removesuffix(b"\r")


def _place(files: SourceFiles, file: int, offset: int) -> str:
    """Return "PATH, line N" of a byte of a file."""
    newlines = sum(int(np.count_nonzero(piece == _NEWLINE)) for piece in files.pieces(file, end=offset))
    return f"{files.paths[file]}, line {newlines + 1},"
