"""A machine that vanishes without a word, and one that only reads nothing; this file is also the program of each rank."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

import bytecheckpoint
from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.link import _keepalive
from bytecheckpoint.collectives.transport.spoke import Spoke
from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.settings import Settings
from tests.collectives.data_world import MIB, SECRET
from tests.support.namespaces import cut_cable, inside, machines, mend_cable, two_machines
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
            assert 1 <= float(hub.stdout.readline()) < 40  # 2 s by the kernel's clock, which is coarser than ours
            assert hub.wait(30) == 0
        finally:
            for process in (hub, spoke):
                process.kill()
                process.wait()


def test_a_machine_that_comes_back_in_time_continues() -> None:
    """What was under way arrives, and the waits go on."""
    with two_machines() as (first, second):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        hub = subprocess.Popen([*inside(first), *python(__file__, "60")], env=environment(), text=True, **pipes)
        assert hub.stdin is not None and hub.stdout is not None
        port = hub.stdout.readline().strip()
        spoke = subprocess.Popen([*inside(second), *python(__file__, "60", port)], env=environment())
        try:
            assert hub.stdout.readline() == "connected\n"
            cut_cable(second)
            hub.stdin.write("go on\n")
            hub.stdin.flush()
            time.sleep(6)
            assert hub.poll() is None
            mend_cable(second)
            assert hub.stdout.readline() == f"answered {MIB}\n"
            assert hub.wait(30) == 0
        finally:
            for process in (hub, spoke):
                process.kill()
                process.wait()


def test_a_machine_may_be_away_for_a_minute_by_default() -> None:
    """As TCP and NCCL survive it; probes of an idle connection take as long."""
    assert Settings().transport.peer_timeout >= 120
    for timeout in (0.5, 18, 120, 3600, 1e9):
        options = _keepalive(timeout)
        whole = options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
        assert min(timeout, 127 * 32767) <= whole < 1.2 * timeout + 20


def test_a_rank_that_reads_nothing_for_a_while_is_not_lost() -> None:
    from tests.support.settings import using  # imports torch, which the ranks need not do

    hub, spoke = Hub(2, Inbox(0), SECRET, 5.0), Spoke(1, 2, Inbox(1), SECRET, 5.0)
    with using(peer_timeout=0.5):
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
    bytecheckpoint.configure(peer_timeout=float(unanswered))
    if port:
        spoke = Spoke(1, 2, Inbox(1), SECRET, 0.5)
        spoke.connect(["10.99.9.1"], int(port), 30)
        length = len(spoke.inbox.take([0], "into the void", timeout=600)[0])
        spoke.send(0, "answer", str(length).encode())
        time.sleep(600)
    inbox = Inbox(0)
    hub = Hub(2, inbox, SECRET, 0.5)
    print(hub.port, flush=True)
    hub.wait_ready(60)
    print("connected", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    hub.send(1, "into the void", b"x" * MIB)
    if float(unanswered) > 10:
        print("answered", inbox.take([1], "answer", timeout=3600)[0].decode(), flush=True)
        return
    with pytest.raises(PeerLostError, match="lost rank 1"):
        inbox.take([1], "never", timeout=3600)
    print(time.monotonic() - begun, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
