"""Receivers of metrics: one that records requests, and those of a network at its worst."""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.servers.process import free_port

__all__ = ["Received", "bad_port", "receiver"]


@dataclass
class Received:
    """Everything that a receiver got.

    Attributes:
        port: at which it listens on the loopback interface.
        requests: (path, headers, body) of each request.
    """

    port: int
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextlib.contextmanager
def receiver(
    status: int = 200, answer: bytes = b"", *, location: str = "", certificate: str = "", key: str = ""
) -> Iterator[Received]:
    """Serve HTTP inside the block, or HTTPS with the files of a certificate, with the same answer to all requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.requests.append((self.path, dict(self.headers), body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # a client that does not trust the certificate
    received = Received(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def bad_port(kind: str) -> Iterator[int]:
    """Return a port that "refuses" connections, that "hangs" (it accepts and never answers), or that answers "500"."""
    if kind == "refuses":
        yield free_port()
    elif kind == "500":
        with receiver(500, b"no space") as received:
            yield received.port
    else:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
            yield listening.getsockname()[1]
