"""S3 servers, and requests to them that the package never makes."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.servers.process import Server, folder_of, free_port, opener

__all__ = ["KEY", "SECRET", "S3Server", "minio", "s3proxy", "versitygw"]

KEY = "testtest"
SECRET = "testtest-secret"
_REGION = "us-east-1"


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes:
        server: the process.
        endpoint: "http://127.0.0.1:port".
    """

    server: Server
    endpoint: str

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return the variables with which clients find the server."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": _REGION,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
        }

    def request(self, method: str, path: str, query: str = "", body: bytes = b"") -> bytes:
        """Send one signed request (AWS signature, version 4); return the answer's body."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        host, digest = self.endpoint.split("://")[1], hashlib.sha256(body).hexdigest()
        names = "host;x-amz-content-sha256;x-amz-date"
        signed = f"host:{host}\nx-amz-content-sha256:{digest}\nx-amz-date:{now}\n"
        canonical = f"{method}\n{path}\n{query}\n{signed}\n{names}\n{digest}"
        scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{SECRET}".encode()
        for part in (now[:8], _REGION, "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        request = urllib.request.Request(
            f"{self.endpoint}{path}" + (f"?{query}" if query else ""),
            method=method,
            data=body or None,
            headers={
                "x-amz-date": now,
                "x-amz-content-sha256": digest,
                "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}",
            },
        )
        with opener.open(request, timeout=30) as answer:
            data: bytes = answer.read()
            return data

    def make_bucket(self, name: str) -> None:
        """Create a bucket. A server that has just started may answer that it is not ready."""
        deadline = time.monotonic() + 20
        while True:
            try:
                self.request("PUT", f"/{name}")
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def uploads(self, bucket: str) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        return re.findall(r"<Key>([^<]*)</Key>", self.request("GET", f"/{bucket}", "uploads=").decode())

    def keys(self, bucket: str) -> list[str]:
        """Return the keys of the first thousand objects."""
        return re.findall(r"<Key>([^<]*)</Key>", self.request("GET", f"/{bucket}", "list-type=2").decode())


def versitygw(folder: Path) -> S3Server:
    """Start versitygw over a folder: its conditional puts are exact, and it is ready at once."""
    program = folder_of("versitygw") / "versitygw"
    data = folder / "data"
    data.mkdir()
    address = f"127.0.0.1:{free_port()}"
    server = Server(
        [str(program), "--port", address, "--health", "/health", "posix", str(data)],
        f"http://{address}/health",
        folder / "versitygw.log",
        env={"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
    )
    return S3Server(server.start(), f"http://{address}")


def minio(folder: Path) -> S3Server:
    """Start MinIO, a second implementation."""
    program = folder_of("minio") / "minio"
    address = f"127.0.0.1:{free_port()}"
    server = Server(
        [str(program), "server", "--address", address, str(folder / "data")],
        f"http://{address}/minio/health/ready",
        folder / "minio.log",
        env={
            "MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET, "MINIO_BROWSER": "off", "MINIO_UPDATE": "off",
            "MINIO_SITE_REGION": _REGION,
        },
    )  # fmt: skip
    return S3Server(server.start(), f"http://{address}")


def s3proxy(folder: Path) -> S3Server:
    """Start s3proxy over a folder: of conditional puts whose headers it has accepted, all succeed.

    It checks no signatures, for which it would read the bodies before the conditions.
    """
    libraries = folder_of("s3proxy") / "lib"
    (folder / "data").mkdir()
    endpoint = f"http://127.0.0.1:{free_port()}"
    settings = folder / "s3proxy.conf"
    settings.write_text(
        f"s3proxy.endpoint={endpoint}\ns3proxy.authorization=none\n"
        f"jclouds.provider=filesystem-nio2\njclouds.filesystem.basedir={folder}/data\n"
    )
    command = ["java", "-Xmx256m", "-cp", f"{libraries}/*", "org.gaul.s3proxy.Main", "--properties", str(settings)]
    return S3Server(Server(command, endpoint, folder / "s3proxy.log").start(), endpoint)
