"""Messages that no rank sends: they end the connection that carries them, with a line in the log, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from bytecheckpoint.collectives.inbox import ASK, Inbox
from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.collectives.transport.star import PLACE
from bytecheckpoint.collectives.transport.wire import _HEADER, ANYBODY, Kind
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.failures import Failure
from bytecheckpoint.tuning import tuned
from tests.collectives.data_world import SECRET, DataWorld, frame, greet, read_frame, until
from tests.support.settings import using

DEEP = b"\x91" * 100_000
PAIR = struct.pack("<QQ", 0, 9)
#: Frames of rank {rank} that are malformed wherever they come from: kind, offset of the source, destination, tag, payload.
MALFORMED = [
    (Kind.MESSAGE, 0, 0, b"\xff\xfe", b"x"),
    (Kind.MESSAGE, 1, 0, b"of another rank", b"x"),
    (Kind.MESSAGE, 0xFFFFFF, 0, b"of no rank", b"x"),
    (Kind.MESSAGE, 0, 0, PLACE.encode(), b"\xc1"),
    (Kind.MESSAGE, 0, 0, ASK.encode(), b"\xff"),
    (Kind.PACK, 0, 0, b"", b"\xc1"),
    (Kind.PACK, 0, 0, b"", b""),
    (Kind.PACK, 0, 0, b"", DEEP),
    (Kind.PACK, 0, 0, b"", msgspec.msgpack.encode([(b"t", b"x", [99999])])),
    (Kind.WATCH, 0, 0xFFFFFFF, b"", b""),
    (Kind.WHERE, 0, 77777, b"", b""),
    (Kind.LOST, 0, 0, b"", b"\xff\xff"),
    (Kind.HELLO, 0, 0, b"", b"n" * 32),
    (Kind.WELCOME, 0, 0, b"", b""),
    (Kind.REDIRECT, 0, 0, b"", DEEP),
    (Kind.DATA, 0, 0, b"x", b"x"),
]
DATA_MALFORMED = [
    (Kind.DATA, 0, 0, b"", b"x"),
    (Kind.WANT, 0, 0, b"x", b""),
    (Kind.WANT, 0, 0, b"\xff", PAIR),
    (Kind.FETCH, 0, 0, b"x", b"123"),
    (Kind.FETCH, 0, 0, b"\xff", PAIR),
    (Kind.FAILED, 0, 0, b"x", DEEP),
    (Kind.FAILED, 0, 0, b"\xff", Failure("StorageError", "m").encode()),
    (Kind.REFUSED, 0, 0, b"", Failure("StorageError", "m").encode()),
    (Kind.REFUSED, 0, 0, b"12345678", b"\xc1"),
]


def mutations(seed: int, count: int) -> Iterator[bytes]:
    """Draw frames with random items, and frames of which bytes are changed, cut off or repeated."""
    draw = random.Random(seed)
    for _ in range(count):
        kind, _, _, tag, payload = draw.choice(MALFORMED + DATA_MALFORMED)
        made = bytearray(
            _HEADER.pack(kind, draw.choice([1, 5, 10**9]), draw.choice([0, 2, ANYBODY]), len(tag), len(payload))
        )
        made += tag + payload[:5000]
        for _ in range(draw.randrange(4)):
            made[draw.randrange(len(made))] = draw.randrange(256)
        yield bytes(made[: draw.randrange(1, len(made) + 1)] * draw.choice([1, 1, 2]))


def ends(connection: socket.socket) -> bool:
    """Return whether the other side ends a connection within a while."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_malformed_messages_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Each rank but the last one sends something else; the last one and rank 0 are not disturbed."""
    size = len(MALFORMED) + 4
    hub = Hub(size, Inbox(0), SECRET, 1.0)
    last = Spoke(size - 1, size, Inbox(size - 1), SECRET, 1.0)
    senders = [socket.create_connection(("localhost", hub.port)) for _ in range(1, size - 1)]
    for rank, sender in enumerate(senders, 1):
        greet(sender, "bytecheckpoint-messages", rank)
    last.connect(["localhost"], hub.port, 30)
    hub.wait_ready(30)
    for rank, (sender, (kind, offset, to, tag, payload)) in enumerate(zip(senders, MALFORMED, strict=False), 1):
        sender.sendall(frame(kind, rank + offset, to, tag, payload))
        assert ends(sender), (kind, tag)
        assert f"ends the connection with rank {rank} at 127.0.0.1 port" in caplog.text or "::" in caplog.text, kind
    huge, most = senders[-2:]
    for sender, length in ((huge, 2**63), (most, 2**44)):  # a claim takes no memory
        sender.sendall(_HEADER.pack(Kind.MESSAGE, size - 3, 0, 1, length) + b"t")
        assert ends(sender)
    last.send(0, "x", b"still here")
    assert hub.inbox.take([size - 1], "x", timeout=20) == [b"still here"]
    with pytest.raises(PeerLostError, match="lost rank 1"):
        hub.inbox.take([1], "x", timeout=20)
    close(last, hub)


