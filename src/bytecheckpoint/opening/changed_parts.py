"""Change the elements of tensors in place after a load: block scales of quantised weights, sums of norms, and means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bytecheckpoint.engine.scatter import BoxTarget
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.planning.element_maps import ElementMap, PartScales
from bytecheckpoint.representation.boxes import Int64s

__all__ = ["ChangedBox", "changed_box"]

#: Elements that are changed at a time: what a change needs beside the tensor stays below 16 MiB.
_ELEMENTS = 1 << 19
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


@dataclass(frozen=True, slots=True)
class _Factors:
    """The scales of a box's elements.

    Attributes:
        part: number of the part that the scales are.
        offsets: first coordinate of the scales that the box needs.
        target: memory of these scales.
        index: coordinate among these scales of each element, along each of their dimensions, broadcast over the box.
        exponents: True if an integer `s` means `2 ** (s - 127)`.
    """

    part: int
    offsets: tuple[int, ...]
    target: BoxTarget
    index: tuple[torch.Tensor, ...]
    exponents: bool

    def along(self, dim: int, device: torch.device, dtype: torch.dtype) -> Callable[[int, int], torch.Tensor]:
        """Return a function that returns the factors of the coordinates `begin` to `end` along a dimension of the box."""
        values = self.target.data
        if self.exponents and values.dtype == torch.uint8:
            values = torch.ldexp(torch.ones(values.shape, dtype=torch.float64), values.int() - 127)
        values = values.to(device=device, dtype=dtype)
        index = [i.to(device) for i in self.index]
        moving = [k for k, i in enumerate(index) if i.shape[dim] > 1]
        fixed = [k for k, i in enumerate(index) if i.shape[dim] == 1]
        if index:  # what is the same for all coordinates is spread once, so that each slab copies whole rows
            values = values.permute(*moving, *fixed)[(slice(None),) * len(moving) + tuple(index[k] for k in fixed)]

        def factors(begin: int, end: int) -> torch.Tensor:
            found = values[tuple(index[k][(slice(None),) * dim + (slice(begin, end),)] for k in moving)]
            if not moving or not fixed:
                return found
            # Each dimension of the box is one of those that moved or one of those that did not.
            rank = found.ndim // 2
            found = found.permute([k for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for k in pair])
            return found.reshape([found.shape[2 * k] * found.shape[2 * k + 1] for k in range(rank)])

        return factors


@dataclass(frozen=True, slots=True)
class ChangedBox:
    """A box of a tensor whose elements are changed once they have arrived.

    Attributes:
        data: memory of the box.
        add: number to add to each element.
        factors: scales of the elements.
        others: further elements, of which each is averaged with the box.
    """

    data: torch.Tensor
    add: float
    factors: Sequence[_Factors]
    others: Sequence[torch.Tensor] = ()

    def change(self) -> None:
        """Take the mean, multiply the elements by their scales, and add the number; each result is rounded once."""
        data = self.data
        if not data.numel():
            return
        wide = torch.float64 if data.dtype == torch.float64 else torch.float32
        dim = next((k for k, length in enumerate(data.shape) if length > 1), 0)
        if data.ndim == 0:
            data, dim = data[None], 0
        factors = [each.along(dim, data.device, wide) for each in self.factors]
        step = max(_ELEMENTS * data.shape[dim] // data.numel(), 1)
        for begin in range(0, data.shape[dim], step):
            end = min(begin + step, data.shape[dim])
            slab = data.narrow(dim, begin, end - begin)
            values = slab.to(wide)
            for other in self.others:
                values = values + other.reshape(data.shape).narrow(dim, begin, end - begin).to(wide)
            if self.others:
                values = values / (1 + len(self.others))
            for of in factors:
                values = values * of(begin, end)
            slab.copy_(values + self.add if self.add else values)


def changed_box(
    name: str, change: ElementMap, offsets: Int64s, lengths: Int64s, data: torch.Tensor
) -> tuple[BoxTarget, ChangedBox]:
    """Return the destination of a box as it is stored, and its change.

    Args:
        name: name of the tensor, for messages.
        change: change of the part.
        offsets: first coordinate of the box in the part, int64 [k].
        lengths: extent of the box, int64 [k].
        data: memory of the box.

    Raises:
        IncompatibleCheckpointError: the memory has a dtype that does not hold the results.
    """
    if data.dtype not in _DTYPES:
        raise IncompatibleCheckpointError(
            f"{name} is {str(data.dtype).removeprefix('torch.')} here, but its elements are scaled or shifted on the way: "
            "load it as float32 or bfloat16"
        )
    stored = data
    if change.pairs >= 0:
        strides, sizes = list(data.stride()), list(data.shape)
        strides[change.pairs] *= 2
        sizes[change.pairs] //= 2
        stored = data.as_strided([*sizes, 2], [*strides, data.stride(change.pairs)], data.storage_offset())
    factors = [_factors(scales, offsets, lengths) for scales in change.scales]
    return BoxTarget(stored, dtype_named(change.dtype), change.pairs >= 0), ChangedBox(data, change.add, factors)


def _factors(scales: PartScales, offsets: Int64s, lengths: Int64s) -> _Factors:
    index: list[torch.Tensor] = []
    low: list[int] = []
    extent: list[int] = []
    for first, weights, block in zip(scales.first.tolist(), scales.weights, scales.blocks.tolist(), strict=True):
        place = np.full((1,) * len(lengths), first + int((weights * offsets[: len(weights)]).sum()), np.int64)
        for k in np.flatnonzero(weights).tolist():
            shape = [1] * len(lengths)
            shape[k] = int(lengths[k])
            place = place + (int(weights[k]) * np.arange(int(lengths[k]))).reshape(shape)
        place //= block
        low.append(int(place.min()))
        extent.append(int(place.max()) - low[-1] + 1)
        index.append(torch.from_numpy(place - low[-1]))
    target = BoxTarget(torch.empty(extent, dtype=dtype_named(scales.dtype), device="cpu"), dtype_named(scales.dtype))
    return _Factors(scales.part, tuple(low), target, tuple(index), scales.exponents)
