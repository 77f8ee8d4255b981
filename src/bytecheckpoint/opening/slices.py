"""Turn an index expression into the start, count and step of each dimension."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import OutOfRangeError, UsageError

__all__ = ["Selection", "row_major_boxes", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected elements of each dimension: `count` elements start, start + step, ...

    Attributes:
        starts, counts, steps: one number per dimension of the tensor.
        shaping: index to apply to the selected elements: it drops the dimension of each integer and adds one for None.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    shaping: tuple[Any, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """Extent of the smallest box around the selected elements."""
        return tuple((c - 1) * s + 1 if c else 0 for c, s in zip(self.counts, self.steps, strict=True))


def select(shape: Sequence[int], index: Any, name: str) -> Selection:
    """Return the selection of `index` from a tensor of `shape`, by torch's rules of basic indexing.

    Args:
        shape: shape of the tensor.
        index: an integer, a slice with a positive step, Ellipsis, None, or a tuple of these.
        name: name of the tensor, for messages.

    Raises:
        OutOfRangeError: `index` reaches outside the shape.
        UsageError: `index` is of another type.
    """
    items = index if isinstance(index, tuple) else (index,)
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if sum(1 for item in items if item is Ellipsis) > 1:
        raise OutOfRangeError(f"{name}: an index can have one ellipsis ('...')")
    if used > len(shape):
        raise OutOfRangeError(f"{name}: {used} indices for a tensor of {len(shape)} dimensions")
    rest = [slice(None)] * (len(shape) - used)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items = (*items[:at], *rest, *items[at + 1 :])

    starts: list[int] = []
    counts: list[int] = []
    steps: list[int] = []
    shaping: list[Any] = []
    for item in items:
        if item is None:
            shaping.append(None)
            continue
        size = shape[len(starts)]
        if isinstance(item, slice):
            start, count, step = _of_slice(item, size, name)
            shaping.append(slice(None))
        else:
            start, count, step = _of_integer(item, len(starts), size, name), 1, 1
            shaping.append(0)
        starts.append(start)
        counts.append(count)
        steps.append(step)
    return Selection(tuple(starts), tuple(counts), tuple(steps), tuple(shaping))


def _of_slice(item: slice, size: int, name: str) -> tuple[int, int, int]:
    try:
        step = 1 if item.step is None else operator.index(item.step)
        if step <= 0:
            raise UsageError(f"{name}: the step of a slice must be greater than zero, not {step}")
        start, stop, step = item.indices(size)
    except TypeError:
        raise UsageError(f"{name}: {item!r} is not a slice of integers") from None
    count = max(0, -(-(stop - start) // step))
    return start, count, step if count > 1 else 1


def _of_integer(item: Any, dim: int, size: int, name: str) -> int:
    try:
        if isinstance(item, bool) or len(getattr(item, "shape", ())):
            raise TypeError  # a mask or an array of indices; operator.index accepts an array of one element
        number = operator.index(item)
    except TypeError:
        raise UsageError(
            f"{name}: cannot be indexed with {type(item).__name__}; use integers, slices, None and '...', or read "
            f"first and index the tensor: entry[...][index]"
        ) from None
    if not -size <= number < size:
        raise OutOfRangeError(f"{name}: index {number} is out of range for dimension {dim} of size {size}")
    return number % size


def row_major_boxes(shape: Sequence[int], max_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes that tile a tensor of `shape` in row-major order, each one run of elements.

    Args:
        shape: shape of the tensor.
        max_elements: largest number of elements of a box, at least 1.

    Yields:
        (offsets, lengths) of each box; one empty box for a tensor without elements.

    >>> list(row_major_boxes((2, 3), 2))
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    """
    inner, dim = 1, len(shape) if 0 not in shape else 0
    while dim > 0 and inner * shape[dim - 1] <= max_elements:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield (0,) * len(shape), tuple(shape)
        return
    dim -= 1
    rows = max(max_elements // inner, 1)
    outer = [0] * dim
    tail, tail_zero = tuple(shape[dim + 1 :]), (0,) * (len(shape) - dim - 1)
    while True:
        for start in range(0, shape[dim], rows):
            yield (*outer, start, *tail_zero), (*(1,) * dim, min(rows, shape[dim] - start), *tail)
        for k in range(dim - 1, -1, -1):
            outer[k] += 1
            if outer[k] < shape[k]:
                break
            outer[k] = 0
        else:
            return
