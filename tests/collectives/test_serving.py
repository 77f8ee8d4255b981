"""Served data: other ranks fetch it, and the serving rank makes no call for each fetch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from bytecheckpoint.collectives.transport.serving import Request, Service
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, StorageFullError
from tests.collectives.data_world import MIB, DataWorld, content, until


def fetch(world: DataWorld, rank: int, server: int, request: bytes, size: int, timeout: float = 30.0) -> np.ndarray:
    """Return the answer of rank `server` to a request of rank `rank`."""
    destination = np.zeros(size, np.uint8)
    world.mesh(rank).fetch(server, "data", request, destination, timeout=timeout)
    return destination


def by_size(request: bytes) -> np.ndarray:
    """Answer "SIZE SALT" with that many bytes."""
    size, salt = map(int, request.split())
    return content(0, 0, size, salt)


@pytest.mark.parametrize(("server", "rank"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_any_rank_fetches_from_any_other(world: DataWorld, server: int, rank: int) -> None:
    """The first fetch connects the two, whichever of them dials; so does one after the connection broke."""
    with world.mesh(server).serve("data", by_size):
        for salt, size in enumerate([1, 4 * MIB, 9 * MIB + 5]):
            got = fetch(world, rank, server, b"%d %d" % (size, salt), size)
            np.testing.assert_array_equal(got, content(0, 0, size, salt))
            world.break_link(rank, server)
            until(lambda: world.link(rank, server) is None and world.link(server, rank) is None)


def test_a_fetch_before_anything_is_served(world: DataWorld) -> None:
    """Rank 1 serves nothing yet; rank 0 has not even begun to listen to others."""
    world.mesh(1)
    for server, rank, says in ((1, 2, "'data' is not served now"), (0, 2, "not connected with rank 0 within")):
        with pytest.raises(CheckpointError, match=f"(fetch|serve) 'data' ?.*{says}"):
            fetch(world, rank, server, b"9 0", 9, timeout=30 if server else 0.2)
        with world.mesh(server).serve("data", by_size):
            assert len(fetch(world, rank, server, b"9 0", 9)) == 9


def test_many_fetches_share_a_connection_with_exchanges(world: DataWorld) -> None:
    size = 2 * MIB + 1
    with world.mesh(0).serve("data", by_size), world.mesh(1).serve("data", by_size):
        calls = [
            (salt, world.pool.submit(fetch, world, rank, server, b"%d %d" % (size, salt), size))
            for salt in range(6)
            for rank, server in ((1, 0), (2, 0), (0, 1), (2, 1))
        ]
        for number in range(6):
            world.pair(f"exchange {number}", number % 2, 2, size)
        for salt, call in calls:
            np.testing.assert_array_equal(call.result(60), content(0, 0, size, salt))
    # Ranks 0 and 1 fetch from each other, and rank 2 from both.
    assert [sum(link.rank >= 0 for link in world.mesh(rank)._open) for rank in range(3)] == [3, 3, 2]


def refusing(request: bytes) -> np.ndarray:
    if request == b"missing":
        raise FileNotFoundError(2, "nothing", "model/file")
    if request == b"full":
        raise StorageFullError("no room")
    if request == b"bug":
        raise ZeroDivisionError("oops")
    return np.zeros(5, np.uint8)


@pytest.mark.parametrize("server", [0, 2])
def test_what_the_provider_raises_is_raised_where_it_was_asked_for(world: DataWorld, server: int) -> None:
    with world.mesh(server).serve("data", refusing):
        with pytest.raises(FileNotFoundError, match="model/file"):
            fetch(world, 1, server, b"missing", 9)
        with pytest.raises(StorageFullError, match=f"rank {server}, serve 'data': no room"):
            fetch(world, 1, server, b"full", 9)
        with pytest.raises(CheckpointError, match="ZeroDivisionError: oops"):
            fetch(world, 1, server, b"bug", 9)
        with pytest.raises(CheckpointError, match="has 5 bytes for a fetch of 9"):
            fetch(world, 1, server, b"", 9)
        assert fetch(world, 1, server, b"", 5).tolist() == [0] * 5, "and the next one works"
    with pytest.raises(CheckpointError, match=f"rank {server}.* 'data' is not served now"):
        fetch(world, 1, server, b"", 5)


class SlowProvider:
    """A provider that counts its calls, and answers when the test lets it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, request: bytes) -> np.ndarray:
        with self._lock:
            self.calls += 1
        assert self.go_on.wait(60)
        return by_size(request)


