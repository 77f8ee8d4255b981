"""Write the files of asynchronous saves in a helper process.

A thread of the training process would take the interpreter lock after every chunk and slow an interpreter-bound
training loop (docs/decisions/0004). The helper maps the same staging memory, so only small messages pass between the two
processes: msgpack records, each behind its length, over a socket pair. The helper ends when the training process ends.

Run as a program (`python -m bytecheckpoint.engine.helper FD STOPS`) this module is the helper; imported, it is the client.
Nothing imported here may import torch: the helper starts in a fraction of a second and stays small.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, UsageError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.liveness import busy
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.settings import configure
from bytecheckpoint.storage import resolve
from bytecheckpoint.threads import try_start
from bytecheckpoint.tracing.operation import Operation, merge_measurements
from bytecheckpoint.tuning import tuning

__all__ = ["HelperProcess"]

_LENGTH = struct.Struct("<Q")
#: The failure of a job that the training process stops. The training process knows the rank and the reason.
_STOPPED = Failure("CheckpointError", "another rank failed")


class _Channel:
    """Sends and receives records over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, record: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data = msgspec.msgpack.encode(record)
        head = _LENGTH.pack(len(data))
        if fds:
            # Descriptors travel with the first bytes of their record.
            socket.send_fds(self.sock, [head], list(fds))
            self.sock.sendall(data)
        else:
            self.sock.sendall(head + data)

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """Receive a record and the descriptors that came with it; None when the other side has closed."""
        head, fds, _, _ = socket.recv_fds(self.sock, _LENGTH.size, 1)
        if not head:
            return None, []
        head += self._exactly(_LENGTH.size - len(head))
        return msgspec.msgpack.decode(self._exactly(_LENGTH.unpack(head)[0])), list(fds)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray(count)
        view = memoryview(parts)
        while view:
            got = self.sock.recv_into(view)
            if got == 0:
                raise ConnectionError("the other side closed the channel")
            view = view[got:]
        return bytes(parts)


# On a busy machine the training loop keeps three quarters of the core that it shares with a writing thread. On an idle core
# the writer loses nothing (decision 0004 has the figures).
_NICENESS = 5


class HelperProcess:
    """The training process's side of the helper. It serves one save at a time, and its calls raise the helper's errors.

    Raises:
        OSError: this process may not make a socket pair or start another process.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._stops, stops = socket.socketpair()
        self._environment = dict(os.environ)
        fds = [theirs.fileno(), stops.fileno()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs, stops:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "bytecheckpoint.engine.helper", *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError:
                ours.close()
                self._stops.close()
                raise
        self._channel = _Channel(ours)
        self._mapped = -1
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True if this process can still use the helper."""
        return self._owner == os.getpid() and self._channel.sock.fileno() >= 0 and self._process.poll() is None

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

    def follow_environment(self, *, timeout: float) -> None:
        """Send changed environment variables: storages find their servers and credentials by them."""
        now = dict(os.environ)
        if now == self._environment:
            return
        changed = {escape(name): escape(value) for name, value in now.items() if self._environment.get(name) != value}
        gone = [escape(name) for name in self._environment.keys() - now.keys()]
        self.call({"op": "environ", "changed": changed, "gone": gone}, timeout=timeout)
        self._environment = now

    def stop_job(self, job: int) -> None:
        """Make the calls of a job fail soon, also one that is in progress; return at once."""
        with contextlib.suppress(OSError):  # the helper is gone
            self._stops.send(_LENGTH.pack(job), socket.MSG_DONTWAIT)

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


