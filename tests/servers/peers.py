"""Peers that listen where a server should, and are none."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from bytecheckpoint.storage.hdfs.rpc import _fields, _frame, _number, _receive, _text, _varint

__all__ = ["garbles", "gone", "hangs_up", "listening", "silent", "stands_by"]


@contextmanager
def listening(serve: Callable[[socket.socket], None], host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Listen; yield the address, "127.0.0.1:port" or "[::1]:port".

    Args:
        serve: function that gets every connection, in a thread of its own.
        host: address to listen on.
        port: port to listen on; 0 for any free one.
    """
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), port), family=family, backlog=100) as listener:
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


# --- NameNodes that never serve ----------------------------------------------------------------------------------------


def _refuse(connection: socket.socket) -> None:
    """Answer every call of a connection as a NameNode in standby does."""
    with contextlib.suppress(OSError):
        _receive(connection, 7)  # "hrpc" and so on
        while True:
            (length,) = struct.unpack(">I", _receive(connection, 4))
            request = _receive(connection, length)
            size, start = _varint(request, 0)
            header = {field.number: field.value for field in _fields(request[start : start + size])}
            call = header[3]
            assert isinstance(call, int)
            if call & 1:  # negative in this encoding: the message that opens a connection
                continue
            answer = (
                _number(1, call >> 1)
                + _number(2, 1)
                + _number(3, 9)
                + _text(4, "org.apache.hadoop.ipc.StandbyException")
                + _text(5, "Operation category is not supported in state standby")
            )
            connection.sendall(_frame(answer))


def stands_by() -> AbstractContextManager[str]:
    """Run a NameNode in standby; yield its address."""
    return listening(_refuse)


@contextmanager
def gone() -> Iterator[str]:
    """Reserve the address of a NameNode whose machine is gone: nobody even refuses connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as waiting:
        address = listener.getsockname()
        for _ in range(3):  # they fill the queue of the listener, which accepts none
            connection = waiting.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"
