"""A proxy before a NameNode that lets chosen operations fail, and NameNodes that never serve: standby, hanging, gone."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bytecheckpoint.storage.hdfs.rpc import _fields, _frame, _number, _receive, _text, _varint
from bytecheckpoint.storage.testing.fault_rule import FaultRule

__all__ = ["FaultRule", "RpcFaultProxy", "gone", "rpc_fault_proxy", "silent", "stands_by"]


class RpcFaultProxy:
    """The proxy.

    Attributes:
        address: "127.0.0.1:port", where clients reach it.
        rules: their `call` is the name of an operation: "create", "addBlock", "complete", "concat", "rename2", ...
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.rules: list[FaultRule] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and end those that clients keep open."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._port), 10)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lost, answered = threading.Event(), threading.Event()
        threading.Thread(target=self._answers, args=(server, client, lost, answered), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                hit = [rule for rule in self.rules if _asks_for(data, rule.call) and rule.hit(rule.call)]
                for rule in hit:
                    rule.wait()
                if any(rule.lose for rule in hit):
                    lost.set()
                    server.sendall(data)
                    answered.wait(10)  # the NameNode has carried it out
                    break
                server.sendall(data)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @staticmethod
    def _answers(
        server: socket.socket, client: socket.socket, lost: threading.Event, answered: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if lost.is_set():
                    answered.set()
                    return
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _asks_for(data: bytes, method: object) -> bool:
    """Whether a request asks for an operation: field 1 of its header is the name behind the name's length."""
    return isinstance(method, str) and bytes([0x0A, len(method)]) + method.encode() in data


@contextmanager
def rpc_fault_proxy(port: int) -> Iterator[RpcFaultProxy]:
    """Run a proxy before the NameNode that listens on a port of this machine."""
    proxy = RpcFaultProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


# --- NameNodes that never serve ----------------------------------------------------------------------------------------


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen; yield the address. `serve` gets every connection, in a thread."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for each in (listener, *connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


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


def stands_by() -> contextlib.AbstractContextManager[str]:
    """Run a NameNode in standby; yield its address."""
    return _listening(_refuse)


def silent() -> contextlib.AbstractContextManager[str]:
    """Run a NameNode that hangs: it takes connections and answers nothing."""
    return _listening(lambda _: None)


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