class _Server:
    """The helper's side: carries out requests one after the other."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._job = 0
        self._cancel = Cancellation()  # of that job
        self._choosing = threading.Lock()  # held while these two change
        self._pool: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._writer: FilesWriter | None = None
        self._operation = Operation("save", "")  # the save whose requests these are
        self._answering = threading.Lock()
        self._at_work = False

    def serve(self) -> None:
        while True:
            try:
                record, fds = self._channel.receive()
            except OSError:
                record, fds = None, []
            if record is None:
                break
            op = record.pop("op")
            if op == "open":
                self._operation = Operation("save", unescape(record["url"]))
            operation = self._operation
            self._at_work = True
            try:
                with operation.running():
                    answer = getattr(self, "do_" + op)(fds=fds, **record)
            except BaseException as error:  # noqa: BLE001  raised in the training process
                answer = {"failure": Failure.of(error).encode()}
            with self._answering:
                self._at_work = False
                answer["measured"] = operation.take()
                try:
                    self._channel.send(answer)
                except OSError:
                    break
        # The training process is gone, so this save cannot finish.
        self.do_abort()

    def report_progress(self) -> None:
        """Send what was measured so far about once a second, while a request takes long. Runs on a thread of its own."""
        while True:
            time.sleep(tuning().progress_interval)
            with self._answering:
                if self._at_work and (measured := self._operation.take())["totals"]:
                    try:
                        self._channel.send({"unfinished": True, "measured": measured})
                    except OSError:
                        return

    def do_ping(self, *, fds: list[int]) -> dict[str, Any]:
        return {}

    def do_map(self, *, capacity: int, fds: list[int]) -> dict[str, Any]:
        self._pool = np.frombuffer(mmap.mmap(fds[0], capacity), np.uint8)
        os.close(fds[0])
        return {}

    def do_environ(self, *, changed: dict[str, str], gone: list[str], fds: list[int]) -> dict[str, Any]:
        for name in gone:
            os.environ.pop(unescape(name), None)
        os.environ.update({unescape(name): unescape(value) for name, value in changed.items()})
        return {}

    def do_open(
        self,
        *,
        job: int,
        url: str,
        tasks: list[dict[str, Any]],
        settings: dict[str, Any],
        stable: bool,
        fds: list[int],
    ) -> dict[str, Any]:
        self.do_abort()
        current = configure(**settings)
        files = [msgspec.convert(t, FileTask) for t in tasks]
        self._writer = FilesWriter(
            resolve(unescape(url)),
            files,
            direct=current.storage.direct_io != "off",
            threads=current.storage.write_threads,
            stable=stable,
            pool=memoryview(self._pool),
            cancel=self._token(job),
        )
        self._writer.open()
        return {}

    def stop_jobs(self, sock: socket.socket) -> None:
        """Cancel the jobs whose numbers come from `sock`. Runs on a thread of its own."""
        while len(data := sock.recv(_LENGTH.size)) == _LENGTH.size:
            self._token(_LENGTH.unpack(data)[0]).set(_STOPPED)

    def _token(self, job: int) -> Cancellation:
        """Return the token of a job. Its stop may come before it begins, or after the next job has begun."""
        with self._choosing:
            if job < self._job:
                return Cancellation()  # that job has ended
            if job > self._job:
                self._job, self._cancel = job, Cancellation()
            return self._cancel

    def do_write(self, *, chunks: list[list[int]], fds: list[int]) -> dict[str, Any]:
        return {"batch": self._opened().write_staged([StagedChunk(*c) for c in chunks])}

    def do_wait(self, *, batch: int, fds: list[int]) -> dict[str, Any]:
        self._opened().wait(batch)
        return {}

    def do_sums(self, *, fds: list[int]) -> dict[str, Any]:
        return {"sums": [s.tobytes() for s in self._opened().sums()]}

    def do_finish(self, *, headers: list[bytes], fds: list[int]) -> dict[str, Any]:
        self._opened().finish(headers)
        self._writer = None
        return {}

    def do_abort(self, *, fds: Sequence[int] = ()) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        return {}

    def _opened(self) -> FilesWriter:
        if self._writer is None:
            raise UsageError("no save is open in the writer process")
        return self._writer


def _end_with(parent: int) -> None:
    """End this process soon after its parent."""
    # Children that the training process forked hold copies of its end of the socket, so its death may not close it.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Serve until the training process closes its end."""
    try_start(threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True))
    # A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole process group. The training process decides what becomes
    # of its saves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    channel, stops = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    server = _Server(_Channel(channel))
    try_start(threading.Thread(target=server.stop_jobs, args=(stops,), daemon=True))
    try_start(threading.Thread(target=server.report_progress, daemon=True))
    server.serve()


if __name__ == "__main__":
    main()
