"""Tests of a storage in programs: event loops, other processes, and no leaks in long runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from bytecheckpoint.storage.base import NewFile, Storage
from bytecheckpoint.storage.testing.support import FILE_BYTES, TRIALS, Suite, content, read_all, write_file

__all__ = ["ProgramTests"]

_PROCESSES = 3
#: Descriptors and threads that a client library may add to its pools at any time.
_SLACK = 8


class ProgramTests(Suite):
    """A storage works in any program, and leaks nothing."""

    def test_inside_an_event_loop(self, storage: Storage) -> None:
        """Call the storage from a coroutine, as a notebook does: it must not use the caller's event loop."""
        data = content(100_000)

        async def program() -> None:
            write_file(storage, "model/file", data, stable=False)
            storage.publish("catalog", b"first", expected="")
            other = self.again(storage)
            assert np.array_equal(read_all(other, "model/file"), data)
            assert np.array_equal(await asyncio.to_thread(read_all, other, "model/file"), data)
            assert other.list() == [("catalog", 5), ("model/file", 100_000)]
            assert other.read("catalog") == b"first"
            storage.delete(["model/file", "catalog"])
            assert other.list() == []

        asyncio.run(program())

    def test_other_processes(self, storage: Storage) -> None:
        if not storage.capabilities.shared or type(self).again is not Suite.again:
            return  # other processes see other files under the URL
        write_file(storage, "model/file", content(FILE_BYTES))
        command = [sys.executable, "-m", f"{__package__}.another", storage.url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        others = [
            subprocess.Popen(
                [*command, str(n)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for n in range(_PROCESSES)
        ]
        try:
            for other in others:
                assert other.stdout is not None
                assert other.stdout.readline() == "True\n", "another process that resolves the URL sees the same file"
            for other in others:
                assert other.stdin is not None
                other.stdin.write("\n")
                other.stdin.flush()
            published = [other.communicate(timeout=60)[0].split() for other in others]
        finally:
            for other in others:
                other.kill()
                other.communicate()
        assert [other.returncode for other in others] == [0] * _PROCESSES
        for trial in range(TRIALS):
            winners = [number for number, trials in enumerate(published) if str(trial) in trials]
            assert len(winners) == 1 or (winners and not storage.capabilities.exclusive_publish), published
            assert storage.read(f"catalog-{trial}") in [str(number).encode() * FILE_BYTES for number in winners]

    def test_nothing_stays_open(self, storage: Storage) -> None:
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("NOT TESTED HERE: open descriptors are counted in /proc")
        data = content(10_000)

        def use(number: int) -> None:
            write_file(storage, f"model/{number}", data, stable=False)
            assert np.array_equal(read_all(storage, f"model/{number}"), data)
            aborted = storage.create(NewFile(f"model/{number}-aborted", 10_000))
            aborted.write_at(0, [memoryview(data)])
            aborted.abort()
            storage.publish("catalog", b"%d" % number)
            assert storage.read("catalog") == b"%d" % number
            storage.delete([f"model/{number}"])

        for number in range(5):
            use(number)
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for number in range(5, 35):
            use(number)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + _SLACK
        assert threading.active_count() <= threads + _SLACK
