"""Copies out of the memory of another process: handshakes, permissions, segments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from bytecheckpoint.engine.peer_memory import (
    make_segments,
    peer_handshake,
    pid_if_readable,
    read_peer_memory,
    segments_of_buffers,
    slice_segments,
)
from bytecheckpoint.tuning import tuned

OTHER_PROCESS = """
import sys
import numpy as np
from bytecheckpoint.engine.peer_memory import peer_handshake, segments_of_buffers
data = np.arange(1000, dtype=np.uint8)
print(peer_handshake().hex(), *segments_of_buffers([memoryview(data)])[0], flush=True)
sys.stdin.read()
"""


def test_a_handshake_proves_that_memory_can_be_read() -> None:
    handshake = peer_handshake()
    assert pid_if_readable(handshake) == os.getpid()
    forged = handshake[:-1] + bytes([handshake[-1] ^ 1])
    assert pid_if_readable(forged) == 0
    assert pid_if_readable(b"") == 0
    with tuned(peer_memory=False):
        assert pid_if_readable(handshake) == 0


def test_memory_of_another_process_is_read_until_it_ends() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        handshake, address, length = other.stdout.readline().split()
        pid = pid_if_readable(bytes.fromhex(handshake))
        if not pid:
            pytest.skip("this system does not let processes read each other's memory")
        assert pid == other.pid
        target = np.zeros(1000, np.uint8)
        remote, local = make_segments([(int(address), int(length))]), segments_of_buffers([memoryview(target)])
        read_peer_memory(pid, remote, local)
        assert np.array_equal(target, np.arange(1000, dtype=np.uint8))
        other.send_signal(signal.SIGKILL)
        other.wait(30)
        with pytest.raises(OSError, match="No such process"):
            read_peer_memory(pid, remote, local)
    finally:
        other.kill()
        other.communicate()


def test_slices_of_segments() -> None:
    whole = make_segments([(100, 10), (500, 5), (900, 20)])

    def slices(*wanted: tuple[int, int]) -> list[list[int]]:
        starts, lengths = np.array(wanted, np.int64).reshape(-1, 2).T
        found: list[list[int]] = slice_segments(whole, starts, lengths).tolist()
        return found

    assert slices((0, 35)) == whole.tolist()
    assert slices((8, 9)) == [[108, 2], [500, 5], [900, 2]]
    assert slices((15, 20)) == [[900, 20]]
    assert slices((15, 20), (9, 1), (9, 2)) == [[900, 20], [109, 1], [109, 1], [500, 1]]
    assert slices() == []


def test_memory_is_copied_in_pieces_of_any_number_and_size() -> None:
    """There are more pieces than one system call takes, and the two sides are cut at different places."""
    rng = np.random.default_rng(7)
    source = rng.integers(0, 255, 1 << 20, dtype=np.uint8)
    target = np.zeros(1 << 20, np.uint8)
    ends = np.sort(rng.choice(np.arange(1, 1 << 20), 5000, replace=False))
    starts, stops = ends[:-1:2], ends[1::2]
    at = rng.permutation(len(starts))
    total = int((stops - starts).sum())
    remote = np.column_stack((source.ctypes.data + starts[at], (stops - starts)[at]))
    cuts = np.concatenate(([0], np.sort(rng.choice(np.arange(1, total), 3000, replace=False)), [total]))
    local = np.column_stack((target.ctypes.data + cuts[:-1], np.diff(cuts)))
    read_peer_memory(os.getpid(), remote, local)
    assert np.array_equal(target[:total], np.concatenate([source[starts[i] : stops[i]] for i in at]))
    assert not target[total:].any()
