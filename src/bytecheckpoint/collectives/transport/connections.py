"""Direct connections between pairs of ranks, each made when an operation first needs it.

The rank that wants bytes dials the rank that has them, at an address that rank 0 knows. So two ranks that want bytes of
each other have two connections. When one breaks, the operations under way between the two fail. The next one connects
again.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from abc import abstractmethod
from collections.abc import Collection
from functools import partial

from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.peers import Peer
from bytecheckpoint.collectives.transport.sockets import reserve_descriptors
from bytecheckpoint.collectives.transport.star import PLACE, PLACES, Star
from bytecheckpoint.collectives.transport.transfers import PeerLink
from bytecheckpoint.collectives.transport.wire import Kind, Payload
from bytecheckpoint.errors import CheckpointError

__all__ = ["REDIAL_SECONDS", "DirectConnections"]

REDIAL_SECONDS = 0.5  # after a failed attempt to connect
_CLOSED = "its connection closed: it was killed, crashed, was cut off or left this world"


class DirectConnections(Loop):
    """One rank's direct connections to other ranks, and the thread that serves them.

    Args:
        star: the messages of this world, which also report lost ranks.
        linger: most seconds that `leave` spends on delivering the last messages.
    """

    def __init__(self, star: Star, linger: float) -> None:
        super().__init__(star.rank, star.world_size, "bytecheckpoint-data", star.secret, linger)
        self._star = star
        self._peers: dict[int, Peer] = {}
        self._lost: dict[int, str] = {}
        self._star_closed: str | None = None  # why no messages come any more
        self._reserved: set[int] = set()  # ranks for whose connections descriptors are reserved

    def _start(self) -> None:
        self._call_soon(lambda: self._accept_from(self._star.take_data_listener()))  # not before the thread runs
        self._start_thread()
        self._star.inbox.set_handler(PLACE, self)

    # Called from any thread.

    def _reserve(self, ranks: Collection[int]) -> None:
        """Make sure that this process may open a descriptor for each direction to and from `ranks`."""
        new = set(ranks) - self._reserved
        if new:
            reserve_descriptors(2 * len(new), f"rank {self.rank}, which exchanges data with {len(new)} more ranks,")
            self._reserved |= new

    def on_message(self, source: int, payload: bytes) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_place, source, payload))

    def on_lost(self, source: int, reason: str) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_lost_rank, source, reason))

    def on_closed(self, reason: str) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_star_closed, reason))

    # Implemented by the subclass, which knows what moves over the connections. All below runs on the thread only.

    @abstractmethod
    def _on_connected(self, peer: Peer) -> None:
        """Handle a new connection with `peer`."""

    @abstractmethod
    def _fail_all(self, peer: Peer, error: CheckpointError) -> None:
        """Fail all operations with `peer`."""

    @abstractmethod
    def _lose(self, peer: Peer, reason: str) -> None:
        """Fail all operations with `peer`, because the rank or its connection is lost."""

    @abstractmethod
    def _on_data_frame(self, peer: Peer, link: PeerLink, kind: Kind, tag: bytes, payload: Payload) -> None: ...

    # Connecting.

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            self._peers[rank] = Peer(rank)
        return self._peers[rank]

    def _connect_if_needed(self, peer: Peer) -> None:
        """Dial `peer` if this rank wants its bytes or has failures to send; watch it if `peer` has to dial."""
        wants = peer.called is None and bool(peer.to_request or (peer.unsent_failures and peer.caller is None))
        waits = peer.caller is None and bool(peer.offers)
        if self._deadline is not None or not (wants or waits):
            return
        if (reason := self._lost.get(peer.rank, self._star_closed)) is not None:
            self._lose(peer, reason)
            return
        try:
            if peer.rank != 0:
                self._star.watch(peer.rank)
            if not wants or peer.dialling.connection is not None:
                return
            if peer.dialling.address is not None:
                self._dial(peer, *peer.dialling.address)
            elif not peer.dialling.asked:
                peer.dialling.asked = True
                self._star.locate(peer.rank)
        except CheckpointError as error:
            self._fail_all(peer, error)

    def _on_place(self, rank: int, payload: bytes) -> None:
        place, peer = PLACES.decode(payload), self._peer(rank)
        peer.dialling.address = place.host or self._star.hub_address, place.data
        self._connect_if_needed(peer)

    def _on_lost_rank(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        if (peer := self._peers.get(rank)) is None:
            return
        if not peer.links:
            self._lose(peer, reason)
        for link in peer.links:
            # Its last bytes may still be under way, and the connection ends after them; not if its machine is gone.
            self._call_later(self.linger, partial(self._cut, peer, link))

    def _on_star_closed(self, reason: str) -> None:
        self._star_closed = reason
        self._on_lost_rank(0, reason)
        for peer in list(self._peers.values()):
            if not peer.links:
                self._lose(peer, reason)

    def _cut(self, peer: Peer, link: PeerLink) -> None:
        if link in peer.links:
            self._drop(link)
            self._on_gone(link)

    def _dial(self, peer: Peer, host: str, port: int) -> None:
        sock: socket.socket | None = None
        try:
            numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, kind, protocol, _, address = numeric[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except (OSError, ValueError, OverflowError) as error:  # an address that is none, too
            if sock is not None:
                sock.close()
            self._redial_later(peer, str(error))
            return
        peer.dialling.connection = sock
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._on_dialled, peer, sock))

    def _on_dialled(self, peer: Peer, sock: socket.socket, _mask: int) -> None:
        self._selector.unregister(sock)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
            self._redial_later(peer, os.strerror(code))
            return
        greeting = Greeting(self._thread.name, self.secret, self.rank, peer.rank)
        peer.dialling.connection = link = PeerLink(self.security.over(sock, dials=True), greeting)
        self._add(link)
        self._post(link, Kind.HELLO, self.rank, peer.rank, b"", greeting.hello())

    def _redial_later(self, peer: Peer, failure: str) -> None:
        peer.dialling.connection = None
        assert peer.dialling.address is not None
        host, port = peer.dialling.address
        peer.dialling.failure = f"{host} port {port}: {failure}"
        for operation in {transfer.operation for transfer in peer.to_request}:
            operation.redials += 1
        self._call_later(REDIAL_SECONDS, partial(self._connect_if_needed, peer))

    def _new_link(self, sock: socket.socket) -> PeerLink:
        return PeerLink(self.security.over(sock, dials=False), Greeting(self._thread.name, self.secret, self.rank))

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        assert isinstance(link, PeerLink)
        self._on_data_frame(self._peer(link.rank), link, kind, tag, payload)

    def _on_greeted(self, link: Link) -> None:
        assert isinstance(link, PeerLink)
        peer = self._peer(link.rank)
        if link.greeting.dialled is not None:
            peer.called = link
            peer.dialling.connection, peer.dialling.failure = None, ""
        else:
            old, peer.caller = peer.caller, link
            if old is not None:  # the other rank has noticed first that it broke
                self._drop(old)
                self._lose(peer, "its connection broke and was made anew")
        self._on_connected(peer)

    def _on_gone(self, link: Link) -> None:
        assert isinstance(link, PeerLink)
        if link.rank >= 0:
            peer = self._peer(link.rank)
            if link in peer.links:
                peer.forget(link)
                self._lose(peer, self._lost.get(peer.rank, _CLOSED))
                self._connect_if_needed(peer)  # the rank may live, and wait for an exchange that was given up here
        elif link.greeting.dialled is not None:
            self._redial_later(self._peer(link.greeting.dialled), link.ungreeted())

    def _on_leave(self) -> None:
        self._stop_accepting()
        for peer in self._peers.values():
            if isinstance(sock := peer.dialling.connection, socket.socket):
                self._selector.unregister(sock)
                sock.close()
        for link in self._open:
            self._hang_up(link)
