"""Arrays on their way over direct connections: the operations, their transfers, and the connections that they share."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.wire import FrameReader, Kind, Payload, ProtocolError, header
from bytecheckpoint.tuning import tuning

__all__ = ["NUMBER", "Answer", "ArrayExchange", "DataOperation", "Fetch", "PeerLink", "Transfer", "pop_first"]

T = TypeVar("T")

#: The tag of a DATA or REFUSED frame: the number of the request that it answers.
NUMBER = struct.Struct("<Q")


class Transfer:
    """One array on its way to or from one rank.

    Attributes:
        operation: the operation that it belongs to.
        rank: the other rank.
        outgoing: direction of the array, True if it goes to that rank.
        request: request to the provider of a fetch, None in an exchange.
        view: bytes that are still to be sent or received.
        number: number of the receiver's request.
    """

    def __init__(
        self,
        operation: DataOperation,
        rank: int,
        array: NDArray[np.uint8],
        *,
        outgoing: bool,
        request: bytes | None = None,
        number: int = -1,
    ) -> None:
        self.operation = operation
        self.rank = rank
        self.outgoing = outgoing
        self.request = request
        self.view = memoryview(array)
        self.number = number


class DataOperation:
    """Arrays that are sent and received together: all of them arrive, or the operation fails.

    Args:
        tag: tag of the call.
        title: display name for errors.
        on_over: function that is called once with this object, when its last array was moved or it has failed.

    Attributes:
        left: transfers that are not complete.
        error: failure of the operation.
        redials: failed attempts to connect with ranks from which arrays are missing.
        over: event, set when no array of the operation moves any more.
    """

    def __init__(self, tag: str, title: str, on_over: Callable[[DataOperation], None]) -> None:
        self.tag = tag
        self.title = title
        self.left: set[Transfer] = set()
        self.error: Exception | None = None
        self.redials = 0
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
        """Return the ranks to which (or from which) an array is not complete."""
        return {transfer.rank for transfer in self.left if transfer.outgoing is outgoing}


class ArrayExchange(DataOperation):
    """One call of `exchange`. The other ranks make the same call, and the failure of one rank reaches all.

    Args:
        tag: tag of the call.
        outgoing: by destination rank.
        incoming: by source rank.
        on_over: function that is called once with this object when it is over.
    """

    def __init__(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        on_over: Callable[[DataOperation], None],
    ) -> None:
        super().__init__(tag, f"exchange {tag!r}", on_over)
        self.left |= {Transfer(self, rank, array, outgoing=True) for rank, array in outgoing.items()}
        self.left |= {Transfer(self, rank, array, outgoing=False) for rank, array in incoming.items()}


class Fetch(DataOperation):
    """One call of `fetch`. No other rank depends on it."""

    def __init__(
        self,
        tag: str,
        rank: int,
        request: bytes,
        destination: NDArray[np.uint8],
        on_over: Callable[[DataOperation], None],
    ) -> None:
        super().__init__(tag, f"fetch {tag!r}", on_over)
        self.left = {Transfer(self, rank, destination, outgoing=False, request=request)}


class Answer(DataOperation):
    """The array that one rank sends for a `Fetch` of another rank. That rank receives its failure, too."""

    def __init__(
        self, tag: str, link: PeerLink, number: int, data: NDArray[np.uint8], on_over: Callable[[DataOperation], None]
    ) -> None:
        super().__init__(tag, f"answer {tag!r}", on_over)
        self.link = link
        self.number = number
        self.left = {Transfer(self, link.rank, data, outgoing=True, number=number)}


class ArrayReader(FrameReader):
    """Assembles frames, and reads each piece of a requested array straight into the array."""

    def __init__(self) -> None:
        super().__init__()
        self._requested: dict[int, Transfer] = {}  # by number
        self._filling: Transfer | None = None  # whose memory the current frame is read into

    def expect(self, incoming: Transfer) -> None:
        """Take frames with the number of `incoming` from now on."""
        self._requested[incoming.number] = incoming

    def requested(self, number: int) -> Transfer | None:
        """Return the transfer that waits for the answer to a request, None if it was given up."""
        return self._requested.get(number)

    def forget(self, incoming: Transfer) -> None:
        """Write no more into the array of `incoming`."""
        self._requested.pop(incoming.number, None)
        if self._filling is incoming:
            self._filling = None
            self._discard_payload()

    def on_data(self, size: int) -> None:
        """Account for a complete DATA frame of `size` bytes."""
        transfer, self._filling = self._filling, None
        if transfer is None:
            return  # its operation was given up
        transfer.view = transfer.view[size:]
        if not transfer.view:
            del self._requested[transfer.number]
            transfer.operation.complete(transfer)

    def _allocate(self, kind: Kind, tag: bytes, size: int) -> Payload:
        transfer = self._requested.get(NUMBER.unpack(tag)[0]) if kind is Kind.DATA else None
        if transfer is None:
            return super()._allocate(kind, tag, size)
        if not 0 < size <= len(transfer.view):
            raise ProtocolError("more bytes came than were asked for")
        self._filling = transfer
        return transfer.view[:size]


class PeerLink(Link):
    """A connection to one rank with the arrays that go over it. Used by one thread.

    Args:
        sock: the connection.
        greeting: this side of the handshake.

    Attributes:
        arrays: reads what arrives.
        early_requests: by tag, requests that came before this rank offered the array: number, bytes.
    """

    def __init__(self, sock: socket.socket, greeting: Greeting) -> None:
        self.arrays = ArrayReader()
        super().__init__(sock, self.arrays, greeting)
        self.early_requests: dict[str, deque[tuple[int, int]]] = {}
        self._sending: deque[Transfer] = deque()  # they take turns, a piece each
        self._current: Transfer | None = None  # whose piece is handed to the kernel now

    def send(self, outgoing: Transfer) -> None:
        """Send an array, from the next `flush` on."""
        self._sending.append(outgoing)

    def forget(self, transfer: Transfer) -> None:
        """Stop the transfer of an array: its memory is neither read nor written once this returns."""
        if not transfer.outgoing:
            self.arrays.forget(transfer)
        elif self._current is transfer:
            # The frame that has begun must end, and may be the last one that the receiver lacks.
            self._current = None
            self._outgoing.queue = deque(memoryview(bytes(part)) for part in self._outgoing.queue)
        elif transfer in self._sending:
            self._sending.remove(transfer)

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
        self._outgoing.queue += (header(Kind.DATA, 0, 0, NUMBER.pack(now.number), len(piece)), piece)
        return True


def pop_first(queues: dict[str, deque[T]], tag: str) -> T | None:
    """Remove and return the first item that waits under `tag`."""
    if (queue := queues.get(tag)) is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[tag]
    return item
