"""Arrays on their way over direct connections: what is to come, what is to go, and the connection they share."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.wire import Kind, Link, Payload, header
from bytecheckpoint.errors import CheckpointError

__all__ = ["Job", "Peer", "PeerLink", "Report", "Transfer", "remember", "take"]

T = TypeVar("T")

Report = dict[str, str]
"""Of an error, as `error_report` makes it."""

_REMEMBERED = 64  # failed exchanges with one peer: more than can be under way between two ranks
_PIECE = 4 << 20  # bytes per DATA frame: what an exchange that starts may have to wait for
_NUMBER = struct.Struct("<Q")


class Transfer:
    """One array on its way to or from one rank.

    Attributes:
        job: the call of `exchange` that it belongs to.
        peer: the other rank.
        outgoing: whether it goes there.
        view: bytes that are still to go or to come.
        number: of the receiver's request.
    """

    def __init__(self, job: Job, peer: int, array: NDArray[np.uint8], *, outgoing: bool) -> None:
        self.job = job
        self.peer = peer
        self.outgoing = outgoing
        self.view = memoryview(array)
        self.number = -1


class Job:
    """One call of `exchange`.

    Args:
        tag: of the call.
        outgoing: by destination rank.
        incoming: by source rank.
        on_over: called once, with this, when the last array has arrived or gone.
    """

    def __init__(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        on_over: Callable[[Job], None],
    ) -> None:
        self.tag = tag
        self.left = {Transfer(self, peer, array, outgoing=True) for peer, array in outgoing.items()}
        self.left |= {Transfer(self, peer, array, outgoing=False) for peer, array in incoming.items()}
        self.error: CheckpointError | None = None
        self.over = threading.Event()
        self._on_over = on_over

    def complete(self, transfer: Transfer) -> None:
        """`transfer` is done."""
        self.left.discard(transfer)
        if not self.left:
            self._on_over(self)
            self.over.set()

    def end(self, error: CheckpointError) -> None:
        """Give up what is left."""
        self.error = error
        self._on_over(self)
        self.over.set()

    def missing(self, *, outgoing: bool) -> set[int]:
        """Ranks to which (or from which) something is left."""
        return {transfer.peer for transfer in self.left if transfer.outgoing is outgoing}


class PeerLink(Link):
    """A connection to one rank with the arrays that go over it. Used by one thread.

    Args:
        sock: the connection.
        dialled: whom we have called; None: they called us.
    """

    def __init__(self, sock: socket.socket, dialled: int | None = None) -> None:
        super().__init__(sock)
        self.dialled = dialled
        self.wanted: dict[str, deque[tuple[int, int]]] = {}  # requests for what is not offered yet: number, bytes
        self._asked: dict[int, Transfer] = {}  # incoming, by number
        self._filling: Transfer | None = None  # whose memory the current frame is read into
        self._sending: deque[Transfer] = deque()  # they take turns, a piece each
        self._current: Transfer | None = None  # whose piece is handed to the kernel now

    def ask(self, incoming: Transfer) -> None:
        """Take frames with its number from now on."""
        self._asked[incoming.number] = incoming

    def offer(self, outgoing: Transfer) -> None:
        """Send it, from the next `flush` on."""
        self._sending.append(outgoing)

    def forget(self, transfer: Transfer) -> None:
        """Move no more of it: its memory is neither read nor written once this returns."""
        if transfer.outgoing:
            if self._current is transfer:
                # The frame that has begun must end, and may be the last one that the receiver lacks.
                self._current = None
                self._out = deque(memoryview(bytes(part)) for part in self._out)
            elif transfer in self._sending:
                self._sending.remove(transfer)
            return
        self._asked.pop(transfer.number, None)
        if self._filling is transfer:
            self._filling = None
            self._payload = bytearray()
            self._target = memoryview(bytearray(len(self._target)))

    def _refill(self) -> bool:
        if (last := self._current) is not None:
            self._current = None
            if last.view:
                self._sending.append(last)
            else:
                last.job.complete(last)
        if not self._sending:
            return False
        self._current = now = self._sending.popleft()
        piece, now.view = now.view[:_PIECE], now.view[_PIECE:]
        self._out += (header(Kind.DATA, 0, 0, _NUMBER.pack(now.number), len(piece)), piece)
        return True

    def _room(self, kind: Kind, tag: bytes, size: int) -> Payload:
        transfer = self._asked.get(_NUMBER.unpack(tag)[0]) if kind is Kind.DATA else None
        if transfer is None:
            return super()._room(kind, tag, size)
        if not 0 < size <= len(transfer.view):
            raise OSError("more bytes came than were asked for")
        self._filling = transfer
        return transfer.view[:size]

    def filled(self, size: int) -> None:
        """A DATA frame of `size` bytes is complete."""
        transfer, self._filling = self._filling, None
        if transfer is None:
            return  # nobody waits for it any more
        transfer.view = transfer.view[size:]
        if not transfer.view:
            del self._asked[transfer.number]
            transfer.job.complete(transfer)


class Peer:
    """What one rank knows of another.

    Attributes:
        rank: the other.
        link: the connection, if there is one.
        address: where it listens, once it has said so; only of lower ranks.
        told: whether it knows where we listen; only of higher ranks.
        dialling: a connection that is being made.
        trouble: why the last attempt to make one failed.
        offers: outgoing that were not asked for yet, by tag.
        waiting: incoming to be asked for once there is a connection.
        failed: by tag, reports of exchanges that it gave up before they began here.
        given_up: by tag, reports of exchanges that were given up here before it has said the same; None: it was told.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link: PeerLink | None = None
        self.address: tuple[str, int] | None = None
        self.told = False
        self.dialling: socket.socket | PeerLink | None = None
        self.trouble = ""
        self.offers: dict[str, deque[Transfer]] = {}
        self.waiting: set[Transfer] = set()
        self.failed: dict[str, Report] = {}
        self.given_up: dict[str, Report | None] = {}

    @property
    def busy(self) -> bool:
        """Whether transfers wait for a connection."""
        return bool(self.offers or self.waiting)

    @property
    def untold(self) -> dict[str, Report]:
        """Of `given_up`, what the other does not know."""
        return {tag: report for tag, report in self.given_up.items() if report is not None}

    def hear(self, tag: str, report: Report) -> None:
        """It has given up `tag`, which does not run here: before it begins, or after it was given up here too."""
        if tag in self.given_up:
            del self.given_up[tag]
        else:
            remember(self.failed, tag, report)

    def withdraw(self, transfer: Transfer) -> None:
        """Move no more of it: its memory is neither read nor written once this returns."""
        self.waiting.discard(transfer)
        tag = transfer.job.tag
        if transfer in self.offers.get(tag, ()):
            self.offers[tag].remove(transfer)
            if not self.offers[tag]:
                del self.offers[tag]
        elif self.link is not None:
            self.link.forget(transfer)


def remember(reports: dict[str, T], tag: str, report: T) -> None:
    """Keep the latest few."""
    while len(reports) >= _REMEMBERED:
        del reports[next(iter(reports))]
    reports[tag] = report


def take(queues: dict[str, deque[T]], tag: str) -> T | None:
    """The first of what waits under `tag`, removed."""
    if (queue := queues.get(tag)) is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[tag]
    return item
