"""Verified reads of boxes of an open checkpoint's tensors."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.reading import read_all
from bytecheckpoint.engine.scatter import BoxTarget, ScatterPlan
from bytecheckpoint.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UsageError,
)
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.opening.part_targets import PartReads, plan_parts
from bytecheckpoint.opening.slices import row_major_boxes
from bytecheckpoint.planning.part_space import LaidOut
from bytecheckpoint.planning.read_plan import StoredRows, groups_to_read, plan_reads, stored_rows
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_rows import rows_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.representation.plans import ReadPlan
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import Storage

__all__ = ["BoxReader", "BoxRequest", "TensorPiece", "read_in_pieces"]

_MAX_BOXES_PER_READ = 2048

TensorPiece = tuple[str, tuple[slice, ...], torch.Tensor]
"""(name of the tensor, position of the piece in the tensor, elements of the piece)."""


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """A request for boxes of one tensor, of equal extent, to be concatenated along one dimension.

    Attributes:
        tensor: number of the tensor in the catalog.
        offsets: first coordinate of each box, for at least one box.
        lengths: extent of every box.
        dim: the dimension along which the boxes are concatenated.
    """

    tensor: int
    offsets: Sequence[Sequence[int]]
    lengths: Sequence[int]
    dim: int = 0

    @property
    def shape(self) -> list[int]:
        """Shape of the concatenated boxes."""
        shape = [*self.lengths]
        if len(self.offsets) > 1:
            shape[self.dim] *= len(self.offsets)
        return shape

    @property
    def contiguous(self) -> bool:
        """True if each box is contiguous in the concatenated tensor."""
        return len(self.offsets) == 1 or all(n == 1 for n in self.lengths[: self.dim])

    def parts(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each box in the concatenated tensor `data`."""
        if len(self.offsets) == 1:
            return [data]
        step = self.lengths[self.dim]
        return [data.narrow(self.dim, i * step, step) for i in range(len(self.offsets))]


