"""Messages between processes: every rank holds a connection towards rank 0 (a star, or in a large world a tree).

Each rank has plain sockets and one I/O thread. The thread sleeps until data come, and looks at silent connections every
other second. A message costs one wake-up at each hop. Threads that wait on a connection notice at once when it
breaks. A peer that hangs cannot hang this rank. Nothing depends on torch (decisions 0002 and 0039 have the alternatives).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from abc import abstractmethod
from collections.abc import Mapping

import msgspec

from bytecheckpoint.collectives.inbox import ASK, Inbox
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.packs import Message, Place, pack, unpack
from bytecheckpoint.collectives.transport.sockets import is_loopback, listen, loopback, remote_end
from bytecheckpoint.collectives.transport.wire import Kind, Payload, ProtocolError
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.settings import settings

__all__ = ["PLACE", "PLACES", "Star"]

_log = logging.getLogger("bytecheckpoint")
#: Tag of the messages in the inbox that hold the `Place` of a rank.
PLACE = "bytecheckpoint/place"
PLACES = msgspec.msgpack.Decoder(Place)


class Star(Loop):
    """One rank's message connections, and the thread that sends, passes on and receives messages.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        inbox: messages for this rank.
        secret: secret of the world, which authenticates connections.
        linger: most seconds that `leave` spends on delivering the last messages.

    Attributes:
        hub_address: address of rank 0's machine.

    Raises:
        UsageError: the settings leave no port to listen at, or name certificates that cannot be used.
    """

    def __init__(self, rank: int, world_size: int, inbox: Inbox, secret: bytes, linger: float) -> None:
        super().__init__(rank, world_size, "bytecheckpoint-messages", secret, linger)
        self.inbox = inbox
        self.hub_address = settings().transport.listen_address or loopback()
        self.ready = threading.Event()  # every rank is connected, or connecting failed and the inbox is closed
        self.below: dict[int, Link] = {}  # the connection through which each rank is reached, away from rank 0
        self._places: dict[int, Place] = {}  # places at which these ranks listen
        self._data_listener: socket.socket | None = None
        try:
            self._data_listener = listen(128)
        except BaseException:
            self._release()
            raise
        self.data_port: int = self._data_listener.getsockname()[1]

    @abstractmethod
    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Send a message, as `Collective.send`."""

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:
        """Send each rank its payload, as `Collective.send_each`."""
        for to, payload in payloads.items():
            self.send(to, tag, payload)

    @abstractmethod
    def watch(self, other: int) -> None:
        """Report the loss of rank `other` to the inbox; for `ANYBODY`, the loss of any rank."""

    @abstractmethod
    def locate(self, other: int) -> None:
        """Ask rank 0 where rank `other` listens; the answer comes into the inbox under `PLACE`."""

    def take_data_listener(self) -> socket.socket:
        """Return the socket at which other ranks reach this one for arrays. One caller takes it, and closes it."""
        listener, self._data_listener = self._data_listener, None
        assert listener is not None
        return listener

    def check_open(self, tag: str) -> None:
        """Raise if no messages can be sent.

        Args:
            tag: tag of the message to send, for the error.

        Raises:
            PeerLostError: this world was closed, or rank 0 is gone.
            UsageError: this is a forked child.
        """
        self.check_process()
        reason = self.inbox.closed or ("this world was closed" if self._leave_asked else None)
        if reason is not None:
            raise PeerLostError(f"rank {self.rank}: cannot send {tag!r}: {reason}")

    def _receive(self, source: int, tag: bytes, payload: Payload) -> None:
        """Put a message for this rank into the inbox."""
        if tag == PLACE.encode():  # only this transport makes such messages
            raise ProtocolError(f"a message under {PLACE!r}")
        if tag != ASK.encode():
            self.inbox.put(source, tag.decode(), bytes(payload))
            return
        with contextlib.suppress(CheckpointError):  # this world was closed
            self.send(source, bytes(payload).decode(), self.inbox.outlook())

    # --- towards the ranks below ------------------------------------------------------------------------------------

    def _send_down(self, messages: list[Message]) -> None:
        """Send messages of rank 0 to ranks below this one. From any thread."""
        by_link: dict[Link, list[Message]] = {}
        for tag, payload, ranks in messages:
            groups: dict[Link, list[int]] = {}
            for rank in ranks:
                groups.setdefault(self.below[rank], []).append(rank)
            for link, group in groups.items():
                by_link.setdefault(link, []).append(Message(tag, payload, group))
        for link, found in by_link.items():
            if len(found) == 1 and len(found[0].ranks) == 1:
                self._post(link, Kind.MESSAGE, 0, found[0].ranks[0], found[0].tag, found[0].payload)
            else:
                self._post(link, Kind.PACK, 0, link.rank, b"", pack(found))

    def _send_all_below(self, kind: Kind, text: str = "") -> None:
        """Send a frame of rank 0 over every connection away from it."""
        for link in set(self.below.values()):
            self._post(link, kind, 0, link.rank, b"", text.encode())

    def _on_messages_down(self, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        """Handle a message, or several, on their way down."""
        messages = unpack(bytes(payload)) if kind is Kind.PACK else [Message(tag, bytes(payload), [to])]
        for message in messages:
            if self.rank in message.ranks:
                self._receive(source, message.tag, message.payload)
        others = [Message(t, p, [r for r in ranks if r != self.rank]) for t, p, ranks in messages]
        self._send_down([message for message in others if message.ranks])

    def _check_source(self, link: Link, source: int) -> None:
        """Refuse a frame of a rank that is not reached through its connection."""
        if self.below.get(source) is not link:
            raise ProtocolError(f"a frame of rank {source}, which is not reached through this connection")

    def _replace(self, rank: int, link: Link) -> None:
        """Note the connection through which a rank is reached; end another one of that rank, with a line in the log."""
        old = self.below.get(rank)
        if old is not None and old is not link:
            _log.warning(
                "rank %d: rank %d has connected from %s, and before from %s: the newer connection counts",
                self.rank, rank, link.remote, old.remote,
            )  # fmt: skip
            if old.rank == rank:
                self._drop(old)
                self._on_gone(old)
        self.below[rank] = link

    def _forget(self, rank: int) -> None:
        """Forget a rank whose connection has ended before this world began."""
        self.below.pop(rank, None)
        self._places.pop(rank, None)

    def _place_of(self, link: Link, payload: Payload) -> Place:
        """Return the place of a rank below this one from its payload, with the address of `link`."""
        place = PLACES.decode(payload)
        if place.host or link.local:
            return place
        host = remote_end(link.sock)
        return msgspec.structs.replace(place, host="" if is_loopback(host) else host)

    def _on_end(self, reason: str) -> None:
        self.inbox.close(reason)
        self.ready.set()

    def _release(self) -> None:
        super()._release()
        if self._data_listener is not None:
            self._data_listener.close()
