"""Stream the pieces of providers to storage files of their own, through two chunks of memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from bytecheckpoint.concurrency import Workers, storage_result
from bytecheckpoint.engine.staging import Chunk, chunks_of
from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk, aligned_memory
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, StorageUnavailableError, UsageError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.frameworks.providers.base import Piece
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.representation.names import file_stem
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving.capture import CapturedState, Value
from bytecheckpoint.saving.file_layout import FileOrigin, PlannedFile, lay_out_values, record_of
from bytecheckpoint.saving.messages import FileRecord, ValueRecord
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.tracing.operation import Operation, span

__all__ = ["PieceWriter"]

_log = logging.getLogger("bytecheckpoint")


class _TakenPiece:
    """A piece that a provider has handed over, until the save needs it no more.

    Args:
        key: key of the tensor that it becomes.
        piece: the piece.
        provider: name of the provider's class.
    """

    def __init__(self, key: TensorKey, piece: Piece, provider: str) -> None:
        self.key = key
        self.piece = piece
        self._provider = provider
        self._ended = False

    def __str__(self) -> str:
        return f"piece {self.piece.name!r} of {self.key.state}, a {self._provider}"

    def end(self) -> None:
        """Tell the provider, once, that the save needs the piece no more."""
        if not self._ended:
            self._ended = True
            try:
                self.piece.done()
            except Exception as error:  # any program, any exception
                raise _failed(f"{self}: its done", error) from error

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, on the thread for pieces."""
        try:
            found = self.piece.read(offset, buffer)
        except Exception as error:  # any program, any exception
            raise _failed(f"{self}: its read at byte {offset}", error) from error
        if found is not None and found != len(buffer):
            raise CheckpointError(
                f"{self}: its read at byte {offset} gave {found} of {len(buffer)} bytes: the piece is shorter than it says"
            )

    def value(self, data: torch.Tensor | None = None, digest: bytes = b"") -> Value:
        """Describe the tensor that the piece becomes, with or without its content."""
        if data is None:  # one element, shown in the piece's shape
            data = torch.empty([1] * len(self.piece.shape), dtype=self.piece.dtype).expand(self.piece.shape)
        return Value(self.key, data, dtype_name(self.piece.dtype), merged=False, digest=digest)