def test_malformed_messages_while_ranks_join() -> None:
    """A false claim of a rank keeps the true one out neither while it is connected nor afterwards."""
    hub = Hub(4, Inbox(0), SECRET, 1.0)
    liars = []
    for rank in (1, 2, 3):
        for kind, offset, to, tag, payload in MALFORMED[:4]:
            with socket.create_connection(("localhost", hub.port)) as liar:
                greet(liar, "bytecheckpoint-messages", rank)
                liar.sendall(frame(kind, rank + offset, to, tag, payload))
                assert ends(liar)
    for rank in (1, 2):
        liars.append(socket.create_connection(("localhost", hub.port)))
        greet(liars[-1], "bytecheckpoint-messages", rank)
    until(lambda: hub.below.keys() == {1, 2})
    spokes = [Spoke(rank, 4, Inbox(rank), SECRET, 1.0) for rank in (1, 2, 3)]
    with ThreadPoolExecutor(4) as pool:
        early = [pool.submit(spoke.connect, ["localhost"], hub.port, 30) for spoke in spokes[:2]]
        assert all(ends(liar) for liar in liars)
        late = socket.create_connection(("localhost", hub.port))  # comes after the true one, which comes back
        until(lambda: hub.below.keys() == {1, 2})
        greet(late, "bytecheckpoint-messages", 1)
        assert ends(late)
        early.append(pool.submit(spokes[2].connect, ["localhost"], hub.port, 30))
        for each in early:
            each.result(40)
    hub.wait_ready(30)
    for spoke in spokes:
        spoke.send(0, "x", b"%d" % spoke.rank)
    assert hub.inbox.take([1, 2, 3], "x", timeout=20) == [b"1", b"2", b"3"]
    close(*spokes, hub)


