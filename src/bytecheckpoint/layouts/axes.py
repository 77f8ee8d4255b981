"""Describe how the named dims of parts lie along one dimension of a tensor, or in a number of its name.

An axis is a dim `d`, the constant `1`, a product `(A B ...)` of axes of which the first is the slowest, or a sum
`[q: A | k: B]` of named alternatives that lie one after the other. So the coordinate of a part along an axis is
`base + sum(weight * index)` over the part's dims, which is all that lowering needs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ONE", "REST", "Alternative", "Axis", "Dim", "One", "Product", "Rest", "Sum", "TextError",
    "affine", "alternatives", "count_alternatives", "dims_of", "parse_axes", "parse_axis", "size_of", "solve",
]  # fmt: skip

_TOKEN = re.compile(r"\s*(\.\.\.|[^\W\d]\w*|1(?!\w)|[()\[\]|:~]|.)", re.DOTALL)
_MOST_DEEP = 20
_NAME = re.compile(r"[^\W\d]\w*")


class TextError(Exception):
    """A mistake in a piece of text.

    Attributes:
        message: text of the error.
        column: place of the mistake in the piece of text, from 0, or None.
    """

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.message, self.column = message, column


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dim."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class One:
    """An axis of size 1 that no part has a dim for."""

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True, slots=True)
class Rest:
    """The remaining dimensions of a tensor, `...`, which are the same on both sides."""

    def __str__(self) -> str:
        return "..."


@dataclass(frozen=True, slots=True)
class Product:
    """Axes that are flattened in row-major order, the first the slowest."""

    factors: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.factors))})"


@dataclass(frozen=True, slots=True)
class Sum:
    """Named axes that lie one after the other. A label that begins with `~` names padding."""

    labels: tuple[str, ...]
    terms: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"[{' | '.join(f'{label}: {term}' for label, term in zip(self.labels, self.terms, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One term of a sum, at its place in the sum.

    Attributes:
        sum: the whole sum.
        index: number of the term.
        axis: the term, in which each sum is replaced by an alternative.
    """

    sum: Sum
    index: int
    axis: Axis


