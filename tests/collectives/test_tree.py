"""Messages that pass through one rank of each machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.collectives.transport.wire import Kind
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError
from bytecheckpoint.tuning import tuned
from tests.collectives.data_world import SECRET, greet, until
from tests.support.socket_world import SocketWorld

MACHINES = [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.fixture
def world() -> Iterator[SocketWorld]:
    with SocketWorld(MACHINES, tree=True) as made:
        yield made


def hub_of(world: SocketWorld) -> Hub:
    star = world.ranks[0]._star
    assert isinstance(star, Hub)
    return star


def carrier(world: SocketWorld, rank: int) -> int:
    """Return the rank that passes on the messages of a rank."""
    return hub_of(world).below[rank].rank


def kill(world: SocketWorld, rank: int) -> None:
    """Cut all connections of a rank, as its death would: it can tell rank 0 nothing of the others any more."""
    star = world.ranks[rank]._star
    for link in sorted(star._open, key=lambda link: link is not getattr(star, "_up", None)):
        with contextlib.suppress(OSError):  # it has noticed already
            link.sock.shutdown(socket.SHUT_RDWR)


def test_rank_0_has_one_connection_for_each_other_machine(world: SocketWorld) -> None:
    hub = hub_of(world)
    assert [hub.below[rank].local for rank in (1, 2)] == [True, True]
    for machine in (1, 2):
        ranks = [rank for rank, of in enumerate(MACHINES) if of == machine]
        assert {carrier(world, rank) for rank in ranks} <= set(ranks)
        assert len({hub.below[rank] for rank in ranks}) == 1
    assert len(hub._open) == 4


def test_messages_of_one_machine_travel_together(world: SocketWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones are sent once; and those that no others join wait for a moment only."""
    hub, kinds, sizes = hub_of(world), list[Kind](), list[int]()
    original = hub._on_frame

    def count(link: object, kind: Kind, source: int, to: int, tag: bytes, payload: bytes) -> None:
        kinds.append(kind)
        sizes.append(len(payload))
        original(link, kind, source, to, tag, payload)  # type: ignore[arg-type]

    for rank in (3, 4):
        world.ranks[rank].send(0, "some", b"%d" % rank)
    assert world.ranks[0].collect((3, 4), "some", timeout=30) == [b"3", b"4"]
    monkeypatch.setattr(hub, "_on_frame", count)
    payload = b"p" * 10_000
    with tuned(pack_delay=60.0):
        got = world.run(lambda c: c.gather("all", payload, timeout=30))
    assert got[0] == [payload] * 9
    assert sorted(kinds) == [Kind.MESSAGE] * 2 + [Kind.PACK] * 2
    assert sum(sizes) < 4.1 * len(payload)


def test_a_lost_rank_is_named_at_once(world: SocketWorld) -> None:
    lost = next(rank for rank in (3, 4, 5) if rank != carrier(world, rank))
    others = [rank for rank in range(1, 9) if rank != lost]
    threading.Timer(0.3, kill, (world, lost)).start()

    def wait(c: Collective) -> None:
        if c.rank == 0:
            with pytest.raises(PeerLostError, match=f"lost rank {lost} while .*its connection closed without a word"):
                c.gather("never", b"", timeout=3600)
            assert c.collect(others, "never", timeout=30) == [b""] * 7  # its neighbours are there
        elif c.rank == lost:
            with pytest.raises(PeerLostError, match=r"rank \d.* was killed, crashed or was cut off"):
                c.recv(0, "never", timeout=3600)
        else:
            if c.rank == 8:
                with pytest.raises(PeerLostError, match=f"lost rank {lost}"):
                    c.recv(lost, "never", timeout=3600)
            c.gather("never", b"", timeout=3600)

    world.run(wait, timeout=60)


@tuned(outlook_timeout=0.1)
def test_a_carrier_that_may_hang_is_named(world: SocketWorld) -> None:
    first = carrier(world, 3)
    others = ", ".join(str(rank) for rank in (3, 4, 5) if rank != first)
    with pytest.raises(CheckpointTimeoutError, match=f"; rank {first} passes on the messages of ranks {others};"):
        world.ranks[0].collect((3, 4, 5), "never", timeout=0.2)


def test_the_death_of_a_carrier_loses_its_machine_by_name(world: SocketWorld) -> None:
    lost = carrier(world, 6)
    kill(world, lost)
    for rank in (6, 7, 8):
        why = "its connection closed" if rank == lost else f"rank {lost}, which passes its messages on, is gone"
        with pytest.raises(PeerLostError, match=f"lost rank {rank} while .*{why}"):
            world.ranks[0].recv(rank, "never", timeout=3600)
        if rank != lost:
            # Its thread goes on here, and may tell the others that it has no connection with rank 0.
            with pytest.raises(PeerLostError, match=f"(rank {lost}, which passes messages on,|rank 0) was killed"):
                world.ranks[rank].recv(0, "never", timeout=3600)
    with pytest.raises(PeerLostError, match="lost ranks 6, 7, 8 while waiting for 'never': rank 6: "):
        world.ranks[0].collect((6, 7, 8), "never", timeout=3600)
    world.ranks[4].send(0, "still", b"works")
    assert world.ranks[0].recv(4, "still", timeout=30) == b"works"


