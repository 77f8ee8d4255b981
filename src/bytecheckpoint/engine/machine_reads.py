"""Pieces of a checkpoint that several ranks of a machine want: one of them reads each, and the others fetch it there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.errors import CheckpointError

__all__ = ["MachineReads"]


class MachineReads:
    """Reads pieces, which go by names, once per machine. Several threads may use it.

    Ranks serve before they know the checkpoint: a request waits until `begin`.

    Args:
        collective: the ranks.
        tag: unique to the load.
        timeout: longest wait for `begin`, seconds.

    Attributes:
        bytes_received: bytes received from other ranks so far.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self._collective, self._tag, self._timeout = collective, tag, timeout
        self._begun: Future[Callable[[str], NDArray[np.uint8]]] = Future()
        self._readers: Sequence[int] = ()
        self._found: dict[str, Future[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()
        self.bytes_received = 0

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Serve pieces to other ranks inside the `with` block."""
        try:
            with self._collective.serve(self._tag, lambda request: self._read_once(request.decode())):
                yield
        finally:
            if not self._begun.done():
                self._begun.set_exception(CheckpointError("it has given up"))

    def begin(self, read: Callable[[str], NDArray[np.uint8]], readers: Sequence[int]) -> None:
        """Begin to read.

        Args:
            read: reads a piece from storage, and verifies it; called once for each name.
            readers: the ranks of this machine that serve, the same on each of them, this one among them; or none.
        """
        self._readers = readers
        self._begun.set_result(read)

    def get(self, name: str, turn: int, destination: NDArray[np.uint8], files: FileSet) -> None:
        """Fill an array with a piece: read it, or get it from the rank of this machine that reads it.

        Args:
            name: of the piece.
            turn: a number that divides the pieces between the readers; that of a reader goes to it.
            destination: of the piece's length.
            files: the checkpoint's files, for the time limit and the failure of another rank.

        Raises:
            CheckpointError: as `read` of `begin`, here or on the other rank.
        """
        reader = self._collective.rank
        if self._readers:
            reader = turn if turn in self._readers else self._readers[turn % len(self._readers)]
        if reader == self._collective.rank:
            found = self._read_once(name)
            if found.ctypes.data != destination.ctypes.data:
                np.copyto(destination, found)
        elif len(destination):
            timeout = files.read_timeout()
            fetch = functools.partial(
                self._collective.fetch, reader, self._tag, name.encode(), destination, timeout=timeout
            )
            call_with_timeout(2 * timeout, fetch, f"cannot read {files.url}", stopped=files.stopped)
            self.bytes_received += len(destination)

    def _read_once(self, name: str) -> NDArray[np.uint8]:
        """Read a piece from storage, unless this rank has done so, for itself or for another."""
        with self._lock:
            found = self._found.get(name)
            first = found is None
            found = self._found.setdefault(name, Future())
        if first:
            try:
                found.set_result(self._begun.result(self._timeout)(name))
            except BaseException as error:  # noqa: BLE001  raised from `result`, in all threads that wait for the piece
                found.set_exception(error)
        return found.result()
