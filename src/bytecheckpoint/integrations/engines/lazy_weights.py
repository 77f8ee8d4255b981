"""Weights that remember which part of them is copied where, and are read when all of that is known.

An inference engine hands each weight to code of its model, which cuts out the part of its rank and copies it into a
parameter. A `LazyWeight` takes part in that without bytes: slices, selections and transpositions give other lazy weights. A
copy into a tensor is noted, and one load reads all copies of all ranks at once; any other operation reads its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

__all__ = ["LazyWeight", "WantedWeight", "WeightPart"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class WeightPart:
    """A box of a stored tensor, and the order in which its dimensions are seen.

    Attributes:
        name: name of the tensor.
        shape: its global shape.
        begins: first coordinate along each of its dimensions.
        lengths: extent along each of its dimensions.
        dims: its dimensions in the order in which they are seen, -1 for an added one of length 1; those of length 1 that
            are left out were selected.
    """

    name: str
    shape: tuple[int, ...]
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> WeightPart:
        """Return a whole tensor."""
        return WeightPart(name, shape, (0,) * len(shape), shape, tuple(range(len(shape))))

    @property
    def seen(self) -> tuple[int, ...]:
        """Shape in which the part is seen."""
        return tuple(self.lengths[dim] if dim >= 0 else 1 for dim in self.dims)

    def cut(self, dim: int, begin: int, length: int, *, select: bool = False) -> WeightPart:
        """Return a range of the part along a dimension as seen; with `select`, without this dimension."""
        dim %= len(self.dims)
        own = self.dims[dim]
        begins, lengths = list(self.begins), list(self.lengths)
        if own >= 0:
            begins[own], lengths[own] = begins[own] + begin, length
        dims = self.dims[:dim] + self.dims[dim + 1 :] if select else self.dims
        return WeightPart(self.name, self.shape, tuple(begins), tuple(lengths), dims)

    def permuted(self, order: Sequence[int]) -> WeightPart:
        """Return the part with its dimensions in another order."""
        dims = tuple(self.dims[dim % len(self.dims)] for dim in order)
        return WeightPart(self.name, self.shape, self.begins, self.lengths, dims)

    def widened(self, dim: int) -> WeightPart:
        """Return the part with another dimension of length 1 at a place."""
        dim %= len(self.dims) + 1
        return WeightPart(self.name, self.shape, self.begins, self.lengths, (*self.dims[:dim], -1, *self.dims[dim:]))

    def as_stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of the shape in which the part is seen with the dimensions of the stored one."""
        order = self._order
        return tensor.reshape([self.lengths[dim] for dim in order]).permute(
            [order.index(dim) for dim in range(len(order))]
        )

    def as_seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of the part's lengths in the shape in which the part is seen."""
        return tensor.permute(self._order).reshape(self.seen)

    @property
    def _order(self) -> list[int]:
        """The stored dimensions: those that are seen in their order, then the selected ones."""
        seen = [dim for dim in self.dims if dim >= 0]
        return [*seen, *(dim for dim in range(len(self.shape)) if dim not in seen)]