class PieceWriter:
    """Takes the pieces of all providers of a save on one rank, and writes them.

    Args:
        origin: origin of the files.
        request: arguments of the save.
        cancel: token of the save.
        operation: measurements of the save.
    """

    def __init__(self, origin: FileOrigin, request: SaveRequest, cancel: Cancellation, operation: Operation) -> None:
        self._origin = origin
        self._request = request
        self._cancel = cancel
        self._operation = operation
        self._taken: list[_TakenPiece] = []
        self._files: list[PlannedFile] = []
        self._writer: FilesWriter | None = None
        self._written: tuple[list[FileRecord], list[ValueRecord]] = [], []

    @property
    def file_names(self) -> list[str]:
        """Names of the files that may exist."""
        return [self._name(file) for file in self._files]

    @property
    def nbytes(self) -> int:
        """Total length of the written files, headers included."""
        return sum(record.size for record in self._written[0])

    def take(self, captured: CapturedState) -> CapturedState:
        """Ask the providers for pieces, in the caller's thread. Read those that are not stable, unless the caller waits.

        Returns:
            The captured state with these values, and with the providers for whose pieces `write` will write a file each.

        Raises:
            CheckpointError: a provider fails; the message names it.
        """
        for state, provider in captured.providers.items():
            name = type(provider).__name__
            known = {value.key.fqn for value in captured.values if value.key.state == state}
            for piece in _handed_out(provider, f"{state}: {name}"):
                if not isinstance(piece, Piece):
                    raise UsageError(f"{state}: {name} gave a {type(piece).__name__} for a Piece")
                self._taken.append(taken := _TakenPiece(TensorKey(state, piece.name), piece, name))
                if piece.name in known:
                    raise UsageError(f"{taken}: the state has another piece or tensor of that name")
                known.add(piece.name)
        if self._request.mode is not SaveMode.SYNCHRONOUS:
            volatile = [taken for taken in self._taken if not taken.piece.stable]
            with self._reader() as read:
                captured.values.extend(self._copied(taken, read) for taken in volatile)
            self._taken = [taken for taken in self._taken if taken.piece.stable]
        streamed = {taken.key.state for taken in self._taken}
        return replace(captured, providers={s: found for s, found in captured.providers.items() if s in streamed})

    def _copied(self, taken: _TakenPiece, read: Any) -> Value:
        """Return a piece that may change after the call with its bytes."""
        data = torch.empty(taken.piece.shape, dtype=taken.piece.dtype)
        memory = memoryview(data.reshape(-1).view(torch.uint8).numpy())
        step = self._request.settings.storage.chunk_bytes
        for offset in range(0, len(memory), step):
            read(taken, offset, memory[offset : offset + step])
        self._operation.count("copied in the call", nbytes=len(memory))
        taken.end()
        return taken.value(data)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Any]:
        """Read pieces on one thread, each time within the time limit of the save, until it fails on any rank."""
        worker = Workers(1, "bytecheckpoint-pieces")
        seconds = self._request.settings.timeout

        def read(taken: _TakenPiece, offset: int, buffer: memoryview) -> None:
            future = worker.submit(taken.read, offset, buffer)
            try:
                with span("read piece", len(buffer), str(taken.key)):
                    storage_result(future, seconds, "", self._cancel.future)
            except StorageUnavailableError:
                late = f"{taken}: its read at byte {offset} took more than {seconds:g} s"
                raise CheckpointTimeoutError(late) from None

        try:
            yield read
        finally:
            worker.shutdown(cancel=True, seconds=0)

    def write(self, siblings: Sequence[str]) -> None:
        """Write all pieces: read one chunk while the one before is hashed and written.

        Args:
            siblings: names of the rank's other files.
        """
        if not self._taken:
            return
        # Small ones first. A digest of its own each: ranks are not compared by pieces, which would have to be read before.
        order = sorted(self._taken, key=lambda taken: taken.piece.nbytes)
        marks = [f"{self._origin.rank} {self._origin.generation} {taken.key}".encode() for taken in order]
        values = [t.value(digest=xxhash.xxh3_128_digest(mark)) for t, mark in zip(order, marks, strict=True)]
        stems = [file_stem(name) for name in siblings]
        self._files, places = lay_out_values(
            values, self._origin, first=0, position=0, part=0, siblings=stems, pieces=True
        )
        storage, settings = self._request.storage, self._request.settings
        size = settings.storage.chunk_bytes
        memory = aligned_memory(2 * size)
        headers = [file.header for file in self._files]
        names = self.file_names
        tasks = [FileTask(n, h.data_offset, h.data_length, h.block_bytes) for n, h in zip(names, headers, strict=True)]
        direct = settings.storage.direct_io != "off"
        writer = FilesWriter(storage, tasks, direct=direct, threads=2, pool=memory, cancel=self._cancel)
        self._writer = writer
        writer.open()
        self._operation.planned_bytes += sum(task.data_bytes for task in tasks)
        batches: list[int] = []
        with self._reader() as read:
            for number, chunk in enumerate(chunks_of([file.image for file in self._files], size)):
                if number >= 2:
                    writer.wait(batches[number - 2])
                at = number % 2 * size
                self._fill(chunk, memory[at : at + chunk.nbytes], order, read)
                batches.append(writer.write_staged([StagedChunk(chunk.file, chunk.start, at, chunk.nbytes)]))
        sums = writer.sums()
        for taken in order:  # those without bytes
            taken.end()
        count = len(siblings) + len(names)
        rendered = [h.render(s, self._origin.generation, count) for h, s in zip(headers, sums, strict=True)]
        writer.finish(rendered)
        records = [record_of(self._name(f), f, h, s) for f, h, s in zip(self._files, rendered, sums, strict=True)]
        self._written = records, [v.record(place) for v, place in zip(values, places, strict=True)]
        self._operation.mark("pieces")

    def _fill(self, chunk: Chunk, buffer: memoryview, order: Sequence[_TakenPiece], read: Any) -> None:
        """Fill a chunk with the bytes of the pieces that lie in it."""
        section = self._files[chunk.file].image
        first = int(np.searchsorted(section.starts, chunk.start, "right")) - 1
        for place in range(max(first, 0), len(section.shards)):
            start, end = int(section.starts[place]), int(section.starts[place] + section.sizes[place])
            low, high = max(start, chunk.start), min(end, chunk.start + chunk.nbytes)
            if start >= chunk.start + chunk.nbytes:
                return
            if low < high:
                taken = order[section.shards[place]]
                read(taken, low - start, buffer[low - chunk.start : high - chunk.start])
                if high == end:
                    taken.end()

    def records(self, first: int) -> tuple[list[FileRecord], list[ValueRecord]]:
        """Return the records of the written files, and of the pieces in them.

        Args:
            first: number of the first of these files among the rank's files.
        """
        files, values = self._written
        return files, [msgspec.structs.replace(value, file=value.file + first) for value in values]

    def end(self) -> None:
        """Stop an unfinished write after a failure, and tell the providers; never raise."""
        if self._writer is not None:
            self._writer.abort()
        for taken in self._taken:
            try:
                taken.end()
            except CheckpointError as error:
                _log.warning("after a failed save: %s", error)

    def _name(self, file: PlannedFile) -> str:
        return self._origin.file_name(file.state, file.part, values=False)


def _handed_out(provider: Any, name: str) -> Iterator[object]:
    try:
        yield from provider.__bytecheckpoint_pieces__()
    except Exception as error:  # any program, any exception
        raise _failed(f"{name}.__bytecheckpoint_pieces__", error) from error


def _failed(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{what} failed ({type(error).__name__}: {error})")
