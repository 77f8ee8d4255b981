"""Files that no folder holds as such: contents that a program compressed, decoded when they are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bytecheckpoint.storage.base import FileReader

__all__ = ["BytesReader", "Decoded", "DecodedFiles"]

#: Bytes of decoded contents that a checkpoint keeps, beside the one decoded last.
_MOST_KEPT: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Decoded:
    """A content that is made when it is read.

    Attributes:
        size: its bytes.
        decode: function that returns it, or raises an error that names its file.
    """

    size: int
    decode: Callable[[], bytes]


class DecodedFiles:
    """The decoded contents of a checkpoint, of which the latest are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def bytes_of(self, name: str, content: Decoded) -> bytes:
        """Return a content; threads that want the same one decode it once."""
        with self._lock:
            data = self._kept.pop(name, None)
            if data is None:
                data = content.decode()
                assert len(data) == content.size, name
            self._kept[name] = data
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return data


class BytesReader(FileReader):
    """A file in memory, of `size` bytes, which a function returns."""

    def __init__(self, size: int, content: Callable[[], bytes]) -> None:
        self.size = size
        self._content = content

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:  # noqa: D102 (inherited)
        data, begin = memoryview(self._content()), offset
        for buffer in buffers:
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            offset += len(part)
        return offset - begin

    def close(self) -> None:  # noqa: D102
        pass