@dataclass
class WantedWeight:
    """The parts of one stored tensor that are to be read into memory, for a load (`SupportsShards`).

    Attributes:
        shape: global shape of the tensor.
        boxes: memory of each box, by its first coordinates and lengths.
        copies: further memory of boxes that are wanted twice.
    """

    shape: tuple[int, ...] = ()
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, part: WeightPart, memory: torch.Tensor) -> bool:
        """Want a part in memory of the shape in which it is seen; return False if other parts get another dtype."""
        if any(other.dtype != memory.dtype for other in self.boxes.values()):
            return False
        self.shape = part.shape
        first = self.boxes.setdefault((part.begins, part.lengths), stored := part.as_stored(memory))
        if first is not stored:
            self.copies.append((stored, first))
        return True

    def kept(self, dtype: torch.dtype) -> WantedWeight:
        """Return the same boxes with memory of their own, in the dtype of the checkpoint."""
        boxes = {box: torch.empty(box[1], dtype=dtype) for box in self.boxes}
        return WantedWeight(self.shape, boxes)

    def part(self, begins: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor | None:
        """Return the elements of a box from the memory of one that holds it; None if none does."""
        for (first, extent), memory in self.boxes.items():
            inside = [(b - f, b - f + n) for b, f, n in zip(begins, first, lengths, strict=True)]
            if all(low >= 0 and high <= size for (low, high), size in zip(inside, extent, strict=True)):
                return memory[tuple(slice(*one) for one in inside)]
        return None

    def __bytecheckpoint_shards__(self) -> list[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
        return [(self.shape, begins, memory) for (begins, _), memory in self.boxes.items()]


class LazyWeight(torch.Tensor):
    """A part of a stored tensor that is not read yet.

    Args:
        part: the part.
        dtype: dtype of the tensor.
        read: function that reads a part, in the shape of its lengths.
        wanted: parts to be read later, by name, to which copies are added; None to read at once what is copied.
    """

    _part: WeightPart
    _read: Callable[[WeightPart], torch.Tensor]
    _wanted: dict[str, WantedWeight] | None
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: type[LazyWeight],
        part: WeightPart,
        dtype: torch.dtype,
        read: Callable[[WeightPart], torch.Tensor],
        wanted: dict[str, WantedWeight] | None,
    ) -> LazyWeight:
        """Make a tensor without memory."""
        device = torch.device("cpu")
        made: LazyWeight = torch.Tensor._make_wrapper_subclass(cls, part.seen, dtype=dtype, device=device)
        made._part, made._read, made._wanted = part, read, wanted
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight({self._part}, {self.dtype})"

    def other(self, part: WeightPart) -> LazyWeight:
        """Return another part of the same tensor."""
        return LazyWeight(part, self.dtype, self._read, self._wanted)

    def read(self) -> torch.Tensor:
        """Return the part as an ordinary tensor."""
        return self._part.as_seen(self._read(self._part))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Take part in a view or in a copy, or read."""
        first, *rest = args
        if isinstance(first, LazyWeight) and function in cls._VIEWS and not kwargs:
            found = cls._VIEWS[function](first, *rest)
            if found is not None:
                return found
        if function is _aten.copy_.default and isinstance(rest[0], LazyWeight) and not isinstance(first, LazyWeight):
            source = rest[0]
            if source._wanted is not None and source.shape == first.shape and not first.is_meta:
                wanted = source._wanted.setdefault(source._part.name, WantedWeight())
                if wanted.add(source._part, first.detach()):
                    return first
        args, kwargs = tree_map(lambda one: one.read() if isinstance(one, LazyWeight) else one, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _slice(
        self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> LazyWeight | None:
        length = self.shape[dim]
        begin, stop, _ = slice(start, end, step).indices(length)
        if step != 1 or (self._part.dims[dim] < 0 and begin >= stop):
            return None
        return self.other(self._part.cut(dim, begin, max(stop - begin, 0)))

    def _select(self, dim: int, index: int) -> LazyWeight:
        return self.other(self._part.cut(dim, index % self.shape[dim], 1, select=True))

    def _split(self, size: int | Sequence[int], dim: int = 0) -> list[LazyWeight] | None:
        length = self.shape[dim]
        sizes = size if not isinstance(size, int) else [min(size, length - at) for at in range(0, length, size)]
        if self._part.dims[dim] < 0 and 0 in sizes:
            return None
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        return [self.other(self._part.cut(dim, end - n, n)) for end, n in zip(ends, sizes, strict=True)]

    def _unbind(self, dim: int = 0) -> list[LazyWeight]:
        return [self._select(dim, index) for index in range(self.shape[dim])]

    def _transpose(self, one: int = 0, two: int = 1) -> LazyWeight:
        order = list(range(self.ndim))
        order[one], order[two] = order[two], order[one]
        return self.other(self._part.permuted(order))

    def _t(self) -> LazyWeight:
        return self.other(self._part.permuted(range(self.ndim - 1, -1, -1)))

    def _unsqueeze(self, dim: int) -> LazyWeight:
        return self.other(self._part.widened(dim))

    def _permute(self, dims: Sequence[int]) -> LazyWeight:
        return self.other(self._part.permuted(dims))

    def _same(self, shape: Sequence[int] | None = None) -> LazyWeight | None:
        return self.other(self._part) if shape is None or tuple(shape) == tuple(self.shape) else None

    _VIEWS: ClassVar[Mapping[Any, Callable[..., Any]]] = {
        _aten.slice.Tensor: _slice,
        _aten.select.int: _select,
        _aten.split.Tensor: _split,
        _aten.split_with_sizes.default: _split,
        _aten.unbind.int: _unbind,
        _aten.unsqueeze.default: _unsqueeze,
        _aten.t.default: _t,
        _aten.transpose.int: _transpose,
        _aten.permute.default: _permute,
        _aten.detach.default: _same,
        _aten.alias.default: _same,
        _aten.view.default: _same,
        _aten._unsafe_view.default: _same,
    }