Axis = Dim | One | Rest | Product | Sum | Alternative
ONE, REST = One(), Rest()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(m[1], m.start(1)) for m in _TOKEN.finditer(text.rstrip())]
        self._at = self._depth = 0

    @property
    def next(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def column(self) -> int:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else len(self._text)

    def take(self) -> str:
        token = self.next
        self._at += 1
        return token

    def expect(self, token: str) -> None:
        if self.next != token:
            raise self.error(f"'{token}'")
        self._at += 1

    def error(self, expected: str) -> TextError:
        found = f"'{self.next}'" if self.next else "the end"
        return TextError(f"expected {expected}, found {found} in '{self._text.strip()}'", self.column)

    def axis(self) -> Axis:
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise TextError(f"axes are nested more than {_MOST_DEEP} deep", self.column)
        axis = self._axis()
        self._depth -= 1
        return axis

    def _axis(self) -> Axis:
        token = self.next
        if token == "(":
            self.take()
            factors: list[Axis] = []
            while self.next != ")":
                if not self.next:
                    raise self.error("')'")
                factors.append(self.axis())
            if not factors:
                raise self.error("an axis")
            self.take()
            return Product(tuple(factors))
        if token == "[":
            return self._sum()
        if token == "1":
            self.take()
            return ONE
        if not _NAME.fullmatch(token):
            raise self.error("an axis")
        return Dim(self.take())

    def _sum(self) -> Sum:
        self.take()
        labels: list[str] = []
        terms: list[Axis] = []
        while True:
            padding = self.next == "~" and self.take()
            if not _NAME.fullmatch(self.next):
                raise self.error("the name of a part")
            labels.append(("~" if padding else "") + self.take())
            self.expect(":")
            terms.append(self.axis())
            if self.next == "]":
                self.take()
                return Sum(tuple(labels), tuple(terms))
            if self.next != "|":
                raise self.error("'|'")
            self.take()


def parse_axis(text: str) -> Axis:
    """Parse the axis in a hole of a name, in which `(` and `)` around a product may be left out."""
    parser = _Parser(text)
    axes = [parser.axis()]
    while parser.next:
        axes.append(parser.axis())
    return axes[0] if len(axes) == 1 else Product(tuple(axes))


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Parse the axes of a tensor, one for each dimension; `...` may stand for any number of them, once."""
    parser = _Parser(text)
    axes: list[Axis] = []
    while parser.next:
        if parser.next == "...":
            if REST in axes:
                raise TextError("'...' stands here twice", parser.column)
            parser.take()
            axes.append(REST)
        else:
            axes.append(parser.axis())
    return tuple(axes)


def dims_of(axis: Axis) -> Iterator[str]:
    """Yield the names of the dims in an axis, from left to right. `...` counts as a dim of that name."""
    match axis:
        case Dim(name):
            yield name
        case Rest():
            yield "..."
        case Product(factors) | Sum(_, factors):
            for factor in factors:
                yield from dims_of(factor)
        case Alternative(_, _, term):
            yield from dims_of(term)


def count_alternatives(axis: Axis) -> int:
    """Return how many choices of one term per sum there are."""
    match axis:
        case Sum(_, terms):
            return sum(map(count_alternatives, terms))
        case Product(factors):
            return math.prod(map(count_alternatives, factors))
        case _:
            return 1


def alternatives(axis: Axis) -> Iterator[tuple[tuple[str, ...], Axis]]:
    """Yield the labels of each choice of one term per sum, and the axis in which alternatives replace the sums."""
    match axis:
        case Sum(labels, terms):
            for index, (label, term) in enumerate(zip(labels, terms, strict=True)):
                for inner, chosen in alternatives(term):
                    yield (label, *inner), Alternative(axis, index, chosen)
        case Product(factors):
            for combination in itertools.product(*(list(alternatives(factor)) for factor in factors)):
                yield (
                    sum((labels for labels, _ in combination), ()),
                    Product(tuple(chosen for _, chosen in combination)),
                )
        case _:
            yield (), axis


def size_of(axis: Axis, sizes: Mapping[str, int]) -> int:
    """Return the number of coordinates of an axis."""
    match axis:
        case Dim(name):
            return sizes[name]
        case Product(factors):
            result = 1
            for factor in factors:
                result *= size_of(factor, sizes)
            return result
        case Sum(_, terms):
            return sum(size_of(term, sizes) for term in terms)
        case Alternative(whole, _, _):
            return size_of(whole, sizes)
        case _:
            return 1


def affine(axis: Axis, sizes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Return the coordinate of a part's first element along an axis without sums, and the weight of each dim."""
    match axis:
        case Dim(name):
            return 0, {name: 1}
        case Product(factors):
            base, weights = 0, dict[str, int]()
            for factor in factors:
                size = size_of(factor, sizes)
                inner, more = affine(factor, sizes)
                base = base * size + inner
                weights = {name: weight * size for name, weight in weights.items()} | more
            return base, weights
        case Alternative(whole, index, term):
            base, weights = affine(term, sizes)
            return base + sum(size_of(other, sizes) for other in whole.terms[:index]), weights
        case _:
            return 0, {}


def solve(axis: Axis, value: int, unknown: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size of the dim `unknown` at which the axis has `value` coordinates, None if there is none.

    The size of an axis is linear in each single dim, because no dim occurs twice in a part. Two evaluations find it.
    """
    at_zero, at_one = (size_of(axis, {**sizes, unknown: size}) for size in (0, 1))
    slope = at_one - at_zero
    if slope <= 0 or (value - at_zero) % slope or value < at_zero:
        return None
    return (value - at_zero) // slope


def axis_texts(axes: Sequence[Axis]) -> str:
    """Return the text of the axes of a tensor."""
    return " ".join(map(str, axes))
