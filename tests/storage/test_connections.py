"""Files go over several connections, so that a limit of each connection, as on busy networks, slows them less.

What counts is how the bytes spread over the connections: seconds would be those of a busy machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.servers.s3 import S3Server
from tests.servers.tcp_proxy import Line, TcpProxy, tcp_proxy
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


def busiest(line: Line, call: Callable[[], object]) -> float:
    """Return the part of a call's bytes that went over the busiest connection: the call's time beside one stream's."""
    before = dict(line.carried)
    call()
    carried = [count - before.get(connection, 0) for connection, count in line.carried.items()]
    assert sum(carried) > len(DATA)
    return max(carried) / sum(carried)


def test_an_upload_is_twice_as_fast_as_one_stream(line: TcpProxy, bucket: str) -> None:
    storage = resolve(f"s3://{bucket}/step")
    storage.check_publish("metadata.parquet", "")
    line.up.rate = _RATE
    assert busiest(line.up, lambda: write_file(storage, "model/file", DATA)) < 1 / 2
    line.up.rate = 0.0
    assert np.array_equal(read_all(storage, "model/file"), DATA)


def test_a_read_is_three_times_as_fast_as_one_stream(line: TcpProxy, bucket: str) -> None:
    storage = resolve(f"s3://{bucket}/step")
    write_file(storage, "model/file", DATA)
    line.down.rate = _RATE
    out = np.zeros(len(DATA), np.uint8)
    with contextlib.closing(storage.open("model/file")) as reader:
        assert busiest(line.down, lambda: reader.read_into(0, [memoryview(out)])) < 1 / 3
    assert np.array_equal(out, DATA)


def test_a_load_is_three_times_as_fast_as_one_stream(line: TcpProxy, bucket: str) -> None:
    """With the settings that everybody has."""
    path = f"s3://{bucket}/step"
    tensor = torch.from_numpy(DATA.view(np.int64).copy())
    bytecheckpoint.save(path, {"model": {"w": tensor}})
    line.down.rate = _RATE
    found = {"w": torch.zeros_like(tensor)}
    assert busiest(line.down, lambda: bytecheckpoint.load(path, {"model": found})) < 1 / 3
    assert torch.equal(found["w"], tensor)
