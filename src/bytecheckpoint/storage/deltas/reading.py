"""Read a file that is kept as differences as if it were whole."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.storage.base import FileReader
from bytecheckpoint.storage.deltas.coding import (
    DENSE,
    PREFIX_BYTES,
    SEGMENT_BYTES,
    SPARSE,
    WHOLE,
    Changes,
    DeltaHead,
    apply_segment,
    changes_of,
    check_payload,
    decode_prefix,
)

__all__ = ["DeltaReader", "stored_differences"]

#: Bytes that are read at once, since many reads of few bytes are slow. Each file of a chain keeps so many.
_WINDOW = 1 << 20

_decode_head = msgspec.msgpack.Decoder(DeltaHead).decode


class DeltaReader(FileReader):
    """A file of differences, decoded as it is read. Nothing proves the result but the sums in the catalog.

    Args:
        label: address of the file, for messages.
        name: its name in the checkpoint.
        stored: the file as it is stored.
        open_base: function that opens the earlier file, decoded, by its name from the folder of the run.

    Attributes:
        size: bytes of the decoded file.
        head: description at the file's end.
        segments: rows of its index.

    Raises:
        CorruptCheckpointError: the file is damaged.
    """

    preferred_bytes = 4 * SEGMENT_BYTES

    def __init__(self, label: str, name: str, stored: FileReader, open_base: Callable[[str], FileReader]) -> None:
        self._label, self._name, self._stored, self._open_base = label, name, stored, open_base
        self._lock = threading.Lock()
        self._base: FileReader | None = None
        self._window: tuple[int, bytes] = (0, b"")  # its first byte, and its content
        with self._located():
            self.head = self._read_head()
        self.size = self.head.size
        self.segments = self.head.segments()
        self._starts = self.segments["start"].astype(np.int64)
        self._ends = self._starts + self.segments["nbytes"]

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        """Name the file in errors."""
        try:
            yield
        except CorruptCheckpointError as error:
            if error.file:
                raise
            raise CorruptCheckpointError(f"{self._label}: {error}; use another checkpoint", file=self._name) from None

    def _read_head(self) -> DeltaHead:
        offset, length, digest = decode_prefix(self._read(0, PREFIX_BYTES))
        if not self._stored.match_size(offset + length):
            raise CorruptCheckpointError(f"it has {self._stored.size} bytes, not {offset + length}: cut, or replaced")
        data = self._read(offset, length)
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise CorruptCheckpointError("its index does not match its checksum")
        try:
            head = _decode_head(data)
            segments = head.segments()
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptCheckpointError(f"its index cannot be read ({error})") from error
        starts, ends = segments["start"], segments["start"] + segments["nbytes"]
        kinds, units = segments["kind"], segments["unit"]
        sound = (
            (np.diff(starts, prepend=0) >= 0).all()
            and (starts[1:] >= ends[:-1]).all()
            and (ends <= head.size).all()
            and (segments["nbytes"] > 0).all()
            and (segments["nbytes"] <= SEGMENT_BYTES).all()
            and np.isin(kinds, (SPARSE, DENSE, WHOLE)).all()
            and np.isin(units, (1, 2, 4)).all()
            and (segments["nbytes"] % np.maximum(units, 1) == 0).all()
            and (segments["count"] >= 0).all()
            and (segments["count"] <= segments["nbytes"] // np.maximum(units, 1)).all()
            and (segments["length"] > 0).all()
            and (segments["at"] >= PREFIX_BYTES).all()
            and (segments["at"] + segments["length"] <= offset).all()
        )
        if not sound or (not head.base and int((ends - starts).sum()) != head.size):
            raise CorruptCheckpointError("its index contradicts itself")
        return head

    def _read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        got = self._stored.read_into(offset, [memoryview(data)])
        return bytes(data[:got])

    def payload(self, number: int) -> memoryview:
        """Return the payload of a segment, proven by its checksum.

        Raises:
            CorruptCheckpointError: it differs from what was written.
        """
        segment = self.segments[number]
        at, length = int(segment["at"]), int(segment["length"])
        first, window = self._window
        if not first <= at <= at + length <= first + len(window):
            first, window = self._window = at, self._read(at, max(length, _WINDOW))
        found = memoryview(window)[at - first : at - first + length]
        with self._located():
            check_payload(segment, found)
        return found

    def changes(self, number: int) -> Changes:
        """Return the changed elements of a segment. Raises as `payload`."""
        with self._located():
            return changes_of(self.segments[number], self.payload(number))

    def check(self, data: memoryview) -> None:
        """Prove all payloads in the bytes of the stored file. Raises as `payload`."""
        with self._located():
            for segment in self.segments:
                check_payload(segment, data[int(segment["at"]) :][: int(segment["length"])])

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        begin = offset
        for buffer in buffers:
            part = np.frombuffer(buffer, np.uint8)[: max(self.size - offset, 0)]
            if len(part):
                self._fill(offset, part)
            offset += len(part)
        return offset - begin

    def _fill(self, start: int, content: NDArray[np.uint8]) -> None:
        end = start + len(content)
        low, high = np.searchsorted(self._ends, start, "right"), np.searchsorted(self._starts, end)
        spans = self.segments[low:high]
        whole = spans[spans["kind"] == WHOLE]
        covered = np.minimum(whole["start"] + whole["nbytes"], end) - np.maximum(whole["start"], start)
        if int(covered.sum()) < len(content):
            self._read_base(start, content)
        for number in range(int(low), int(high)):
            first, last = int(self._starts[number]), int(self._ends[number])
            if start <= first and last <= end:
                self._apply(number, content[first - start : last - start])
                continue
            segment = np.empty(last - first, np.uint8)
            if self.segments[number]["kind"] != WHOLE:
                self._read_base(first, segment)
            self._apply(number, segment)
            begin, stop = max(first, start), min(last, end)
            content[begin - start : stop - start] = segment[begin - first : stop - first]

    def _apply(self, number: int, content: NDArray[np.uint8]) -> None:
        with self._located():
            apply_segment(self.segments[number], self.payload(number), content)

    def _read_base(self, start: int, content: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._base is None:
                self._base = self._open_base(self.head.base)
                if not self._base.match_size(self.size):
                    raise CorruptCheckpointError(
                        f"{self._label}: {self.head.base}, on which it builds, has {self._base.size} bytes, not "
                        f"{self.size}",
                        file=self._name,
                    )
        got = self._base.read_into(start, [memoryview(content)])
        if got != len(content):
            raise CorruptCheckpointError(
                f"{self._label}: {self.head.base}, on which it builds, was cut", file=self._name
            )

    def close(self) -> None:
        self._stored.close()
        if self._base is not None:
            self._base.close()


def stored_differences(label: str, name: str, stored: FileReader) -> memoryview:
    """Read a file of differences as it is stored, and prove all of it by its own checksums.

    Args:
        label: address of the file, for messages.
        name: its name in the checkpoint.
        stored: the file; the caller closes it.

    Raises:
        CorruptCheckpointError: it differs from what was written.
    """

    def refuse(base: str) -> FileReader:
        raise AssertionError(f"nothing is decoded, so {base} is not needed")

    reader = DeltaReader(label, name, stored, refuse)
    data = memoryview(bytearray(stored.size))
    stored.read_into(0, [data])
    reader.check(data)
    return data
