"""Messages between processes, with both ends of each connection in this process."""

from __future__ import annotations

import errno
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.sockets import is_loopback, local_addresses
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.collectives.transport.star import PLACE, PLACES, Star
from bytecheckpoint.collectives.transport.wire import Kind
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, UsageError
from bytecheckpoint.tuning import tuned
from tests.collectives.data_world import MIB, SECRET, frame, greet
from tests.servers.process import free_port
from tests.support.certificates import certificates
from tests.support.processes import wait_until
from tests.support.settings import using
from tests.support.system_calls import failing


def hub(size: int, linger: float = 5.0) -> Hub:
    return Hub(size, Inbox(0), SECRET, linger)


def spoke(rank: int, size: int) -> Spoke:
    return Spoke(rank, size, Inbox(rank), SECRET, 5.0)


@pytest.fixture
def star() -> Iterator[tuple[Star, Star, Star]]:
    center, one, two = hub(3), spoke(1, 3), spoke(2, 3)
    # Unauthenticated: one sends nothing, one speaks another protocol, one claims to be rank 1 without the secret.
    unauthenticated = [socket.create_connection(("localhost", center.port)) for _ in range(3)]
    unauthenticated[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    unauthenticated[2].sendall(frame(Kind.HELLO, 1, payload=b"x" * 32) + frame(Kind.PROOF, 1, payload=b"x" * 32))
    joining = threading.Thread(target=one.connect, args=(["localhost"], center.port, 10))
    joining.start()
    two.connect(["localhost"], center.port, 10)
    center.wait_ready(10)
    joining.join()
    yield center, one, two
    for wire in (center, one, two):
        wire.leave()
    assert all(wire.join(10) for wire in (center, one, two))
    for connection in unauthenticated:
        connection.close()


def test_what_was_sent_before_leaving_arrives(star: tuple[Star, ...]) -> None:
    """Rank 2 leaves right after sending, and then rank 0 does."""
    star[2].send(0, "last", b"r" * (16 * MIB))
    star[2].leave()
    assert len(star[0].inbox.take([2], "last", timeout=10)[0]) == 16 * MIB
    star[0].send(1, "last", b"l" * (16 * MIB))
    star[0].leave()
    assert star[0].join(10)
    assert len(star[1].inbox.take([0], "last", timeout=10)[0]) == 16 * MIB
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        star[1].inbox.take([0], "more", timeout=60)
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        star[1].send(0, "more", b"")


def test_a_wait_for_a_rank_that_left_fails(star: tuple[Star, ...]) -> None:
    star[1].watch(2)
    star[2].leave()
    for rank in (0, 1):
        with pytest.raises(PeerLostError, match="lost rank 2"):
            star[rank].inbox.take([2], "never", timeout=60)
    star[0].send(2, "to nobody", b"dropped")
    star[1].send(0, "still", b"works")
    assert star[0].inbox.take([1], "still", timeout=10) == [b"works"]


def test_ranks_that_do_not_connect_are_named() -> None:
    center = hub(3)
    with pytest.raises(CheckpointTimeoutError, match=r"ranks \[1, 2\] of 3"):
        center.wait_ready(0.1)
    assert center.join(10)


def test_rank_0_that_cannot_be_reached_is_an_error_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="cannot reach rank 0"):
        spoke(1, 2).connect(["localhost"], free_port(), 0.5)
    assert time.monotonic() - started < 30


def test_addresses_follow_the_route_to_the_master() -> None:
    assert local_addresses("127.0.0.1")[0] == "127.0.0.1"
    assert local_addresses(None) == local_addresses("no such host.invalid")
    assert local_addresses(None)[0] == socket.gethostname()


def test_the_addresses_of_all_interfaces_are_offered() -> None:
    """Without MASTER_ADDR another machine may not know this one's name."""
    up = [name for name, found in psutil.net_if_stats().items() if found.isup]
    first = [
        next((a.address for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET), None)
        for name in up
    ]
    expected = {address for address in first if address and not address.startswith("127.")}
    offered = local_addresses(None)[1:]
    assert expected <= set(offered)
    assert not any(is_loopback(address) or address.startswith("fe80") for address in offered)
    assert all(":" in later for address, later in pairwise(offered) if ":" in address), "IPv4 first"
    for address in offered:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], 5).close()