def test_the_death_of_rank_0_ends_all_waits(world: SocketWorld) -> None:
    kill(world, 0)
    for rank in range(1, 9):
        with pytest.raises(PeerLostError, match="rank 0 was killed, crashed or was cut off"):
            world.ranks[rank].recv(0, "never", timeout=3600)


@pytest.mark.parametrize("first", ["members", "carriers", "rank 0"])
def test_what_was_sent_before_leaving_arrives(world: SocketWorld, first: str) -> None:
    carriers = {carrier(world, rank) for rank in (3, 6)}
    order = sorted(
        range(9), key=lambda rank: {"members": rank in carriers, "carriers": rank not in carriers}.get(first, 0)
    )
    for rank in range(1, 9):
        world.ranks[rank].send(0, "up", b"%d" % rank * 100_000 if rank % 2 else b"%d" % rank)
    world.ranks[0].send_each("down", dict.fromkeys(range(1, 9), b"d" * 3_000_000))
    if first == "rank 0":
        world.ranks[0].close()
    else:
        until(lambda: all(world.ranks[0].inbox.has(rank, "up") for rank in range(1, 9)))
    for rank in order:
        if rank:
            assert world.ranks[rank].recv(0, "down", timeout=30) == b"d" * 3_000_000
        world.ranks[rank].close()
    assert all(loop.join(20) for each in world.ranks for loop in each._loops)


def test_machines_beyond_the_limit_connect_to_another_machine() -> None:
    machines = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    with tuned(direct_links=3), SocketWorld(machines, tree=True) as world:
        hub = hub_of(world)
        assert len({link for link in hub.below.values() if not link.local}) < 4
        assert len(hub.below) == 12
        got = world.run(lambda c: c.all_gather("all", b"%d" % c.rank, timeout=30))
        assert got == [[b"%d" % rank for rank in range(13)]] * 13
        far = next(rank for rank in range(2, 13) if machines[carrier(world, rank)] != machines[rank])
        kill(world, carrier(world, far))
        with pytest.raises(PeerLostError, match=f"lost rank {far}"):
            world.ranks[0].recv(far, "never", timeout=3600)


def test_a_machine_whose_carrier_does_not_answer() -> None:
    """Somebody listens under the name, and is no rank: an error in time."""
    hub = Hub(3, Inbox(0), b"s" * 32, 1.0, "bytecheckpoint-test-carrier")
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind("\0bytecheckpoint-test-elsewhere")
        nobody.listen()
        spoke = Spoke(1, 3, Inbox(1), b"s" * 32, 1.0)
        with pytest.raises(CheckpointTimeoutError, match="rank 1: not every rank connected"):
            spoke.connect(["localhost"], hub.port, 1.0, beside="bytecheckpoint-test-elsewhere")
    hub.leave()
    assert hub.join(10)


def test_a_second_peer_that_claims_a_connected_rank_harms_nobody() -> None:
    """It knows the secret, and dials the rank that passes on the messages of a machine."""
    hub = Hub(5, Inbox(0), SECRET, 1.0, "bytecheckpoint-test-m0")
    spokes = {rank: Spoke(rank, 5, Inbox(rank), SECRET, 1.0) for rank in range(1, 5)}

    def join(rank: int) -> threading.Thread:
        beside = "bytecheckpoint-test-m1" if rank < 3 else f"bytecheckpoint-test-m{rank}"
        joining = threading.Thread(
            target=spokes[rank].connect, args=(["localhost"], hub.port, 30.0), kwargs={"beside": beside}
        )
        joining.start()
        return joining

    joining = [join(1)]
    until(lambda: 1 in hub.below)
    joining += [join(2), join(3)]
    until(lambda: hub.below.keys() == {1, 2, 3})
    claimed = [2, 3]  # of this machine, and of another one
    for rank in claimed:
        with socket.create_connection(("localhost", spokes[1]._message_port)) as second:
            greet(second, "bytecheckpoint-messages", rank, 1)
            second.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                assert second.recv(1) == b""
    joining.append(join(4))
    hub.wait_ready(30)
    for rank, thread in enumerate(joining, start=1):
        thread.join(30)
        spokes[rank].send(0, "x", b"%d" % rank)
    assert hub.inbox.take(range(1, 5), "x", timeout=30) == [b"1", b"2", b"3", b"4"]
    for star in (*spokes.values(), hub):
        star.leave()
    assert all(star.join(10) for star in (*spokes.values(), hub))


def test_where_abstract_sockets_are_forbidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank speaks for itself, and rank 0 says so."""

    class Confined(socket.socket):
        def __init__(self, family: int = -1, kind: int = -1, protocol: int = -1, fileno: int | None = None) -> None:
            if family == socket.AF_UNIX and fileno is None:
                raise PermissionError(1, "Operation not permitted")
            super().__init__(family, kind, protocol, fileno)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Confined)
        with SocketWorld(MACHINES, tree=True) as world:
            assert len(hub_of(world)._open) == len(MACHINES) - 1
            world.run(lambda c: c.barrier("all", timeout=30))
    assert caplog.text.count("forbids abstract Unix sockets") == 1
