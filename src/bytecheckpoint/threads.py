"""Threads where another one may be refused: by a limit on processes, or while the interpreter ends."""

from __future__ import annotations

import logging
import os
import threading

from bytecheckpoint.errors import CheckpointError

__all__ = ["ADVICE", "start", "try_start"]

_log = logging.getLogger("bytecheckpoint")
ADVICE = "raise the limit on processes (ulimit -u, pids.max of the cgroup)"
"""Ends the message that no thread can be started."""
_warned = False


def start(thread: threading.Thread) -> None:
    """Start a thread without which the caller cannot go on.

    Raises:
        CheckpointError: this process may start no other thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise CheckpointError(f"cannot start the thread {thread.name}: {error}; {ADVICE}") from error


def try_start(thread: threading.Thread) -> bool:
    """Start a thread that the caller can do without; return whether it runs. A refusal is logged once."""
    global _warned  # noqa: PLW0603  one line for each process
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
