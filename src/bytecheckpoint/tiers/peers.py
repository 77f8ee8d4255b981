"""Ranges of hot files over the network: what a rank reads that is in another machine's memory only.

Ranks serve while all of them load. A connection is a stranger until it has answered a challenge with the secret that
the ranks of the load have shared.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

from ..collectives.sockets import listen
from ..errors import StorageError, StorageUnavailableError
from ..storage import FileReader
from ..storage.base import check_name
from ..storage.local import PosixStorage

__all__ = ["Address", "PeerReader", "PeerServer", "Peers"]

#: Where a rank serves: names or numbers of its machine, and the port.
Address = tuple[Sequence[str], int]

_REQUEST = struct.Struct("<HQQ")  # bytes of the name, offset, length (0: only the size is asked for)
_ANSWER = struct.Struct("<BQ")  # 0 fine, 1 no such file, 2 failed; size of the file, or bytes that follow
_NONCE = 16
_PROOF = 32
_PIECE = 8 << 20


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        got = sock.recv_into(buffer)
        if got == 0:
            raise ConnectionError("the other side hung up")
        buffer = buffer[got:]


class PeerServer:
    """Serves this machine's hot files of one step until it is closed.

    Args:
        hot: the folder.
        secret: known to the ranks of the load only.
    """

    def __init__(self, hot: PosixStorage, secret: bytes) -> None:
        self._hot = hot
        self._secret = secret
        self._listener = listen(128)
        self._listener.setblocking(True)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="bytecheckpoint-serve", daemon=True).start()

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._closed = True
            for sock in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="bytecheckpoint-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(30.0)
            nonce = secrets.token_bytes(_NONCE)
            sock.sendall(nonce)
            if not hmac.compare_digest(_exactly(sock, _PROOF), _proof(self._secret, nonce)):
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(None)
            while True:
                self._answer(sock)
        except OSError:
            pass  # it hung up
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        length, offset, count = _REQUEST.unpack(_exactly(sock, _REQUEST.size))
        name = _exactly(sock, length).decode("utf-8", "replace")
        try:
            path = os.path.join(self._hot.root, *check_name(name).split("/"))
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, StorageError, ValueError):
            sock.sendall(_ANSWER.pack(1, 0))
            return
        try:
            size = os.fstat(fd).st_size
            count = max(min(count, size - offset), 0)
            sock.sendall(_ANSWER.pack(0, count if count else size))
            while count:
                sent = os.sendfile(sock.fileno(), fd, offset, min(count, _PIECE))
                if sent == 0:
                    raise OSError("the file was cut meanwhile")
                offset, count = offset + sent, count - sent
        finally:
            os.close(fd)


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


class Peers:
    """Connections to the ranks that serve.

    Args:
        secret: theirs.
        timeout: seconds for one answer.
    """

    def __init__(self, secret: bytes, timeout: float) -> None:
        self._secret = secret
        self._timeout = timeout
        self._idle: dict[Address, queue.SimpleQueue[socket.socket]] = {}
        self._lock = threading.Lock()
        self.received = 0

    def _connection(self, address: Address) -> socket.socket:
        with self._lock:
            idle = self._idle.setdefault(address, queue.SimpleQueue())
        try:
            return idle.get_nowait()
        except queue.Empty:
            pass
        hosts, port = address
        failure: OSError | None = None
        for host in hosts:
            try:
                sock = socket.create_connection((host, port), timeout=min(self._timeout, 10.0))
            except OSError as error:
                failure = failure or error
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(_proof(self._secret, _exactly(sock, _NONCE)))
                sock.settimeout(self._timeout)
            except OSError as error:
                sock.close()
                failure = failure or error
                continue
            return sock
        raise failure or ConnectionError("no address is known")

    def ask(self, address: Address, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` with a range of a file; returns the bytes, or the size of the file when nothing is to be filled.

        Raises:
            FileNotFoundError: it is not there.
            StorageUnavailableError: the other rank does not answer.
        """
        wanted = sum(map(len, buffers))
        shown = f"{name} in the memory of {address[0][0] if address[0] else '?'}"
        try:
            sock = self._connection(address)
            try:
                encoded = name.encode()
                sock.sendall(_REQUEST.pack(len(encoded), offset, wanted) + encoded)
                status, count = _ANSWER.unpack(_exactly(sock, _ANSWER.size))
                if status == 0 and wanted and count <= wanted:
                    left = count
                    for buffer in buffers:
                        _fill(sock, buffer[:left])
                        left -= min(left, len(buffer))
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise StorageUnavailableError(f"cannot read {shown}: {error}") from error
        if status != 0:
            self._idle[address].put(sock)
            raise FileNotFoundError(2, "no such file", shown)
        if wanted and count > wanted:  # the offset is beyond the end: the answer is the size
            count = 0
        self._idle[address].put(sock)
        with self._lock:
            self.received += count if wanted else 0
        return int(count)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            for idle in self._idle.values():
                with contextlib.suppress(queue.Empty):
                    while True:
                        idle.get_nowait().close()


class PeerReader(FileReader):
    """A file in another machine's memory.

    Args:
        peers: the connections.
        address: who serves it.
        name: of the file.
        size: its length in bytes.
    """

    step_bytes = _PIECE

    def __init__(self, peers: Peers, address: Address, name: str, size: int) -> None:
        self._peers, self._address, self._name = peers, address, name
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:  # noqa: D102 (inherited)
        left = max(self.size - offset, 0)
        wanted = []
        for buffer in buffers:
            wanted.append(buffer[:left])
            left -= len(wanted[-1])
        wanted = [buffer for buffer in wanted if len(buffer)]
        if not wanted:
            return 0
        try:
            return self._peers.ask(self._address, self._name, offset, wanted)
        except FileNotFoundError as error:
            raise StorageError(f"cannot read {error.filename}: it is gone") from error

    def close(self) -> None:  # noqa: D102 (inherited)
        pass
