"""A machine that vanishes without a word, and one that only reads nothing; this file is also the program of each rank."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.tuning import tuned
from tests.collectives.data_world import MIB, SECRET
from tests.support.namespaces import cut_cable, inside, machines, two_machines
from tests.support.processes import environment, python


def test_a_machine_with_ipv6_only() -> None:
    """Its ranks reach each other: it has no 127.0.0.1."""
    code = "from bytecheckpoint.collectives.transport.sockets import loopback; print(loopback())"
    with machines(1) as (name,):
        for expected in ("127.0.0.1", "::1"):
            found = subprocess.run(
                [*inside(name), *python("-c", code)], env=environment(), check=True, capture_output=True, text=True
            )
            assert found.stdout.strip() == expected
            subprocess.run([*inside(name), "ip", "addr", "flush", "dev", "lo", "to", "127.0.0.1"], check=True)


def test_a_machine_that_vanishes_while_data_are_under_way() -> None:
    """The kernel would send again for a quarter of an hour, and sends no keepalive probes meanwhile."""
    with two_machines() as (first, second):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        hub = subprocess.Popen([*inside(first), *python(__file__, "2")], env=environment(), text=True, **pipes)
        assert hub.stdin is not None and hub.stdout is not None
        port = hub.stdout.readline().strip()
        spoke = subprocess.Popen([*inside(second), *python(__file__, "2", port)], env=environment())
        try:
            assert hub.stdout.readline() == "connected\n"
            cut_cable(second)
            hub.stdin.write("go on\n")
            hub.stdin.flush()
            assert 2 <= float(hub.stdout.readline()) < 40
            assert hub.wait(30) == 0
        finally:
            for process in (hub, spoke):
                process.kill()
                process.wait()


def test_a_rank_that_reads_nothing_for_a_while_is_not_lost() -> None:
    hub, spoke = Hub(2, Inbox(0), SECRET, 5.0), Spoke(1, 2, Inbox(1), SECRET, 5.0)
    with tuned(unanswered_timeout=0.5):
        spoke.connect(["localhost"], hub.port, 10)
        release = threading.Event()
        spoke._call_soon(lambda: release.wait(30) and None)
        hub.send(1, "large", b"x" * (64 * MIB))
        time.sleep(2.0)
        release.set()
        assert len(spoke.inbox.take([0], "large", timeout=30)[0]) == 64 * MIB
    for loop in (spoke, hub):
        loop.leave()
        assert loop.join(20)


def main(unanswered: str, port: str = "") -> None:
    with tuned(unanswered_timeout=float(unanswered)):
        if port:
            Spoke(1, 2, Inbox(1), SECRET, 0.5).connect(["10.99.9.1"], int(port), 30)
            time.sleep(600)
        inbox = Inbox(0)
        hub = Hub(2, inbox, SECRET, 0.5)
        print(hub.port, flush=True)
        hub.wait_ready(60)
        print("connected", flush=True)
        sys.stdin.readline()
        begun = time.monotonic()
        hub.send(1, "into the void", b"x" * MIB)
        with pytest.raises(PeerLostError, match="lost rank 1"):
            inbox.take([1], "never", timeout=3600)
        print(time.monotonic() - begun, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
