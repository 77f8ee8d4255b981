"""Files go over several connections, so that a limit of each connection, as on busy networks, slows them less."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import obstore
import pytest
import torch
from obstore.store import S3Store

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.servers.s3 import S3Server
from tests.servers.tcp_proxy import TcpProxy, tcp_proxy
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

_RATE = 5 << 20
DATA = content(24 << 20)


@pytest.fixture
def line(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """A proxy before the server, with no limit yet."""
    with tcp_proxy(s3.endpoint.removeprefix("http://")) as made:
        use(monkeypatch, s3.environment(f"http://{made.address}"))
        yield made


@pytest.fixture
def single(line: TcpProxy, bucket: str) -> S3Store:
    """The plain client."""
    return S3Store(bucket, client_options={"allow_http": True})


def seconds(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_an_upload_is_twice_as_fast_as_one_stream(line: TcpProxy, single: S3Store, bucket: str) -> None:
    storage = resolve(f"s3://{bucket}/step")
    storage.check_publish("metadata.parquet", "")
    line.up.rate = _RATE
    ours = seconds(lambda: write_file(storage, "model/file", DATA))
    alone = seconds(lambda: obstore.put(single, "alone", DATA.tobytes(), use_multipart=False))
    line.up.rate = 0.0
    assert np.array_equal(read_all(storage, "model/file"), DATA)
    assert alone > 2 * ours, (alone, ours)


def test_a_read_is_three_times_as_fast_as_one_stream(line: TcpProxy, single: S3Store, bucket: str) -> None:
    storage = resolve(f"s3://{bucket}/step")
    write_file(storage, "model/file", DATA)
    line.down.rate = _RATE
    out = np.zeros(len(DATA), np.uint8)
    with contextlib.closing(storage.open("model/file")) as reader:
        ours = seconds(lambda: reader.read_into(0, [memoryview(out)]))
    alone = seconds(lambda: obstore.get(single, "step/model/file").bytes())
    assert np.array_equal(out, DATA)
    assert alone > 3 * ours, (alone, ours)


def test_a_load_is_three_times_as_fast_as_one_stream(line: TcpProxy, single: S3Store, bucket: str) -> None:
    """With the settings that everybody has."""
    path = f"s3://{bucket}/step"
    tensor = torch.from_numpy(DATA.view(np.int64).copy())
    bytecheckpoint.save(path, {"model": {"w": tensor}})
    line.down.rate = _RATE
    found = {"w": torch.zeros_like(tensor)}
    ours = seconds(lambda: bytecheckpoint.load(path, {"model": found}))
    (name,) = [name for name, _ in resolve(path).list() if name.startswith("model/rank")]
    alone = seconds(lambda: obstore.get(single, f"step/{name}").bytes())
    assert torch.equal(found["w"], tensor)
    assert alone > 3 * ours, (alone, ours)
