"""Be the helper process: the program that `engine.helper` starts, and the channel between the two.

Run it as `python -m bytecheckpoint.engine.helper_server FD STOPS`. Nothing imported here may import torch: the helper
starts in a fraction of a second and stays small.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk
from bytecheckpoint.errors import UsageError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.settings import configure
from bytecheckpoint.storage import resolve
from bytecheckpoint.threads import try_start
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.tuning import tuning

__all__ = ["LENGTH", "Channel"]

#: Length of a record, and number of a job to stop.
LENGTH = struct.Struct("<Q")
#: The failure of a job that the training process stops. The training process knows the rank and the reason.
_STOPPED = Failure("CheckpointError", "another rank failed")


class Channel:
    """Sends and receives records over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, record: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a record, and descriptors with it."""
        data = msgspec.msgpack.encode(record)
        head = LENGTH.pack(len(data))
        if fds:
            # Descriptors travel with the first bytes of their record.
            socket.send_fds(self.sock, [head], list(fds))
            self.sock.sendall(data)
        else:
            self.sock.sendall(head + data)

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """Receive a record and the descriptors that came with it; None when the other side has closed."""
        head, fds, _, _ = socket.recv_fds(self.sock, LENGTH.size, 1)
        if not head:
            return None, []
        head += self._exactly(LENGTH.size - len(head))
        return msgspec.msgpack.decode(self._exactly(LENGTH.unpack(head)[0])), list(fds)

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


class _Server:
    """The helper's side: carries out requests one after the other."""

    def __init__(self, channel: Channel) -> None:
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

    def do_follow(
        self, *, changed: dict[str, str], gone: list[str], folder: str, umask: int, fds: list[int]
    ) -> dict[str, Any]:
        for name in gone:
            os.environ.pop(unescape(name), None)
        os.environ.update({unescape(name): unescape(value) for name, value in changed.items()})
        if umask >= 0:
            os.umask(umask)
        if folder:
            with contextlib.suppress(OSError):  # the user may not enter it, or it is gone
                os.chdir(unescape(folder))
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
        while len(data := sock.recv(LENGTH.size)) == LENGTH.size:
            self._token(LENGTH.unpack(data)[0]).set(_STOPPED)

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
        return {"sums": [[sums.tobytes() for sums in file] for file in self._opened().sums()]}

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
    # Not by os._exit, which programs replace: coverage stores its data there, while the main thread stores them too.
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve until the training process closes its end."""
    try_start(threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True))
    # A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole process group. The training process decides what becomes
    # of its saves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    channel, stops = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    server = _Server(Channel(channel))
    try_start(threading.Thread(target=server.stop_jobs, args=(stops,), daemon=True))
    try_start(threading.Thread(target=server.report_progress, daemon=True))
    server.serve()


if __name__ == "__main__":
    main()
