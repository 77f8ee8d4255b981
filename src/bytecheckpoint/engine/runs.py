"""Copy many short runs of elements of one 1-D tensor together, without a view of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from bytecheckpoint.engine.tensor_bytes import flat_bytes, movable
from bytecheckpoint.representation.boxes import Int64s

__all__ = ["Runs", "elements_of", "move_runs"]

#: From this length on, in elements, a slice takes less time than an index for each element.
_LONG_RUN = 128
#: Short runs that are moved at once: their indexes stay in the processor's cache.
_RUNS_AT_ONCE = 4096
#: Elements of a device that are moved at once: their indexes take eight bytes each there.
_DEVICE_ELEMENTS = 1 << 20
_SAME_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def elements_of(tensor: torch.Tensor) -> NDArray[Any]:
    """View the elements of a contiguous tensor of the host as numbers of the same size, shape [numel]."""
    return flat_bytes(tensor).numpy().view(_SAME_SIZE[tensor.element_size()])


def move_runs(
    target: NDArray[Any] | torch.Tensor,
    target_at: Int64s,
    source: NDArray[Any] | torch.Tensor,
    source_at: Int64s,
    counts: Int64s,
) -> None:
    """Copy runs of elements; run i goes from `source_at[i]` to `target_at[i]`. Returns when all are copied.

    Args:
        target: elements of the host (`elements_of`), or a 1-D tensor of stride 1 on a device.
        target_at: number of each run's first element there, [n].
        source: elements like `target`; one of both is of the host.
        source_at: number of each run's first element there, [n].
        counts: elements of each run, [n].
    """
    if isinstance(target, torch.Tensor) or isinstance(source, torch.Tensor):
        _move_on_device(target, target_at, source, source_at, counts)
        return
    long = counts >= _LONG_RUN
    if long.any():
        columns = (target_at[long].tolist(), source_at[long].tolist(), counts[long].tolist())
        for to, begin, count in zip(*columns, strict=True):
            target[to : to + count] = source[begin : begin + count]
        target_at, source_at, counts = target_at[~long], source_at[~long], counts[~long]
    for first in range(0, len(counts), _RUNS_AT_ONCE):
        part = slice(first, first + _RUNS_AT_ONCE)
        to, begin, count = target_at[part], source_at[part], counts[part]
        if (count == count[0]).all():
            # Rows of a view in which every element begins a run: one index for each run.
            _windows(target, int(count[0]))[to] = _windows(source, int(count[0]))[begin]
        else:
            target[_elements(to, count)] = source[_elements(begin, count)]


def _windows(array: NDArray[Any], length: int) -> NDArray[Any]:
    return as_strided(array, (len(array) - length + 1, length), array.strides * 2)


def _elements(first: Int64s, counts: Int64s) -> Int64s:
    """Return the numbers of all elements of the runs."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(first - ends + counts, counts)


def _move_on_device(target: Any, target_at: Int64s, source: Any, source_at: Int64s, counts: Int64s) -> None:
    """Copy runs to or from a device, which gathers or spreads their elements itself: a copy for each would take longer."""
    for to, begin, count in _pieces(target_at, source_at, counts):
        if isinstance(source, torch.Tensor):
            index = torch.from_numpy(_elements(begin, count)).to(source.device)
            gathered = source.index_select(0, index).cpu()
            target[_elements(to, count)] = elements_of(gathered)
        else:
            index = torch.from_numpy(_elements(to, count)).to(target.device)
            values = torch.from_numpy(source[_elements(begin, count)].view(np.uint8)).view(target.dtype)
            target.index_copy_(0, index, values.to(target.device))


def _pieces(target_at: Int64s, source_at: Int64s, counts: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Cut runs where a piece has enough elements; yield their columns."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, _DEVICE_ELEMENTS):
        high = min(low + _DEVICE_ELEMENTS, total)
        first, last = int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1
        begin = np.maximum(ends[first:last] - counts[first:last], low)
        shift = begin - (ends[first:last] - counts[first:last])
        yield target_at[first:last] + shift, source_at[first:last] + shift, np.minimum(ends[first:last], high) - begin


@dataclass(slots=True, eq=False)
class Runs:
    """Runs of elements of a 1-D tensor of stride 1, one after the other.

    Attributes:
        memory: the tensor, under a dtype that torch copies on every device.
        places: number of the first element of each run, int64 [n].
        counts: elements of each run, at least 1, int64 [n].
    """

    memory: torch.Tensor
    places: Int64s
    counts: Int64s
    _ends: Int64s = field(init=False)

    def __post_init__(self) -> None:
        self.memory = movable(self.memory)
        self._ends = np.cumsum(self.counts)

    @property
    def nbytes(self) -> int:
        """Length of all runs in bytes."""
        return int(self._ends[-1]) * self.memory.element_size()

    def places_of(self, numbers: Int64s) -> Int64s:
        """Return the places in the memory of elements of the joined runs, by their numbers."""
        run = np.searchsorted(self._ends, numbers, "right")
        return self.places[run] + numbers - (self._ends - self.counts)[run]

    def copy_bytes(self, first: int, last: int, destination: torch.Tensor) -> None:
        """Copy bytes [first, last) of the joined runs, whole elements, to `destination` (uint8 on the host)."""
        size = self.memory.element_size()
        low, high = first // size, last // size
        assert (low * size, high * size) == (first, last), "chunks begin and end between elements"
        a, b = int(np.searchsorted(self._ends, low, "right")), int(np.searchsorted(self._ends, high, "left")) + 1
        starts = self._ends[a:b] - self.counts[a:b]
        begin = np.maximum(starts, low)
        source = elements_of(self.memory) if self.memory.is_cpu else self.memory
        counts = np.minimum(self._ends[a:b], high) - begin
        target: NDArray[Any] = destination.numpy().view(_SAME_SIZE[size])
        move_runs(target, begin - low, source, self.places[a:b] + begin - starts, counts)
