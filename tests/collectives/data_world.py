"""Worlds of several ranks in this process that exchange data, and the data that they exchange."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport import transfers
from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.mesh import Mesh
from bytecheckpoint.collectives.transport.packs import Place
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.collectives.transport.star import Star
from bytecheckpoint.collectives.transport.wire import _HEADER, ANYBODY, Kind, header
from tests.support.processes import wait_until

__all__ = ["MIB", "SECRET", "DataWorld", "content", "frame", "greet", "read_frame", "until"]

MIB = 1 << 20
SECRET = b"s" * 32
Arrays = Mapping[int, np.ndarray]


def content(source: int, to: int, size: int, salt: int = 0) -> np.ndarray:
    """Return bytes of which each depends on its place, on both ranks and on the salt."""
    words = np.arange(size // 4 + 1, dtype=np.uint32) * np.uint32(2654435761)
    return (words + np.uint32(source * 7919 + to * 104729 + salt * 15485863)).view(np.uint8)[:size]


def greet(sock: socket.socket, purpose: str, rank: int, to: int = ANYBODY, secret: bytes = SECRET) -> None:
    """Greet the other side of a blocking connection as a rank that has dialled; raise `OSError` if it is no rank."""
    greeting = Greeting(purpose, secret, rank, to, msgspec.msgpack.encode(Place(0)))
    sock.sendall(frame(Kind.HELLO, rank, to, payload=greeting.hello()))
    answer = greeting.answer(*read_frame(sock))
    assert answer is not None
    sock.sendall(frame(answer[0], rank, greeting.other, payload=answer[1]))


def frame(kind: int, source: int, to: int = 0, tag: bytes = b"", payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return header(Kind(kind), source, to, tag, len(payload)).tobytes() + payload


def read_frame(sock: socket.socket) -> tuple[Kind, int, int, bytes]:
    """Receive a frame over a blocking connection; return its kind, source, destination and payload."""
    head = sock.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(head) < _HEADER.size:
        raise EOFError
    kind, source, to, tag, payload = _HEADER.unpack(head)
    content = sock.recv(tag + payload, socket.MSG_WAITALL) if tag + payload else b""
    return Kind(kind), source, to, content[tag:]


def until(happened: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    assert wait_until(lambda: bool(happened()), 30)


class DataWorld:
    """A star of `size` ranks in this process; each rank's mesh starts with its first exchange."""

    def __init__(self, size: int, linger: float = 5.0) -> None:
        hub = Hub(size, Inbox(0), SECRET, linger)
        spokes = [Spoke(rank, size, Inbox(rank), SECRET, linger) for rank in range(1, size)]
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda spoke: spoke.connect(["localhost"], hub.port, 20), spokes))
        hub.wait_ready(20)
        self.linger = linger
        self.stars: list[Star] = [hub, *spokes]
        self.meshes: dict[int, Mesh] = {}
        self.pool = ThreadPoolExecutor(4 * size)
        self._lock = threading.Lock()

    def mesh(self, rank: int) -> Mesh:
        """Return the mesh of a rank, which starts with the first call."""
        with self._lock:
            if rank not in self.meshes:
                self.meshes[rank] = Mesh(self.stars[rank], self.linger)
            return self.meshes[rank]

    def link(self, rank: int, peer: int) -> transfers.PeerLink | None:
        """Return the connection over which another rank asks this one for arrays, else the one the other way round."""
        found = self.mesh(rank)._peer(peer)
        return found.caller or found.called

    def break_link(self, rank: int, peer: int) -> None:
        """Break the connections of a rank with another one."""
        links = self.mesh(rank)._peer(peer).links
        assert links
        for link in links:
            link.sock.shutdown(socket.SHUT_RDWR)

    def each_rank(self, body: Callable[[int], object]) -> None:
        """Call `body(rank)` for all ranks at the same time."""
        list(self.pool.map(body, range(len(self.stars))))

    def exchange(self, rank: int, tag: str, outgoing: Arrays, incoming: Arrays, timeout: float = 30.0) -> None:
        """Take part in an exchange as one rank."""
        self.mesh(rank).exchange(tag, outgoing, incoming, timeout=timeout)

    def start(self, *args: object, **kwargs: object) -> Callable[[], None]:
        """Start `exchange` on another thread; return a function that waits for it and raises its error."""
        return self.pool.submit(self.exchange, *args, **kwargs).result  # type: ignore[arg-type]

    def begin(self, rank: int, tag: str, *arrays: Arrays) -> Callable[[], None]:
        """Start `exchange` with a time limit of an hour, and wait until it is under way."""
        waiting = self.start(rank, tag, *arrays, timeout=3600)
        until(lambda: any(each.tag == tag for each in list(self.mesh(rank)._operations)))
        return waiting

    def pair(self, tag: str, source: int, to: int, size: int) -> None:
        """Send an array from one rank to another, and check that it arrives whole."""
        got = np.zeros(size, np.uint8)
        sent = self.start(source, tag, {to: content(source, to, size)}, {})
        self.exchange(to, tag, {}, {source: got})
        sent()
        np.testing.assert_array_equal(got, content(source, to, size))

    def close(self) -> None:
        """End all ranks."""
        loops = [*self.meshes.values(), *self.stars]
        for each in loops:
            each.leave()
        assert all(each.join(20) for each in loops)
        self.pool.shutdown()
