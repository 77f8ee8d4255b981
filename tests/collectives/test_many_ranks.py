"""Worlds of thousands of ranks: rank 0 is real, the others speak its protocol; this file is also their program."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport import star
from bytecheckpoint.collectives.transport.sockets import listen, reserve_descriptors
from bytecheckpoint.collectives.transport.star import Hub
from bytecheckpoint.errors import PeerLostError, UsageError

SECRET = b"s" * 32
RANKS = 2000


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """An ordinary soft limit, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = len(os.listdir("/proc/self/fd")) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield soft
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_two_thousand_ranks(soft_limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < RANKS + 500:
        pytest.skip(f"needs {RANKS + 500} descriptors, and the hard limit here is {hard}")
    inbox = Inbox(0)
    hub = Hub(RANKS, inbox, SECRET, 10.0)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > RANKS + soft_limit - 1
    seconds: dict[str, float] = {}
    others = subprocess.Popen(
        [sys.executable, __file__, str(hub.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert others.stdin is not None
    assert others.stdout is not None

    def step(name: str) -> None:
        nonlocal started
        assert others.stdout is not None
        assert others.stdout.readline() == f"{name}\n"
        seconds[name] = time.monotonic() - started
        started = time.monotonic()

    try:
        assert others.stdout.readline() == "ready\n"
        started = time.monotonic()
        others.stdin.write("go\n")
        others.stdin.flush()
        hub.wait_ready(60)
        step("connected")
        gathered = inbox.take(range(1, RANKS), "gather", timeout=60)
        assert gathered == [b"%d" % rank * 40 for rank in range(1, RANKS)]
        step("gathered")
        for rank in range(1, RANKS):
            hub.send(rank, "scatter", b"%d" % -rank)
        step("scattered")
        # The last rank is cut off: whoever waits for it learns that, and nobody else is disturbed.
        with pytest.raises(PeerLostError, match=f"lost rank {RANKS - 1}"):
            inbox.take(range(1, RANKS), "never", timeout=60)
        hub.leave()
        assert hub.join(30)
        step("left")
        assert others.wait(30) == 0
    finally:
        others.kill()
        others.wait()
        hub.leave()
    print({name: round(value, 3) for name, value in seconds.items()})
    # Measured: 0.1 to 0.3 s each. Anything quadratic in the number of ranks takes minutes.
    assert all(value < 10 for value in seconds.values()), seconds


def test_too_low_a_hard_limit_says_what_to_do(soft_limit: int) -> None:
    with mock.patch.object(resource, "getrlimit", return_value=(soft_limit, 4096)):
        reserve_descriptors(10, "somebody")
        with pytest.raises(
            UsageError, match=r"rank 0 of a world of 9000 needs .* hard limit .* is 4096: raise it to 9\d"
        ):
            Hub(9000, Inbox(0), SECRET, 1.0)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit


def test_a_raised_limit_leaves_the_program_its_room(soft_limit: int) -> None:
    reserve_descriptors(200, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit
    reserve_descriptors(290, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit + 290


class Scarce(socket.socket):
    """A listener of a process that has no descriptors left for a while."""

    refusals = 3
    calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        Scarce.calls += 1
        if Scarce.calls <= Scarce.refusals:
            raise OSError(24, "Too many open files")
        return super().accept()


def test_descriptors_that_run_out_while_accepting_delay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pause the thread would turn as fast as it can, and with an error the world would be lost."""
    monkeypatch.setattr(star, "listen", lambda backlog: Scarce(fileno=listen(backlog).detach()))
    hub = Hub(2, Inbox(0), SECRET, 1.0)
    with socket.create_connection(("localhost", hub.port)) as one:
        one.sendall(bytes([1, 1]) + bytes(11) + b"\x20" + bytes(7) + SECRET)
        hub.wait_ready(20)
        assert 4 <= Scarce.calls <= 6
        hub.leave()
        one.shutdown(socket.SHUT_WR)
        assert hub.join(10)


# ---- the other ranks ----


def others() -> None:
    from bytecheckpoint.collectives.transport.wire import _HEADER, Kind

    port = int(sys.argv[1])
    reserve_descriptors(RANKS, "the test")

    def frame(kind: Kind, rank: int, tag: bytes = b"", payload: bytes = b"") -> bytes:
        return _HEADER.pack(kind, rank, 0, len(tag), len(payload)) + tag + payload

    def read(sock: socket.socket) -> tuple[int, bytes, bytes]:
        kind, _, _, tag, payload = _HEADER.unpack(sock.recv(_HEADER.size, socket.MSG_WAITALL))
        return kind, *(sock.recv(size, socket.MSG_WAITALL) if size else b"" for size in (tag, payload))  # type: ignore[return-value]

    def say(word: str) -> None:
        print(word, flush=True)

    say("ready")
    sys.stdin.readline()
    socks: dict[int, socket.socket] = {}
    for rank in range(1, RANKS):
        socks[rank] = socket.create_connection(("127.0.0.1", port))
        socks[rank].sendall(frame(Kind.HELLO, rank, payload=SECRET))
    for sock in socks.values():
        assert read(sock) == (Kind.WELCOME, b"", SECRET)
    say("connected")
    for rank, sock in socks.items():
        sock.sendall(frame(Kind.MESSAGE, rank, b"gather", b"%d" % rank * 40))
    say("gathered")
    for rank, sock in socks.items():
        assert read(sock) == (Kind.MESSAGE, b"scatter", b"%d" % -rank)
    say("scattered")
    socks.pop(RANKS - 1).close()
    for rank, sock in socks.items():
        assert read(sock)[0] == Kind.CLOSING
        sock.sendall(frame(Kind.BYE, rank))
    for sock in socks.values():
        assert sock.recv(1) == b""
        sock.close()
    say("left")


if __name__ == "__main__":
    others()
