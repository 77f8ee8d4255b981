"""Plain values of a checkpoint: of the ranks of one machine, one reads each tree, and the others fetch it there.

A file of values is small, so a load from a server costs about one open per file, and ranks want many of the same trees:
those that all ranks share, and, to reshard a data loader, those of every rank that saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.machine_reads import MachineReads
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.planning.read_plan import stored_rows
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog

__all__ = ["Trees"]


class Trees:
    """Reads trees, which go by the number of their tensor in the catalog. Several threads may use it.

    Args:
        catalog: of the checkpoint.
        files: of the checkpoint.
        shared: divides the reading between the ranks of a machine; None: this rank reads all that it wants.

    Attributes:
        rows: the stored shards, ordered by tensor.
        bytes_read: bytes read from storage so far.
    """

    def __init__(self, catalog: Catalog, files: FileSet, shared: MachineReads | None = None) -> None:
        self._catalog = catalog
        self._files = files
        self._shared = shared
        self.rows = stored_rows(catalog)
        self.bytes_read = 0

    def far(self) -> bool:
        """Return whether there are trees that are not in this machine's memory, which is as near as another rank."""
        trees = np.flatnonzero(self._catalog.slot.codes == self._catalog.slot.code_of(VALUES_SLOT))
        # Some of them tell: to look at all would cost more opens than serving saves.
        sample = trees[[0, len(trees) // 2, -1]] if len(trees) else trees
        return bool(len(trees)) and not self._files.is_cached(self._ranges(sample))

    def read(self, number: int) -> bytes:
        """Read a tree, or get it from the rank of this machine that reads it. Raises as `FileSet.read`."""
        if self._shared is None:
            return self.read_here(number).tobytes()
        owner = int(self._catalog.owner[number])  # reads its own tree, which other ranks rarely want
        tree = np.empty(self._nbytes(number), np.uint8)
        self._shared.get(f"tree {number}", owner if owner >= 0 else number, tree, self._files)
        return tree.tobytes()

    def read_here(self, number: int) -> NDArray[np.uint8]:
        """Read a tree from storage. Raises as `FileSet.read`."""
        nbytes = self._nbytes(number)
        ((file, start, _),) = self._ranges([number]).tolist()
        tree = np.frombuffer(self._files.read(file, start, nbytes), np.uint8)
        self.bytes_read += nbytes
        return tree

    def _ranges(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where trees are: (file, start, stop) rows, int64 [n, 3]. Each is one row of bytes."""
        row = np.searchsorted(self.rows.boxes.tensor, numbers)
        start = self.rows.start[row]
        return np.stack([self.rows.file[row], start, start + self._catalog.byte_length[row]], axis=1).astype(np.int64)

    def _nbytes(self, number: int) -> int:
        nbytes = int(self._catalog.byte_length[np.searchsorted(self.rows.boxes.tensor, number)])
        if self._catalog.shape(number) != (nbytes,) or self._catalog.dtype[number] != "uint8":
            raise CorruptCheckpointError(
                f"the values of {self._catalog.state[number]} are not one run of bytes; use another checkpoint"
            )
        return nbytes
