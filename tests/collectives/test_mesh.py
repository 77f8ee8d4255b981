"""The data plane: which bytes move, and what a failure on one rank does to the others."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from bytecheckpoint.collectives.transport.mesh import Mesh
from bytecheckpoint.collectives.transport.packs import Place
from bytecheckpoint.collectives.transport.transfers import PeerLink
from bytecheckpoint.collectives.transport.wire import Kind
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, StorageError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.tuning import tuned
from tests.collectives.data_world import MIB, DataWorld, content, frame, greet, read_frame, until
from tests.servers.process import free_port


class TrippedSocket:
    """A socket that calls a function once, before the first call that sends more after `size` bytes."""

    def __init__(self, sock: socket.socket, size: int, action: Callable[[], object]) -> None:
        self._sock, self._left, self._action = sock, float(size), action

    def sendmsg(self, parts: Iterable[memoryview]) -> int:
        if self._left <= 0:
            self.disarm()
            self._action()
        sent = self._sock.sendmsg(parts)
        self._left -= sent
        return sent

    def disarm(self) -> None:
        self._left = math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def trip(link: PeerLink | None, size: int, action: Callable[[], object]) -> TrippedSocket:
    """Call `action` on the data thread once `size` bytes were sent over a connection."""
    assert link is not None
    tripped = TrippedSocket(link.sock, size, action)
    link.sock = cast(socket.socket, tripped)
    return tripped


class Hold:
    """Makes a data thread stand still while it sends."""

    def __init__(self) -> None:
        self.reached, self.release = threading.Event(), threading.Event()

    def __call__(self, link: PeerLink | None, size: int) -> None:
        self.reached.clear()
        self.release.clear()
        trip(link, size, self._wait)

    def _wait(self) -> None:
        self.reached.set()
        assert self.release.wait(30)


@pytest.fixture
def hold() -> Iterator[Hold]:
    held = Hold()
    yield held
    held.release.set()


def all_to_all(mesh: Mesh, tag: str, size: int, timeout: float, salt: int = 0) -> None:
    """Exchange `size` bytes both ways with the two other ranks, as one rank of three."""
    peers = [p for p in range(3) if p != mesh.rank]
    incoming = {p: np.zeros(size, np.uint8) for p in peers}
    mesh.exchange(tag, {p: content(mesh.rank, p, size, salt) for p in peers}, incoming, timeout=timeout)
    for p in peers:
        np.testing.assert_array_equal(incoming[p], content(p, mesh.rank, size, salt))


# ---- moving bytes ----


@pytest.mark.parametrize("seed", range(3))
def test_any_matrix_of_sizes(seed: int) -> None:
    """sizes[i][j] bytes go from rank i to rank j; 0: nothing, not even a request."""
    random = np.random.default_rng(seed)
    world = DataWorld(4)
    sizes = random.choice([0, 1, 3, 4095, 70_001, 4 * MIB, 4 * MIB + 1, 13 * MIB + 5], (4, 4))

    def body(rank: int) -> None:
        peers = [p for p in range(4) if p != rank]
        incoming = {p: np.zeros(sizes[p][rank], np.uint8) for p in peers if sizes[p][rank]}
        outgoing = {p: content(rank, p, sizes[rank][p]) for p in peers if sizes[rank][p]}
        for array in outgoing.values():
            array.flags.writeable = False
        world.exchange(rank, "matrix", outgoing, incoming)
        for p, array in incoming.items():
            np.testing.assert_array_equal(array, content(p, rank, sizes[p][rank]))

    world.each_rank(body)
    for one in range(4):
        for other in range(4):
            linked = one != other and world.link(one, other) is not None
            assert linked == (one != other and bool(sizes[one][other] or sizes[other][one]))
    world.close()


def test_many_tags_from_several_threads_in_different_order(world: DataWorld) -> None:
    """Rank 0 waits for tag 0 while rank 1 has sent all others first: they share a connection, and none blocks another."""
    tags = range(12)

    def body(rank: int) -> None:
        def one(tag: int) -> None:
            all_to_all(world.mesh(rank), f"tag {tag} \N{SNOWMAN}", 3 * MIB + 1, 60, salt=tag)

        with ThreadPoolExecutor(len(tags)) as pool:
            list(pool.map(one, np.random.default_rng(rank).permutation(tags).tolist()))

    world.each_rank(body)
    # One for each direction, whatever the number of exchanges.
    assert [sum(link.rank >= 0 for link in world.meshes[rank]._open) for rank in range(3)] == [4, 4, 4]


def test_order_of_arrival_does_not_matter(world: DataWorld) -> None:
    """Receiver first, sender first; the rank that listens first, the one that dials first; connected or not."""
    for number, (first, source, to) in enumerate([(1, 1, 2), (2, 1, 2), (2, 2, 1), (0, 0, 2), (2, 0, 2), (1, 0, 1)]):
        for again in (False, True):
            got = np.zeros(999, np.uint8)
            calls = {source: ({to: content(source, to, 999)}, {}), to: ({}, {source: got})}
            begun = world.begin(first, f"{number} {again}", *calls.pop(first))
            [(other, arguments)] = calls.items()
            world.exchange(other, f"{number} {again}", *arguments)
            begun()
            np.testing.assert_array_equal(got, content(source, to, 999))


def test_what_was_sent_before_leaving_arrives(world: DataWorld) -> None:
    world.pair("connect", 1, 2, 1)
    got = np.zeros(24 * MIB, np.uint8)
    receiving = world.start(2, "last", {}, {1: got})
    world.exchange(1, "last", {2: content(1, 2, got.size)}, {})
    world.meshes[1].leave()
    receiving()
    np.testing.assert_array_equal(got, content(1, 2, got.size))
    assert world.meshes[1].join(10)


# ---- what fails, fails alone ----


def test_nothing_is_written_after_a_timeout(world: DataWorld, hold: Hold) -> None:
    world.pair("connect", 1, 2, 1)
    hold(world.link(1, 2), 12 * MIB)
    got, kept = np.zeros(40 * MIB, np.uint8), np.zeros(5, np.uint8)
    sending = world.start(1, "held", {2: content(1, 2, got.size)}, {})
    with pytest.raises(
        CheckpointTimeoutError, match=r"rank 2: exchange 'held': not all bytes came from rank 1 within 2 s"
    ):
        world.exchange(2, "held", {}, {1: got}, timeout=2)
    assert hold.reached.is_set() and got.any()
    got[:] = 0
    other = world.start(2, "other", {}, {1: kept})
    hold.release.set()
    with contextlib.suppress(CheckpointTimeoutError):  # unless all was sent before the report came
        sending()
    world.exchange(1, "other", {2: np.arange(5, dtype=np.uint8)}, {})
    other()
    assert kept.tolist() == [0, 1, 2, 3, 4] and not got.any()
    world.pair("afterwards", 1, 2, 9 * MIB)
    world.pair("the other way", 2, 1, 9 * MIB)


@pytest.fixture
def one_piece() -> Iterator[None]:
    """Every array is one piece."""
    with tuned(data_piece=128 * MIB):
        yield


def test_a_piece_under_way_stays_what_it_was_when_the_sender_gives_up(world: DataWorld, one_piece: None) -> None:
    """The last piece has begun when the time is up: the receiver must never get a mixture."""
    world.pair("connect", 1, 2, 1)
    size = 96 * MIB  # more than the system buffers
    array, got = content(1, 2, size), np.zeros(size, np.uint8)
    receiving = world.start(2, "slow", {}, {1: got}, timeout=60)
    stuck, release = threading.Event(), threading.Event()
    link = world.link(1, 2)
    assert link is not None
    until(lambda: "slow" in link.early_requests)
    world.meshes[2]._call_soon(lambda: (stuck.set(), release.wait(30)))  # type: ignore[arg-type, return-value]
    assert stuck.wait(10)
    with pytest.raises(CheckpointTimeoutError, match="not all bytes went to rank 2"):
        world.exchange(1, "slow", {2: array}, {}, timeout=0.5)
    array[:] = 0
    release.set()
    receiving()
    np.testing.assert_array_equal(got, content(1, 2, size))
    world.pair("afterwards", 1, 2, 9 * MIB)


def test_the_first_cause_reaches_everybody_at_once(world: DataWorld) -> None:
    """Rank 2 hangs; rank 0 gives up after a second; rank 1, which waits for rank 0 only, need not wait for an hour."""
    world.pair("connect", 0, 1, 1)
    got = np.zeros(9, np.uint8)
    waiting = world.start(1, "chain", {}, {0: got}, timeout=3600)
    started = time.monotonic()
    with pytest.raises(
        CheckpointTimeoutError, match=r"not all bytes came from ranks 1, 2, not connected with rank 2 within 1 s"
    ):
        world.exchange(0, "chain", {}, {1: got, 2: got.copy()}, timeout=1)
    with pytest.raises(CheckpointTimeoutError, match=r"^rank 0: exchange 'chain': not all bytes came from ranks 1, 2"):
        waiting()
    assert time.monotonic() - started < 20
    world.pair("afterwards", 0, 1, 9)


def test_sizes_that_differ_are_an_error_on_both_sides(world: DataWorld) -> None:
    receiving = world.start(2, "sizes", {}, {1: np.zeros(8, np.uint8)})
    message = "rank 1: exchange 'sizes': has 9 bytes for rank 2, which expects 8"
    with pytest.raises(CheckpointError, match=message):
        world.exchange(1, "sizes", {2: np.zeros(9, np.uint8)}, {})
    with pytest.raises(CheckpointError, match=f"^{message}"):
        receiving()
    world.pair("afterwards", 1, 2, 9)


def test_a_connection_that_breaks_is_an_error_and_the_next_exchange_connects_again(
    world: DataWorld, hold: Hold
) -> None:
    for number in range(3):
        world.pair(f"connect {number}", 1, 2, 1)
        hold(world.link(1, 2), 8 * MIB)
        receiving = world.start(2, f"broken {number}", {}, {1: np.zeros(40 * MIB, np.uint8)}, timeout=3600)
        sending = world.start(1, f"broken {number}", {2: content(1, 2, 40 * MIB)}, {}, timeout=3600)
        assert hold.reached.wait(30)
        world.break_link(number % 2 + 1, 2 - number % 2)
        hold.release.set()
        with pytest.raises(PeerLostError, match="lost rank 1: its connection closed"):
            receiving()
        # The sender has seen it itself, or heard of it first: a second connection of the two may carry the report.
        with pytest.raises(PeerLostError, match=r"lost rank [12]: its connection closed"):
            sending()
        world.pair(f"again {number}", 2, 1, 9 * MIB)


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_begins_after_the_connection_broke_fails_too(world: DataWorld, late: int) -> None:
    """Of two ranks one has failed with the connection; the other would wait for it for an hour."""
    world.pair("connect", 1, 2, 1)
    early = 3 - late
    waiting = world.begin(early, "x", {late: np.ones(9, np.uint8)}, {})
    world.break_link(late, early)
    with pytest.raises(PeerLostError, match=f"lost rank {late}"):
        waiting()
    with pytest.raises(PeerLostError, match=f"^rank {early}: .* lost rank {late}"):
        world.exchange(late, "x", {}, {early: np.zeros(9, np.uint8)}, timeout=3600)
    # The tag is free again, once each has heard from the other.
    until(lambda: not world.mesh(early)._peer(late).given_up_here)
    world.pair("x", 1, 2, 9)
    world.pair("x", 2, 1, 9)


def test_a_failure_is_reported_as_soon_as_there_is_a_connection(world: DataWorld) -> None:
    for early, late in ((1, 2), (2, 0)):
        with pytest.raises(CheckpointTimeoutError, match=f"not connected with rank {late} within"):
            world.exchange(early, "x", {}, {late: np.zeros(9, np.uint8)}, timeout=0.3)
        with pytest.raises(CheckpointTimeoutError, match=f"^rank {early}: "):
            world.exchange(late, "x", {early: np.zeros(9, np.uint8)}, {}, timeout=3600)
        world.pair("x", early, late, 9)


def test_a_rank_that_has_left_is_lost(world: DataWorld) -> None:
    """Whether it was connected or not, and whichever side has to dial."""
    world.pair("connect", 1, 2, 1)
    array = np.zeros(9, np.uint8)
    waiting = [world.begin(1, "never", {}, {2: array}), world.begin(0, "never", {2: array}, {})]
    world.meshes[2].leave()
    world.stars[2].leave()
    for wait in waiting:
        with pytest.raises(PeerLostError, match="lost rank 2"):
            wait()
    for rank in (0, 1):
        with pytest.raises(PeerLostError, match="lost rank 2"):
            world.exchange(rank, "later", {}, {2: np.zeros(9, np.uint8)}, timeout=3600)
    with pytest.raises(PeerLostError, match="closed"):
        world.exchange(2, "own", {1: np.zeros(9, np.uint8)}, {}, timeout=3600)
    world.pair("afterwards", 0, 1, 9)


def test_leaving_ends_what_is_under_way(world: DataWorld) -> None:
    waiting = world.begin(1, "never", {}, {2: np.zeros(9, np.uint8)})
    world.meshes[1].leave()
    with pytest.raises(PeerLostError, match="rank 1: exchange 'never': this world was closed"):
        waiting()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exchange_whose_data_thread_died_is_an_error(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the end of the thread could not fail the exchange: its array was never filled."""
    monkeypatch.setattr(world.mesh(1), "_on_end", lambda reason: None)
    waiting = world.start(1, "never", {}, {2: np.zeros(9, np.uint8)}, timeout=2)
    until(lambda: world.meshes[1]._operations)
    world.meshes[1]._call_soon(sys.exit)
    with pytest.raises(
        PeerLostError, match="rank 1: exchange 'never': the thread bytecheckpoint-data failed: SystemExit"
    ):
        waiting()


