"""Fixtures of the storage tests."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from tests.servers.s3 import S3Server, versitygw


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults and no failure waiting to be raised."""
    before = bytecheckpoint.settings()
    yield
    bytecheckpoint.configure(**dataclasses.asdict(before))
    saver = saver_of(current())
    saver.drain()
    saver._failed = None


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A versitygw for all tests of the run."""
    server = versitygw(tmp_path_factory.mktemp("versitygw"))
    yield server
    server.server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with the environment pointing to it."""
    use(monkeypatch, s3_server.environment())
    return s3_server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A new bucket of the server."""
    name = f"bucket-{uuid.uuid4().hex[:16]}"
    s3.make_bucket(name)
    return name


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Let clients, those of child processes too, find a server."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # The writer process has the environment of its start.
    saver = saver_of(current())
    if saver._helper is not None:
        saver._helper.stop()
