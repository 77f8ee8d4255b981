"""Calls with a timeout, which run on reusable threads."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.errors import StorageUnavailableError, UsageError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.mounts import _recent_mounts, is_in_memory
from bytecheckpoint.tuning import tuned
from tests.support.mounts import small_tmpfs
from tests.support.processes import run_program, wait_until


def call_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "bytecheckpoint-call"}


def test_results_and_errors() -> None:
    def refuse() -> None:
        raise UsageError("no")

    assert call_with_timeout(5, lambda: None) is None
    assert call_with_timeout(5, threading.get_ident) != threading.get_ident()
    with pytest.raises(UsageError, match="no"):
        call_with_timeout(5, refuse)
    with pytest.raises(StorageUnavailableError, match=r"^cannot read x: no answer within 0.05 s"):
        call_with_timeout(0.05, lambda: time.sleep(0.5), "cannot read x")


def test_a_failed_call_keeps_nothing_alive() -> None:
    """Not even until the next garbage collection: a training's objects may be in the frames of its callers."""

    class Large:
        pass

    def fail() -> None:
        raise FileNotFoundError

    def caller() -> weakref.ref[Large]:
        large = Large()
        with contextlib.suppress(FileNotFoundError):
            call_with_timeout(5, fail)
        return weakref.ref(large)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_a_call_within_a_call() -> None:
    assert call_with_timeout(5, lambda: call_with_timeout(5, lambda: call_with_timeout(5, lambda: 3))) == 3


@tuned(idle_call_thread=0.2)
def test_threads_are_reused_and_end() -> None:
    earlier = call_threads()  # those of other tests, of which one may hang in its call for a long time
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: call_with_timeout(5, lambda: n), range(500))) == list(range(500))
    idents = {call_with_timeout(5, threading.get_ident) for _ in range(50)}
    assert len(idents) == 1
    assert wait_until(lambda: not call_threads() - earlier, 15)
    assert call_with_timeout(5, lambda: 1) == 1


def test_a_thread_that_hangs_is_not_given_another_call() -> None:
    hung, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hung.set()
        go_on.wait(30)

    with pytest.raises(StorageUnavailableError):
        call_with_timeout(0.1, hang)
    assert hung.is_set()
    assert [call_with_timeout(5, lambda n=n: n) for n in range(10)] == list(range(10))  # type: ignore[misc]
    go_on.set()


def test_at_the_end_of_a_program_and_after_a_fork() -> None:
    program = """
import atexit, os
from bytecheckpoint.concurrency import call_with_timeout, parallel_map
assert call_with_timeout(5, lambda: 1) == 1
child = os.fork()
assert call_with_timeout(5, lambda: 2) == 2
if child:
    assert os.waitpid(child, 0)[1] == 0
    class Last:
        def __del__(self, write=os.write):
            assert call_with_timeout(60, lambda: 3) == 3
            write(1, b"last")
    last = Last()
    atexit.register(lambda: print("exit", call_with_timeout(5, lambda: 4), flush=True))
else:
    os._exit(0)
"""
    done = run_program(program, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exit", "4", "last"], done.stderr


def test_what_is_in_memory(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "a b", "1m"):
        inside = tmp_path / "a b"
        _recent_mounts.cache_clear()  # looked up once a second
        assert is_in_memory(str(inside / "step" / "model"))
        assert resolve(str(inside / "step")).capabilities.in_memory
        (inside / "link").symlink_to(tmp_path)
        assert not is_in_memory(str(inside / "link" / "step"))
    _recent_mounts.cache_clear()
    assert is_in_memory(str(inside)) == is_in_memory(str(tmp_path))
    assert not is_in_memory("/proc/self")
    assert resolve(f"mem://test-{os.getpid()}/x").capabilities.in_memory


def test_ctrl_c_waits_for_the_calls_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    release, join = threading.Event(), threading.Thread.join
    ended: list[int] = []

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.2)  # the other thread takes the other number
            ended.append(number)
        else:
            release.wait(10)
            ended.append(number)
            raise ValueError("later")

    def interrupted(thread: threading.Thread) -> None:
        if not release.is_set():
            release.set()
            raise KeyboardInterrupt
        join(thread)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(2), 2, "test")
    assert sorted(ended) == [0, 1]
