"""The two ends of the star of `wire`: rank 0, which relays, and all others."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable

from bytecheckpoint.collectives.base import Mailbox
from bytecheckpoint.collectives.wire import Kind, Link, Wire
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError

__all__ = ["Hub", "Spoke", "local_addresses"]


def local_addresses(towards: str | None) -> list[str]:
    """Addresses that other ranks may reach this machine by, most likely first.

    Args:
        towards: the job's MASTER_ADDR: the interface that leads there is the one that the job uses.
    """
    found: list[str] = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM) if towards else ():
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # a datagram socket: picks a route, sends nothing
                found.append(str(probe.getsockname()[0]))
    except OSError:
        pass
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))


def _listener(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", 0), backlog=backlog)


class Hub(Wire):
    """Rank 0's end. Listens on `port` of all interfaces at once when constructed."""

    def __init__(self, world_size: int, mailbox: Mailbox, secret: bytes, linger: float) -> None:
        super().__init__(0, world_size, mailbox, secret, linger)
        self._listener = _listener(max(128, world_size))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._links: dict[int, Link] = {}
        self._gone: dict[int, str] = {}
        self._watchers: dict[int, list[Link]] = {}
        self._hung_up = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def wait_ready(self, timeout: float) -> None:
        """Wait until every rank is connected.

        Raises:
            CheckpointTimeoutError: some are not (named).
        """
        if not self.ready.wait(timeout) or self.mailbox.closed:
            missing = [rank for rank in range(1, self.world_size) if rank not in self._links]
            self.leave()
            raise CheckpointTimeoutError(
                f"rank 0: ranks {missing[:16]} of {self.world_size} did not connect to port {self.port} within "
                f"{timeout:g} s; look for a hung rank or a firewall"
            )

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._check_sendable(tag)
        if to == 0:
            self.mailbox.deposit(0, tag, payload)
        else:
            self._post(self._links[to], Kind.MAIL, 0, to, tag.encode(), payload)

    def watch(self, other: int) -> None:
        """Nothing to do: rank 0 sees every connection."""

    def _on_stranger(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._add(Link(sock))

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: bytearray) -> None:
        if kind is Kind.HELLO:
            if not self._is_ours(payload) or not 0 < source < self.world_size or source in self._links:
                self._drop(link)
                return
            link.rank = source
            self._links[source] = link
            if len(self._links) == self.world_size - 1:
                self._selector.unregister(self._listener)
                self._listener.close()
                for stranger in [link for link in self._open if link.rank < 0]:
                    self._drop(stranger)
                for other in self._links.values():
                    self._post(other, Kind.WELCOME, 0, other.rank, b"", self._secret)
                self.ready.set()
        elif kind is Kind.MAIL and to == 0:
            self._deposit(link.rank, tag, payload)
        elif kind is Kind.MAIL:
            self._post(self._links[to], Kind.MAIL, link.rank, to, tag, payload)
        elif kind is Kind.WATCH:
            if to in self._gone:
                self._post(link, Kind.LOST, to, link.rank, b"", self._gone[to].encode())
            else:
                self._watchers.setdefault(to, []).append(link)
        elif kind is Kind.BYE:
            link.said_bye = True
            if self._deadline is None:
                self._report(link.rank, "it has left this world or ended")

    def _on_gone(self, link: Link) -> None:
        if link.rank > 0 and not link.said_bye:
            self._report(link.rank, "its connection closed without a word: it was killed, crashed or was cut off")

    def _report(self, rank: int, how: str) -> None:
        self._gone[rank] = how
        self.mailbox.lose(rank, how)
        for link in self._watchers.pop(rank, ()):
            self._post(link, Kind.LOST, rank, link.rank, b"", how.encode())

    def _on_leave(self) -> None:
        for link in list(self._open):
            if link.rank > 0:
                self._post(link, Kind.CLOSING, 0, link.rank, b"", b"")
            else:
                self._drop(link)

    def _on_turn(self) -> None:
        # Hang up only when nobody can send any more: what they had sent is then in our queues or delivered.
        if self._deadline is not None and not self._hung_up and all(link.said_bye for link in self._open):
            self._hung_up = True
            for link in self._open:
                self._hang_up(link)

    def _release(self) -> None:
        super()._release()
        self._listener.close()


