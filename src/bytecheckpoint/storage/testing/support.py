"""What all parts of the conformance suite use: bytes that tell where they stand, and the way the engine writes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ..base import NewFile, Storage
from ..registry import resolve

__all__ = ["FILE_BYTES", "TRIALS", "Suite", "all_at_once", "content", "read_all", "write_file"]

#: What a test and another process have agreed on: the length of the file, and how often they race to publish.
FILE_BYTES, TRIALS = 10_000, 5
_HEAD = 100


def content(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes of which any 8 in a row tell where they stand (and the seed), shape [nbytes]."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return (words ^ (words >> np.uint64(29))).view(np.uint8)[:nbytes]


def write_file(
    storage: Storage,
    name: str,
    data: NDArray[np.uint8],
    *,
    stable: bool = True,
    piece: int = 0,
    announced: int | None = None,
) -> None:
    """Write a file as the engine does: pieces from several threads in any order, the first bytes last.

    Args:
        storage: where.
        name: of the file.
        data: its bytes, shape [nbytes].
        stable: as in `NewFile`. Otherwise each buffer is overwritten as soon as it was taken.
        piece: bytes of one piece; 0: such that there are some ten of them.
        announced: the size in the request, which is a guess; None: the true one.
    """
    piece = piece or max(len(data) // 10, 1)
    head = min(_HEAD, len(data))
    writer = storage.create(NewFile(name, len(data) if announced is None else announced, stable=stable))

    def one(start: int) -> None:
        part = data[start : start + piece]
        if stable:
            half = len(part) // 2
            writer.write_at(start, [memoryview(part)[:half], memoryview(part)[half:]])
            return
        scratch = part.copy()
        writer.write_at(start, [memoryview(scratch)])
        scratch[:] = 0xEE

    starts = list(range(head, len(data), piece))
    random.Random(len(data)).shuffle(starts)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, starts))
    if head:
        writer.write_at(0, [memoryview(data)[:head].toreadonly()])  # as the headers of the engine
    writer.finish(len(data))
    storage.sync(each for each in [name])


def read_all(storage: Storage, name: str) -> NDArray[np.uint8]:
    """All bytes of a file through a reader, shape [nbytes]."""
    reader = storage.open(name)
    try:
        data = np.zeros(reader.size, np.uint8)
        assert reader.read_into(0, [memoryview(data)]) == reader.size
        return data
    finally:
        reader.close()


def all_at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(number)` on `count` threads that start together; what each returned or raised."""
    start = threading.Barrier(count)

    def one(number: int) -> Any:
        start.wait()
        try:
            return function(number)
        except Exception as error:  # noqa: BLE001  it is what the caller asks for
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class Suite:
    """What a backend's test class may override."""

    #: A file of this length takes several parts.
    large_bytes = (20 << 20) + 4097
    #: As many files, and as many folders, take several pages of a listing and several requests of a bulk deletion.
    many = 1100
    #: Whether `publish` can replace what is expected. Some object stores can only create.
    replaces = True

    @pytest.fixture
    def storage(self) -> Storage:
        """The storage under test."""
        raise NotImplementedError

    def again(self, storage: Storage) -> Storage:
        """The same folder as another process finds it."""
        return resolve(storage.url)

    def neighbour(self, storage: Storage, suffix: str) -> Storage:
        """The folder whose address is that of `storage` with something behind it."""
        return resolve(storage.url + suffix)
