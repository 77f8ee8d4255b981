"""Read documents from the indexed data sets of Megatron: tokens in a .bin file, and an index of them in an .idx file.

The index, little-endian (megatron/core/datasets/indexed_dataset.py): "MMIDIDX" and two zero bytes, the version 1 (uint64),
a code of the dtype (uint8), the number of sequences and that of document indices (uint64 each), the lengths of the
sequences in tokens (int32), their places in the .bin file in bytes (int64), and the numbers of the sequences with which
documents begin, with the number of all sequences at the end (int64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.dataloader.sources.base import Document
from bytecheckpoint.dataloader.sources.files import RangeSource, SourceFiles
from bytecheckpoint.errors import UsageError

__all__ = ["MegatronSource"]

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
#: Integer types by their codes in the index; 6 and 7 are floating.
_DTYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronSource(RangeSource):
    """Token arrays of an indexed data set of Megatron, as `tools/preprocess_data.py` writes it.

    Args:
        prefix: path of the two files without ".bin" and ".idx".
        name: name of the source; None for the last component of the path.
        by: unit of a document, "document" or "sequence"; a document may consist of several sequences.
        shuffle: True for a random order of its own in every epoch.
        cache: local folder for copies of files behind a URL, as for `TextSource`.

    Raises:
        UsageError: a file is missing, is no such index, or does not fit the other one, or there is no document.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        name: str | None = None,
        *,
        by: Literal["document", "sequence"] = "document",
        shuffle: bool = True,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if by not in {"document", "sequence"}:
            raise UsageError(f"by is {by!r}: give 'document' or 'sequence'")
        path = os.fspath(prefix).removesuffix(".bin").removesuffix(".idx")
        files = SourceFiles(f"{path}.bin", cache)
        index = SourceFiles(f"{path}.idx", cache)
        data = index.read(0, 0, int(index.sizes[0]))
        self._by, self._index, self._index_files = by, xxhash.xxh3_64_hexdigest(data), index
        self._dtype, bounds = _read_index(index.paths[0], data, by)
        if bounds[-1] > files.sizes[0]:
            raise UsageError(
                f"{files.paths[0]} has {files.sizes[0]} bytes, and its index counts {bounds[-1]}: the two do not belong "
                "together, or the file was cut short"
            )
        super().__init__(files, os.path.basename(path) if name is None else name, shuffle, [bounds])

    def _document(self, data: bytes, file: int, start: int) -> Document:
        return np.frombuffer(data, self._dtype)

    def describe_first(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the description of the first documents; see `Source`."""
        found = super().describe_first(saved)
        if found is None:
            return None
        data = self._index_files.read(0, 0, int(self._index_files.sizes[0]))
        *head, sequences, indices = _HEADER.unpack_from(data)
        lengths, places, begins = _arrays(data, sequences, indices)
        count = int(np.searchsorted(places + lengths * self._dtype.itemsize, saved["bytes"], side="right"))
        arrays = lengths[:count], places[:count], begins[begins <= count]
        index = _HEADER.pack(*head, count, len(arrays[2])) + b"".join(array.tobytes() for array in arrays)
        return {**found, "index": xxhash.xxh3_64_hexdigest(index)}

    def describe(self) -> dict[str, Any]:
        """Return the count, the size and samples of the tokens, a hash of the index, and the unit of a document."""
        return {"kind": "megatron", "by": self._by, "index": self._index} | super().describe()


def _read_index(path: str, data: bytes, by: str) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Return the dtype of the tokens, and the starts of the documents that are not empty, with the end of the last one."""
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        raise UsageError(f"{path} is no index of Megatron (it does not begin with MMIDIDX)")
    _, version, code, sequences, indices = _HEADER.unpack_from(data)
    if version != 1 or code not in _DTYPES:
        raise UsageError(
            f"{path} has version {version} and dtype code {code}: only version 1 with integers can be read"
        )
    if len(data) < _HEADER.size + 12 * sequences + 8 * indices:
        raise UsageError(f"{path} ends before its {sequences} sequences and {indices} document indices")
    dtype = np.dtype(_DTYPES[code])
    lengths, places, begins = _arrays(data, sequences, indices)
    ends = np.concatenate(([0], np.cumsum(lengths.astype(np.int64) * dtype.itemsize)))
    if not np.array_equal(places, ends[:-1]) or (lengths < 0).any():
        raise UsageError(f"the sequences of {path} do not follow one another in the .bin file: write the data set anew")
    if by == "document":
        if indices < 1 or begins[0] != 0 or begins[-1] != sequences or (np.diff(begins) < 0).any():
            raise UsageError(
                f"the documents of {path} do not cover its {sequences} sequences from the first to the last"
            )
        ends = ends[begins]
    return dtype, np.unique(ends)


def _arrays(data: bytes, sequences: int, indices: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the lengths and places of the sequences in an index, and the first sequences of the documents."""
    return (
        np.frombuffer(data, "<i4", sequences, _HEADER.size),
        np.frombuffer(data, "<i8", sequences, _HEADER.size + 4 * sequences),
        np.frombuffer(data, "<i8", indices, _HEADER.size + 12 * sequences),
    )
