"""One tensor of an open checkpoint, and the reading of its boxes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine.file_set import FileSet
from ..engine.reading import Delivery, Target, read_all
from ..engine.staging import movable
from ..errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from ..planning.read_plan import StoredRows, plan_reads, stored_rows
from ..representation.boxes import BoxTable
from ..representation.catalog import Catalog
from ..representation.dtypes import itemsize
from ..representation.plans import ReadPlan
from ..settings import settings
from ..storage import Storage
from .slices import Selection, row_major_boxes, select

__all__ = ["BoxReader", "Entry", "Piece", "Request", "stream"]

# From this distance on, strided elements are read one index at a time and what lies between them is left alone.
_FAR = 128 << 10
_MANY = 1 << 16
_TOGETHER = 2048


@dataclass(frozen=True, slots=True)
class Request:
    """Boxes of one tensor, equal in shape, which shall stand one after the other along one dimension.

    Attributes:
        tensor: number of the tensor in the catalog.
        offsets: first coordinate of each box, at least one.
        lengths: extent of every box.
        dim: the dimension along which they are joined.
    """

    tensor: int
    offsets: Sequence[Sequence[int]]
    lengths: Sequence[int]
    dim: int = 0

    @property
    def shape(self) -> list[int]:
        """Shape of the joined boxes."""
        joined = [*self.lengths]
        if len(self.offsets) > 1:
            joined[self.dim] *= len(self.offsets)
        return joined

    @property
    def contiguous(self) -> bool:
        """Whether each box is one run of memory in the joined tensor."""
        return len(self.offsets) == 1 or all(n == 1 for n in self.lengths[: self.dim])

    def parts(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The places of the boxes in the joined tensor."""
        if len(self.offsets) == 1:
            return [data]
        step = self.lengths[self.dim]
        return [data.narrow(self.dim, i * step, step) for i in range(len(self.offsets))]


