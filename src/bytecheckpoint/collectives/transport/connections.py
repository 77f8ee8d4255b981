"""Direct connections between pairs of ranks, each made when an operation first needs it.

Of two ranks the lower one listens and sends its address as a message; the higher one dials and shows the secret of the
world. When a connection breaks, the operations under way over it fail. The next one connects again.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
from abc import abstractmethod
from collections.abc import Collection
from functools import partial

from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.peers import Peer
from bytecheckpoint.collectives.transport.sockets import is_loopback, listen, reserve_descriptors
from bytecheckpoint.collectives.transport.star import Spoke, Star
from bytecheckpoint.collectives.transport.transfers import PeerLink
from bytecheckpoint.collectives.transport.wire import Kind, Link, Payload
from bytecheckpoint.errors import CheckpointError

__all__ = ["Connections"]

#: Tag of the message that says where a rank listens. Without an address it asks the receiver for such a message.
_ADDRESS = "bytecheckpoint/direct"
_REDIAL = 0.5  # seconds after a failed attempt to connect
_CLOSED = "its connection closed: it was killed, crashed, was cut off or left this world"


class Connections(Loop):
    """One rank's direct connections to other ranks, and the thread that serves them.

    Args:
        star: the messages of this world, which also report lost ranks.
        linger: as of `Loop`.
    """

    def __init__(self, star: Star, linger: float) -> None:
        super().__init__(star.rank, star.world_size, "bytecheckpoint-data", star.secret, linger)
        self._star = star
        self._peers: dict[int, Peer] = {}
        self._port: int | None = None
        self._lost: dict[int, str] = {}
        self._star_closed: str | None = None  # why no messages come any more
        self._reserved: set[int] = set()  # ranks for whose connection a descriptor is reserved

    def _start(self) -> None:
        self._star.inbox.set_handler(_ADDRESS, self)
        self._thread.start()

    # Called from any thread.

    def _reserve(self, ranks: Collection[int]) -> None:
        """Make sure that this process may open a descriptor for each of `ranks`."""
        new = set(ranks) - self._reserved
        if new:
            reserve_descriptors(len(new) + 1, f"rank {self.rank}, which exchanges data with {len(new)} more ranks,")
            self._reserved |= new

    def on_message(self, source: int, payload: bytes) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_address, source, payload))

    def on_lost(self, source: int, reason: str) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_lost_rank, source, reason))

    def on_closed(self, reason: str) -> None:  # noqa: D102 (MessageHandler)
        self._call_soon(partial(self._on_star_closed, reason))

    # Implemented by the subclass, which knows what moves over the connections. All below runs on the thread only.

    @abstractmethod
    def _serves_data(self) -> bool:
        """Whether other ranks may fetch data from this one."""

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

    def _needs_link(self, peer: Peer) -> bool:
        waiting = peer.offers or peer.to_request or peer.unreported
        return bool(waiting) or (peer.setup.wanted and self._serves_data())

    def _connect_if_needed(self, peer: Peer) -> None:
        """Do this rank's part for a connection with `peer`, if one is needed."""
        if peer.link is not None or self._deadline is not None or not self._needs_link(peer):
            return
        if (reason := self._lost.get(peer.rank, self._star_closed)) is not None:
            self._lose(peer, reason)
            return
        try:
            if peer.rank != 0:
                self._star.watch(peer.rank)
            if self.rank < peer.rank:
                self._send_address(peer)
            elif peer.setup.address is None:
                self._ask_for_address(peer)
            elif peer.setup.dialling is None:
                self._dial(peer, *peer.setup.address)
        except CheckpointError as error:
            self._fail_all(peer, error)

    def _send_address(self, peer: Peer) -> None:
        if self._port is None:
            try:
                listener = listen(128)
            except OSError as error:
                raise CheckpointError(f"rank {self.rank}: cannot listen for other ranks: {error}") from error
            self._port = listener.getsockname()[1]
            self._accept_from(listener)
        if not peer.setup.message_sent:
            peer.setup.message_sent = True
            address = {"address": self._star.address_for(peer.rank), "port": self._port}
            self._star.send(peer.rank, _ADDRESS, json.dumps(address).encode())

    def _ask_for_address(self, peer: Peer) -> None:
        # In an exchange the other rank sends its address unasked. A rank that serves data does not know who fetches it.
        fetches = any(transfer.request is not None for transfer in peer.to_request)
        if fetches and not peer.setup.message_sent:
            peer.setup.message_sent = True
            self._star.send(peer.rank, _ADDRESS, b"{}")

    def _on_address(self, source: int, payload: bytes) -> None:
        message = json.loads(payload)
        peer = self._peer(source)
        peer.setup.wanted = True
        if message:
            assert isinstance(self._star, Spoke)  # addresses go to higher ranks only
            # A rank that has reached rank 0 over a loopback address is on the machine of rank 0.
            loopback = is_loopback(message["address"])
            peer.setup.address = (self._star.hub_address if loopback else message["address"], message["port"])
        self._connect_if_needed(peer)

    def _on_lost_rank(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        if (peer := self._peers.get(rank)) is None:
            return
        if peer.link is None:
            self._lose(peer, reason)
        else:
            # Its last bytes may still be under way, and the connection ends after them; not if its machine is gone.
            self._call_later(self.linger, partial(self._cut, peer, peer.link))

    def _on_star_closed(self, reason: str) -> None:
        self._star_closed = reason
        self._on_lost_rank(0, reason)
        for peer in list(self._peers.values()):
            if peer.link is None:
                self._lose(peer, reason)

    def _cut(self, peer: Peer, link: PeerLink) -> None:
        if peer.link is link:
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
        except OSError as error:
            if sock is not None:
                sock.close()
            self._redial_later(peer, str(error))
            return
        peer.setup.dialling = sock
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._on_dialled, peer, sock))

    def _on_dialled(self, peer: Peer, sock: socket.socket, _mask: int) -> None:
        self._selector.unregister(sock)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
            self._redial_later(peer, os.strerror(code))
            return
        peer.setup.dialling = link = PeerLink(sock, peer.rank)
        self._add(link)
        self._post(link, Kind.HELLO, self.rank, peer.rank, b"", self.secret)

    def _redial_later(self, peer: Peer, failure: str) -> None:
        peer.setup.dialling = None
        assert peer.setup.address is not None
        host, port = peer.setup.address
        peer.setup.failure = f"{host} port {port}: {failure}"
        if self._needs_link(peer):
            self._call_later(_REDIAL, partial(self._connect_if_needed, peer))

    def _new_link(self, sock: socket.socket) -> PeerLink:
        return PeerLink(sock)

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        assert isinstance(link, PeerLink)
        if link.rank < 0:
            self._on_greeting(link, kind, source, to, payload)
        else:
            self._on_data_frame(self._peer(link.rank), link, kind, tag, payload)

    def _on_greeting(self, link: PeerLink, kind: Kind, source: int, to: int, payload: Payload) -> None:
        if self._is_secret(payload) and kind is Kind.HELLO and link.dialled is None:
            if to == self.rank < source < self.world_size:
                self._post(link, Kind.WELCOME, self.rank, source, b"", self.secret)
                self._on_authenticated(self._peer(source), link)
                return
        elif self._is_secret(payload) and kind is Kind.WELCOME and link.dialled is not None:
            self._on_authenticated(self._peer(link.dialled), link)
            return
        raise OSError("not a rank of this world")

    def _on_authenticated(self, peer: Peer, link: PeerLink) -> None:
        link.rank = peer.rank
        if (old := peer.link) is not None:
            self._drop(old)  # the other rank has noticed first that it broke
        peer.link = link
        peer.setup.dialling, peer.setup.failure, peer.setup.wanted = None, "", False
        if old is not None:
            self._lose(peer, "its connection broke and was made anew")
        self._on_connected(peer)

    def _on_gone(self, link: Link) -> None:
        assert isinstance(link, PeerLink)
        if link.rank >= 0:
            peer = self._peer(link.rank)
            if peer.link is link:
                peer.link, peer.setup.message_sent = None, False
                self._lose(peer, self._lost.get(peer.rank, _CLOSED))
                self._connect_if_needed(peer)  # the rank may live, and wait for an exchange that was given up here
        elif link.dialled is not None:
            self._redial_later(
                self._peer(link.dialled), "the connection closed before the ranks had greeted each other"
            )

    def _on_leave(self) -> None:
        self._stop_accepting()
        for peer in self._peers.values():
            if isinstance(peer.setup.dialling, socket.socket):
                self._selector.unregister(peer.setup.dialling)
                peer.setup.dialling.close()
        for link in self._open:
            self._hang_up(link)
