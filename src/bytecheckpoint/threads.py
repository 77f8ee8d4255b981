"""Threads where another one may be refused: by a limit on processes, or while the interpreter ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from bytecheckpoint.errors import CheckpointError

__all__ = ["ADVICE", "start", "try_start", "wait_for_any"]

_log = logging.getLogger("bytecheckpoint")
ADVICE = "raise the limit on processes (ulimit -u, pids.max of the cgroup) or on address space (ulimit -v)"
"""Ends the message that no thread can be started."""
_warned = False
_forked = False  # torch has made no thread pool since
_lock = threading.Lock()


def start(thread: threading.Thread) -> None:
    """Start a thread without which the caller cannot go on.

    Raises:
        CheckpointError: this process may start no other thread.
    """
    _settle_torch()
    try:
        thread.start()
    except RuntimeError as error:
        raise CheckpointError(f"cannot start the thread {thread.name}: {error}; {ADVICE}") from error


def try_start(thread: threading.Thread) -> bool:
    """Start a thread that the caller can do without; return whether it runs. A refusal is logged once."""
    global _warned  # noqa: PLW0603  one line for each process
    _settle_torch()
    try:
        thread.start()
    except RuntimeError as error:
        if not _warned and "shutdown" not in str(error):
            _warned = True
            _log.warning(
                "process %d cannot start the thread %s: %s; %s. Until then its other threads do such work, and wait for "
                "storages without a time limit",
                os.getpid(),
                thread.name,
                error,
                ADVICE,
            )
        return False
    return True


def wait_for_any(futures: Iterable[Future[Any]], seconds: float | None = None) -> bool:
    """Wait until one of the futures is done. Return False after `seconds`.

    Ctrl-C while `Future.result`, `concurrent.futures.wait` or a `threading.Condition` takes its lock again becomes
    "release unlocked lock", and the lock may stay taken. This waits in one call, which ends with or without an interrupt.
    """
    news: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    for future in futures:
        if future.done():
            return True
        Future.add_done_callback(future, news.put)
    try:
        news.get(timeout=None if seconds is None else max(seconds, 0.0))
    except queue.Empty:
        return False
    return True


def _settle_torch() -> None:
    """Let a thread alone make torch's pool of threads anew after a fork, before others are started that may need it.

    Where `torch.set_num_threads` was called, a new thread does that at its first large operation, and two at once may fail:
    "Invalid thread pool!" (torch 2.13).
    """
    global _forked  # noqa: PLW0603  of this process
    if not _forked:
        return
    with _lock:
        look = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if _forked and look is not None:
            thread = threading.Thread(target=look, name="bytecheckpoint-torch", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started, so none will race
                thread.start()
                thread.join()
        _forked = False


def _note_fork() -> None:
    global _forked, _lock
    _forked, _lock = True, threading.Lock()


os.register_at_fork(after_in_child=_note_fork)