class BoxReader:
    """Reads boxes of a checkpoint's tensors, verified. Several threads, and a forked child, may use one."""

    def __init__(self, storage: Storage, catalog: Catalog) -> None:
        self.storage = storage
        self.catalog = catalog
        self._rows: StoredRows | None = None
        self._files: FileSet | None = FileSet(storage, catalog)
        self._pid = os.getpid()

    def close(self) -> None:
        """Release the files; reading raises from now on."""
        files, self._files = self._files, None
        if files is not None and self._pid == os.getpid():
            files.close()

    def files(self) -> FileSet:
        """The open files.

        Raises:
            UsageError: it was closed.
        """
        if self._files is None:
            raise UsageError(f"the checkpoint {self.storage.url} was closed; open it again")
        if self._pid != os.getpid():  # another thread of the parent may have held the lock at the fork
            self._files, self._pid = FileSet(self.storage, self.catalog), os.getpid()
        return self._files

    def rows_of(self, tensor: int) -> slice:
        """The catalog's rows of one tensor."""
        low, high = np.searchsorted(self.catalog.boxes.tensor, (tensor, tensor + 1))
        return slice(int(low), int(high))

    def _stored(self, tensors: Sequence[int]) -> StoredRows:
        if self._rows is None:
            self._rows = stored_rows(self.catalog)
        every = self._rows
        at = np.concatenate([np.arange(rows.start, rows.stop) for rows in map(self.rows_of, sorted(set(tensors)))])
        boxes = every.boxes.take(at)
        return StoredRows(
            boxes, every.file[at], every.start[at], every.element[at], every.data_bytes, every.block_bytes
        )

    def read(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """New tensors with the requested elements, read together.

        Raises:
            CorruptCheckpointError: bytes differ from what was written.
            IncompatibleCheckpointError: the checkpoint has no data for a part.
        """
        files, catalog = self.files(), self.catalog
        dtypes = [_dtype(catalog, r.tensor) for r in requests]
        sizes = [math.prod(r.shape) * dtype.itemsize for r, dtype in zip(requests, dtypes, strict=True)]
        if any(size >= 1 << 62 for size in sizes):
            raise CorruptCheckpointError(
                f"{self.storage.url}: the shape of {catalog.key(requests[0].tensor)} is not possible; use another "
                f"checkpoint"
            )
        plan = self._plan(requests)
        try:
            with torch.inference_mode(False):  # the readers' threads, which write into it, are in no such mode
                out = [torch.empty(r.shape, dtype=t, device="cpu") for r, t in zip(requests, dtypes, strict=True)]
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.storage.url}: no memory for {sum(sizes)} bytes of {catalog.key(requests[0].tensor)}; read it in "
                f"parts, such as entry[0:1000] or entry.chunks()"
            ) from error
        ranges = range(len(plan.file))
        if ranges:
            longest = int((plan.stop - plan.start).max())
            targets = [
                Target(part, dtype)
                for request, data, dtype in zip(requests, out, dtypes, strict=True)
                for part in request.parts(data)
            ]
            read_all(files, Delivery(plan, targets), ranges, threads=settings().read_threads, chunk_bytes=longest)
        return out

    def _plan(self, requests: Sequence[Request]) -> ReadPlan:
        """What to read, proved to fill everything that was requested."""
        url, catalog = self.storage.url, self.catalog
        stored = self._stored([r.tensor for r in requests])
        boxes = [(r.tensor, offsets, r.lengths, r.contiguous) for r in requests for offsets in r.offsets]
        tensor, offsets, lengths, contiguous = map(list, zip(*boxes, strict=True))
        wanted = BoxTable.build(tensor, offsets, lengths)
        blocks = stored.block_bytes[stored.file]
        if (blocks == 0).any():
            name = str(catalog.key(int(stored.boxes.tensor[np.argmin(blocks)])))
            raise IncompatibleCheckpointError(
                f"{url}: {name} lies in a file without checksums, which this version does not read"
            )
        largest = int(blocks.max(initial=1))
        chunk = -(-settings().chunk_bytes // largest) * largest
        plan = plan_reads(stored, wanted, np.array(contiguous, bool), chunk)
        if len(plan.overlaps):
            name = str(catalog.key(int(stored.boxes.tensor[plan.overlaps[0, 0]])))
            raise CorruptCheckpointError(
                f"{url}: stored shards of {name} overlap; use another checkpoint", tensors=(name,)
            )
        if plan.missing.any():
            name = str(catalog.key(tensor[int(np.flatnonzero(plan.missing)[0])]))
            raise IncompatibleCheckpointError(
                f"{url} has no data for some elements of {name}; `bytecheckpoint inspect --boxes` shows what it holds"
            )
        return plan


def _dtype(catalog: Catalog, tensor: int) -> torch.dtype:
    name = catalog.dtype[tensor]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IncompatibleCheckpointError(f"dtype {name!r} is unknown to torch {torch.__version__}: use a newer torch")
    return dtype


class Entry:
    """A tensor of an open checkpoint. Slicing reads it: `entry[...]`, `entry[a:b, :, 3]`.

    Indices are those of torch's basic indexing: integers, slices with positive steps, None and Ellipsis. The result
    is a new tensor on the CPU; only the checksum blocks that hold selected elements are read, and all are verified.

    Attributes:
        key: the key under which the checkpoint shows it.
        shape: global shape.
        nbytes: size of the whole tensor in bytes.
        requires_grad: as it was saved.
        device: type of the device that it was saved from, e.g. "cuda".
    """

    __slots__ = ("_reader", "_tensor", "device", "key", "nbytes", "requires_grad", "shape")

    def __init__(self, reader: BoxReader, tensor: int, key: str) -> None:
        catalog = reader.catalog
        self._reader = reader
        self._tensor = tensor
        self.key = key
        self.shape = torch.Size(catalog.shape(tensor))
        self.nbytes = math.prod(self.shape) * itemsize(catalog.dtype[tensor])
        self.requires_grad = bool(catalog.requires_grad[tensor])
        self.device = catalog.device[tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype.

        Raises:
            IncompatibleCheckpointError: this version of torch does not have it.
        """
        return _dtype(self._reader.catalog, self._tensor)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"Entry({self.key!r}, shape={list(self.shape)}, dtype={self._reader.catalog.dtype[self._tensor]})"

    def __copy__(self) -> Entry:
        return self

    def __deepcopy__(self, memo: object) -> Entry:
        return self

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Like a tensor: over the first dimension, one read for each index."""
        if not self.shape:
            raise UsageError(f"{self.key} has no dimension to iterate over; read it with entry[...]")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The selected elements.

        Raises:
            OutOfRangeError: an index outside the shape; also an IndexError.
            UsageError: not a basic index.
            CorruptCheckpointError: bytes differ from what was written.
        """
        selection = select(self.shape, index, self.key)
        if 0 in selection.counts:
            self._reader.files()
            return torch.empty(selection.counts, dtype=self.dtype, device="cpu")[selection.shaping]
        dim = self._split_dim(selection)
        spans = list(selection.spans)
        starts, steps = list(selection.starts), list(selection.steps)
        offsets = [starts]
        if dim is not None:
            spans[dim] = steps[dim] = 1
            every = range(starts[dim], starts[dim] + selection.spans[dim], selection.steps[dim])
            offsets = [[*starts[:dim], i, *starts[dim + 1 :]] for i in every]
        (data,) = self._reader.read([Request(self._tensor, offsets, spans, dim or 0)])
        if any(step > 1 for step in steps):
            picked = movable(data)[tuple(slice(None, None, step) for step in steps)]
            data = picked.contiguous().view(self.dtype)
        return data[selection.shaping]

    def _split_dim(self, selection: Selection) -> int | None:
        """The outermost strided dimension whose selected indices lie so far apart that each is read by itself."""
        inner = self.nbytes // max(math.prod(self.shape), 1)
        found = None
        for dim in range(self.ndim - 1, -1, -1):
            step, count = selection.steps[dim], selection.counts[dim]
            if step > 1 and (step - 1) * inner >= _FAR and count <= _MANY:
                found = dim
            inner *= self.shape[dim]
        return found

    def chunks(self, max_bytes: int = 32 << 20) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """The whole tensor piece by piece, for work in bounded memory.

        Args:
            max_bytes: size of a piece at most.

        Yields:
            (slices, data) such that `data` is `entry[slices]`. Pieces come in row-major order and each is one run of
            elements in that order, so that their bytes one after the other are the bytes of the whole.
        """
        for _, slices, data in stream(self._reader, [(self.key, self._tensor)], max_bytes):
            yield slices, data


Piece = tuple[str, tuple[slice, ...], torch.Tensor]


def stream(reader: BoxReader, tensors: Iterable[tuple[str, int]], max_bytes: int) -> Iterator[Piece]:
    """Whole tensors piece by piece, small ones read together.

    Args:
        reader: of the checkpoint.
        tensors: (name, number) of each tensor.
        max_bytes: of tensors in memory at a time.

    Yields:
        (name, slices, data), the pieces of a tensor in row-major order; one empty piece for an empty tensor.
    """
    names: list[str] = []
    requests: list[Request] = []
    held = 0
    for name, tensor in tensors:
        element = itemsize(reader.catalog.dtype[tensor])
        shape = reader.catalog.shape(tensor)
        for offsets, lengths in row_major_boxes(shape, max(max_bytes // element, 1)):
            nbytes = math.prod(lengths) * element
            if requests and (held + nbytes > max_bytes or len(requests) >= _TOGETHER):
                yield from _pieces(reader, names, requests)
                names, requests, held = [], [], 0
            names.append(name)
            requests.append(Request(tensor, [offsets], lengths))
            held += nbytes
    if requests:
        yield from _pieces(reader, names, requests)


def _pieces(reader: BoxReader, names: list[str], requests: list[Request]) -> Iterator[Piece]:
    for name, request, data in zip(names, requests, reader.read(requests), strict=True):
        yield name, tuple(slice(o, o + n) for o, n in zip(request.offsets[0], request.lengths, strict=True)), data
