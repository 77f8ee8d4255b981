"""Plan what happens to the elements of parts on their way: block scales of quantised weights, and sums of norms.

A part whose elements change is copied as it is stored, and its destination is changed in place once the bytes and their
scales have arrived. So the copies stay those of boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.axes import affine
from bytecheckpoint.layouts.binding import Binding, BoundSide, PartGroup
from bytecheckpoint.layouts.lowering import Lowering
from bytecheckpoint.layouts.scaling import ScaleGrid
from bytecheckpoint.planning.read_plan import StoredRows
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_rows import rows_of

__all__ = ["ElementMap", "PartScales", "element_maps", "in_bytes", "in_halves", "pairs_of", "scale_rows"]

#: dtypes that have a meaning only together with their scales.
_QUANTISED = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"})


@dataclass(frozen=True, slots=True)
class PartScales:
    """The scales of a part's elements. Element `i` has the scale at `(first + weights @ i) // blocks`.

    Attributes:
        part: number of the part that the tensor of scales is.
        dtype: dtype of the scales.
        exponents: True if an integer `s` means `2 ** (s - 127)`.
        first: place of the part's first element along each dimension of the scales, int64 [s].
        weights: elements per step of each dim of the part, along each dimension of the scales, int64 [s, k].
        blocks: elements that one scale is for, along each dimension, int64 [s].
    """

    part: int
    dtype: str
    exponents: bool
    first: Int64s
    weights: Int64s
    blocks: Int64s


@dataclass(frozen=True, slots=True)
class ElementMap:
    """The change of a part's elements.

    Attributes:
        dtype: dtype in which the part is stored; "uint8" if a byte holds two elements.
        pairs: dim of the part along which a byte holds two elements, -1 if none does.
        add: number to add to each element.
        scales: factors of each element.
        mean: extent of the part along each dim of which an element here is the mean, by the number of the dim.
    """

    dtype: str
    pairs: int = -1
    add: float = 0
    scales: tuple[PartScales, ...] = ()
    mean: tuple[tuple[int, int], ...] = ()


def element_maps(
    bound: Binding,
    side: BoundSide,
    dtypes: Sequence[str],
    catalog: Catalog,
    tensors: Int64s,
    first_part: int,
    sign: int,
) -> dict[int, ElementMap]:
    """Return the change of each part whose elements change, by its number.

    Args:
        bound: the layout, bound.
        side: the stored side of it.
        dtypes: stored dtype of each part.
        catalog: catalog of the checkpoint.
        tensors: number in the catalog of each tensor of the side.
        first_part: number of the first part; the tensors of scales, in the order of `scale_rows`, come after the last one.
        sign: 1 if the left side is stored, -1 if the right one is.

    Raises:
        IncompatibleCheckpointError: scales of a tensor are missing, or are no numbers.
    """
    maps = {
        part + first_part: ElementMap(dtypes[part], add=sign * group.rule.add, mean=_averaged(bound, group, part, sign))
        for group in bound.groups
        if group.rule.add or group.rule.mean
        for part in range(group.start, group.stop)
    }
    places = side.places
    averaged = {part for part, change in maps.items() if change.mean}
    number = {tensor: k for k, tensor in enumerate(side.scale_tensors)}
    read = (places.part >= 0) & ~places.copy
    quantised = np.array([dtype in _QUANTISED for dtype in dtypes], bool)
    scaled = np.zeros(len(side.names), bool)
    scaled[list(side.scales)] = True
    bare = np.flatnonzero(read & ~scaled[places.tensor] & quantised[places.part])
    if len(bare):
        name, dtype = side.names[int(places.tensor[bare[0]])], dtypes[int(places.part[bare[0]])]
        raise IncompatibleCheckpointError(
            f"{name} is stored as {dtype}, and no `scales` line of {bound.layout.label} finds its scales"
        )
    codes = catalog.dtype.codes[tensors].tolist()
    alike: dict[tuple[object, ...], ElementMap] = {}  # the same but for the numbers of parts
    for place in np.flatnonzero(read & scaled[places.tensor]).tolist():
        part, tensor, low = int(places.part[place]), int(places.tensor[place]), int(places.lowering[place])
        if part + first_part in averaged:
            raise IncompatibleCheckpointError(
                f"{side.names[tensor]} is quantised: nothing takes the mean of its elements"
            )
        grids = side.scales[tensor]
        kinds = tuple(codes[grid.tensor] for grid in grids)
        key = (low, dtypes[part], kinds, *(id(grid.statement) for grid in grids))
        if key not in alike:
            names = [catalog.dtype.values[kind] for kind in kinds]
            alike[key] = _map_of(side, grids, places.lowerings[low], dtypes[part], names, tensor)
        own = first_part + len(bound.sizes)
        scales = [replace(s, part=own + number[g.tensor]) for s, g in zip(alike[key].scales, grids, strict=True)]
        add = maps[part + first_part].add if part + first_part in maps else 0
        maps[part + first_part] = replace(alike[key], add=add, scales=tuple(scales))
    return maps


def _averaged(bound: Binding, group: PartGroup, part: int, sign: int) -> tuple[tuple[int, int], ...]:
    """Return the number and the extent of each dim of a part along which elements are averaged.

    Raises:
        IncompatibleCheckpointError: the checkpoint has the mean of elements that the program has.
    """
    found = []
    for k, dim in enumerate(group.part.dims):
        if dim in group.rule.mean:
            if dim not in group.part.given[0 if sign > 0 else 1]:
                raise IncompatibleCheckpointError(
                    f"{group} is a mean along '{dim}' in the checkpoint, which nothing undoes"
                )
            found.append((k, int(bound.sizes[part, k])))
    return tuple(found)


def _map_of(
    side: BoundSide, grids: Sequence[ScaleGrid], low: Lowering, dtype: str, scale_dtypes: Sequence[str], tensor: int
) -> ElementMap:
    """Return the change of the parts that lie in tensors with some scales in one way."""
    column = {name: k for k, name in enumerate(low.dims)}
    first, weights = np.zeros(len(low.axes), np.int64), np.zeros((len(low.axes), len(column)), np.int64)
    for d, axis in enumerate(low.axes):
        first[d], weight = affine(axis, low.sizes)
        for name, w in weight.items():
            weights[d, column[name]] += w
    pairs, scales = -1, []
    for grid, kind in zip(grids, scale_dtypes, strict=True):
        place, operation = grid.statement.place, grid.statement.operation
        if grid.packed:
            pairs = _pairs(side.names[tensor], dtype, low.sizes, low.dims, first[-1], weights[-1])
        elif dtype in ("uint8", "bool") or dtype.startswith(("complex", "float4")):
            name = side.names[tensor]
            raise IncompatibleCheckpointError(
                f"{place}: {name} is stored as {dtype}, of which '{operation}' knows no elements"
            )
        if not kind.startswith(("float", "bfloat")) and not (grid.exponents and kind == "uint8"):
            raise IncompatibleCheckpointError(f"{place}: the scales {side.names[grid.tensor]} are stored as {kind}")
        chosen = [k for k in grid.dims if k >= 0]
        kept = [k for k, dim in enumerate(grid.dims) if dim >= 0]
        along, at = np.zeros((len(grid.dims), len(column)), np.int64), np.zeros(len(grid.dims), np.int64)
        along[kept], at[kept] = weights[chosen], first[chosen]
        scales.append(PartScales(-1, kind, grid.exponents, at, along, np.array(grid.blocks, np.int64)))
    return ElementMap("uint8" if pairs >= 0 else dtype, pairs, 0, tuple(scales))


def _pairs(name: str, dtype: str, sizes: Mapping[str, int], dims: Sequence[str], first: int, weights: Int64s) -> int:
    """Return the dim of a part along which two elements lie in one byte."""
    if dtype not in ("uint8", "int8", "float4_e2m1fn_x2"):
        raise IncompatibleCheckpointError(f"{name} is stored as {dtype}, not as bytes of two elements")
    fast = np.flatnonzero(weights == 1)
    if len(fast) != 1 or first % 2 or sizes[dims[fast[0]]] % 2 or (np.delete(weights, fast) % 2).any():
        raise IncompatibleCheckpointError(f"{name} has two elements in a byte, which the layout takes apart")
    return int(fast[0])


def scale_rows(side: BoundSide, stored: StoredRows, tensors: Int64s, first_part: int) -> StoredRows:
    """Return the rows of the tensors of scales, each as a part of its own.

    Args:
        side: the stored side.
        stored: rows of the checkpoint.
        tensors: number in the catalog of each tensor of the side.
        first_part: number of the first of these parts.
    """
    number, row = rows_of(stored.boxes.tensor, tensors[np.array(side.scale_tensors, np.int64)])
    found = stored.take(row)
    return replace(found, boxes=BoxTable(first_part + number, found.boxes.offsets, found.boxes.lengths))


def in_halves(side: BoundSide, boxes: BoxTable, strides: Int64s) -> tuple[BoxTable, Int64s]:
    """Count the elements of packed tensors, of which a byte holds two, and strides of these in half bytes.

    Args:
        side: the stored side.
        boxes: stored boxes, numbered by the side's tensors.
        strides: bytes from one byte of a packed box to the next along each dimension, int64 [n, d].
    """
    packed = np.zeros(len(side.names), bool)
    packed[[tensor for tensor, grids in side.scales.items() if grids[0].packed]] = True
    rows = np.flatnonzero(packed[boxes.tensor])
    if not len(rows):
        return boxes, strides
    last = side.ndims[boxes.tensor[rows]] - 1
    offsets, lengths, strides = boxes.offsets.copy(), boxes.lengths.copy(), strides.copy()
    if ((strides[rows, last] != 1) & (lengths[rows, last] > 1)).any():
        raise IncompatibleCheckpointError("tensors of two elements in a byte are stored with strides")
    strides[rows] *= 2
    strides[rows, last] = 1
    offsets[rows, last] *= 2
    lengths[rows, last] *= 2
    return BoxTable(boxes.tensor, offsets, lengths), strides


def pairs_of(maps: Mapping[int, ElementMap], parts: Int64s) -> Int64s:
    """Return, for each of some parts, the dim along which a byte holds two elements, -1 if none does."""
    if not maps:
        return np.full(len(parts), -1)
    return np.array([maps[part].pairs if part in maps else -1 for part in parts.tolist()], np.int64)


def in_bytes(boxes: BoxTable, pairs: Int64s) -> BoxTable:
    """Count the bytes of boxes of parts.

    Args:
        boxes: boxes in elements.
        pairs: dim along which a byte holds two elements, -1 if none does, int64 [n].

    Raises:
        IncompatibleCheckpointError: a box begins or ends within a byte.
    """
    rows = np.flatnonzero(pairs >= 0)
    if not len(rows):
        return boxes
    offsets, lengths, dim = boxes.offsets.copy(), boxes.lengths.copy(), pairs[rows]
    if (offsets[rows, dim] % 2).any() or (lengths[rows, dim] % 2).any():
        raise IncompatibleCheckpointError(
            "a shard here begins or ends between the two elements of a byte in the checkpoint: shard these tensors along "
            "another dimension, or at an even index"
        )
    offsets[rows, dim] //= 2
    lengths[rows, dim] //= 2
    return BoxTable(boxes.tensor, offsets, lengths)
