"""What every collective must do: that of threads, of sockets in a star, and of sockets in a tree."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, StorageError, UsageError
from bytecheckpoint.failures import Cancellation, Failure
from tests.collectives.socket_world import SocketWorld
from tests.support.certificates import certificates
from tests.support.settings import using

MACHINES = [0, 0, 1, 1, 1, 2, 3, 3]
RANKS = range(len(MACHINES))


@pytest.fixture(scope="module", params=["threads", "star", "tree", "star over TLS", "tree over TLS"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadWorld]:
    if request.param == "threads":
        yield ThreadWorld(len(MACHINES))
        return
    secured = certificates(tmp_path_factory.mktemp("tls")) if "TLS" in request.param else {}
    with using(**secured), SocketWorld(MACHINES, tree="tree" in request.param) as made:
        yield made


@pytest.fixture
def run(world: ThreadWorld, request: pytest.FixtureRequest) -> Callable[..., object]:
    """Run a body on all ranks with a tag of its own."""
    tag = request.node.name
    return lambda body: world.run(lambda c: body(c, tag), timeout=60)


def test_each_operation(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> str:
        mine = bytes([c.rank]) * (c.rank * 3)
        everyone = [bytes([r]) * (r * 3) for r in RANKS]
        time.sleep(0.01 * (c.world_size - c.rank))  # arrival in the opposite order
        assert c.gather(f"{tag} g", mine, timeout=20) == (everyone if c.rank == 0 else None)
        assert c.scatter(f"{tag} s", everyone if c.rank == 0 else None, timeout=20) == mine
        assert c.broadcast(f"{tag} b", b"x" if c.rank == 0 else None, timeout=20) == b"x"
        assert c.all_gather(f"{tag} a", mine, timeout=20) == everyone
        c.barrier(f"{tag} bar", timeout=20)
        return c.world_id

    assert len(set(run(body))) == 1  # type: ignore[call-overload]


def test_watched_and_forgotten_messages(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        end_watch = c.watch(f"{tag} watched", received.put)
        c.barrier(f"{tag} begun", timeout=30)
        if c.rank == 0:
            c.forget(f"{tag} forgotten")
            for rank in RANKS:
                c.send(rank, f"{tag} watched", b"for %d" % rank)
        assert received.get(timeout=30) == b"for %d" % c.rank
        end_watch()
        c.send(0, f"{tag} forgotten", b"late")
        c.send(0, f"{tag} after", b"")
        if c.rank == 0:
            c.collect(RANKS, f"{tag} after", timeout=30)
            with pytest.raises(CheckpointTimeoutError):
                c.recv(0, f"{tag} forgotten", timeout=0)

    run(body)


def test_a_failure_ends_a_wait(run: Callable[..., object]) -> None:
    """The last rank fails while rank 0 waits for all, and the others for rank 0."""

    def body(c: Collective, tag: str) -> None:
        cancel = Cancellation()
        with StopSignal(c, tag, cancel) as stop:
            if c.rank == RANKS[-1]:
                stop.fail(Failure.of(StorageError("gone"), rank=c.rank, stage="write"))
            with pytest.raises(StorageError, match=f"^rank {RANKS[-1]}, write: gone"):
                c.collect(RANKS if c.rank == 0 else [0], f"{tag} never", timeout=3600, cancel=cancel)

    run(body)


def test_messages_with_one_tag_keep_their_order(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        sizes = (1, 100_000, 7, 70_000, 0)  # short ones wait for others on their way, long ones do not
        for number, size in enumerate(sizes):
            c.send(0, f"{tag} {number}", bytes([c.rank]) * size)
        for number in range(3):
            c.send(0, tag, b"%d" % number)
        if c.rank == 0:
            for number, size in enumerate(sizes):
                assert c.collect(RANKS, f"{tag} {number}", timeout=20) == [bytes([r]) * size for r in RANKS]
            for number in range(3):
                assert c.collect(RANKS, tag, timeout=20) == [b"%d" % number] * len(RANKS)
        c.barrier(f"{tag} end", timeout=20)

    run(body)


def test_some_ranks_get_one_object_and_others_another(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        if c.rank == 0:
            even, odd = b"even", b"odd" * 50_000
            c.send_each(tag, {rank: odd if rank % 2 else even for rank in RANKS if rank != 5})
        if c.rank != 5:
            assert c.recv(0, tag, timeout=20) == (b"odd" * 50_000 if c.rank % 2 else b"even")

    run(body)


def test_every_rank_gets_its_own_answer(run: Callable[..., object]) -> None:
    def decide(payloads: list[bytes]) -> list[bytes]:
        return [b"all: %s, to %d" % (b"".join(payloads), rank) for rank in range(len(payloads))]

    def body(c: Collective, tag: str) -> bytes:
        return c.gather_scatter(tag, b"%d" % c.rank, decide, timeout=20)

    assert run(body) == [b"all: 01234567, to %d" % rank for rank in RANKS]


def test_a_decision_that_fails_fails_every_rank_at_once(run: Callable[..., object]) -> None:
    def decide(_: list[bytes]) -> list[bytes]:
        raise UsageError("no such thing")

    def body(c: Collective, tag: str) -> None:
        with pytest.raises(CheckpointError, match="no such thing"):
            c.gather_scatter(tag, b"", decide, timeout=3600)

    run(body)


def test_arrays_between_all_ranks(run: Callable[..., object]) -> None:
    def content(source: int, to: int) -> np.ndarray:
        size = (source * 37 + to * 11) % 5 * 40_001  # some are empty
        return (np.arange(size) * 7 + source * 13 + to).astype(np.uint8)

    def body(c: Collective, tag: str) -> None:
        incoming = {source: np.zeros_like(content(source, c.rank)) for source in RANKS}
        c.exchange(tag, {to: content(c.rank, to) for to in RANKS}, incoming, timeout=60)
        for source, array in incoming.items():
            np.testing.assert_array_equal(array, content(source, c.rank))

    run(body)


def test_a_long_answer_for_all(run: Callable[..., object]) -> None:
    answer = np.random.default_rng(1).bytes(300_000)

    def body(c: Collective, tag: str) -> bytes:
        return c.gather_scatter(tag, b"", lambda payloads: [answer] * len(payloads), timeout=30)

    assert run(body) == [answer] * len(RANKS)


def test_data_that_one_rank_serves(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        served = np.arange(1000, dtype=np.uint8) + c.rank
        with c.serve(tag, lambda request: served[int(request) :]):
            c.barrier(f"{tag} begun", timeout=20)
            for other in RANKS:
                got = np.zeros(900, np.uint8)
                c.fetch(other, tag, b"100", got, timeout=30)
                np.testing.assert_array_equal(got, (np.arange(1000, dtype=np.uint8) + other)[100:])
            c.barrier(f"{tag} over", timeout=20)

    run(body)
