"""Messages between processes: every rank holds one TCP connection to rank 0, which relays (a star).

Each rank has plain sockets and one I/O thread that does not poll. A message costs one wake-up at each hop. Threads that
wait on a connection notice at once when it breaks. A peer that hangs cannot hang this rank. Nothing depends on torch.
`torch.distributed.TCPStore` was tried first: it refuses values over 8 MiB, its `get`, `check` and even timed `wait`
never return while its server is stopped, and each timed wait that ends logs two warnings.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable

from bytecheckpoint.collectives.inbox import ASK, Inbox
from bytecheckpoint.collectives.transport.loop import Loop
from bytecheckpoint.collectives.transport.sockets import listen, remote_end, reserve_descriptors
from bytecheckpoint.collectives.transport.wire import FrameReader, Kind, Link, Payload
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError

__all__ = ["Hub", "Spoke", "Star"]


class Star(Loop):
    """One rank's end of the star: the thread that sends its messages and fills its inbox.

    Args:
        rank: of this process.
        world_size: number of ranks.
        inbox: receives the messages for this rank.
        secret: as of `Loop`.
        linger: as of `Loop`.
    """

    def __init__(self, rank: int, world_size: int, inbox: Inbox, secret: bytes, linger: float) -> None:
        super().__init__(rank, world_size, "bytecheckpoint-messages", secret, linger)
        self.inbox = inbox
        self.ready = threading.Event()  # every rank is connected, or connecting failed and the inbox is closed

    @abstractmethod
    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Send a message, as `Collective.send`."""

    @abstractmethod
    def watch(self, other: int) -> None:
        """Report to the inbox when rank `other` is gone."""

    @abstractmethod
    def address_for(self, other: int) -> str:
        """Return the address of this machine that rank `other` can best reach."""

    def check_open(self, tag: str) -> None:
        """Raise if no messages can be sent.

        Args:
            tag: of the message to send, for the error.

        Raises:
            PeerLostError: this world was closed, or rank 0 is gone.
            UsageError: this is a forked child.
        """
        self.check_process()
        reason = self.inbox.closed or ("this world was closed" if self._leave_asked else None)
        if reason is not None:
            raise PeerLostError(f"rank {self.rank}: cannot send {tag!r}: {reason}")

    def _receive(self, source: int, tag: bytes, payload: Payload) -> None:
        if tag != ASK.encode():
            self.inbox.put(source, tag.decode(), bytes(payload))
            return
        with contextlib.suppress(CheckpointError):  # this world was closed
            self.send(source, bytes(payload).decode(), self.inbox.outlook())

    def _on_end(self, reason: str) -> None:
        self.inbox.close(reason)
        self.ready.set()


