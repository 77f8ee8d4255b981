"""Plain values of a checkpoint: of the ranks of one machine, one reads each tree, and the others fetch it there.

A file of values is small, so a load from a server costs about one open per file, and ranks want many of the same trees:
those that all ranks share, and, to reshard a data loader, those of every rank that saved.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.workers import call_until_stopped
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, error_from_report, error_report
from bytecheckpoint.planning.read_plan import stored_rows
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog

__all__ = ["Trees"]


class Trees:
    """Reads trees, which go by the number of their tensor in the catalog. Several threads may use it.

    Args:
        catalog: of the checkpoint.
        files: of the checkpoint.

    Attributes:
        rows: the stored shards, ordered by tensor.
        bytes_read: bytes read from storage so far.
        bytes_received: bytes received from other ranks so far.
    """

    def __init__(self, catalog: Catalog, files: FileSet) -> None:
        self._catalog = catalog
        self._files = files
        self.rows = stored_rows(catalog)
        self.bytes_read = 0
        self.bytes_received = 0
        self._found: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._collective: Collective | None = None
        self._tag = ""
        self._readers: Sequence[int] = ()

    @contextlib.contextmanager
    def serve(self, collective: Collective, tag: str) -> Iterator[bool]:
        """Serve trees to other ranks inside the `with` block; yield whether it does.

        It does not if the trees are in this machine's memory, which is as near as another rank.
        """
        trees = np.flatnonzero(self._catalog.slot.codes == self._catalog.slot.code_of(VALUES_SLOT))
        # Some of them tell: to look at all would cost more opens than serving saves.
        sample = trees[[0, len(trees) // 2, -1]] if len(trees) else trees
        if collective.world_size == 1 or not len(trees) or self._files.is_cached(self._ranges(sample)):
            yield False
            return

        def answer(request: bytes) -> NDArray[np.uint8]:
            return np.frombuffer(self._read_once(int(request)), np.uint8)

        with collective.serve(tag, answer):
            yield True

    def share(self, collective: Collective, tag: str, readers: Sequence[int]) -> None:
        """Divide the reading from now on.

        Args:
            collective: the ranks.
            tag: of `serve`.
            readers: the ranks of this machine that serve, the same on each of them; this one is among them.
        """
        self._collective, self._tag, self._readers = collective, tag, readers

    def read(self, number: int) -> bytes:
        """Read a tree, or get it from the rank of this machine that reads it. Raises as `FileSet.read`."""
        if self._collective is None or not self._readers:
            return self._read_once(number)
        owner = int(self._catalog.owner[number])  # reads its own tree, which other ranks rarely want
        reader = owner if owner in self._readers else self._readers[number % len(self._readers)]
        if reader == self._collective.rank:
            return self._read_once(number)
        tree = np.empty(self._nbytes(number), np.uint8)
        if len(tree):
            timeout = self._files.read_timeout()
            fetch = functools.partial(self._fetch, self._collective, reader, number, tree, timeout)
            call_until_stopped(fetch, 2 * timeout, f"read {self._files.url}", self._files.stopped)
            self.bytes_received += len(tree)
        return tree.tobytes()

    def _fetch(self, collective: Collective, reader: int, number: int, tree: NDArray[np.uint8], timeout: float) -> None:
        try:
            collective.fetch(reader, self._tag, str(number).encode(), tree, timeout=timeout)
        except CheckpointError as error:
            report = error_report(error)
            raise error_from_report(report, prefix=f"rank {reader}, which reads it for this one: ") from error

    def _read_once(self, number: int) -> bytes:
        """Read a tree from storage, unless this rank has done so, for itself or for another."""
        with self._lock:
            found = self._found.get(number)
            first = found is None
            found = self._found.setdefault(number, Future())
        if first:
            try:
                nbytes = self._nbytes(number)
                ((file, start, _),) = self._ranges([number]).tolist()
                found.set_result(self._files.read(file, start, nbytes))
                self.bytes_read += nbytes
            except BaseException as error:  # noqa: BLE001  raised from `result`, in all threads that wait for the tree
                found.set_exception(error)
        return found.result()

    def _ranges(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where trees are: (file, start, stop) rows, int64 [n, 3]. Each is one row of bytes."""
        row = np.searchsorted(self.rows.boxes.tensor, numbers)
        start = self.rows.start[row]
        return np.stack([self.rows.file[row], start, start + self._catalog.byte_length[row]], axis=1).astype(np.int64)

    def _nbytes(self, number: int) -> int:
        nbytes = int(self._catalog.byte_length[np.searchsorted(self.rows.boxes.tensor, number)])
        if self._catalog.shape(number) != (nbytes,) or self._catalog.dtype[number] != "uint8":
            raise CorruptCheckpointError(
                f"the values of {self._catalog.kind[number]} are not one run of bytes; use another checkpoint"
            )
        return nbytes
