"""A rank 0 that serves thousands of ranks; one other process, which this file is too, speaks for all others."""

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
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.sockets import listen, reserve_descriptors
from bytecheckpoint.collectives.transport.wire import Kind
from bytecheckpoint.errors import PeerLostError, UsageError
from tests.collectives.data_world import SECRET, frame, greet, read_frame
from tests.support.processes import environment
from tests.support.programs import forked

RANKS = 2000


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """Set the soft limit of descriptors to that of an ordinary system; yield it, and restore the old one."""
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
    command = forked(__file__, hub.port)
    others = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert others.stdin is not None
    assert others.stdout is not None

    def end_step(name: str) -> None:
        """Note how long the ranks took to report `name`."""
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
        end_step("connected")
        gathered = inbox.take(range(1, RANKS), "gather", timeout=60)
        assert gathered == [b"%d" % rank * 40 for rank in range(1, RANKS)]
        end_step("gathered")
        for rank in range(1, RANKS):
            hub.send(rank, "scatter", b"%d" % -rank)
        end_step("scattered")
        # The last rank closes its connection: a wait for it fails, and the other ranks stay connected.
        with pytest.raises(PeerLostError, match=f"lost rank {RANKS - 1}"):
            inbox.take(range(1, RANKS), "never", timeout=60)
        hub.leave()
        assert hub.join(30)
        end_step("left")
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


def test_a_limit_is_raised_only_if_too_few_descriptors_are_free(soft_limit: int) -> None:
    reserve_descriptors(200, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit
    reserve_descriptors(290, "somebody")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft_limit + 290


class Scarce(socket.socket):
    """A listener whose first calls of `accept` find no free descriptor."""

    refusals = 3
    calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        Scarce.calls += 1
        if Scarce.calls <= Scarce.refusals:
            raise OSError(24, "Too many open files")
        return super().accept()


def test_a_lack_of_descriptors_delays_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits before it tries again, and the world goes on."""
    monkeypatch.setattr(
        "bytecheckpoint.collectives.transport.hub.listen", lambda backlog: Scarce(fileno=listen(backlog).detach())
    )
    hub = Hub(2, Inbox(0), SECRET, 1.0)
    with socket.create_connection(("localhost", hub.port)) as one:
        greet(one, "bytecheckpoint-messages", 1)
        hub.wait_ready(20)
        assert 4 <= Scarce.calls <= 6
        hub.leave()
        one.shutdown(socket.SHUT_WR)
        assert hub.join(10)


# ---- the other ranks ----


def report(word: str) -> None:
    """Tell the test that a step is done."""
    print(word, flush=True)


def speak_for_others() -> None:
    """Go through the life of a world as all ranks but rank 0."""
    port = int(sys.argv[1])
    reserve_descriptors(RANKS, "the test")
    report("ready")
    sys.stdin.readline()
    socks: dict[int, socket.socket] = {}
    for rank in range(1, RANKS):
        socks[rank] = socket.create_connection(("127.0.0.1", port))
        greet(socks[rank], "bytecheckpoint-messages", rank)
    for sock in socks.values():
        assert read_frame(sock)[0] == Kind.WELCOME
    report("connected")
    for rank, sock in socks.items():
        sock.sendall(frame(Kind.MESSAGE, rank, 0, b"gather", b"%d" % rank * 40))
    report("gathered")
    for rank, sock in socks.items():
        assert read_frame(sock) == (Kind.MESSAGE, 0, rank, b"%d" % -rank)
    report("scattered")
    socks.pop(RANKS - 1).close()
    for rank, sock in socks.items():
        assert read_frame(sock)[0] == Kind.CLOSING
        sock.sendall(frame(Kind.BYE, rank))
    for sock in socks.values():
        assert sock.recv(1) == b""
        sock.close()
    report("left")


if __name__ == "__main__":
    speak_for_others()
