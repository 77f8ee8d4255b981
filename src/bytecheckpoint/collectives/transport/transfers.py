"""Arrays on their way over direct connections: the operations, their transfers, and the connection that they share."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.transport.wire import Kind, Link, Payload, header
from bytecheckpoint.tuning import tuning

__all__ = ["NUMBER", "Answer", "Exchange", "Fetch", "Operation", "Peer", "PeerLink", "Report", "Transfer", "pop_first"]

T = TypeVar("T")

#: Of an error, as `error_report` makes it.
Report = dict[str, str]
#: The tag of a DATA or REFUSED frame: the number of the request that it answers.
NUMBER = struct.Struct("<Q")

_REMEMBERED = 64  # failed exchanges with one peer: more than can be under way between two ranks


class Transfer:
    """One array on its way to or from one rank.

    Attributes:
        operation: the operation that it belongs to.
        peer: the other rank.
        outgoing: whether the array goes to that rank.
        request: what is fetched; None in an exchange.
        view: bytes that are still to be sent or received.
        number: of the receiver's request.
    """

    def __init__(
        self,
        operation: Operation,
        peer: int,
        array: NDArray[np.uint8],
        *,
        outgoing: bool,
        request: bytes | None = None,
        number: int = -1,
    ) -> None:
        self.operation = operation
        self.peer = peer
        self.outgoing = outgoing
        self.request = request
        self.view = memoryview(array)
        self.number = number


class Operation:
    """Arrays that are sent and received together: all of them arrive, or the operation fails.

    Args:
        tag: of the call.
        title: display name for errors.
        on_over: called once, with this, when the last array was moved or the operation has failed.

    Attributes:
        left: transfers that are not complete.
        error: why the operation failed.
        over: set when nothing of it is moved any more.
    """

    def __init__(self, tag: str, title: str, on_over: Callable[[Operation], None]) -> None:
        self.tag = tag
        self.title = title
        self.left: set[Transfer] = set()
        self.error: Exception | None = None
        self.over = threading.Event()
        self._on_over = on_over

    def complete(self, transfer: Transfer) -> None:
        """Note that `transfer` is complete."""
        self.left.discard(transfer)
        if not self.left:
            self._on_over(self)
            self.over.set()

    def fail(self, error: Exception) -> None:
        """Give up the transfers that are left."""
        self.error = error
        self._on_over(self)
        self.over.set()

    def missing(self, *, outgoing: bool) -> set[int]:
        """Ranks to which (or from which) an array is not complete."""
        return {transfer.peer for transfer in self.left if transfer.outgoing is outgoing}


class Exchange(Operation):
    """One call of `exchange`. The other ranks make the same call, and hear of its failure.

    Args:
        tag: of the call.
        outgoing: by destination rank.
        incoming: by source rank.
        on_over: as of `Operation`.
    """

    def __init__(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        on_over: Callable[[Operation], None],
    ) -> None:
        super().__init__(tag, f"exchange {tag!r}", on_over)
        self.left |= {Transfer(self, peer, array, outgoing=True) for peer, array in outgoing.items()}
        self.left |= {Transfer(self, peer, array, outgoing=False) for peer, array in incoming.items()}


class Fetch(Operation):
    """One call of `fetch`. No other rank depends on it."""

    def __init__(
        self, tag: str, peer: int, request: bytes, into: NDArray[np.uint8], on_over: Callable[[Operation], None]
    ) -> None:
        super().__init__(tag, f"fetch {tag!r}", on_over)
        self.left = {Transfer(self, peer, into, outgoing=False, request=request)}


class Answer(Operation):
    """What one rank sends for a `Fetch` of another. The other rank hears of its failure."""

    def __init__(
        self, tag: str, link: PeerLink, number: int, data: NDArray[np.uint8], on_over: Callable[[Operation], None]
    ) -> None:
        super().__init__(tag, f"answer {tag!r}", on_over)
        self.link = link
        self.number = number
        self.left = {Transfer(self, link.rank, data, outgoing=True, number=number)}


class PeerLink(Link):
    """A connection to one rank with the arrays that go over it. Used by one thread.

    Args:
        sock: the connection.
        dialled: the rank that this rank has called; None: that rank has called this one.
    """

    def __init__(self, sock: socket.socket, dialled: int | None = None) -> None:
        super().__init__(sock)
        self.dialled = dialled
        self.wanted: dict[str, deque[tuple[int, int]]] = {}  # requests for what is not offered yet: number, bytes
        self._requested: dict[int, Transfer] = {}  # incoming, by number
        self._filling: Transfer | None = None  # whose memory the current frame is read into
        self._sending: deque[Transfer] = deque()  # they take turns, a piece each
        self._current: Transfer | None = None  # whose piece is handed to the kernel now

    def expect(self, incoming: Transfer) -> None:
        """Take frames with its number from now on."""
        self._requested[incoming.number] = incoming

    def requested(self, number: int) -> Transfer | None:
        """The transfer that waits for the answer to a request, unless it was given up."""
        return self._requested.get(number)

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
        self._requested.pop(transfer.number, None)
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
                last.operation.complete(last)
        if not self._sending:
            return False
        self._current = now = self._sending.popleft()
        size = tuning().data_piece
        piece, now.view = now.view[:size], now.view[size:]
        self._out += (header(Kind.DATA, 0, 0, NUMBER.pack(now.number), len(piece)), piece)
        return True

    def _room(self, kind: Kind, tag: bytes, size: int) -> Payload:
        transfer = self._requested.get(NUMBER.unpack(tag)[0]) if kind is Kind.DATA else None
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
            return  # its operation was given up
        transfer.view = transfer.view[size:]
        if not transfer.view:
            del self._requested[transfer.number]
            transfer.operation.complete(transfer)


class Peer:
    """What one rank knows of another.

    Attributes:
        rank: the other.
        link: the connection, if there is one.
        address: where it listens, once it has said so; only of lower ranks.
        address_wanted: whether it was asked for its address; only of lower ranks.
        address_sent: whether it knows where this rank listens; only of higher ranks.
        asks_for_link: whether it has asked for a connection since the last one was made.
        dialling: a connection that is being made.
        failure: why the last attempt to make one failed.
        offers: outgoing transfers that were not asked for yet, by tag.
        waiting: incoming transfers to be asked for once there is a connection.
        failed: by tag, reports of exchanges that it gave up before they began here.
        given_up: by tag, reports of exchanges that were given up here before it has done the same; None: it knows.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link: PeerLink | None = None
        self.address: tuple[str, int] | None = None
        self.address_wanted = False
        self.address_sent = False
        self.asks_for_link = False
        self.dialling: socket.socket | PeerLink | None = None
        self.failure = ""
        self.offers: dict[str, deque[Transfer]] = {}
        self.waiting: set[Transfer] = set()
        self.failed: dict[str, Report] = {}
        self.given_up: dict[str, Report | None] = {}

    @property
    def busy(self) -> bool:
        """Whether transfers wait for a connection."""
        return bool(self.offers or self.waiting)

    @property
    def fetching(self) -> bool:
        """Whether fetches wait for a connection."""
        return any(transfer.request is not None for transfer in self.waiting)

    @property
    def unreported(self) -> dict[str, Report]:
        """Of `given_up`, what the other rank does not know."""
        return {tag: report for tag, report in self.given_up.items() if report is not None}

    def give_up(self, tag: str, report: Report) -> None:
        """Note that exchange `tag` was given up here."""
        _remember(self.given_up, tag, report)

    def on_given_up(self, tag: str, report: Report) -> None:
        """Note that the other rank has given up exchange `tag`, which does not run here now."""
        if tag in self.given_up:
            del self.given_up[tag]
        else:
            _remember(self.failed, tag, report)

    def withdraw(self, transfer: Transfer) -> None:
        """Move no more of it: its memory is neither read nor written once this returns."""
        self.waiting.discard(transfer)
        tag = transfer.operation.tag
        if transfer in self.offers.get(tag, ()):
            self.offers[tag].remove(transfer)
            if not self.offers[tag]:
                del self.offers[tag]
        elif self.link is not None:
            self.link.forget(transfer)


def _remember(reports: dict[str, T], tag: str, report: T) -> None:
    """Keep the latest few."""
    while len(reports) >= _REMEMBERED:
        del reports[next(iter(reports))]
    reports[tag] = report


def pop_first(queues: dict[str, deque[T]], tag: str) -> T | None:
    """Remove and return the first item that waits under `tag`."""
    if (queue := queues.get(tag)) is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[tag]
    return item