class Spoke(Wire):
    """The end of any rank but 0."""

    def __init__(self, rank: int, world_size: int, mailbox: Mailbox, secret: bytes, linger: float) -> None:
        super().__init__(rank, world_size, mailbox, secret, linger)
        self._no_more = False
        self._watched: set[int] = set()

    def connect(self, hosts: Iterable[str], port: int, timeout: float) -> None:
        """Join the world; returns when every rank has.

        Raises:
            PeerLostError: rank 0 cannot be reached, or went away.
            CheckpointTimeoutError: not every rank joined in time.
        """
        deadline = time.monotonic() + timeout
        sock = self._dial(list(hosts), port, deadline)
        self._hub_address = str(sock.getpeername()[0])
        self._link = Link(sock)
        self._add(self._link)
        self._post(self._link, Kind.HELLO, self.rank, 0, b"", self._secret)
        self._thread.start()
        if not self.ready.wait(max(0.0, deadline - time.monotonic())):
            self.leave()
            raise CheckpointTimeoutError(f"rank {self.rank}: not every rank connected to rank 0 within {timeout:g} s")
        if self.mailbox.closed:
            raise PeerLostError(f"rank {self.rank}: rank 0 went away while the ranks were connecting to it")

    def hub_address(self) -> str:
        """The address at which rank 0 was reached."""
        return self._hub_address

    def _dial(self, hosts: list[str], port: int, deadline: float) -> socket.socket:
        failure: OSError | None = None
        while True:
            for host in hosts:
                # A wrong address must not eat the time of the right one.
                patience = min(5.0, max(0.1, deadline - time.monotonic()))
                try:
                    return socket.create_connection((host, port), timeout=patience)
                except OSError as error:
                    failure = error
            if time.monotonic() + 0.2 > deadline:
                self._release()
                raise PeerLostError(f"rank {self.rank}: cannot reach rank 0 at {hosts} port {port}: {failure}")
            time.sleep(0.2)

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self._check_sendable(tag)
        if to == self.rank:
            self.mailbox.deposit(to, tag, payload)
            return
        if self._no_more:
            raise PeerLostError(
                f"rank {self.rank}: cannot send {tag!r} to rank {to}: rank 0 has left this world or ended"
            )
        self._post(self._link, Kind.MAIL, self.rank, to, tag.encode(), payload)

    def watch(self, other: int) -> None:  # noqa: D102 (inherited)
        if other not in self._watched and not self._no_more and not self._leave_asked:
            self._watched.add(other)
            self._post(self._link, Kind.WATCH, self.rank, other, b"", b"")

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: bytearray) -> None:
        if kind is Kind.MAIL:
            self._deposit(source, tag, payload)
        elif kind is Kind.LOST:
            self.mailbox.lose(source, payload.decode())
        elif kind is Kind.CLOSING:
            self._no_more = True
            self._say_bye()
        elif kind is Kind.WELCOME:
            link.rank = 0
            self.ready.set()

    def _say_bye(self) -> None:
        if not self._link.said_bye:
            self._link.said_bye = True
            self._post(self._link, Kind.BYE, self.rank, 0, b"", b"")

    def _on_leave(self) -> None:
        self._no_more = True
        if self._link in self._open:
            self._say_bye()
            self._hang_up(self._link)

    def _on_gone(self, link: Link) -> None:
        how = "rank 0 has left this world or ended" if self._no_more else "rank 0 was killed, crashed or was cut off"
        self.mailbox.close(f"{how}; restart the job from its last committed checkpoint")
        self._no_more = True
        self.ready.set()
        # Nothing can come any more: let the thread end.
        self._deadline = time.monotonic()
