"""Replicas: copies of each rank's hot files in the memory of other machines, so that a lost machine loses nothing.

The idea is Gemini's (checkpoints in the memory of other machines).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.storage import FileReader, FileWriter, NewFile, Storage
from bytecheckpoint.tiers.copying import has_adopted, has_header, is_sound, link_if_beside, own_files
from bytecheckpoint.tiers.machines import Machines

__all__ = ["replicate"]

_log = logging.getLogger("bytecheckpoint")
_PIECE = 8 << 20

#: Number of the file, first byte, end.
_Piece = tuple[int, int, int]


def replicate(agreement: Agreement, machines: Machines, hot: Storage, catalog: Catalog, replicas: int) -> None:
    """Send this rank's files to its partners, and write the files of ranks whose partner it is. Every rank calls this.

    A partner keeps the files of earlier saves that it has already.

    Args:
        agreement: the ranks.
        machines: machines of the ranks.
        hot: this machine's hot folder.
        catalog: catalog of the step.
        replicas: machines that keep a replica of each file.

    Raises:
        CheckpointError: this rank could not read its own files or write those of others. Other ranks do not hear of it.
        PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
    """
    rank = agreement.rank
    partners = machines.partners(rank, replicas)
    sources = [source for source in range(len(machines.machine_of)) if rank in machines.partners(source, replicas)]
    wanted = {source: _lacking(hot, catalog, _files_of(catalog, source)) for source in sources}
    own = _files_of(catalog, rank)
    lacking = {partner: np.ones(len(own), np.uint8) for partner in partners}
    if has_adopted(catalog):
        agreement.collective.exchange(f"{agreement.tag}/replicas/lacking", wanted, lacking, timeout=agreement.timeout)
    sent = {partner: list(_pieces_of(catalog, own, mask)) for partner, mask in lacking.items()}
    sender = _ReplicaReader(hot, catalog)
    receivers = {
        source: _ReplicaWriter(hot, catalog, list(_pieces_of(catalog, _files_of(catalog, source), mask)))
        for source, mask in wanted.items()
    }
    rounds = max(map(len, [*sent.values(), *(receiver.pieces for receiver in receivers.values())]), default=0)
    try:
        for number in range(rounds):
            outgoing = {
                partner: sender.read(pieces[number]) for partner, pieces in sent.items() if number < len(pieces)
            }
            incoming = {
                source: np.empty(receiver.size_of(number), np.uint8)
                for source, receiver in receivers.items()
                if number < len(receiver.pieces)
            }
            tag = f"{agreement.tag}/replicas/{number}"
            agreement.collective.exchange(tag, outgoing, incoming, timeout=agreement.timeout)
            for source, data in incoming.items():
                receivers[source].write(number, data)
    except BaseException as error:
        for receiver in receivers.values():
            receiver.error = receiver.error or error
        raise
    finally:
        sender.close()
        failures = [sender.error] if sender.error is not None else []
        for receiver in receivers.values():
            try:
                receiver.finish()
            except (CheckpointError, OSError) as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _files_of(catalog: Catalog, rank: int) -> list[int]:
    """Return the numbers of the files of a rank."""
    return [number for number in own_files(catalog) if catalog.files[number].rank == rank]


def _lacking(hot: Storage, catalog: Catalog, numbers: Sequence[int]) -> NDArray[np.uint8]:
    """Return 1 for each of these files that must be sent to this machine, and 0 for those that it has; never raise."""
    lacking = np.ones(len(numbers), np.uint8)
    if not has_adopted(catalog):
        return lacking
    try:
        present = dict(hot.list())
        for place, number in enumerate(numbers):
            name = catalog.files[number].name
            if name not in present:
                lacking[place] = not link_if_beside(hot, catalog, number)
            elif has_header(hot, catalog, number):
                lacking[place] = 0
            else:
                hot.delete([name])
    except CheckpointError as error:
        _log.warning("%s: replicas are sent anew: %s", hot.url, error)
    return lacking


def _pieces_of(catalog: Catalog, numbers: Sequence[int], lacking: NDArray[np.uint8]) -> Iterator[_Piece]:
    """Yield the pieces of those files that a receiver lacks, in order. Both sides derive the same pieces."""
    for number, lacks in zip(numbers, lacking.tolist(), strict=True):
        for start in range(0, catalog.files[number].stored_bytes if lacks else 0, _PIECE):
            yield number, start, min(start + _PIECE, catalog.files[number].stored_bytes)


class _ReplicaReader:
    """Reads the pieces that this rank sends."""

    def __init__(self, hot: Storage, catalog: Catalog) -> None:
        self._hot, self._catalog = hot, catalog
        self._open: tuple[int, FileReader] | None = None
        self.error: BaseException | None = None

    def read(self, piece: _Piece) -> NDArray[np.uint8]:
        number, start, stop = piece
        data = np.zeros(stop - start, np.uint8)
        if self.error is None:
            try:
                if self._open is None or self._open[0] != number:
                    self.close()
                    self._open = number, self._hot.open(self._catalog.files[number].name)
                if self._open[1].read_into(start, [memoryview(data)]) != len(data):
                    raise CorruptCheckpointError(f"{self._hot.url}/{self._catalog.files[number].name} was cut")
            except (CheckpointError, OSError) as error:
                # The receivers wait for all pieces. They fail later, when they verify the file.
                self.error = error
        return data

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


class _ReplicaWriter:
    """Writes the files that one rank sends."""

    def __init__(self, hot: Storage, catalog: Catalog, pieces: list[_Piece]) -> None:
        self._hot, self._catalog = hot, catalog
        self.pieces = pieces
        self._writer: FileWriter | None = None
        self._files: list[int] = []  # numbers of the files that were begun
        self.error: BaseException | None = None

    def size_of(self, piece: int) -> int:
        _, start, stop = self.pieces[piece]
        return stop - start

    def write(self, piece: int, data: NDArray[np.uint8]) -> None:
        if self.error is not None:
            return
        number, start, stop = self.pieces[piece]
        file = self._catalog.files[number]
        try:
            if number not in self._files[-1:]:
                self._writer = self._hot.create(NewFile(file.name, file.stored_bytes))
                self._files.append(number)
            assert self._writer is not None
            self._writer.write_at(start, [memoryview(data)])
            if stop == file.stored_bytes:
                writer, self._writer = self._writer, None
                writer.finish(file.stored_bytes)
        except (CheckpointError, OSError) as error:
            self.error = error

    def finish(self) -> None:
        """Verify the files and make them durable. After an error, remove the damaged files and raise the error."""
        if self._writer is not None:
            self._writer.abort()
        damaged = [
            self._catalog.files[number].name
            for number in self._files
            if self.error is not None or not is_sound(self._hot, self._catalog, number)
        ]
        if damaged:
            self._hot.delete(damaged)
            if self.error is None:
                self.error = CorruptCheckpointError(
                    f"{self._hot.url}: {damaged[0]} came over damaged from another machine"
                )
        if self.error is not None:
            raise self.error
        self._hot.sync([self._catalog.files[number].name for number in self._files])
