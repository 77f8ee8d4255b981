"""Find the tensors that hold scales of other tensors' elements: block scales of fp8, mxfp4 and nvfp4, rows of int8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.layouts.axes import ONE, Axis, Dim, Product, TextError, parse_axes
from bytecheckpoint.layouts.names import parse_template
from bytecheckpoint.layouts.statements import Scales

__all__ = ["ScaleGrid", "check_scales", "find_scales", "logical_shape", "tensors_of_scales"]

#: Operation of a `scales` line: whether a byte holds two elements, and whether an integer is an exponent of two.
_OPERATIONS = {"blocks": (False, False), "rows": (False, False), "mxfp4": (True, True), "nvfp4": (True, False)}


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The way in which a tensor of scales lies over the tensor that it scales.

    Attributes:
        statement: line of the layout.
        tensor: number of the tensor of scales on its side.
        dims: dimension of the scaled tensor along each dimension of the scales, -1 for one of size 1.
        blocks: elements that one scale is for, along each dimension of the scales.
    """

    statement: Scales
    tensor: int
    dims: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """True if a byte of the scaled tensor holds two elements of 4 bits, the first in the low bits."""
        return _OPERATIONS[self.statement.operation][0]

    @property
    def exponents(self) -> bool:
        """True if a scale that is stored as an integer `s` means `2 ** (s - 127)`."""
        return _OPERATIONS[self.statement.operation][1]


def check_scales(statement: Scales) -> None:
    """Refuse a `scales` line that has a mistake.

    Raises:
        TextError: names, axes or the operation are wrong.
    """
    _grid(statement)
    templates = [parse_template(name) for name in (statement.name, statement.of)]
    first, second = ({str(h.axis) for h in t.holes} | {f"<{x.name}>" for x in t.texts} for t in templates)
    if first != second:
        raise TextError(f"'{statement.name}' and '{statement.of}' do not have the same numbers and texts")
    if statement.operation not in _OPERATIONS:
        raise TextError(f"'{statement.operation}' is no operation: write {', '.join(_OPERATIONS)}")


def _grid(statement: Scales) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the scaled tensor's dimension along each dimension of the scales, and the length of a block along it."""
    sizes = dict(statement.sizes)
    places: dict[str, tuple[int, int]] = {}
    for k, axis in enumerate(parse_axes(statement.of_axes)):
        name, block = _name_and_block(axis, sizes)
        places[name] = (k, block)
    found = []
    for axis in parse_axes(statement.axes):
        if axis != ONE and not (isinstance(axis, Dim) and axis.name in places):
            raise TextError(f"'{axis}' of the scales stands in no axis of '{statement.of_axes}'")
        found.append((-1, 1) if axis == ONE else places[str(axis)])
    return tuple(k for k, _ in found), tuple(block for _, block in found)


def _name_and_block(axis: Axis, sizes: Mapping[str, int]) -> tuple[str, int]:
    match axis:
        case Dim(name):
            return name, 1
        case Product((Dim(name), Dim(block))) if sizes.get(block, 0) > 0:
            return name, sizes[block]
    raise TextError(f"'{axis}' is no axis of scaled tensors: write a dim, or '(i b)' and the size of b after 'with'")


def find_scales(
    statements: Sequence[Scales], names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[int, list[ScaleGrid]]:
    """Find the tensors of scales of a side.

    Args:
        statements: `scales` lines of the side.
        names: names of the side's tensors.
        shapes: shapes of the tensors.

    Returns:
        The scales of each scaled tensor, by its number.

    Raises:
        IncompatibleCheckpointError: a tensor of scales has another shape than the scaled tensor needs, or scales no tensor.
    """
    if not statements:
        return {}
    numbers = {name: number for number, name in enumerate(names)}
    found: dict[int, list[ScaleGrid]] = defaultdict(list)
    for statement in statements:
        dims, blocks = _grid(statement)
        template, other = parse_template(statement.name), parse_template(statement.of)
        end = template.pieces[-1] if isinstance(template.pieces[-1], str) else ""
        checked: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for name, tensor in numbers.items():
            of = template.renamed(name, other) if name.endswith(end) else None
            if of is None:
                continue
            if of not in numbers:
                raise IncompatibleCheckpointError(f"{statement.place}: {name} holds scales of {of}, which is missing")
            grid = ScaleGrid(statement, tensor, dims, blocks)
            pair = (tuple(shapes[numbers[of]]), tuple(shapes[tensor]))
            if pair not in checked:
                _check_shape(grid, numbers[of], names, shapes)
                checked.add(pair)
            found[numbers[of]].append(grid)
    for tensor, grids in found.items():
        kinds = {(grid.packed, grid.statement.of_axes) for grid in grids}
        if len({packed for packed, _ in kinds}) > 1:
            labels = listed([f"'{grid.statement.operation}'" for grid in grids])
            raise IncompatibleCheckpointError(f"{names[tensor]} has scales of several sorts: {labels}")
    return dict(found)


def tensors_of_scales(scales: Mapping[int, Sequence[ScaleGrid]]) -> list[int]:
    """Return the numbers of the tensors that hold scales, ascending."""
    return sorted({grid.tensor for grids in scales.values() for grid in grids})


def _check_shape(grid: ScaleGrid, scaled: int, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
    """Refuse scales of which there are more or less than blocks."""
    place, shape = grid.statement.place, logical_shape(shapes[scaled], grid.packed)
    count = len(parse_axes(grid.statement.of_axes))
    if len(shape) != count:
        raise IncompatibleCheckpointError(
            f"{place}: {names[scaled]} has {len(shape)} dimensions, but '{grid.statement.of_axes}' has {count}"
        )
    expected = [1 if k < 0 else -(-shape[k] // block) for k, block in zip(grid.dims, grid.blocks, strict=True)]
    if expected != list(shapes[grid.tensor]):
        blocks = " x ".join(map(str, _block_lengths(grid, shape)))
        raise IncompatibleCheckpointError(
            f"{place}: {names[grid.tensor]} has shape {list(shapes[grid.tensor])}, but {names[scaled]} has shape {shape} "
            f"in blocks of {blocks}, which need {expected}"
        )


def _block_lengths(grid: ScaleGrid, shape: Sequence[int]) -> Iterator[int]:
    for k, length in enumerate(shape):
        yield grid.blocks[grid.dims.index(k)] if k in grid.dims else length


def logical_shape(shape: Sequence[int], packed: bool) -> list[int]:
    """Return the shape of a tensor in elements, of which a byte holds two if it is packed."""
    return [*shape[:-1], shape[-1] * 2] if packed and shape else list(shape)
