"""Find files of earlier checkpoints that hold the same bytes as live tensors (decision 0069)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.buffers import block_sums
from bytecheckpoint.engine.image_writer import chunk_slots, slot_bytes
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.staging import Chunk, Image
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.fingerprints import FileBoxSums
from bytecheckpoint.representation.header_reader import header_bytes_needed
from bytecheckpoint.representation.names import file_stem, generation_of
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage

__all__ = ["EarlierFiles", "holds_chunks", "read_header"]

#: Files that are remembered: those of some managers with some states each.
_MOST = 256


class EarlierFiles:
    """The files of committed checkpoints whose bytes the next save may not have to write again.

    Attributes:
        pieces: files of pieces of providers in the last committed save, by state.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, list[Any]] = {}
        self._saved: dict[tuple[str, bytes], tuple[str, str]] = {}
        self._loaded: tuple[str, dict[str, str]] = ("", {})

    def note_saved(self, url: str, names: Iterable[tuple[str, bytes]]) -> None:
        """Remember files of a checkpoint that this rank has saved.

        Args:
            url: address of the checkpoint.
            names: name of each file, and the hash of its tensors' description.
        """
        for name, content in names:
            self._saved.pop((file_stem(name), content), None)
            self._saved[file_stem(name), content] = (url, name)
        while len(self._saved) > _MOST:
            del self._saved[next(iter(self._saved))]

    def note_loaded(self, url: str, names: Iterable[str]) -> None:
        """Remember the files of the checkpoint that was loaded last."""
        self._loaded = (url, {file_stem(name): name for name in names if generation_of(name) is not None})

    def candidates(self, stem: str, content: bytes) -> Iterator[tuple[str, str]]:
        """Iterate over the files that may hold the same as a file to write, as (address of the checkpoint, name).

        Args:
            stem: `names.file_stem` of that file.
            content: hash of its tensors' description (`content_of_header`).
        """
        if (saved := self._saved.get((stem, content))) is not None:
            yield saved
        url, names = self._loaded
        if stem in names and (url, names[stem]) != saved:
            yield url, names[stem]


def read_header(storage: Storage, name: str) -> tuple[bytes, int]:
    """Return the header of a storage file, and the size of the file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file ends inside of its header.
    """
    reader = storage.open(name)
    try:
        data = bytearray(0)
        needs = header_bytes_needed(bytes(data), file=name)
        while len(data) < needs:
            chunk = bytearray(min(needs, reader.size) - len(data))
            got = reader.read_into(len(data), [memoryview(chunk)])
            data += chunk[:got]
            if not got:
                raise CorruptCheckpointError(f"{name} ends inside its header")
            needs = header_bytes_needed(bytes(data[:8]), file=name)
        return bytes(data), reader.size
    finally:
        reader.close()


def holds_chunks(
    sums: NDArray[np.uint64],
    image: Image,
    chunks: Sequence[Chunk],
    block_bytes: int,
    settings: Settings,
    threads: int,
    cancel: Cancellation,
    fingerprints: FileBoxSums | None = None,
) -> bool:
    """Return whether the live tensors of an image have the checksums of a stored file.

    Args:
        sums: checksum of each block of the file.
        image: tensors of the one file, on any device.
        chunks: chunks of the file to compare, each of whole blocks but the last one.
        block_bytes: length of a block.
        settings: settings of the save.
        threads: number of threads, at most those that write.
        cancel: token of the save.
        fingerprints: sums to which the compared bytes are added.
    """
    pool, large = StagingPool(shared=False), image.large()
    size = slot_bytes(image.files, settings)
    pool.reserve(size, touch=False, device=image.copies.any_device)
    slots = chunk_slots(pool, size, threads)
    differs = False

    def compare(chunk: Chunk) -> None:
        nonlocal differs
        if differs:
            return
        cancel.raise_if_set()
        slot = slots.get()
        try:
            buffers = image.fill(chunk, slot, large)
            found = list(block_sums(buffers, block_bytes))
            if fingerprints is not None:
                fingerprints.add(chunk.start, buffers)
        finally:
            slots.put(slot)
        first = chunk.start // block_bytes
        differs = differs or found != sums[first : first + len(found)].tolist()

    try:
        image.copies.wait_for_caller()
        parallel_map(compare, chunks, threads, "bytecheckpoint-compare")
    finally:
        while not slots.empty():
            slots.get()
        pool.release()
    return not differs
