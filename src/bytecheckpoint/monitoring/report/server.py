"""Serve the page of a run over HTTP, with the progress of running operations. The server only reads."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from bytecheckpoint.concurrency import Workers
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.monitoring.live import LIVE_PREFIX, is_cut_off, read_live
from bytecheckpoint.monitoring.reading import RunReader
from bytecheckpoint.monitoring.record import path_without_secrets, without_secrets
from bytecheckpoint.monitoring.report.page import content_security_policy, make_page, page_data
from bytecheckpoint.monitoring.report.report import Reporter
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER
from bytecheckpoint.monitoring.table import OperationFacts
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.time_limits import with_time_limits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from starlette.requests import Request
    from starlette.responses import Response

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["RunView", "make_app", "require_token"]

#: Fewest seconds between two reads of the storage, for any number of browsers, and most for which one waits for a read.
_REFRESH, _PATIENCE = 1.0, 2.0


def require_token(host: str, token: str) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        UsageError: `host` is not a loopback address, and there is no token.
    """
    if not token and not _is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines read the metrics: give a --token, or the variable "
            "BYTECHECKPOINT_MONITOR_TOKEN, or keep to 127.0.0.1 and use an SSH tunnel"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _RunSnapshot:
    """The monitor's knowledge of a run at one time.

    Attributes:
        read_at: `time.monotonic` of the last attempt to read.
        files: names and sizes of the files of metrics, and ids of killed operations; None before the first read.
        version: number that grows with each change of `data`. It begins with the time, so that a page takes the data of a
            monitor that was restarted.
        data: data of the page as JSON.
        operations: operations that have ended.
        running: progress of running operations.
        error: reason why the last attempt failed, "" if it did not.
    """

    read_at: float = -_REFRESH
    files: list[tuple[str, int]] | None = None
    version: int = field(default_factory=time.time_ns)
    data: bytes = b"null"
    operations: Sequence[OperationFacts] = ()
    running: Sequence[dict[str, Any]] = ()
    error: str = ""


class RunView:
    """Reads a run for the monitor, at most once a second. Any thread may call it.

    Args:
        root: folder or URL of the run.
        reporter: maker of reports from the metrics.
    """

    def __init__(self, root: str, reporter: Reporter) -> None:
        self._shown = path_without_secrets(root)
        self._reporter = reporter
        self._reader = RunReader(root)
        self._folder = with_time_limits(resolve(f"{root.rstrip('/')}/{METRICS_FOLDER}"))
        self._worker = Workers(1, "bytecheckpoint-monitor")
        self._reading: Future[_RunSnapshot] | None = None
        self._files_read = (0, 0)  # of all, by the read that runs
        self._lock = threading.Lock()  # guards `_view` and `_reading`
        self._view = _RunSnapshot()

    def news(self) -> dict[str, Any]:
        """Return the running operations, the version of the data, and the error if the metrics cannot be read."""
        view, now = self._current(), time.time()
        running = [operation | {"age": now - operation["time"]} for operation in view.running]
        return {"version": str(view.version), "running": running, "error": view.error}

    def data(self) -> bytes:
        """Return the data of the page as JSON."""
        return self._current().data

    def _current(self) -> _RunSnapshot:
        """Return what is known, after a read if the last one was a while ago, unless that takes long."""
        with self._lock:
            if self._reading is None and time.monotonic() - self._view.read_at >= _REFRESH:
                self._reading = self._worker.submit(self._read)
            reading = self._reading
        if reading is not None:
            wait([reading], _PATIENCE)
        with self._lock:
            if self._reading is not None and self._reading.done():
                try:
                    self._view = self._reading.result()
                except (CheckpointError, OSError) as error:
                    text = f"The metrics cannot be read now: {without_secrets(str(error))}"
                    self._view = replace(self._view, read_at=time.monotonic(), error=text)
                self._reading = None
            if self._view.files is None and self._reading is not None:
                done, in_all = self._files_read
                return replace(self._view, error=f"Reading the metrics: {done:,} of {in_all:,} files.")
            return self._view

    def _note_progress(self, done: int, in_all: int) -> None:
        self._files_read = done, in_all

    def _read(self) -> _RunSnapshot:
        listed = sorted(self._folder.list())
        view = self._view
        news = read_live(self._folder, [name for name, _ in listed]).values()
        live = {one.operation: one for one in news if not one.ended}
        cut_off = {name for name, one in live.items() if is_cut_off(one, view.operations)}
        files = [(name, size) for name, size in listed if not name.startswith(LIVE_PREFIX)]  # files of alerts grow
        files += [(name, 0) for name in sorted(cut_off)]
        if files != view.files:
            metrics = self._reader.read(self._note_progress)
            data = page_data(self._reporter.report(metrics), self._shown, time.time())
            encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
            view = replace(view, files=files, version=view.version + 1, data=encoded, operations=metrics.operations)
        ended = cut_off.union(one.id for one in view.operations)
        running = [msgspec.to_builtins(one) for name, one in live.items() if name not in ended]
        return replace(view, read_at=time.monotonic(), running=running, error="")


def make_app(view: RunView, token: str = "") -> App:
    """Return the ASGI application that serves a run.

    Args:
        view: reader of the run.
        token: secret of every request, as a bearer token or as the password of a login. With "", the server answers only
            requests to a name of this machine's loopback interface.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response
    from starlette.routing import Route

    page = make_page(None, live=True)
    headers = {
        "Content-Security-Policy": content_security_policy(live=True) + "; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    def answer(content: bytes, kind: str) -> Response:
        return Response(content, media_type=kind, headers=headers)

    async def show_page(_: Request) -> Response:
        return answer(page, "text/html")

    async def show_data(_: Request) -> Response:
        return answer(await run_in_threadpool(view.data), "application/json")

    async def show_news(_: Request) -> Response:
        news = await run_in_threadpool(view.news)
        return answer(json.dumps(news).encode(), "application/json")

    routes = [Route("/", show_page), Route("/data.json", show_data), Route("/live.json", show_news)]
    return _Guard(Starlette(routes=routes), token)


class _Guard:
    """Passes requests with the token; without a token, those that name this machine's loopback interface.

    The check of the name stops pages of other sites whose own name resolves to 127.0.0.1.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if self._token:
                if not hmac.compare_digest(_given_token(headers.get(b"authorization", b"")), self._token):
                    challenge = (
                        b"www-authenticate",
                        b'Basic realm="bytecheckpoint monitor: the token is the password"',
                    )
                    await _refuse(send, 401, b"The monitor needs its token.\n", challenge)
                    return
            elif not _is_loopback(_host_of(headers.get(b"host", b""))):
                await _refuse(send, 403, b"Without a token the monitor answers to 127.0.0.1 and localhost only.\n")
                return
        await self._app(scope, receive, send)


def _given_token(header: bytes) -> bytes:
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] if scheme.lower() == b"basic" else b""
    except binascii.Error:
        return b""


def _host_of(header: bytes) -> str:
    """Return the name or address in a `Host` header, without the port."""
    host = header.decode("latin-1")
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


async def _refuse(send: Send, status: int, text: bytes, *headers: tuple[bytes, bytes]) -> None:
    plain = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": plain})
    await send({"type": "http.response.body", "body": text})