class BoxReader:
    """Reads boxes of an open checkpoint. Several threads, and a forked child, may share a reader.

    Args:
        storage: storage of the checkpoint.
        catalog: catalog of the checkpoint; of a large one the tensors, and the rows that were read so far.
        rest: reader of the catalog: of the other rows of a large one, and of a later one in its place.
        laid: the catalog as a layout shows it, in the place of `catalog`; None without a layout.
    """

    def __init__(
        self, storage: Storage, catalog: Catalog, rest: CatalogReader | None = None, laid: LaidOut | None = None
    ) -> None:
        self.storage = storage
        self._laid = laid
        self.catalog = catalog
        self._opened = rest
        self._groups = (
            rest.groups.value_groups if rest is not None and rest.groups is not None else np.zeros(0, np.int64)
        )
        self._lock = threading.RLock()  # a signal handler may read too
        self._rows: StoredRows | None = None
        self._files: FileSet | None = FileSet(storage, catalog)
        self._pid = os.getpid()

    @property
    def _rest(self) -> CatalogReader | None:
        """Reader of the other rows of a large catalog; None of a small one."""
        return self._opened if self._opened is not None and self._opened.groups is not None else None

    @property
    def shown_names(self) -> Mapping[str, Sequence[str]]:
        """Names under which a layout shows the tensors of each of the checkpoint's names."""
        return {} if self._laid is None else self._laid.names

    def close(self) -> None:
        """Close the files; later reads raise."""
        files, self._files = self._files, None
        if files is not None and self._pid == os.getpid():
            files.close()

    def files(self) -> FileSet:
        """Return the open files.

        Raises:
            UsageError: the reader was closed.
        """
        if self._files is None:
            raise UsageError(f"the checkpoint {self.storage.url} was closed; open it again")
        if self._pid != os.getpid():  # after a fork: another thread of the parent may have held the old lock
            self._files, self._pid, self._lock = FileSet(self.storage, self.catalog), os.getpid(), threading.RLock()
            self._opened = self._opened and self._opened.again()
        return self._files

    def _read_groups(self, wanted: BoxTable) -> None:
        """Read the groups of a large catalog that may have rows of some boxes.

        Each call at least doubles the number of groups read so far, with the groups that follow, so that many calls stay
        cheap.
        """
        assert self._rest is not None and self._rest.groups is not None
        every = np.unique(self._rest.groups.group)
        more = np.setdiff1d(groups_to_read(self._rest.groups, wanted), self._groups)
        if len(more):
            others = np.setdiff1d(every, np.append(self._groups, more))
            following = np.roll(others, -int(np.searchsorted(others, more[-1])))
            more = np.append(more, following[: max(len(self._groups) - len(more), 0)])
            numbers = np.union1d(self._groups, more)
            try:
                catalog = self._rest.rows(numbers)
            finally:
                self._rest.close()
            self.files().replace_catalog(catalog)
            self.catalog, self._groups, self._rows = catalog, numbers, None

    def _stored(self, wanted: BoxTable) -> StoredRows:
        """Return the rows of the tensors of some boxes. Planning on these costs less than on all rows."""
        with self._lock:
            if self._rest is not None:
                self._read_groups(wanted)
            if self._rows is None:
                self._rows = stored_rows(self.catalog)
            every = self._rows
        _, chosen = rows_of(every.boxes.tensor, np.unique(wanted.tensor))
        return every.take(chosen)

    def read(self, requests: Sequence[BoxRequest]) -> list[torch.Tensor]:
        """Read several requests together and return a new tensor for each.

        Raises:
            CheckpointReplacedError: another save has replaced the checkpoint, and removed what this one reads.
            CorruptCheckpointError: the bytes read do not match their checksums.
            IncompatibleCheckpointError: the checkpoint lacks some of the elements.
        """
        try:
            return self._read(requests)
        except CorruptCheckpointError as error:
            if self._opened is None or not self._opened.replaced():
                raise
            url = self.storage.url
            raise CheckpointReplacedError(
                f"{url} was replaced by another save, or moved by a cooldown, while it was open; open it again"
            ) from error

    def _read(self, requests: Sequence[BoxRequest]) -> list[torch.Tensor]:
        files, catalog = self.files(), self.catalog
        dtypes = [dtype_named(catalog.dtype[r.tensor]) for r in requests]
        sizes = [math.prod(r.shape) * dtype.itemsize for r, dtype in zip(requests, dtypes, strict=True)]
        if any(size >= 1 << 62 for size in sizes):
            raise CorruptCheckpointError(
                f"{self.storage.url}: catalog '{CATALOG_NAME}' gives {catalog.key(requests[0].tensor)} an impossible "
                "shape; use another checkpoint",
                file=CATALOG_NAME,
                tensors=(str(catalog.key(requests[0].tensor)),),
            )
        plan = self._plan(requests) if self._laid is None else None
        try:
            with torch.inference_mode(False):  # the reader threads, which write into it, do not inherit the mode
                out = [torch.empty(r.shape, dtype=t, device="cpu") for r, t in zip(requests, dtypes, strict=True)]
        except RuntimeError as error:
            raise IncompatibleCheckpointError(
                f"{self.storage.url}: no memory for {sum(sizes)} bytes of {catalog.key(requests[0].tensor)}; read it in "
                f"parts, such as entry[0:1000] or entry.chunks()"
            ) from error
        targets = [
            BoxTarget(part, dtype)
            for request, data, dtype in zip(requests, out, dtypes, strict=True)
            for part in request.parts(data)
        ]
        parts = None
        if plan is None:
            parts = self._plan_parts(requests, targets)
            plan, targets = parts.plan, parts.targets
        ranges = range(len(plan.file))
        if ranges:
            threads = settings().storage.read_threads
            read_all(files, ScatterPlan(plan, targets), ranges, threads=threads, chunk_bytes=plan.longest)
            files.check_unchanged(np.unique(plan.file).tolist())
        if parts is not None:
            parts.finish()
        return out

    def _plan_parts(self, requests: Sequence[BoxRequest], targets: list[BoxTarget]) -> PartReads:
        """Plan the reads through the layout."""
        assert self._laid is not None
        boxes = [(r.tensor, offsets, r.lengths) for r in requests for offsets in r.offsets]
        tensor, offsets, lengths = map(list, zip(*boxes, strict=True))
        wanted = BoxTable.build(tensor, offsets, lengths)
        reads = plan_parts(self._laid, wanted, targets, self._chunk_bytes(self._laid.rows))
        self._refuse_holes(reads.plan, tensor)
        return reads

    @staticmethod
    def _chunk_bytes(stored: StoredRows) -> int:
        largest = int(stored.block_bytes[stored.file].max(initial=1))
        return -(-settings().storage.chunk_bytes // largest) * largest

    def _refuse_holes(self, plan: ReadPlan, tensors: Sequence[int]) -> None:
        if plan.missing.any():
            name = str(self.catalog.key(tensors[int(np.flatnonzero(plan.missing)[0])]))
            raise IncompatibleCheckpointError(
                f"{self.storage.url} has no data for some elements of {name}; `bytecheckpoint inspect --boxes` shows "
                "what it holds"
            )

    def _plan(self, requests: Sequence[BoxRequest]) -> ReadPlan:
        """Plan the reads and check that they fill all requested elements."""
        url, catalog = self.storage.url, self.catalog
        boxes = [(r.tensor, offsets, r.lengths, r.contiguous) for r in requests for offsets in r.offsets]
        tensor, offsets, lengths, contiguous = map(list, zip(*boxes, strict=True))
        wanted = BoxTable.build(tensor, offsets, lengths)
        stored = self._stored(wanted)
        plan = plan_reads(stored, wanted, np.array(contiguous, bool), self._chunk_bytes(stored))
        if len(plan.overlaps):
            name = str(catalog.key(int(stored.boxes.tensor[plan.overlaps[0, 0]])))
            raise CorruptCheckpointError(
                f"{url}: stored shards of {name} overlap; use another checkpoint", file=CATALOG_NAME, tensors=(name,)
            )
        self._refuse_holes(plan, tensor)
        return plan


def read_in_pieces(reader: BoxReader, tensors: Iterable[tuple[str, int]], max_bytes: int) -> Iterator[TensorPiece]:
    """Read whole tensors in pieces of bounded size; small tensors are read together.

    Args:
        reader: reader of the checkpoint.
        tensors: (name, number) of each tensor.
        max_bytes: size of all pieces in memory at a time.

    Yields:
        The pieces of each tensor in row-major order; one empty piece for an empty tensor.
    """
    names: list[str] = []
    requests: list[BoxRequest] = []
    pending_bytes = 0
    for name, tensor in tensors:
        element = itemsize(reader.catalog.dtype[tensor])
        shape = reader.catalog.shape(tensor)
        for offsets, lengths in row_major_boxes(shape, max(max_bytes // element, 1)):
            nbytes = math.prod(lengths) * element
            if requests and (pending_bytes + nbytes > max_bytes or len(requests) >= _MAX_BOXES_PER_READ):
                yield from _read_pieces(reader, names, requests)
                names, requests, pending_bytes = [], [], 0
            names.append(name)
            requests.append(BoxRequest(tensor, [offsets], lengths))
            pending_bytes += nbytes
    if requests:
        yield from _read_pieces(reader, names, requests)


def _read_pieces(reader: BoxReader, names: list[str], requests: list[BoxRequest]) -> Iterator[TensorPiece]:
    for name, request, data in zip(names, requests, reader.read(requests), strict=True):
        yield name, tuple(slice(o, o + n) for o, n in zip(request.offsets[0], request.lengths, strict=True)), data
