"""A TCP proxy before a server: lines that are slow, break or swallow bytes, and requests that fail by rules.

It sees bytes. `fault_proxy` sees requests of HTTP, whose answers it can lose, cut or make up.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.storage.testing.fault_rule import FaultRule
from tests.servers.peers import listening

__all__ = ["Line", "TcpProxy", "tcp_proxy"]

#: The option that makes `close` send a reset.
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Line:
    """One direction of every connection. Tests change it at any time.

    Attributes:
        rate: bytes per second of each connection; 0.0: no limit.
        delay: seconds that each piece waits.
        piece: number of bytes that travel together at most.
        cut: number of bytes after which a connection breaks; 0: never.
        swallow: True if the other end gets nothing.
        carried: number of bytes that each connection has carried, by connection in the order of their beginnings.
    """

    rate: float = 0.0
    delay: float = 0.0
    piece: int = 64 << 10
    cut: int = 0
    swallow: bool = False
    carried: dict[object, int] = field(default_factory=dict)


class TcpProxy:
    """The proxy.

    Args:
        target: "host:port" of the server.

    Attributes:
        address: "127.0.0.1:port", where clients reach the proxy.
        up: line from the client to the server.
        down: line from the server to the client.
        rules: rules for what clients send; a rule's `call` gets the bytes. With `lose` the server carries the request out,
            and the connection breaks when it answers.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.address = ""
        self.up, self.down = Line(), Line()
        self.rules: list[FaultRule] = []

    def add(self, call: str | Callable[[bytes], bool], **options: Any) -> FaultRule:
        """Add a rule.

        Args:
            call: the operation of a NameNode ("create", "addBlock", "rename2", ...), or a predicate of the bytes.
            **options: see `FaultRule`.
        """
        self.rules.append(FaultRule(functools.partial(_asks_for, call) if isinstance(call, str) else call, **options))
        return self.rules[-1]

    def serve(self, client: socket.socket) -> None:
        """Serve one connection of a client."""
        try:
            server = socket.create_connection(self._target, 10)
        except OSError:
            client.close()
            return
        connection = _Connection(client, server)
        threading.Thread(target=connection.pump, args=(server, client, self.down, []), daemon=True).start()
        connection.pump(client, server, self.up, self.rules)


class _Connection:
    """A client's connection and the one to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ends = client, server
        self._losing, self._answered = threading.Event(), threading.Event()
        for end in self._ends:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pump(self, source: socket.socket, target: socket.socket, line: Line, rules: list[FaultRule]) -> None:
        """Carry bytes in one direction until an end closes, a rule fails or the line breaks."""
        try:
            if self._carry(source, target, line, rules):
                target.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        self._break()

    def _carry(self, source: socket.socket, target: socket.socket, line: Line, rules: list[FaultRule]) -> bool:
        """Return True when `source` has sent everything, False when the connection is to break."""
        total, free = 0, time.monotonic()
        while data := source.recv(line.piece):
            if self._losing.is_set():
                self._answered.set()
                return False
            hit = [rule for rule in rules if rule.hit(data)]
            for rule in hit:
                rule.wait()
            if line.rate:
                free = max(free, time.monotonic()) + len(data) / line.rate
                time.sleep(max(free - time.monotonic(), 0))
            time.sleep(line.delay)
            if line.cut and total + len(data) > line.cut:
                target.sendall(data[: max(line.cut - total, 0)])
                return False
            total = line.carried[self] = total + len(data)
            if line.swallow:
                continue
            if any(rule.lose for rule in hit):
                self._losing.set()
                target.sendall(data)
                self._answered.wait(10)
                return False
            target.sendall(data)
        return True

    def _break(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _asks_for(method: str, data: bytes) -> bool:
    """Return whether a request to a NameNode asks for an operation: field 1 of its header has the name."""
    return bytes([0x0A, len(method)]) + method.encode() in data


@contextmanager
def tcp_proxy(target: str, host: str = "127.0.0.1", port: int = 0) -> Iterator[TcpProxy]:
    """Run a proxy before the server at `target`, "host:port"."""
    proxy = TcpProxy(target)
    with listening(proxy.serve, host, port) as proxy.address:
        yield proxy
