"""Toxiproxy: TCP connections that are slow, cut or refused."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.servers.process import Server, folder_of, free_port, opener

__all__ = ["Toxiproxy"]


class Toxiproxy:
    """One proxy before one server.

    Args:
        folder: for its log.
        target: "http://127.0.0.1:port" of the server.

    Attributes:
        endpoint: "http://127.0.0.1:port", where clients reach the server.
    """

    def __init__(self, folder: Path, target: str) -> None:
        program = folder_of("toxiproxy") / "toxiproxy"
        port, listen = free_port(), f"127.0.0.1:{free_port()}"
        self._api = f"http://127.0.0.1:{port}"
        command = [str(program), "-host", "127.0.0.1", "-port", str(port)]
        self._server = Server(command, f"{self._api}/version", folder / "toxiproxy.log").start()
        self.endpoint = f"http://{listen}"
        upstream = target.split("://")[1].split("/", maxsplit=1)[0]
        self._call("POST", "/proxies", {"name": "p", "listen": listen, "upstream": upstream, "enabled": True})

    def _call(self, method: str, path: str, record: dict[str, Any] | None = None) -> None:
        data = json.dumps(record).encode() if record is not None else None
        request = urllib.request.Request(self._api + path, data=data, method=method)
        opener.open(request, timeout=10).close()

    def add(self, kind: str, *, stream: str = "upstream", **attributes: int) -> None:
        """Add a toxic: "latency" (latency=ms), "bandwidth" (rate=KB/s), "timeout" (timeout=0), "limit_data" (bytes=n)."""
        record = {"name": kind, "type": kind, "stream": stream, "attributes": attributes}
        self._call("POST", "/proxies/p/toxics", record)

    def remove(self, kind: str) -> None:
        """Remove a toxic."""
        self._call("DELETE", f"/proxies/p/toxics/{kind}")

    def stop(self) -> None:
        """End the proxy."""
        self._server.stop()
