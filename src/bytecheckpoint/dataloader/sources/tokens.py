"""Read documents from files that hold nothing but token ids."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from bytecheckpoint.dataloader.sources.base import Document
from bytecheckpoint.dataloader.sources.files import RangeSource, SourceFiles
from bytecheckpoint.dataloader.sources.paths import Paths
from bytecheckpoint.errors import UsageError

__all__ = ["TokenFileSource"]


class TokenFileSource(RangeSource):
    """Tokens in flat binary files, as arrays (read-only) of the files' dtype.

    Exactly one of `document_end`, `offsets` and `length` divides the tokens into documents.

    Args:
        paths: files of tokens of `dtype` and nothing else.
        name: name of the source; None for the last component of the (first) path.
        dtype: integer type of numpy.
        document_end: token that ends each document, and belongs to it. It is searched for once, when the source is made.
        offsets: numbers of the tokens with which documents start, and the end of the last one: an integer array
            [documents + 1], or a .npy file of it. For one file. Empty documents are left out.
        length: number of tokens of a document; the last piece of a file may be shorter.
        shuffle: True for a random order of its own in every epoch.
        cache: local folder for copies of files that are compressed or behind a URL of fsspec, and for the places of
            `document_end`. All processes of a machine may share it.

    Raises:
        UsageError: a file is missing or does not fit the dtype or the offsets, or there is no document.
    """

    def __init__(
        self,
        paths: Paths,
        name: str | None = None,
        *,
        dtype: DTypeLike = "uint16",
        document_end: int | None = None,
        offsets: NDArray[Any] | str | os.PathLike[str] | None = None,
        length: int | None = None,
        shuffle: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if sum(given is not None for given in (document_end, offsets, length)) != 1:
            raise UsageError("give one of document_end, offsets and length, to divide the tokens into documents")
        files = SourceFiles(paths, cache)
        self._dtype = np.dtype(dtype)
        if self._dtype.kind not in "iu":
            raise UsageError(f"tokens are integers, not {self._dtype}: give the dtype that the files were written with")
        for path, size in zip(files.paths, files.sizes.tolist(), strict=True):
            if size % self._dtype.itemsize:
                raise UsageError(f"{path} has {size} bytes, which is no whole number of {self._dtype} tokens")
        counts = (files.sizes // self._dtype.itemsize).tolist()
        self._documents: dict[str, Any]  # division into documents, for `describe`
        if document_end is not None:
            self._documents = {"document_end": document_end}
            kind = f"{self._dtype.str} {document_end}"
            bounds = [*files.bounds(kind, lambda file: self._ended(files, file, document_end, counts[file]))]
        elif length is not None:
            if type(length) is not int or length < 1:
                raise UsageError(f"length is {length!r}: give the tokens of a document, an int of at least 1")
            self._documents = {"length": length}
            bounds = [np.append(np.arange(0, count, length), count) for count in counts]
        else:
            if len(files.paths) != 1:
                raise UsageError(f"offsets are for one file, not for {len(files.paths)}: make a source of each file")
            try:
                loaded = np.load(offsets, allow_pickle=False) if isinstance(offsets, (str, os.PathLike)) else offsets
            except (OSError, EOFError, ValueError) as error:
                raise UsageError(f"offsets={offsets!r} is no .npy file of integers: {error}") from error
            bounds = [_checked(np.asarray(loaded), counts[0])]
            self._documents = {"offsets": None}
        super().__init__(files, name, shuffle, (one.astype(np.int64) * self._dtype.itemsize for one in bounds))

    def _ended(self, files: SourceFiles, file: int, document_end: int, count: int) -> NDArray[np.int64]:
        """Return the starts of the documents of a file of `count` tokens, and the end of the last one, in tokens."""
        found, offset = [np.zeros(1, np.int64)], 0
        for piece in files.pieces(file, self._dtype):
            found.append(np.flatnonzero(piece == document_end) + (offset + 1))
            offset += len(piece)
        bounds = np.concatenate(found)
        return bounds if bounds[-1] == count else np.append(bounds, count)

    def _document(self, data: bytes, file: int, start: int) -> Document:
        return np.frombuffer(data, self._dtype)

    def describe(self) -> dict[str, Any]:
        """Return the count, the sizes and samples of the files, the dtype, and the division into documents."""
        documents = self._documents
        if "offsets" in documents:
            offsets = (self._bounds // self._dtype.itemsize).astype("<i8")
            documents = {"offsets": xxhash.xxh3_64_hexdigest(offsets.tobytes())}
        return {"kind": "tokens", "dtype": self._dtype.str, **documents} | super().describe()


def _checked(offsets: NDArray[Any], tokens: int) -> NDArray[np.int64]:
    """Return the offsets without those of empty documents."""
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise UsageError(f"offsets are {offsets.dtype} of shape {offsets.shape}: give integers, documents + 1 of them")
    offsets = offsets.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > tokens or (np.diff(offsets) < 0).any():
        raise UsageError(
            f"offsets go from {offsets[0]} to {offsets[-1]} in a file of {tokens} tokens: they must rise from 0 on, "
            "to the number of tokens at most"
        )
    return np.unique(offsets)