class Hub(Star):
    """Rank 0's end of the star. The constructor listens on `port` of all interfaces.

    Raises:
        UsageError: this process may not open a descriptor per rank.
    """

    def __init__(self, world_size: int, inbox: Inbox, secret: bytes, linger: float) -> None:
        reserve_descriptors(world_size, f"rank 0 of a world of {world_size}")
        super().__init__(0, world_size, inbox, secret, linger)
        listener = listen(max(128, world_size))
        self.port: int = listener.getsockname()[1]
        self._links: dict[int, Link] = {}
        self._lost: dict[int, str] = {}
        self._watchers: dict[int, list[Link]] = {}
        self._senders = 0  # connected ranks that may still send
        self._hung_up = False
        self._accept_from(listener)
        self._thread.start()

    def wait_ready(self, timeout: float) -> None:
        """Wait until every rank is connected.

        Raises:
            CheckpointTimeoutError: the named ranks are not connected.
        """
        if not self.ready.wait(timeout) or self.inbox.closed:
            missing = [rank for rank in range(1, self.world_size) if rank not in self._links]
            self.leave()
            raise CheckpointTimeoutError(
                f"rank 0: ranks {missing[:16]} of {self.world_size} did not connect to port {self.port} within "
                f"{timeout:g} s; look for a hung rank or a firewall"
            )

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self.check_open(tag)
        if to == 0:
            self.inbox.put(0, tag, payload)
        else:
            self._post(self._links[to], Kind.MESSAGE, 0, to, tag.encode(), payload)

    def watch(self, other: int) -> None:
        """Do nothing: rank 0 sees every connection."""

    def address_for(self, other: int) -> str:  # noqa: D102 (inherited)
        return self._links[other].local

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if kind is Kind.HELLO:
            if not self._is_secret(payload) or not 0 < source < self.world_size or source in self._links:
                raise OSError("not a rank of this world")
            link.rank = source
            self._links[source] = link
            self._senders += 1
            if len(self._links) == self.world_size - 1:
                self._stop_accepting()
                for other in self._links.values():
                    self._post(other, Kind.WELCOME, 0, other.rank, b"", self.secret)
                self.ready.set()
        elif kind is Kind.MESSAGE and to == 0:
            self._receive(link.rank, tag, payload)
        elif kind is Kind.MESSAGE:
            self._post(self._links[to], Kind.MESSAGE, link.rank, to, tag, payload)
        elif kind is Kind.WATCH:
            if to in self._lost:
                self._post(link, Kind.LOST, to, link.rank, b"", self._lost[to].encode())
            else:
                self._watchers.setdefault(to, []).append(link)
        elif kind is Kind.BYE:
            link.said_bye = True
            self._senders -= 1
            if self._deadline is None:
                self._report_loss(link.rank, "it has left this world or ended")

    def _on_gone(self, link: Link) -> None:
        if link.rank > 0 and not link.said_bye:
            self._senders -= 1
            self._report_loss(link.rank, "its connection closed without a word: it was killed, crashed or was cut off")

    def _report_loss(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        self.inbox.mark_lost(rank, reason)
        for link in self._watchers.pop(rank, ()):
            self._post(link, Kind.LOST, rank, link.rank, b"", reason.encode())

    def _on_leave(self) -> None:
        self._stop_accepting()
        for link in self._open:
            self._post(link, Kind.CLOSING, 0, link.rank, b"", b"")

    def _on_turn(self) -> None:
        # Hang up only when no rank can send any more: all their messages are then delivered or in the queues here.
        if self._deadline is not None and not self._hung_up and not self._senders:
            self._hung_up = True
            for link in self._open:
                self._hang_up(link)


class Spoke(Star):
    """The end of any other rank than 0."""

    def __init__(self, rank: int, world_size: int, inbox: Inbox, secret: bytes, linger: float) -> None:
        super().__init__(rank, world_size, inbox, secret, linger)
        self._sending_over = False  # rank 0 takes no more messages
        self._watched: set[int] = set()

    def connect(
        self, hosts: Iterable[str], port: int, timeout: float, *, outdated: Callable[[], bool] = lambda: False
    ) -> None:
        """Join the world, and wait until every rank has joined.

        Args:
            hosts: addresses of rank 0, tried in this order.
            port: where it listens.
            timeout: seconds.
            outdated: returns whether rank 0 listens elsewhere by now; asked while nobody answers.

        Raises:
            PeerLostError: rank 0 cannot be reached, or went away.
            CheckpointTimeoutError: not every rank joined in time.
        """
        deadline = time.monotonic() + timeout
        sock, self.hub_address = self._dial(list(hosts), port, deadline, outdated)
        self._link = Link(sock, FrameReader())
        self._add(self._link)
        self._post(self._link, Kind.HELLO, self.rank, 0, b"", self.secret)
        self._thread.start()
        if not self.ready.wait(max(0.0, deadline - time.monotonic())):
            self.leave()
            raise CheckpointTimeoutError(f"rank {self.rank}: not every rank connected to rank 0 within {timeout:g} s")
        if self.inbox.closed:
            raise PeerLostError(f"rank {self.rank}: rank 0 went away while the ranks were connecting to it")

    def address_for(self, other: int) -> str:
        """Return the address of the interface that leads to rank 0. Other ranks can probably reach it too."""
        return self._link.local

    def _dial(
        self, hosts: list[str], port: int, deadline: float, outdated: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        failure: OSError | None = None
        while True:
            for host in hosts:
                # A wrong address must not use up the time of the right one.
                timeout = min(5.0, max(0.1, deadline - time.monotonic()))
                try:
                    sock = socket.create_connection((host, port), timeout=timeout)
                    return sock, remote_end(sock)
                except OSError as error:
                    failure = error
            if time.monotonic() + 0.2 > deadline or outdated():
                self._release()
                raise PeerLostError(f"rank {self.rank}: cannot reach rank 0 at {hosts} port {port}: {failure}")
            time.sleep(0.2)

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self.check_open(tag)
        if to == self.rank:
            self.inbox.put(to, tag, payload)
            return
        if self._sending_over:
            raise PeerLostError(
                f"rank {self.rank}: cannot send {tag!r} to rank {to}: rank 0 has left this world or ended"
            )
        self._post(self._link, Kind.MESSAGE, self.rank, to, tag.encode(), payload)

    def watch(self, other: int) -> None:  # noqa: D102 (inherited)
        if other not in self._watched and not self._sending_over and not self._leave_asked:
            self._watched.add(other)
            self._post(self._link, Kind.WATCH, self.rank, other, b"", b"")

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if kind is Kind.MESSAGE:
            self._receive(source, tag, payload)
        elif kind is Kind.LOST:
            self.inbox.mark_lost(source, bytes(payload).decode())
        elif kind is Kind.CLOSING:
            self._sending_over = True
            self._say_bye()
        elif kind is Kind.WELCOME and self._is_secret(payload):
            link.rank = 0
            self.ready.set()

    def _say_bye(self) -> None:
        if not self._link.said_bye:
            self._link.said_bye = True
            self._post(self._link, Kind.BYE, self.rank, 0, b"", b"")

    def _on_leave(self) -> None:
        self._sending_over = True
        if self._link in self._open:
            self._say_bye()
            self._hang_up(self._link)

    def _on_gone(self, link: Link) -> None:
        expected = self._sending_over
        reason = "rank 0 has left this world or ended" if expected else "rank 0 was killed, crashed or was cut off"
        self.inbox.close(f"{reason}; restart the job from its last committed checkpoint")
        self._sending_over = True
        self.ready.set()
        # No more messages can come: let the thread end.
        self._deadline = time.monotonic()