def test_a_rank_that_cannot_be_dialled_is_named_with_the_reason(
    world: DataWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = free_port()
    monkeypatch.setitem(world.stars[0]._places, 1, Place(nobody))
    inviting = world.start(1, "x", {2: np.zeros(9, np.uint8)}, {}, timeout=2)
    operation = Operation("load", "/x")
    with (
        operation.running(),
        pytest.raises(
            CheckpointTimeoutError,
            match=rf"not connected with rank 1 \(127\.0\.0\.1 port {nobody}: Connection refused\).* look for .* a firewall",
        ),
    ):
        world.exchange(2, "x", {}, {1: np.zeros(9, np.uint8)}, timeout=1.5)
    assert operation.retries >= 1 and operation.retry_seconds == 0.5 * operation.retries
    with pytest.raises(CheckpointTimeoutError, match="not all bytes went to rank 2, not connected"):
        inviting()


def test_a_machine_that_is_gone_without_a_word(world: DataWorld) -> None:
    """Its connections look alive while nobody answers; the messages report the loss."""
    for rank in range(3):
        world.mesh(rank).linger = 0.5
    world.pair("connect", 1, 2, 1)
    world.pair("connect to 0", 0, 1, 1)
    waiting = world.begin(1, "gone", {}, {2: np.zeros(9, np.uint8)})
    world.stars[1].inbox.mark_lost(2, "its machine lost power")
    with pytest.raises(PeerLostError, match="lost rank 2: its machine lost power"):
        waiting()
    waiting = world.begin(1, "gone too", {}, {0: np.zeros(9, np.uint8)})
    world.stars[1].inbox.close("rank 0 lost power")
    with pytest.raises(PeerLostError, match="lost rank 0: rank 0 lost power"):
        waiting()


def test_exchanges_between_connected_ranks_outlive_rank_0(world: DataWorld, hold: Hold) -> None:
    world.pair("connect", 1, 2, 1)
    hold(world.link(1, 2), 8 * MIB)
    got = np.zeros(40 * MIB, np.uint8)
    receiving = world.start(2, "held", {}, {1: got})
    sending = world.start(1, "held", {2: content(1, 2, got.size)}, {})
    assert hold.reached.wait(30)
    world.stars[0].leave()
    assert world.stars[0].join(20)
    hold.release.set()
    sending()
    receiving()
    np.testing.assert_array_equal(got, content(1, 2, got.size))


def test_an_interrupted_exchange_is_over(world: DataWorld) -> None:
    world.pair("connect", 1, 2, 1)
    waiting = world.start(2, "x", {}, {1: np.zeros(9, np.uint8)}, timeout=3600)
    got = np.zeros(9, np.uint8)
    # A shell gives its background jobs an ignored SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.exchange(1, "x", {}, {2: got}, timeout=3600)
    finally:
        signal.signal(signal.SIGINT, handler)
    with pytest.raises(CheckpointError, match=r"^rank 1: .* was interrupted"):
        waiting()
    world.pair("afterwards", 2, 1, 9)


@pytest.mark.parametrize("early", [True, False])
def test_a_token_ends_an_exchange_on_both_sides(world: DataWorld, early: bool) -> None:
    cancel, failure = Cancellation(), Failure("StorageError", "no permission", rank=2, stage="write")
    if early:
        cancel.set(failure)
    else:
        threading.Timer(0.3, cancel.set, [failure]).start()
    incoming = {1: np.zeros(4, np.uint8)}
    with pytest.raises(StorageError, match="rank 2, write: no permission"):
        world.mesh(0).exchange("token", {1: content(0, 1, 4)}, incoming, timeout=60, cancel=cancel)
    with pytest.raises(StorageError, match="no permission"):  # rank 1 comes later
        world.mesh(1).exchange("token", {0: content(1, 0, 4)}, {0: np.zeros(4, np.uint8)}, timeout=60)


def test_an_address_that_means_another_machine_elsewhere(world: DataWorld) -> None:
    """A rank that has reached rank 0 over a loopback address is where rank 0 is."""
    world.stars[2].hub_address = "127.0.0.3"
    world.pair("x", 1, 2, 9)
    assert world.meshes[2]._peer(1).dialling.address == ("127.0.0.3", world.stars[1].data_port)
    place = msgspec.msgpack.encode(Place(5, host="10.11.12.13"))
    world.meshes[2].on_message(0, place)
    world.pair("y", 1, 2, 9)
    assert world.meshes[2]._peer(0).dialling.address == ("10.11.12.13", 5)


# ---- unauthenticated connections ----


@tuned(handshake_timeout=1.0)
def test_connections_of_others_are_closed(world: DataWorld) -> None:
    secret_array = np.full(9, 42, np.uint8)
    offering = world.start(1, "x", {2: secret_array}, {})
    port = world.mesh(1)._star.data_port
    want = frame(Kind.WANT, 2, 1, b"x", (0).to_bytes(8, "little") + (9).to_bytes(8, "little"))
    hello = frame(Kind.HELLO, 2, 1, b"", b"n" * 32)
    greetings = [
        hello + frame(Kind.PROOF, 2, 1, b"", b"p" * 32) + want,  # does not know the secret
        frame(Kind.PROOF, 2, 1, b"", b"p" * 32) + want,
        hello + hello,
        hello + want,
        frame(Kind.HELLO, 2, 1, b"", b"n"),
        frame(Kind.HELLO, 2, 0, b"", b"n" * 32) + want,  # looks for another rank
        frame(Kind.CHALLENGE, 2, 1, b"", b"c" * 64) + want,  # an answer, though nobody has dialled
        want,
        frame(Kind.HELLO, 2, 1, b"", b"x" * MIB),  # would have us read a lot
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"",  # says nothing
    ]
    intruders = [socket.create_connection(("localhost", port)) for _ in greetings]
    for intruder, greeting in zip(intruders, greetings, strict=True):
        intruder.settimeout(10)
        try:
            intruder.sendall(greeting)
            if greeting.startswith(hello):
                read_frame(intruder)  # the challenge, which shows nothing
            assert intruder.recv(100) == b"", greeting[:60]
        except ConnectionError:
            pass
        intruder.close()
    for rank, to, purpose in ((3, 1, "data"), (1, 1, "data"), (2, 1, "messages"), (2, 0, "data")):
        with (
            socket.create_connection(("localhost", port)) as intruder,
            contextlib.suppress(OSError, EOFError),
        ):  # as soon as it sees that the other side is not whom it looks for
            greet(intruder, f"bytecheckpoint-{purpose}", rank, to)
            assert intruder.recv(100) == b""
    got = np.zeros(9, np.uint8)
    world.exchange(2, "x", {}, {1: got})
    offering()
    assert (got == secret_array).all()
    assert len(world.meshes[1]._open) == 1
