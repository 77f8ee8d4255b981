"""Azurite, the emulator of Azure's blob storage."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import Server, folder_of, free_port, opener

__all__ = ["ACCOUNT", "AzureServer", "azurite"]

ACCOUNT = "devstoreaccount1"
#: Azurite's well-known key from its manual: no secret.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class AzureServer:
    """A running server.

    Attributes:
        server: the process.
        endpoint: "http://127.0.0.1:port/account".
    """

    server: Server
    endpoint: str

    def environment(self) -> dict[str, str]:
        """Return the variables with which clients find the server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket, which Azure calls a container, with one signed request."""
        date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()).decode()
        request = urllib.request.Request(
            f"{self.endpoint}/{name}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date, "x-ms-version": "2021-08-06", "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            },
        )  # fmt: skip
        opener.open(request, timeout=30).close()


def azurite(folder: Path) -> AzureServer:
    """Start Azurite over a folder."""
    program = folder_of("azurite") / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    port = free_port()
    command = [
        "node", str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "data"),
        "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    server = Server(command, f"http://127.0.0.1:{port}/", folder / "azurite.log")
    return AzureServer(server.start(), f"http://127.0.0.1:{port}/{ACCOUNT}")
