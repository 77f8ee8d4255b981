"""Find the sizes of dims from shapes and from the numbers in names, one unknown of one equation at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.axes import REST, Alternative, Axis, Dim, One, Product, Sum, dims_of, size_of, solve
from bytecheckpoint.layouts.matching import MatchedSide
from bytecheckpoint.layouts.parsed import ParsedRule
from bytecheckpoint.layouts.parts import SourcePlace
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["Equation", "decode", "numbering", "solved", "without_rest"]


@dataclass(frozen=True)
class Equation:
    """The size of an axis.

    Attributes:
        axis: the axis.
        value: its size.
        what: text that says where the size was found.
        place: place of the axis in the source.
    """

    axis: Axis
    value: int
    what: str
    place: SourcePlace


def without_rest(axes: Sequence[Axis], count: int) -> tuple[Axis, ...]:
    """Return the axes of a tensor with `count` dims for `...`."""
    result: list[Axis] = []
    for axis in axes:
        result += rest_dims(count) if axis == REST else [axis]
    return tuple(result)


def rest_dims(count: int) -> list[Dim]:
    """Return the dims that `...` stands for."""
    return [Dim(f"...{k}") for k in range(count)]


def solved(equations: Sequence[Equation], known: Mapping[str, int]) -> dict[str, int]:
    """Return all sizes that follow from the equations.

    Raises:
        IncompatibleCheckpointError: an equation has no solution.
    """
    sizes = dict(known)
    solve_all([(equation.axis, equation.value) for equation in equations], sizes)
    for equation in equations:
        axis, what = equation.axis, f"{equation.place}: {equation.what}: {equation.value} here"
        names = list(dict.fromkeys(dims_of(axis)))
        values = ", ".join(f"{name}={sizes[name]}" for name in names if name in sizes)
        unknown = [name for name in names if name not in sizes]
        if not unknown and (size := size_of(axis, sizes)) != equation.value:
            given = f" with {values}" if values and not isinstance(axis, Dim) else ""
            raise IncompatibleCheckpointError(f"{what}, but {axis} is {size}{given}")
        if len(unknown) == 1:  # else it would have been solved
            given = f" with {values}" if values else ""
            raise IncompatibleCheckpointError(f"{what}, but no size of '{unknown[0]}' gives {axis} that size{given}")
    return sizes


def padding_dims(axes: Sequence[Axis]) -> set[str]:
    """Return the dims that stand in padding only."""
    padding, others = set[str](), set[str]()

    def add(axis: Axis, in_padding: bool) -> None:
        match axis:
            case Dim(name):
                (padding if in_padding else others).add(name)
            case Product(factors):
                for factor in factors:
                    add(factor, in_padding)
            case Sum(labels, terms):
                for label, term in zip(labels, terms, strict=True):
                    add(term, in_padding or label.startswith("~"))

    for axis in axes:
        add(axis, False)
    return padding - others


def decode(axis: Axis, numbers: Int64s, sizes: Mapping[str, int], values: dict[str, Int64s]) -> Mask:
    """Find the values of dims at coordinates along an axis without sums; return a mask of the coordinates that it has.

    Raises:
        KeyError: the size of a dim is not known.
    """
    match axis:
        case Dim(name):
            values[name] = numbers
            return numbers >= 0
        case One():
            zero: Mask = numbers == 0
            return zero
        case Product(factors):
            fits: Mask = np.ones(len(numbers), bool)
            for factor in factors[:0:-1]:
                size = max(size_of(factor, sizes), 1)
                fits &= decode(factor, numbers % size, sizes, values)
                numbers = numbers // size
            return fits & decode(factors[0], numbers, sizes, values)
        case Alternative(whole, index, term):
            local = numbers - sum(size_of(other, sizes) for other in whole.terms[:index])
            fits = decode(term, local, sizes, values) & (local >= 0)
            last = index + 1 == len(whole.terms)
            return fits if last else fits & (local < size_of(whole.terms[index], sizes))
        case _:
            raise AssertionError(axis)


def numbering(
    parsed: ParsedRule, rule: int, sides: Sequence[MatchedSide | None], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of dims that products and sums in the names of a rule need.

    They follow from the largest numbers of the names, and from shapes that are the same for all tensors of a family.
    """
    sizes = dict(known)
    holes = [hole.axis for family in parsed.families for hole in family.template.holes]
    if all(isinstance(axis, Dim) for axis in holes):
        return sizes
    equations: list[tuple[Axis, int]] = []
    for f, family in enumerate(parsed.families):
        side = sides[family.side]
        rows = side.rows.get((rule, f)) if side else None
        if side is None or rows is None:
            continue
        if not side.side.partial:
            equations += [
                (hole.axis, int(rows.numbers[:, k].max()) + 1)
                for k, hole in enumerate(family.template.holes)
                if not _ends_in_padding(hole.axis)  # no name has the last number of such an axis
            ]
        shapes = side.shapes[rows.tensor]
        if (shapes == shapes[0]).all() and side.ndims[rows.tensor[0]] == len(family.axes) and REST not in family.axes:
            equations += [(axis, int(size)) for axis, size in zip(family.axes, shapes[0], strict=False)]
    solve_all(equations, sizes)
    needed = {name for axis in holes if not isinstance(axis, Dim) for name in dims_of(axis)}
    return {name: size for name, size in sizes.items() if name in known or name in needed}


def _ends_in_padding(axis: Axis) -> bool:
    match axis:
        case Product(factors):
            return any(map(_ends_in_padding, factors))
        case Sum(labels, terms):
            return labels[-1].startswith("~") or _ends_in_padding(terms[-1])
        case _:
            return False


def solve_all(equations: Sequence[tuple[Axis, int]], sizes: dict[str, int]) -> None:
    """Add each size to `sizes` that follows from an equation with one unknown."""
    changed = True
    while changed:
        changed = False
        for axis, value in equations:
            unknown = {name for name in dims_of(axis) if name not in sizes}
            if len(unknown) == 1:
                (name,) = unknown
                size = solve(axis, value, name, sizes)
                if size is not None:
                    sizes[name] = size
                    changed = True
