"""Layouts without torch.distributed: several ranks as threads, each holding boxes of coordinate-coded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, lengths

_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
#: All dtypes of torch but the quantised, which cannot be saved.
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _QUANTISED, key=lambda d: (d.itemsize, str(d))
)


def coded(shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return a tensor whose every element encodes its flat index, mixed with a salt."""
    count = int(np.prod(shape, dtype=np.int64))
    flat = torch.arange(count, dtype=torch.int64) + 1 + salt * 1_000_003
    if dtype.is_floating_point or dtype.is_complex:
        # Modulo a prime below the mantissa's range, so that neighbours differ in every dtype.
        modulus = {torch.bfloat16: 251, torch.float16: 2039}.get(dtype, 16_777_213)
        return (flat % modulus).to(dtype).reshape(tuple(shape))
    if dtype == torch.bool:
        return (flat * 2654435761 % 97 % 2 == 0).reshape(tuple(shape))
    return (flat % 127).to(dtype).reshape(tuple(shape)) if dtype.itemsize == 1 else flat.to(dtype).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in order, uint8 [nbytes]."""
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return (tensor if same_width is None else tensor.view(same_width)).contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Leaf:
    """In place of a tensor: the boxes of it that one rank holds."""

    shape: tuple[int, ...]
    boxes: list[Box]
    tensors: list[torch.Tensor] = field(default_factory=list)

    def __bytecheckpoint_shards__(self) -> Any:
        for (offsets, _), tensor in zip(self.boxes, self.tensors, strict=True):
            yield self.shape, offsets, tensor

    def fill(self, full: torch.Tensor, strided: bool) -> Leaf:
        """Copy the boxes' elements from `full`; `strided`: into memory that is not contiguous."""
        self.tensors = []
        for offsets, lengths in self.boxes:
            piece = full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            self.tensors.append(as_strided_copy(piece) if strided else piece.clone().contiguous())
        return self

    def check(self, full: torch.Tensor) -> None:
        """Fail unless every element equals that of `full`."""
        for (offsets, lengths), tensor in zip(self.boxes, self.tensors, strict=True):
            piece = full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            assert torch.equal(piece, tensor), (self.shape, offsets, lengths)


class Declared:
    """In place of a tensor: the shards (global shape, offsets or number of the first element, data) that it lists."""

    def __init__(self, *shards: Any) -> None:
        self.shards = shards

    def __bytecheckpoint_shards__(self) -> Any:
        return self.shards


def as_strided_copy(piece: torch.Tensor) -> torch.Tensor:
    """Copy the elements into a view with gaps, transposed if it has two dimensions or more."""
    if piece.ndim == 0:
        return torch.stack([piece, piece])[1]
    wide = torch.zeros((*piece.shape[:-1][::-1], piece.shape[-1] * 2), dtype=piece.dtype)
    view = wide.permute(*range(piece.ndim - 2, -1, -1), piece.ndim - 1)[..., ::2]
    view.copy_(piece)
    return view


def grid_boxes(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Return the boxes between `cuts`: per dimension, sorted inner positions (repeated ones give empty boxes)."""
    edges = [[0, *c, n] for c, n in zip(cuts, shape, strict=True)]
    boxes = []
    for corner in product(*[range(len(e) - 1) for e in edges]):
        offsets = tuple(e[i] for e, i in zip(edges, corner, strict=True))
        lengths = tuple(e[i + 1] - e[i] for e, i in zip(edges, corner, strict=True))
        boxes.append((offsets, lengths))
    return boxes