def test_an_unknown_name_of_rank_0_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host.invalid")
    addresses = local_addresses(None)
    if len(addresses) == 1:
        pytest.skip("this machine has no interface but loopback")
    center = hub(2)
    outer = spoke(1, 2)
    outer.connect(addresses, center.port, 20)
    assert not is_loopback(outer.hub_address)
    for loop in (outer, center):
        loop.leave()
    assert outer.join(10) and center.join(10)


def test_ranks_listen_where_the_settings_say() -> None:
    first = free_port()
    with using(listen_address="127.0.0.1", listen_ports=f"{first}-{first + 3}"):
        center, outer = hub(2), spoke(1, 2)
        assert {center.port, center.data_port, outer.data_port} <= set(range(first, first + 4))
        assert local_addresses("elsewhere.invalid") == ["127.0.0.1"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", center.port), 5)
        other = spoke(2, 3)  # takes the last port
        with pytest.raises(UsageError, match=rf"listen_ports is '{first}-{first + 3}': no port of these is free"):
            spoke(2, 3)
        outer.connect(local_addresses(None), center.port, 10)
    other._release()
    for loop in (outer, center):
        loop.leave()
        assert loop.join(10)
    with (
        using(listen_address="203.0.113.7"),
        pytest.raises(UsageError, match=r"listen_address is '203\.0\.113\.7': not of this machine"),
    ):
        hub(2)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ranks_that_listen_at_an_ipv6_address_only() -> None:
    with using(listen_address="::1"):
        center, outer = hub(2), spoke(1, 2)
        outer.connect(["::1"], center.port, 10)
        assert outer.hub_address == "::1"
        outer.locate(0)
        place = PLACES.decode(outer.inbox.take([0], PLACE, timeout=10)[0])
        assert (place.host, place.data) == ("::1", center.data_port)
    for loop in (outer, center):
        loop.leave()
        assert loop.join(10)


@tuned(handshake_timeout=1.0)
def test_certificates_of_others_are_refused(tmp_path: Path) -> None:
    """Those of another authority, a rank without any, and one that has some where rank 0 has none."""
    ours, theirs = (certificates(tmp_path / name) for name in ("ours", "theirs"))
    before = "before the ranks had greeted each other"
    cut = f"{before}|somebody was reached who does not answer"  # the last one, if an attempt is under way at the end
    for of_rank_0, of_rank_1, why in (
        (ours, theirs, rf"{before} \(.*CERTIFICATE_VERIFY_FAILED"),
        (ours, {}, cut),
        ({}, ours, cut),
    ):
        with using(**of_rank_0):
            center = hub(2)
        with using(**of_rank_1), pytest.raises((PeerLostError, CheckpointTimeoutError), match=why):
            spoke(1, 2).connect(["localhost"], center.port, 3)
        assert not center.below
        center.leave()
        assert center.join(10)


@tuned(strangers=5)
def test_half_open_connections_use_up_nothing() -> None:
    """As a scan of ports makes them. A rank that comes later is not kept out."""
    center = hub(2)
    half_open = [socket.create_connection(("localhost", center.port)) for _ in range(50)]
    for connection in half_open:
        connection.sendall(frame(Kind.HELLO, 1, payload=b"x" * 32)[:9])
    assert wait_until(lambda: len(select.select(half_open, [], [], 0)[0]) == 45, 20), "the oldest are closed"
    other = spoke(1, 2)
    other.connect(["localhost"], center.port, 20)
    center.wait_ready(20)
    for each in (other, center):
        each.leave()
    assert center.join(10)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    for wrong in ({"tls_key": "/nowhere"}, {"tls_authority": files["tls_key"]}, {"tls_key": files["tls_authority"]}):
        with using(**files | wrong), pytest.raises(UsageError, match=r"tls_certificate is .* cannot be used"):
            hub(2)


def test_a_denied_socket_pair_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "socketpair", errno.EPERM, owner=socket)
    with pytest.raises(CheckpointError, match=r"rank 1: cannot open a socket pair.*not permitted"):
        spoke(1, 2)


def test_importing_collectives_does_not_import_torch() -> None:
    program = (
        "import sys; sys.argv[0] = 'bytecheckpoint'\n"
        "import bytecheckpoint.collectives as c; c.current(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_leaving_waits_no_longer_than_linger_for_a_hung_rank() -> None:
    center = hub(2, linger=0.3)
    with socket.create_connection(("localhost", center.port)) as hung:
        greet(hung, "bytecheckpoint-messages", 1)
        center.wait_ready(10)
        center.send(1, "large", b"x" * (32 * MIB))
        center.leave()
        assert center.join(5)
