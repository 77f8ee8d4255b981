"""Write the files of asynchronous saves in a helper process.

A thread of the training process would take the interpreter lock after every chunk and slow an interpreter-bound
training loop (docs/decisions/0004). The helper maps the same staging memory, so only small messages pass between the two
processes: msgpack records, each behind its length, over a socket pair. The helper ends when the training process ends.

`engine.helper_server` is the program. This module is the client, in the training process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.engine.helper_server import LENGTH, Channel
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.liveness import busy
from bytecheckpoint.representation.names import escape
from bytecheckpoint.tracing.operation import merge_measurements
from bytecheckpoint.tuning import tuning

__all__ = ["HelperProcess"]


class HelperProcess:
    """The training process's side of the helper. It serves one save at a time, and its calls raise the helper's errors.

    Raises:
        OSError: this process may not make a socket pair or start another process.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._stops, stops = socket.socketpair()
        self._followed = _Followed()
        self._inherited = _inherited()
        fds = [theirs.fileno(), stops.fileno()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs, stops:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "bytecheckpoint.engine.helper_server", *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError:
                ours.close()
                self._stops.close()
                raise
        self._channel = Channel(ours)
        self._mapped = -1
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True if this process can still use the helper."""
        return self._owner == os.getpid() and self._channel.sock.fileno() >= 0 and self._process.poll() is None

    @property
    def outdated(self) -> bool:
        """True if the training process has changed in a way that only a new helper follows."""
        return self._inherited != _inherited()

    @property
    def pid(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    def call(
        self, record: dict[str, Any], *, timeout: float, fds: Sequence[int] = (), cancel: Cancellation | None = None
    ) -> dict[str, Any]:
        """Send one request and return its answer.

        Args:
            record: "op" names the request; the other items are its arguments.
            timeout: seconds to wait.
            fds: file descriptors to send along.
            cancel: token of the save. Once it is set, the helper gets only the time to stop its own calls.

        Raises:
            CheckpointTimeoutError: no answer in time; the helper is stopped.
            CheckpointError: the helper died or closed its channel, or its own error.
        """
        with self._lock:
            try:
                deadline = time.monotonic() + timeout
                self._channel.sock.settimeout(timeout)
                with busy(timeout):
                    self._channel.send(record, fds)
                    answer = self._receive(deadline, cancel)
                    while answer is not None and answer.get("unfinished"):
                        merge_measurements(answer["measured"])
                        answer = self._receive(deadline, cancel)
            except TimeoutError:
                self.stop(kill=True)
                raise CheckpointTimeoutError(
                    f"the writer process did not finish {record['op']!r} within {timeout:g} s; storage may hang"
                ) from None
            except OSError as error:
                self.stop()
                raise CheckpointError(f"the writer process died during {record['op']!r}: {error}") from error
        if answer is None:
            try:
                code = self._process.wait(tuning().helper_end)
            except subprocess.TimeoutExpired:
                self.stop()
                raise CheckpointError(
                    f"the writer process closed its channel during {record['op']!r} and has not ended; storage may hang"
                ) from None
            raise CheckpointError(f"the writer process died during {record['op']!r} (exit status {code})")
        merge_measurements(answer.pop("measured"))
        if "failure" in answer:
            raise Failure.decode(answer["failure"]).as_error()
        return answer

    def _receive(self, deadline: float, cancel: Cancellation | None) -> dict[str, Any] | None:
        """Wait for the next record from the helper; None when it has closed the channel."""
        sock = self._channel.sock
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while True:
            now = time.monotonic()
            if cancel is not None and cancel.failure is not None:
                deadline, cancel = min(deadline, now + tuning().stopped_calls + tuning().helper_end), None
            left = max(deadline - now, 0.0)
            if poll.poll(min(left, tuning().progress_interval) * 1e3):
                break
            if not left:
                raise TimeoutError
        sock.settimeout(max(left, 0.001))
        return self._channel.receive()[0]

    def answers(self, *, timeout: float) -> bool:
        """Return whether the helper still serves requests.

        A process that was killed may count as running until its last thread has ended, so `alive` does not say.

        Raises:
            CheckpointTimeoutError: no answer in time; the helper is stopped.
        """
        try:
            self.call({"op": "ping"}, timeout=timeout)
        except CheckpointTimeoutError:
            raise
        except CheckpointError:
            self.stop()
            return False
        return True

    def map_pool(self, fd: int, capacity: int, generation: int, *, timeout: float) -> None:
        """Have the helper map the staging memory, unless it has mapped this generation already."""
        if generation != self._mapped:
            self.call({"op": "map", "capacity": capacity}, timeout=timeout, fds=[fd])
            self._mapped = generation

    def follow(self, *, timeout: float) -> None:
        """Send changes of the environment variables, the folder and the umask of this process.

        Storages find their servers and credentials by the variables.
        """
        now, before = _Followed(), self._followed
        if now == before:
            return
        new, old = now.environment, before.environment
        changed = {escape(name): escape(value) for name, value in new.items() if old.get(name) != value}
        gone = [escape(name) for name in old.keys() - new.keys()]
        record = {"op": "follow", "changed": changed, "gone": gone, "folder": escape(now.folder), "umask": now.umask}
        self.call(record, timeout=timeout)
        self._followed = now

    def stop_job(self, job: int) -> None:
        """Make the calls of a job fail soon, also one that is in progress; return at once."""
        with contextlib.suppress(OSError):  # the helper is gone
            self._stops.send(LENGTH.pack(job), socket.MSG_DONTWAIT)

    def stop(self, *, kill: bool = False) -> None:
        """End the helper. A file that it was writing stays unfinished.

        Args:
            kill: flag not to wait until it ends by itself.
        """
        self._channel.sock.close()
        self._stops.close()
        if self._owner == os.getpid() and self._process.poll() is None:
            try:
                self._process.wait(0.0 if kill else tuning().helper_end)
            except subprocess.TimeoutExpired:
                self._process.kill()
                # A process inside a call of a file system that hangs dies when that answers.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(tuning().helper_end)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _umask() -> int:
    # Not by `os.umask`, which sets it, for all threads.
    with contextlib.suppress(OSError), open("/proc/self/status", errors="replace") as lines:
        for line in lines:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return -1


@dataclass(frozen=True, slots=True)
class _Followed:
    """The facts of this process that a running helper takes over.

    Attributes:
        environment: environment variables.
        folder: current folder, "" if it is gone.
        umask: mask of the permissions of new files, -1 where it cannot be read without a change.
    """

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=_folder)
    umask: int = field(default_factory=_umask)


#: Limits that a process gets at its start, and that concern files, threads and memory.
_LIMITS = ("RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_MEMLOCK")


def _inherited() -> tuple[object, ...]:
    """Return the users, groups and limits of this process."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in _LIMITS]
    return os.getresuid(), os.getresgid(), sorted(os.getgroups()), limits