@pytest.fixture
def slow() -> Iterator[SlowProvider]:
    provider = SlowProvider()
    yield provider
    provider.go_on.set()


def test_a_fetch_fails_at_once_when_its_server_is_gone(world: DataWorld, slow: SlowProvider) -> None:
    with world.mesh(2).serve("data", slow):
        calls = [world.pool.submit(fetch, world, rank, 2, b"9 0", 9, 3600) for rank in (0, 1)]
        until(lambda: slow.calls == 2)
        world.mesh(2).leave()
        world.stars[2].leave()
        for call in calls:
            error = call.exception(30)
            assert isinstance(error, PeerLostError) and "lost rank 2" in str(error)
        with pytest.raises(PeerLostError, match="lost rank 2"):
            fetch(world, 1, 2, b"9 0", 9, timeout=3600)


def test_a_service_ends_with_what_it_has_not_answered(world: DataWorld, slow: SlowProvider) -> None:
    with world.mesh(0).serve("data", slow):
        calls = [world.pool.submit(fetch, world, 1, 0, b"9 0", 9, 3600) for _ in range(6)]
        until(lambda: slow.calls == 4)
    slow.go_on.set()
    for call in calls:
        assert "'data' is not served now" in str(call.exception(30))


def test_a_request_that_comes_while_a_service_ends_is_refused(
    world: DataWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data thread has found the service when the block ends, and submits the request after that."""
    submit, submitting, ended = Service.submit, threading.Event(), threading.Event()

    def late(service: Service, request: Request) -> None:
        submitting.set()
        assert ended.wait(30)
        submit(service, request)

    monkeypatch.setattr(Service, "submit", late)
    with world.mesh(0).serve("data", by_size):
        call = world.pool.submit(fetch, world, 1, 0, b"9 0", 9, 10)
        assert submitting.wait(30)
    ended.set()
    assert "'data' is not served now" in str(call.exception(30))


def test_nothing_is_written_after_a_timeout(world: DataWorld, slow: SlowProvider) -> None:
    destination = np.zeros(9 * MIB, np.uint8)
    with world.mesh(0).serve("data", slow):
        with pytest.raises(CheckpointTimeoutError, match="rank 1: fetch 'data': not all bytes came from rank 0"):
            world.mesh(1).fetch(0, "data", b"%d 0" % destination.nbytes, destination, timeout=0.3)
        slow.go_on.set()
        assert len(fetch(world, 1, 0, b"9 0", 9)) == 9, "what came late was passed over"
        assert not destination.any()


def test_answers_in_memory_are_few(world: DataWorld) -> None:
    """However many are asked for; a rank that takes nothing does not make its server read on."""
    lock, alive, most = threading.Lock(), [0], [0]

    def count(change: int) -> None:
        with lock:
            alive[0] += change
            most[0] = max(most[0], alive[0])

    def provider(request: bytes) -> np.ndarray:
        data = by_size(request)
        count(1)
        weakref.finalize(data, count, -1)
        return data

    size, stuck, release = 12 * MIB, threading.Event(), threading.Event()
    with world.mesh(0).serve("data", provider):
        calls = [world.pool.submit(fetch, world, 1, 0, b"%d %d" % (size, salt), size, 60) for salt in range(12)]
        until(lambda: most[0])
        world.mesh(1)._call_soon(lambda: (stuck.set(), release.wait(60)))  # type: ignore[arg-type, return-value]
        assert stuck.wait(30)
        release.set()
        for salt, call in enumerate(calls):
            np.testing.assert_array_equal(call.result(60), content(0, 0, size, salt))
    assert most[0] <= 6, "four, and what is just being given up"
