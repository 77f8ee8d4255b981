"""A proxy before an HTTP server that lets chosen requests fail: it loses or cuts answers, and makes some up.

All other requests and answers pass unchanged, so that signatures stay valid.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bytecheckpoint.storage.testing.fault_rule import FaultRule

__all__ = [
    "FaultProxy",
    "HttpFault",
    "Request",
    "asks",
    "fail_at_rate",
    "fault_proxy",
    "repeated_by_client",
    "s3_error",
]


@dataclass(frozen=True)
class Request:
    """A request that passes.

    Attributes:
        method: HTTP method ("PUT", ...).
        path: path with its query.
        headers: headers by their names in lower case.
    """

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class HttpFault(FaultRule):
    """A rule for requests: `call` is a predicate of a `Request`.

    Attributes:
        status: status of a made-up answer; 0 if the server answers.
        body: body of a made-up answer.
        cut: number of bytes of the server's answer after which the connection breaks; -1: none.
        headers: headers to add to a made-up answer, or to replace in the server's answer, by names in lower case.
        strip: names in lower case of the headers that the server does not get.
        together: number of requests whose headers the server must have accepted before it gets the body of one.
    """

    status: int = 0
    body: bytes = b""
    cut: int = -1
    headers: dict[str, str] = field(default_factory=dict)
    strip: tuple[str, ...] = ()
    together: int = 0
    _accepted: list[int] = field(default_factory=list)
    _enough: threading.Event = field(default_factory=threading.Event)

    def wait_for_others(self) -> None:
        """Wait until the server has accepted the headers of `together` requests, this one among them."""
        self._accepted.append(1)
        if len(self._accepted) >= self.together:
            self._enough.set()
        assert self._enough.wait(60)


def asks(method: str, word: str = "") -> Callable[[Request], bool]:
    """Return a predicate: requests of a method whose path contains a word."""
    return lambda request: request.method == method and word in request.path


def s3_error(code: str, message: str = "so it is") -> bytes:
    """Return the body of an error of S3."""
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


class FaultProxy:
    """The proxy.

    Attributes:
        endpoint: URL of the proxy for clients.
        rules: rules, of which the first that hits a request applies.
        requests: all requests so far.
    """

    def __init__(self, target: str) -> None:
        self._target = target.split("://")[1].split("/", maxsplit=1)[0]
        self.rules: list[HttpFault] = []
        self.requests: list[Request] = []
        self._open: set[socket.socket] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._open.add(self.connection)

            def finish(self) -> None:
                outer._open.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                outer._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exception(), OSError):  # clients may go away
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = target.replace(self._target, f"127.0.0.1:{self._server.server_port}")
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[Request], bool], **options: Any) -> HttpFault:
        """Add a rule; see `HttpFault` for the options."""
        self.rules.append(HttpFault(call, **options))
        return self.rules[-1]

    def close(self) -> None:
        """Stop serving, and end the connections that clients keep open."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _rule(self, request: Request) -> HttpFault | None:
        self.requests.append(request)
        rule = next((rule for rule in self.rules if rule.hit(request)), None)
        if rule is not None:
            rule.wait()
        return rule

    def _serve(self, client: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in client.headers.items()}
        if headers.get("expect", "").lower() == "100-continue":
            client.send_response_only(100)
            client.end_headers()
        body = client.rfile.read(int(headers.get("content-length", 0)))
        rule = self._rule(Request(client.command, client.path, headers))
        if rule is not None and rule.status:
            client.send_response_only(rule.status)
            for name, value in {"content-length": str(len(rule.body)), **rule.headers}.items():
                client.send_header(name, value)
            client.end_headers()
            if client.command != "HEAD":
                client.wfile.write(rule.body)
            return
        upstream = http.client.HTTPConnection(self._target, timeout=60)
        try:
            upstream.putrequest(client.command, client.path, skip_host=True, skip_accept_encoding=True)
            for name, value in client.headers.items():
                if rule is None or name.lower() not in rule.strip:
                    upstream.putheader(name, value)
            if rule is not None and rule.together:
                upstream.putheader("expect", "100-continue")
                upstream.endheaders()
                if upstream.sock.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 100":
                    rule.wait_for_others()
                    upstream.send(body)
            else:
                upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
        except OSError:
            client.close_connection = True
            return
        finally:
            upstream.close()
        if rule is not None and rule.lose:
            client.close_connection = True
            return
        client.send_response_only(answer.status, answer.reason)
        other = rule.headers if rule is not None else {}
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                client.send_header(name, other.get(name.lower(), value))
        length = answer.getheader("content-length") if client.command == "HEAD" else str(len(data))
        client.send_header("content-length", length or "0")
        client.end_headers()
        if rule is not None and rule.cut >= 0:
            client.wfile.write(data[: rule.cut])
            client.close_connection = True
            return
        client.wfile.write(data)


def fail_at_rate(proxy: FaultProxy, rate: float, seed: int = 0) -> list[Request]:
    """Let a share of all requests fail in every way that S3 knows; return the list that these requests come into.

    A request is refused, or the connection breaks before the server has it, after the server has carried it out, or in the
    middle of the answer to a GET.
    """
    hits: list[Request] = []
    chance, lock = random.Random(seed), threading.Lock()

    def break_off() -> None:
        raise ConnectionResetError

    kinds: list[dict[str, Any]] = [
        {"cut": 1},
        {"status": 503, "body": s3_error("SlowDown"), "headers": {"retry-after": "1"}},
        {"status": 500, "body": s3_error("InternalError")},
        {"status": 429, "body": s3_error("TooManyRequests"), "headers": {"retry-after": "1"}},
        {"before": break_off},
        {"lose": True},
    ]

    def is_hit(request: Request, number: int) -> bool:
        share = rate / len(kinds)
        with lock:  # of those that no kind before this one has hit
            hit = chance.random() < share / (1 - number * share) and (number > 0 or request.method == "GET")
            if hit:
                hits.append(request)
        return hit

    for number, fault in enumerate(kinds):
        proxy.add(partial(is_hit, number=number), times=-1, **fault)
    return hits


def repeated_by_client(request: Request) -> bool:
    """Return whether the client library repeats a request silently, as it does those of multipart uploads."""
    words = ("uploadId=", "comp=block")
    return any(word in request.path for word in words) or (request.method == "POST" and "?uploads" in request.path)


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    """Run a proxy before `target` ("http://127.0.0.1:port")."""
    proxy = FaultProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
