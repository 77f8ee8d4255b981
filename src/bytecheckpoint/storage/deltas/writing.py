"""Write the files of a save as differences from those of the save before, whose contents this process keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.header_reader import content_of_header, header_bytes_needed, parse_header
from bytecheckpoint.representation.names import delta_name, file_stem, is_of_values
from bytecheckpoint.storage.base import FileWriter, NewFile, Storage
from bytecheckpoint.storage.deltas.coding import (
    INDEX,
    PREFIX_BYTES,
    SEGMENT_BYTES,
    DeltaHead,
    encode_head,
    encode_segment,
    encode_whole,
)
from bytecheckpoint.storage.wrappers import WrappedStorage

__all__ = ["DeltaStorage", "KeptFiles", "is_published"]


@dataclass
class _KeptFile:
    """A file of this rank that was published last.

    Attributes:
        name: name from the folder of the run.
        content: its bytes, uint8.
    """

    name: str
    content: NDArray[np.uint8]


class KeptFiles:
    """The contents of the files that this rank has published last, which take as much memory as they are long."""

    def __init__(self) -> None:
        self._files: dict[str, _KeptFile] = {}
        self._next: dict[str, _KeptFile] = {}

    def begin(self, name: str, size: int) -> tuple[_KeptFile, str]:
        """Return the memory of a new file, and the name of the file whose bytes it holds, "" for none."""
        stem = file_stem(name.partition("/")[2])
        known = self._files.get(stem)
        # A file that is written twice in one save has overwritten the content of its base.
        if known is None or len(known.content) != size or stem in self._next:
            known = _KeptFile("", np.empty(size, np.uint8))
        self._next[stem] = _KeptFile(name, known.content)
        return self._next[stem], known.name

    def commit(self) -> None:
        """Build on the new files from now on."""
        self._files, self._next = self._next, {}

    def forget(self) -> None:
        """Build on nothing: a save has failed, and the contents are of no committed file any more."""
        self._files, self._next = {}, {}


class DeltaStorage(WrappedStorage):
    """A storage whose files become differences from the kept ones.

    Args:
        inner: storage of the checkpoint.
        kept: contents of the files published last; those of this save replace them.
        whole: True to write the files whole, and the differences of tensors beside them.
    """

    def __init__(self, inner: Storage, kept: KeptFiles, *, whole: bool) -> None:
        super().__init__(inner)
        self._kept, self._whole = kept, whole
        self._folder = inner.url.rpartition("/")[2]
        self._encoded: dict[str, int] = {}
        self.capabilities = replace(self.capabilities, shared=False)  # the helper process has no kept files

    def create(self, request: NewFile) -> FileWriter:
        file, base = self._kept.begin(f"{self._folder}/{request.name}", request.size)
        whole = super().create(replace(request, direct=False)) if self._whole else None
        if whole is not None and (not base or is_of_values(request.name)):  # followers read values whole
            return _KeepingWriter(whole, file)
        # Beside a whole file they are expected to be short: its length is not reserved twice.
        size = request.size if whole is None else request.size // 8
        try:
            inner = super().create(NewFile(delta_name(request.name), size))
        except BaseException:
            if whole is not None:
                whole.abort()
            raise
        differences = _DeltaWriter(inner, file, base, {} if whole is not None else self._encoded)
        return differences if whole is None else _PairWriter(whole, differences)

    @property
    def file_suffix(self) -> str:  # type: ignore[override]
        """Suffix of the files that this save writes."""
        return "safetensors" if self._whole else "delta"

    def encoded_bytes(self, name: str) -> int:
        return self._encoded.get(name, 0)


def is_published(storage: Storage) -> bool:
    """Return whether a save to a storage publishes a version."""
    while isinstance(storage, WrappedStorage):
        if isinstance(storage, DeltaStorage):
            return True
        storage = storage.inner
    return False


class _KeepingWriter(FileWriter):
    """Writes a file whole, and keeps its content."""

    def __init__(self, inner: FileWriter, file: _KeptFile) -> None:
        self._inner, self._file = inner, file
        self.preferred_bytes = inner.preferred_bytes

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._inner.write_at(offset, buffers)
        for buffer in buffers:
            self._file.content[offset : offset + len(buffer)] = np.frombuffer(buffer, np.uint8)
            offset += len(buffer)

    def finish(self, size: int) -> None:
        self._inner.finish(size)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def abort(self) -> None:
        self._inner.abort()


class _PairWriter(FileWriter):
    """Writes a file whole, and its differences beside it.

    Args:
        whole: writer of the file.
        differences: writer of its differences, which also keeps its content.
    """

    def __init__(self, whole: FileWriter, differences: FileWriter) -> None:
        self._both = (whole, differences)
        self.preferred_bytes = whole.preferred_bytes

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for writer in self._both:
            writer.write_at(offset, buffers)

    def finish(self, size: int) -> None:
        for writer in self._both:
            writer.finish(size)

    def interrupt(self) -> None:
        for writer in self._both:
            writer.interrupt()

    def abort(self) -> None:
        for writer in self._both:
            writer.abort()


class _DeltaWriter(FileWriter):
    """Writes a file as differences; several threads encode its parts.

    Args:
        inner: writer of the stored file.
        file: memory with the content of the base, which becomes that of the file.
        base: name of the base from the folder of the run, "" for none.
        encoded: stored bytes by file name, to which this file is added.
    """

    preferred_bytes = 4 * SEGMENT_BYTES

    def __init__(self, inner: FileWriter, file: _KeptFile, base: str, encoded: dict[str, int]) -> None:
        self._inner, self._file, self._encoded = inner, file, encoded
        self._lock = threading.Lock()
        self._end = PREFIX_BYTES
        self._segments: list[tuple[int, ...]] = []
        self._base = base
        self._starts, self._units, self._boxes = np.zeros(0, np.int64), [1], b""
        if base:
            self._find_boxes()

    def _find_boxes(self) -> None:
        """Find where the boxes of tensors begin, and the sizes of their elements, in the header of the base."""
        text = self._header()
        header, self._boxes = parse_header(text), content_of_header(text)[0]
        self._starts = np.array([header.data_offset + entry.byte_offset for entry in header.entries], np.int64)
        self._units += [min(itemsize(entry.dtype), 4) for entry in header.entries]

    def _header(self) -> bytes:
        content = self._file.content
        return content[: header_bytes_needed(content[:8].tobytes())].tobytes()

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            new = np.frombuffer(buffer, np.uint8)
            for first, last, unit in self._cut(offset, offset + len(new)):
                self._write(first, new[first - offset : last - offset], unit)
            offset += len(new)

    def _cut(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range where boxes begin, and into segments; yield first byte, end and bytes of an element of each."""
        box = int(np.searchsorted(self._starts, begin, "right"))
        while begin < end:
            border = int(self._starts[box]) if box < len(self._starts) else end
            stop = min(border, end, begin + SEGMENT_BYTES)
            unit = self._units[box]
            yield begin, stop, unit if (stop - begin) % unit == 0 else 1
            begin = stop
            box += begin == border

    def _write(self, start: int, new: NDArray[np.uint8], unit: int) -> None:
        content = self._file.content[start : start + len(new)]
        found = encode_segment(content, new, unit) if self._base else encode_whole(new, unit)
        if found is None:
            return
        content[:] = new
        with self._lock:
            at, self._end = self._end, self._end + len(found.payload)
            digest = xxhash.xxh3_64_intdigest(found.payload)
            row = (start, len(new), found.kind, unit, at, len(found.payload), found.changed, found.held, digest)
            self._segments.append(row)
        self._inner.write_at(at, [memoryview(found.payload)])

    def finish(self, size: int) -> None:
        index = np.array(sorted(self._segments), INDEX)
        moved = bool(self._base) and content_of_header(self._header())[0] != self._boxes
        head, prefix = encode_head(DeltaHead(size, self._base, index.tobytes(), moved), self._end)
        self._inner.write_at(self._end, [memoryview(head)])
        self._inner.write_at(0, [memoryview(prefix)])
        self._inner.finish(self._end + len(head))
        self._encoded[self._file.name.partition("/")[2]] = self._end + len(head)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def abort(self) -> None:
        self._inner.abort()
