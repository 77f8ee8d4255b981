"""Every promise of a collective, for one process, threads, sockets in a star and sockets in a tree."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, StorageError, UsageError
from bytecheckpoint.failures import Cancellation, Failure
from tests.support.certificates import certificates
from tests.support.settings import using
from tests.support.socket_world import SocketWorld

MACHINES = [0, 0, 1, 1, 1, 2, 3, 3]


class OneProcess(ThreadWorld):
    """The world of a process alone."""

    def __init__(self) -> None:
        super().__init__(1)
        self.ranks = [SingleProcess()]  # type: ignore[list-item]


@pytest.fixture(scope="module", params=["one process", "threads", "star", "tree", "star over TLS", "tree over TLS"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadWorld]:
    if request.param in ("one process", "threads"):
        yield OneProcess() if request.param == "one process" else ThreadWorld(len(MACHINES))
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
        everyone = [bytes([r]) * (r * 3) for r in range(c.world_size)]
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
            for rank in range(c.world_size):
                c.send(rank, f"{tag} watched", b"for %d" % rank)
        assert received.get(timeout=30) == b"for %d" % c.rank
        end_watch()
        c.send(0, f"{tag} forgotten", b"late")
        c.send(0, f"{tag} after", b"")
        if c.rank == 0:
            c.collect(range(c.world_size), f"{tag} after", timeout=30)
            with pytest.raises(CheckpointTimeoutError):
                c.recv(0, f"{tag} forgotten", timeout=0)

    run(body)


def test_a_failure_ends_a_wait(run: Callable[..., object]) -> None:
    """The last rank fails while rank 0 waits for all, and the others for rank 0."""

    def body(c: Collective, tag: str) -> None:
        cancel = Cancellation()
        with StopSignal(c, tag, cancel) as stop:
            last = c.world_size - 1
            if c.rank == last:
                stop.fail(Failure.of(StorageError("gone"), rank=c.rank, stage="write"))
            with pytest.raises(StorageError, match=f"^rank {last}, write: gone"):
                c.collect(range(c.world_size) if c.rank == 0 else [0], f"{tag} never", timeout=3600, cancel=cancel)

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
                assert c.collect(range(c.world_size), f"{tag} {number}", timeout=20) == [
                    bytes([r]) * size for r in range(c.world_size)
                ]
            for number in range(3):
                assert c.collect(range(c.world_size), tag, timeout=20) == [b"%d" % number] * c.world_size
        c.barrier(f"{tag} end", timeout=20)

    run(body)


def test_some_ranks_get_one_object_and_others_another(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        if c.rank == 0:
            even, odd = b"even", b"odd" * 50_000
            c.send_each(tag, {rank: odd if rank % 2 else even for rank in range(c.world_size) if rank != 5})
        if c.rank != 5:
            assert c.recv(0, tag, timeout=20) == (b"odd" * 50_000 if c.rank % 2 else b"even")

    run(body)


def test_every_rank_gets_its_own_answer(run: Callable[..., object]) -> None:
    def decide(payloads: list[bytes]) -> list[bytes]:
        return [b"all: %s, to %d" % (b"".join(payloads), rank) for rank in range(len(payloads))]

    def body(c: Collective, tag: str) -> None:
        everyone = b"".join(b"%d" % rank for rank in range(c.world_size))
        answer = c.gather_scatter(tag, b"%d" % c.rank, decide, timeout=20)
        assert answer == b"all: %s, to %d" % (everyone, c.rank)

    run(body)


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
        incoming = {source: np.zeros_like(content(source, c.rank)) for source in range(c.world_size)}
        c.exchange(tag, {to: content(c.rank, to) for to in range(c.world_size)}, incoming, timeout=60)
        for source, array in incoming.items():
            np.testing.assert_array_equal(array, content(source, c.rank))

    run(body)


def test_a_long_answer_for_all(run: Callable[..., object]) -> None:
    answer = np.random.default_rng(1).bytes(300_000)

    def body(c: Collective, tag: str) -> None:
        assert c.gather_scatter(tag, b"", lambda payloads: [answer] * len(payloads), timeout=30) == answer

    run(body)


def test_operations_of_several_threads_in_any_order(run: Callable[..., object]) -> None:
    """Each rank runs the same operations on four threads, which begin in an order of its own."""

    def body(c: Collective, tag: str) -> None:
        def work(name: str) -> None:
            for number in range(10):
                got = c.all_gather(f"{tag} {name} {number}", f"{name} {number} {c.rank}".encode(), timeout=60)
                assert got == [f"{name} {number} {rank}".encode() for rank in range(c.world_size)]

        names = ["a", "b", "c", "d"]
        first = c.rank % len(names)
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(work, names[first:] + names[:first]))

    run(body)


def refusing(request: bytes) -> np.ndarray:
    if request == b"missing":
        raise FileNotFoundError(2, "nothing", "model/file")
    return np.zeros(5, np.uint8)


def test_data_that_one_rank_serves(run: Callable[..., object]) -> None:
    def body(c: Collective, tag: str) -> None:
        served = np.arange(1000, dtype=np.uint8) + c.rank
        with c.serve(tag, lambda request: served[int(request) :]):
            c.barrier(f"{tag} begun", timeout=20)
            for other in range(c.world_size):
                got = np.zeros(900, np.uint8)
                c.fetch(other, tag, b"100", got, timeout=30)
                np.testing.assert_array_equal(got, (np.arange(1000, dtype=np.uint8) + other)[100:])
            c.barrier(f"{tag} over", timeout=20)
        with pytest.raises(CheckpointError, match="is not served now"):
            c.fetch(c.rank, tag, b"100", got, timeout=30)
        other = (c.rank + 1) % c.world_size
        with c.serve(f"{tag} refused", refusing):
            c.barrier(f"{tag} refusing", timeout=20)
            with pytest.raises(FileNotFoundError, match="model/file"):
                c.fetch(other, f"{tag} refused", b"missing", got, timeout=30)
            with pytest.raises(CheckpointError, match="has 5 bytes for a fetch of 900"):
                c.fetch(other, f"{tag} refused", b"", got, timeout=30)
            c.barrier(f"{tag} refused all", timeout=20)

    run(body)


def test_a_closed_collective_sends_nothing() -> None:
    alone = SingleProcess()
    alone.close()
    with pytest.raises(PeerLostError):
        alone.send(0, "t", b"")
