"""Stream the pieces of providers to storage files of their own, through two chunks of memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from bytecheckpoint.concurrency import Workers, storage_result
from bytecheckpoint.engine.earlier_files import EarlierFiles
from bytecheckpoint.engine.staging import Chunk, chunks_of
from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk, aligned_memory
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, StorageUnavailableError, UsageError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.frameworks.providers.base import Piece
from bytecheckpoint.representation.names import escape, file_stem
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.saving.capture import CapturedState, Value
from bytecheckpoint.saving.file_layout import (
    FileOrigin,
    PlannedFile,
    end_of,
    lay_out_names,
    lay_out_values,
    record_of,
)
from bytecheckpoint.saving.messages import FileRecord, ValueRecord, unescaped
from bytecheckpoint.saving.piece_files import PieceFiles, TakenPiece, failure_of_provider
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.tracing.operation import Operation, span

__all__ = ["PieceWriter"]

_log = logging.getLogger("bytecheckpoint")


class PieceWriter:
    """Takes the pieces of all providers of a save on one rank, and writes them.

    Args:
        origin: origin of the files.
        request: arguments of the save.
        earlier: files that may be used again.
        cancel: token of the save.
        operation: measurements of the save.
    """

    def __init__(
        self,
        origin: FileOrigin,
        request: SaveRequest,
        earlier: EarlierFiles,
        cancel: Cancellation,
        operation: Operation,
    ) -> None:
        self._origin = origin
        self._request = request
        self._cancel = cancel
        self._operation = operation
        self._taken: list[TakenPiece] = []
        self._arranged = PieceFiles(request, earlier)
        self._files: list[PlannedFile] = []
        self._writer: FilesWriter | None = None
        self._written: tuple[list[FileRecord], list[ValueRecord]] = [], []

    @property
    def file_names(self) -> list[str]:
        """Names of the files that may exist because of this save."""
        return [*self._arranged.linked, *map(self._name, self._files)]

    @property
    def nbytes(self) -> int:
        """Total length of the written files, headers included."""
        return sum(record.size for record in self._written[0])

    @property
    def nbytes_adopted(self) -> int:
        """Total length of the files that are used again."""
        return sum(file.record.size for file in self._arranged.kept)

    def take(self, captured: CapturedState) -> None:
        """Ask the providers for pieces, in the caller's thread. Read those that are not stable, unless the caller waits.

        Raises:
            CheckpointError: a provider fails; the message names it.
        """
        for state, provider in captured.providers.items():
            name = type(provider).__name__
            known = {value.key.fqn for value in captured.values if value.key.state == state}
            for piece in _handed_out(provider, f"{state}: {name}"):
                if not isinstance(piece, Piece):
                    raise UsageError(f"{state}: {name} gave a {type(piece).__name__} for a Piece")
                self._taken.append(taken := TakenPiece(TensorKey(state, piece.name), piece, name))
                if piece.name in known:
                    raise UsageError(f"{taken}: the state has another piece or tensor of that name")
                known.add(piece.name)
        if self._request.mode is not SaveMode.SYNCHRONOUS:
            volatile = [taken for taken in self._taken if not taken.piece.stable]
            with self._reader() as read:
                captured.values.extend(self._copied(taken, read) for taken in volatile)
            self._taken = [taken for taken in self._taken if taken.piece.stable]

    def adopt(self) -> int:
        """Use files of earlier saves again, and arrange the other pieces in files; return the number of both."""
        self._arranged.arrange(self._taken)
        return len(self._arranged.kept) + len(self._arranged.groups)

    def _copied(self, taken: TakenPiece, read: Any) -> Value:
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

        def read(taken: TakenPiece, offset: int, buffer: memoryview) -> None:
            future = worker.submit(taken.read, offset, buffer)
            try:
                with span("read piece", len(buffer), escape(str(taken.key))):
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
        if not self._arranged.groups:
            return
        adopted = [file.record.name for file in self._arranged.kept]
        order, values, places = self._lay_out([*siblings, *adopted], adopted)
        storage, settings = self._request.storage, self._request.settings
        size = settings.storage.chunk_bytes
        memory = aligned_memory(2 * size)
        headers = [file.header for file in self._files]
        names = list(map(self._name, self._files))
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
        number = len(siblings) + len(adopted) + len(names)
        rendered = [
            h.render(s.blocks, self._origin.generation, number, adopted) for h, s in zip(headers, sums, strict=True)
        ]
        writer.finish(rendered)
        records = [record_of(self._name(f), f, h, s) for f, h, s in zip(self._files, rendered, sums, strict=True)]
        self._written = records, [value.record(place) for value, place in zip(values, places, strict=True)]
        self._operation.mark("pieces")

    def _lay_out(
        self, siblings: Sequence[str], adopted: Sequence[str]
    ) -> tuple[list[TakenPiece], list[Value], list[tuple[int, int]]]:
        """Lay out the files to write; return their pieces in order, the values that these become, and their places."""
        names = (self._origin.file_name(group.state, group.part, values=False) for group in self._arranged.groups)
        stems, reused = list(map(file_stem, (*siblings, *names))), list(map(file_stem, adopted))
        order: list[TakenPiece] = []
        values: list[Value] = []
        places: list[tuple[int, int]] = []
        for number, (state, part, pieces) in enumerate(self._arranged.groups):
            position = end_of(self._files[-1].image) if self._files else 0
            if not pieces:
                self._files.append(lay_out_names(state, self._origin, stems, reused, part=part, position=position))
                continue
            found = [piece.value(digest=self._digest(piece.key)) for piece in pieces]
            (file,), at = lay_out_values(
                found, self._origin, first=len(order), position=position, part=part, siblings=stems, adoptable=reused,
                pieces=True,
            )  # fmt: skip
            self._files.append(file)
            places += [(number, offset) for _, offset in at]
            order += pieces
            values += found
        return order, values, places

    def _digest(self, key: object) -> bytes:
        """Return a digest that no other piece has: ranks are not compared by pieces, which would have to be read before."""
        return xxhash.xxh3_128_digest(f"{self._origin.rank} {self._origin.generation} {escape(str(key))}".encode())

    def _fill(self, chunk: Chunk, buffer: memoryview, order: Sequence[TakenPiece], read: Any) -> None:
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
        """Return the records of all files, and of the pieces in them.

        Args:
            first: number of the first of these files among the rank's files.
        """
        kept = self._arranged.kept
        values = [
            msgspec.structs.replace(value, file=number, digest=self._digest(unescaped(value.key)))
            for number, file in enumerate(kept, first)
            for value in file.values
        ]
        written, own = self._written
        values += [msgspec.structs.replace(value, file=value.file + first + len(kept)) for value in own]
        return [*(file.record for file in kept), *written], values

    def remember(self) -> None:
        """Remember the committed files, for later saves."""
        self._arranged.remember(*self._written)

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
        raise failure_of_provider(f"{name}.__bytecheckpoint_pieces__", error) from error
