"""Peers that listen where a server should, and are none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["garbles", "hangs_up", "listening", "silent"]


@contextmanager
def listening(serve: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[str]:
    """Listen; yield the address, "127.0.0.1:port" or "[::1]:port". `serve` gets every connection, in a thread."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family, backlog=100) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"{host}:{listener.getsockname()[1]}"
        finally:
            for each in (listener, *connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


def silent() -> AbstractContextManager[str]:
    """Run a peer that takes connections and says nothing."""
    return listening(lambda _: None)


def hangs_up() -> AbstractContextManager[str]:
    """Run a peer that closes every connection."""
    return listening(socket.socket.close)


def _garble(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(b"\x15\x03\x01\x00\x02\x02\x46" * 100)
        connection.close()


def garbles() -> AbstractContextManager[str]:
    """Run a peer that speaks another protocol."""
    return listening(_garble)
