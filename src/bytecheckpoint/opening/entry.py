"""One tensor of an open checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from bytecheckpoint.engine.tensor_bytes import movable
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.opening.box_reader import BoxReader, BoxRequest, read_in_pieces
from bytecheckpoint.opening.slices import Selection, select
from bytecheckpoint.representation.dtypes import itemsize

__all__ = ["Entry"]

_SEPARATE_READ_DISTANCE = 128 << 10
"""Smallest distance in bytes at which strided elements are read separately, without the bytes between them."""
_MAX_SEPARATE_READS = 1 << 16


class Entry:
    """A tensor of an open checkpoint; slicing reads it: `entry[...]`, `entry[a:b, :, 3]`.

    Indices follow torch's basic indexing: integers, slices with positive steps, None and Ellipsis. The result is a new
    tensor on the CPU. Only checksum blocks that hold selected elements are read, and each of them is verified.

    Attributes:
        key: key of the tensor in the checkpoint.
        shape: global shape.
        nbytes: size of the whole tensor in bytes.
        requires_grad: flag of the saved tensor.
        device: type of the device that the tensor was saved from, e.g. "cuda".
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
        """Dtype of the tensor.

        Raises:
            IncompatibleCheckpointError: this version of torch lacks the dtype.
        """
        return dtype_named(self._reader.catalog.dtype[self._tensor])

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
        """Iterate over the first dimension, as a tensor does, with one read for each index."""
        if not self.shape:
            raise UsageError(f"{self.key} has no dimension to iterate over; read it with entry[...]")
        return (self[i] for i in range(self.shape[0]))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the selected elements.

        Raises:
            OutOfRangeError: an index is outside the shape; this is also an IndexError.
            UsageError: `index` is not a basic index.
            CorruptCheckpointError: the bytes read do not match their checksums.
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
        (data,) = self._reader.read([BoxRequest(self._tensor, offsets, spans, dim or 0)])
        if any(step > 1 for step in steps):
            picked = movable(data)[tuple(slice(None, None, step) for step in steps)]
            data = picked.contiguous().view(self.dtype)
        return data[selection.shaping]

    def _split_dim(self, selection: Selection) -> int | None:
        """Return the outermost strided dimension whose selected indices are far enough apart for separate reads."""
        inner = self.nbytes // max(math.prod(self.shape), 1)
        found = None
        for dim in range(self.ndim - 1, -1, -1):
            step, count = selection.steps[dim], selection.counts[dim]
            if step > 1 and (step - 1) * inner >= _SEPARATE_READ_DISTANCE and count <= _MAX_SEPARATE_READS:
                found = dim
            inner *= self.shape[dim]
        return found

    def chunks(self, max_bytes: int = 32 << 20) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Read the whole tensor in pieces, for work in bounded memory.

        Args:
            max_bytes: largest size of a piece.

        Yields:
            (slices, data) where `data` is `entry[slices]`. The pieces come in row-major order, and each is one run of
            elements in that order, so the concatenated bytes of the pieces are the bytes of the tensor.
        """
        for _, slices, data in read_in_pieces(self._reader, [(self.key, self._tensor)], max_bytes):
            yield slices, data