@pytest.mark.parametrize(
    ("kind", "to", "tag", "payload"),
    [
        *(
            (kind, 1, tag, payload)
            for kind, other, _, tag, payload in MALFORMED
            if not other and kind is not Kind.WELCOME
        ),
        (Kind.PLACE, 1, b"", b"\xc1"),
        (Kind.PLACE, 2, b"", msgspec.msgpack.encode((1, 2, "x"))),
        (Kind.LOST, 2, b"", b"reason"),
        (Kind.MESSAGE, 55, b"of another", b"x"),
    ],
)
def test_malformed_messages_of_rank_0(kind: Kind, to: int, tag: bytes, payload: bytes) -> None:
    """The rank ends the connection, and says that rank 0 is lost."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        spoke = Spoke(1, 3, Inbox(1), SECRET, 1.0)
        joining = pool.submit(spoke.connect, ["127.0.0.1"], server.getsockname()[1], 30)
        connection = accept_greeting(server)
        connection.sendall(frame(Kind.WELCOME, 0, 1))
        joining.result(30)
        connection.sendall(frame(kind, 2 if kind is Kind.LOST and to == 2 else 0, to, tag, payload))
        with pytest.raises(PeerLostError, match="rank 0"):
            spoke.inbox.take([0], "never", timeout=60)
    assert "failed:" not in str(spoke.inbox.closed)
    assert spoke.join(20)


def accept_greeting(server: socket.socket) -> socket.socket:
    """Accept a connection, and greet its rank as rank 0 does."""
    connection, _ = server.accept()
    greeting = Greeting("bytecheckpoint-messages", SECRET, 0)
    while not greeting.over:
        if (answer := greeting.answer(*read_frame(connection))) is not None:
            connection.sendall(frame(answer[0], 0, greeting.other, payload=answer[1]))
    return connection


def test_malformed_data_frames(world: DataWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.pair("before", 1, 2, 999)
    port = world.mesh(1)._star.data_port
    for kind, _, _, tag, payload in DATA_MALFORMED:
        with socket.create_connection(("localhost", port)) as sender:
            greet(sender, "bytecheckpoint-data", 0, 1)
            sender.sendall(frame(kind, 0, 1, tag, payload))
            assert ends(sender), kind
    assert caplog.text.count("ends the connection with rank 0") == len(DATA_MALFORMED)
    world.pair("after", 1, 2, 999)
    world.pair("to it", 0, 1, 999)


def test_a_failure_with_fields_that_are_none(world: DataWorld) -> None:
    """It fails its exchange, now or later."""
    for fields in ("{", "[]", "7", '{"file": 3, "tensors": "x"}', "[" * 100_000):
        failure = Failure("CorruptCheckpointError", "damaged", fields)
        assert "damaged" in str(Failure.decode(failure.encode()).as_error())


@pytest.mark.parametrize("seed", range(4))
def test_random_frames_with_the_secret(world: DataWorld, seed: int) -> None:
    for number, sent in enumerate(mutations(seed, 60)):
        purpose, port = ("bytecheckpoint-data", world.mesh(2)._star.data_port)
        with socket.create_connection(("localhost", port)) as sender, contextlib.suppress(ConnectionError):
            greet(sender, purpose, 0, 2)
            sender.sendall(sent)
        if number % 20 == 0:
            world.pair(f"pair {number}", 1, 2, 99)
    hub = Hub(3, Inbox(0), SECRET, 1.0)
    for sent in mutations(seed + 100, 60):
        with socket.create_connection(("localhost", hub.port)) as sender, contextlib.suppress(ConnectionError):
            greet(sender, "bytecheckpoint-messages", 1)
            sender.sendall(sent)
    spokes = [Spoke(rank, 3, Inbox(rank), SECRET, 1.0) for rank in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda spoke: spoke.connect(["localhost"], hub.port, 30), spokes))
    hub.wait_ready(30)
    close(*spokes, hub)


@tuned(strangers=16)
def test_a_flood_of_greetings_without_the_secret() -> None:
    """Ranks whose connection was closed to make room come back."""
    hub = Hub(6, Inbox(0), SECRET, 1.0)
    hub._most_strangers = 16
    over = threading.Event()

    def flood(seed: int) -> None:
        shapes = list(mutations(seed, 50))
        while not over.is_set():
            for sent in (frame(Kind.HELLO, seed % 5 + 1, ANYBODY, payload=b"n" * 32), *shapes[:3]):
                with contextlib.suppress(OSError), socket.create_connection(("localhost", hub.port), 5) as one:
                    one.sendall(sent)
                over.wait(0.02)  # the ranks share the processor with their attacker

    spokes = [Spoke(rank, 6, Inbox(rank), SECRET, 1.0) for rank in range(1, 6)]
    with ThreadPoolExecutor(12) as pool:
        floods = [pool.submit(flood, seed) for seed in range(6)]
        try:
            list(pool.map(lambda spoke: spoke.connect(["localhost"], hub.port, 60), spokes))
            hub.wait_ready(30)
        finally:
            over.set()
        for each in floods:
            each.result(30)
    close(*spokes, hub)


def test_addresses_that_accept_and_never_answer() -> None:
    """They are tried side by side with the right one."""
    with using(listen_address="127.0.0.1"), contextlib.ExitStack() as stack:
        hub, spoke = Hub(2, Inbox(0), SECRET, 1.0), Spoke(1, 2, Inbox(1), SECRET, 1.0)
        silent = [f"127.0.0.{number}" for number in (2, 3, 4)]
        for address in silent:
            stack.enter_context(socket.create_server((address, hub.port)))
        spoke.connect([*silent, "192.0.2.1", "127.0.0.1"], hub.port, 10)
        hub.wait_ready(10)
        assert spoke.hub_address == "127.0.0.1"
        other = Spoke(1, 2, Inbox(1), SECRET, 1.0)
        with pytest.raises(
            CheckpointError, match=r"not every rank connected .*: somebody was reached who does not answer"
        ):
            other.connect(silent, hub.port, 1)
    close(other, spoke, hub)


def close(*stars: Hub | Spoke) -> None:
    """End all ranks."""
    for star in stars:
        star.leave()
    assert all(star.join(20) for star in stars)
    assert not any("failed:" in str(star.inbox.closed) for star in stars)
