"""Helpers of the conformance suite: content that shows its position, writing as the engine does, and the base class."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bytecheckpoint.storage.base import NewFile, Storage
from bytecheckpoint.storage.registry import resolve
from bytecheckpoint.storage.testing.access import RawAccess

__all__ = ["FILE_BYTES", "TRIALS", "Suite", "all_at_once", "content", "read_all", "write_file"]

#: Shared by a test and its other processes: the length of the file, and the number of publish races.
FILE_BYTES, TRIALS = 10_000, 5
_HEAD = 100


def content(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return bytes of which any 8 in a row identify their position and the seed, shape [nbytes]."""
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
        storage: storage to write to.
        name: name of the file.
        data: its bytes, shape [nbytes].
        stable: True if buffers stay as they are, as in `NewFile`; False to overwrite each as soon as `write_at` returns.
        piece: bytes of one piece; 0: about a tenth of the file.
        announced: the size in the request, which is an estimate; None: the true size.
    """
    piece = piece or max(len(data) // 10, 1)
    head = min(_HEAD, len(data))
    writer = storage.create(NewFile(name, len(data) if announced is None else announced, stable=stable))

    def write_piece(start: int) -> None:
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
        list(pool.map(write_piece, starts))
    if head:
        writer.write_at(0, [memoryview(data)[:head].toreadonly()])  # as the headers of the engine
    writer.finish(len(data))
    storage.sync(each for each in [name])


def read_all(storage: Storage, name: str) -> NDArray[np.uint8]:
    """Read all bytes of a file through a reader, shape [nbytes]."""
    reader = storage.open(name)
    try:
        data = np.zeros(reader.size, np.uint8)
        assert reader.read_into(0, [memoryview(data)]) == reader.size
        return data
    finally:
        reader.close()


def all_at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(number)` on `count` threads that start together; return the results or errors."""
    start = threading.Barrier(count)

    def call(number: int) -> Any:
        start.wait()
        try:
            return function(number)
        except Exception as error:  # noqa: BLE001  returned to the caller
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


class Suite:
    """Base of all parts of the suite: the settings and methods that a backend's test class may override."""

    #: A file of this length takes several parts.
    large_bytes = (20 << 20) + 4097
    #: So many files or folders take several pages of a listing and several requests of a bulk deletion.
    many = 1100
    #: Whether `publish` can replace an expected version. Some object stores can only create.
    replaces = True

    @pytest.fixture
    def storage(self) -> Storage:
        """Return the storage under test."""
        raise NotImplementedError

    def again(self, storage: Storage) -> Storage:
        """Return the same folder as another process finds it."""
        return resolve(storage.url)

    def neighbour(self, storage: Storage, suffix: str) -> Storage:
        """Return the folder whose URL is that of `storage` with a suffix."""
        return resolve(storage.url + suffix)

    def raw_access(self, storage: Storage) -> RawAccess | None:
        """Return access to the folder by other means than the storage, such as the server's own client; None: no tests."""
        return None
