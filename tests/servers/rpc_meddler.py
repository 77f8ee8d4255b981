"""A proxy that stands before a NameNode and meddles with chosen operations: it tells of them, and loses their answers.

Besides, NameNodes of a pair that are of no use: one that stands by, one that hangs, one whose machine is gone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bytecheckpoint.storage.hdfs_rpc import _fields, _frame, _number, _receive, _text, _varint

__all__ = ["Event", "RpcMeddler", "gone", "rpc_meddler", "silent", "stands_by"]


@dataclass
class Event:
    """What happens when an operation passes.

    Attributes:
        method: name of the operation, "create", "addBlock", "complete", "concat", "rename2", "getBlockLocations", ...
        before: called before the NameNode gets the request.
        lose: the NameNode gets the request, the client gets no answer: the connection breaks.
        skip: how many go through first.
        times: how many are then hit; -1: all.
        hits: how many were hit.
    """

    method: str
    before: Callable[[], object] | None = None
    lose: bool = False
    skip: int = 0
    times: int = 1
    hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def meets(self, data: bytes) -> bool:
        """Whether it hits this request, which it counts."""
        # Field 1 of the request's header: the name and its length.
        if bytes([0x0A, len(self.method)]) + self.method.encode() not in data:
            return False
        with self._lock:
            if self.skip > 0:
                self.skip -= 1
                return False
            if not self.times:
                return False
            self.times -= 1
            self.hits += 1
            return True


class RpcMeddler:
    """The proxy.

    Attributes:
        address: "127.0.0.1:port", where the NameNode seems to be.
        events: in force.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.events: list[Event] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and end those that clients keep for later."""
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
        lost = threading.Event()
        threading.Thread(target=self._answers, args=(server, client, lost), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                hit = [event for event in self.events if event.meets(data)]
                for event in hit:
                    if event.before is not None:
                        event.before()
                if any(event.lose for event in hit):
                    lost.set()
                    server.sendall(data)
                    time.sleep(0.5)  # it is carried out meanwhile
                    break
                server.sendall(data)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @staticmethod
    def _answers(server: socket.socket, client: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if lost.is_set():
                    return
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def rpc_meddler(port: int) -> Iterator[RpcMeddler]:
    """A proxy before the NameNode that listens on a port of this machine."""
    made = RpcMeddler(port)
    try:
        yield made
    finally:
        made.close()


# --- NameNodes of no use ----------------------------------------------------------------------------------------------


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Its address; `serve` gets every connection, in a thread."""
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
            if call & 1:  # negative, in this encoding: who connects tells of itself
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
    """A NameNode in standby; its address."""
    return _listening(_refuse)


def silent() -> contextlib.AbstractContextManager[str]:
    """A NameNode that hangs: it takes connections and answers nothing."""
    return _listening(lambda _: None)


@contextmanager
def gone() -> Iterator[str]:
    """A NameNode whose machine is gone without a word: nobody even refuses connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as waiting:
        address = listener.getsockname()
        for _ in range(3):  # nobody accepts them, and there is no room for more
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"
