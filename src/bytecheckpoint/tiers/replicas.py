"""Copies of each rank's hot files in the memory of other machines (Gemini's idea): a lost machine loses nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, CorruptCheckpointError
from ..representation.catalog import Catalog
from ..storage import FileReader, FileWriter, NewFile, Storage
from .copying import own_files, sound
from .party import Machines, Party

__all__ = ["replicate"]

_PIECE = 8 << 20

#: One message: (number of the file, first byte, end).
_Piece = tuple[int, int, int]


def _stream(catalog: Catalog, rank: int) -> Iterator[_Piece]:
    """What a rank sends, in order; every rank derives the same from the catalog."""
    for number in own_files(catalog):
        file = catalog.files[number]
        if file.rank == rank:
            for start in range(0, file.size, _PIECE):
                yield number, start, min(start + _PIECE, file.size)


class _Sender:
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
                # The others count on the messages; what is in them does not matter any more.
                self.error = error
        return data

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


class _Receiver:
    """Takes what one rank sends."""

    def __init__(self, hot: Storage, catalog: Catalog, pieces: list[_Piece]) -> None:
        self._hot, self._catalog = hot, catalog
        self.pieces = pieces
        self._writer: FileWriter | None = None
        self._number = -1
        self._begun: list[int] = []
        self.error: BaseException | None = None

    def write(self, piece: _Piece, data: NDArray[np.uint8]) -> None:
        if self.error is not None:
            return
        number, start, stop = piece
        file = self._catalog.files[number]
        try:
            if number != self._number:
                self._writer = self._hot.create(NewFile(file.name, file.size))
                self._number = number
                self._begun.append(number)
            assert self._writer is not None
            self._writer.write_at(start, [memoryview(data)])
            if stop == file.size:
                writer, self._writer = self._writer, None
                writer.finish(file.size)
        except (CheckpointError, OSError) as error:
            self.error = error

    def check(self) -> None:
        """Raise what went wrong; nothing wrong stays behind."""
        if self._writer is not None:
            self._writer.abort()
        bad = [
            number for number in self._begun if self.error is not None or not sound(self._hot, self._catalog, number)
        ]
        if bad:
            names = [self._catalog.files[number].name for number in bad]
            self._hot.delete(names)
            if self.error is None:
                self.error = CorruptCheckpointError(
                    f"{self._hot.url}: {names[0]} came over damaged from another machine"
                )
        if self.error is not None:
            raise self.error
        self._hot.sync([self._catalog.files[number].name for number in self._begun])


def replicate(party: Party, machines: Machines, hot: Storage, catalog: Catalog, replicas: int) -> None:
    """Send this rank's files to its partners, and keep those of the ranks whose partner it is. All ranks call it.

    Raises:
        CheckpointError: this rank could not read its files or keep the others'. Other ranks are not told here.
        PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
    """
    me = party.rank
    world = range(len(machines.of))
    partners = machines.partners(me, replicas)
    mine = list(_stream(catalog, me)) if partners else []
    sender = _Sender(hot, catalog)
    receivers = {
        rank: _Receiver(hot, catalog, list(_stream(catalog, rank)))
        for rank in world
        if me in machines.partners(rank, replicas)
    }
    rounds = max([len(mine), *(len(receiver.pieces) for receiver in receivers.values())], default=0)
    try:
        for number in range(rounds):
            outgoing = {}
            if number < len(mine):
                data = sender.read(mine[number])
                outgoing = dict.fromkeys(partners, data)
            incoming = {
                rank: np.empty(receiver.pieces[number][2] - receiver.pieces[number][1], np.uint8)
                for rank, receiver in receivers.items()
                if number < len(receiver.pieces)
            }
            party.collective.exchange(f"{party.tag}/replicas/{number}", outgoing, incoming, timeout=party.timeout)
            for rank, array in incoming.items():
                receivers[rank].write(receivers[rank].pieces[number], array)
    except BaseException as error:
        for receiver in receivers.values():
            receiver.error = receiver.error or error
        raise
    finally:
        sender.close()
        failures = [sender.error] if sender.error is not None else []
        for receiver in receivers.values():
            try:
                receiver.check()
            except (CheckpointError, OSError) as error:
                failures.append(error)
    if failures:
        raise failures[0]
