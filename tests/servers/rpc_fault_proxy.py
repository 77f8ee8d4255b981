"""A proxy before a NameNode that lets chosen operations fail, and NameNodes that never serve: standby and gone."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.storage.hdfs.rpc import _fields, _frame, _number, _receive, _text, _varint
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from tests.servers.peers import listening

__all__ = ["FaultRule", "RpcFaultProxy", "gone", "rpc_fault_proxy", "stands_by"]


class RpcFaultProxy:
    """The proxy.

    Attributes:
        address: "127.0.0.1:port", where clients reach it.
        rules: their `call` is the name of an operation: "create", "addBlock", "complete", "concat", "rename2", ...;
            or a predicate, which is called for all of them.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.address = ""
        self.rules: list[FaultRule] = []

    def add(self, call: str | Callable[[Any], bool], **options: Any) -> FaultRule:
        """Add a rule; see `FaultRule` for the options."""
        self.rules.append(FaultRule(call, **options))
        return self.rules[-1]

    def serve(self, client: socket.socket) -> None:
        """Serve one connection of a client."""
        try:
            server = socket.create_connection(("127.0.0.1", self._port), 10)
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            client.close()
            return
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
    """Whether a request asks for an operation: field 1 of its header is the name behind the name's length. Or any, for a
    predicate.
    """
    return callable(method) or (isinstance(method, str) and bytes([0x0A, len(method)]) + method.encode() in data)


@contextmanager
def rpc_fault_proxy(port: int) -> Iterator[RpcFaultProxy]:
    """Run a proxy before the NameNode that listens on a port of this machine."""
    proxy = RpcFaultProxy(port)
    with listening(proxy.serve) as proxy.address:
        yield proxy


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


def stands_by() -> contextlib.AbstractContextManager[str]:
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
