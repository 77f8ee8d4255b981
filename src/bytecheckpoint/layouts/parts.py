"""Cut a rule into parts, and check that it is a bijection between the elements of both sides.

A part is an array with named dims. If each side has every part once, no dim stands twice in a part, and both sides have the
same dims for it, then each side's parts tile its tensors, and equal indices connect the elements of both sides.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.layouts.axes import Axis, TextError, alternatives, count_alternatives, dims_of
from bytecheckpoint.layouts.names import Template

__all__ = [
    "Component",
    "Family",
    "FamilyError",
    "Part",
    "SourcePlace",
    "Variant",
    "components",
    "family_dims",
    "part_text",
]

_MOST_PARTS = 1000
Labels = frozenset[str]


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in the source of a layout, for messages.

    Attributes:
        text: file and line, or the rule of a layout that was made in Python.
        name_column: column at which the name begins, from 0.
        axes_column: column at which the axes begin, from 0.
    """

    text: str
    name_column: int = 0
    axes_column: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Family:
    """The tensors of one side whose names fit one template of a rule.

    Attributes:
        side: 0 for the left side, 1 for the right one.
        template: template of the names.
        labels: names of the parts to which all elements belong.
        axes: axis of each dimension.
        place: place of the family in the source.
    """

    side: int
    template: Template
    labels: tuple[str, ...]
    axes: tuple[Axis, ...]
    place: SourcePlace


@dataclass(frozen=True, eq=False)
class Variant:
    """The tensors of a family for which the numbers in the names are in the same terms of the sums.

    Attributes:
        family: the family.
        holes: axis of each hole of the template, with alternatives for sums.
        dims: dims in the holes.
        pieces: labels of each part of the tensors, None for padding, and its axis along each dimension.
    """

    family: Family
    holes: tuple[Axis, ...]
    dims: tuple[str, ...]
    pieces: tuple[tuple[Labels | None, tuple[Axis, ...]], ...]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a rule.

    Attributes:
        labels: name of the part.
        dims: its dims, in the order of the left side, without those that number the instances.
        given: dims on each side.
    """

    labels: Labels
    dims: tuple[str, ...]
    given: tuple[Labels, Labels]


@dataclass(frozen=True, eq=False)
class Component:
    """Variants of a rule that parts connect, so that their sizes depend on each other.

    Attributes:
        variants: variants of both sides.
        parts: parts, each of which is in a variant of the left side and in one of the right side.
        shared: dims that stand in all names: their values number the instances of the component.
    """

    variants: tuple[Variant, ...]
    parts: tuple[Part, ...]
    shared: tuple[str, ...]


def family_dims(family: Family) -> Iterator[str]:
    """Yield the dims in the axes and names of a family."""
    axes: tuple[Axis, ...] = (*family.axes, *(hole.axis for hole in family.template.holes))
    for axis in axes:
        yield from dims_of(axis)


def part_text(labels: Labels) -> str:
    """Return how messages name a part."""
    return f"part '{' '.join(sorted(labels))}'" if labels else "the part without a name"


def components(families: Sequence[Family], sides: Sequence[str], one_sided: Sequence[str]) -> tuple[Component, ...]:
    """Cut a rule into its components.

    Args:
        families: families of both sides.
        sides: names of both sides.
        one_sided: dims that one side may lack.

    Raises:
        FamilyError: the rule is no bijection.
    """
    variants = [variant for family in families for variant in _variants(family)]
    where: dict[tuple[Labels, int], tuple[Variant, tuple[str, ...]]] = {}
    for variant in variants:
        for labels, axes in variant.pieces:
            if labels is None:
                continue
            dims = (*variant.dims, *(name for axis in axes for name in dims_of(axis)))
            twice = next((name for name in dims if dims.count(name) > 1), None)
            if twice:
                raise FamilyError(f"dim '{twice}' stands twice in {part_text(labels)}", variant)
            if (labels, variant.family.side) in where:
                raise FamilyError(f"{part_text(labels)} stands twice on the {sides[variant.family.side]} side", variant)
            where[labels, variant.family.side] = variant, dims
    used = set[str]()
    connected: dict[Variant, Variant] = {variant: variant for variant in variants}
    parts: list[tuple[Labels, Variant, Variant, tuple[str, ...], tuple[str, ...]]] = []
    for (labels, side), (variant, dims) in where.items():
        if (labels, 1 - side) not in where:
            raise FamilyError(f"{part_text(labels)} stands on the {sides[side]} side only", variant)
        other, other_dims = where[labels, 1 - side]
        for name in dims:
            if name not in other_dims and name not in one_sided:
                raise FamilyError(f"{part_text(labels)} has dim '{name}' on the {sides[side]} side only", variant)
            if name not in other_dims:
                used.add(name)
        if side == 0:
            parts.append((labels, variant, other, dims, other_dims))
            first, second = _root(connected, variant), _root(connected, other)
            connected[second] = first
    if unused := [name for name in one_sided if name not in used]:
        raise FamilyError(
            f"dim '{unused[0]}' is on both sides: 'same' and 'mean' are for dims that one side lacks", variants[0]
        )
    groups: dict[Variant, list[Variant]] = defaultdict(list)
    for variant in variants:
        groups[_root(connected, variant)].append(variant)
    result: list[Component] = []
    for root, members in groups.items():
        shared = tuple(name for name in members[0].dims if all(name in other.dims for other in members))
        own = [part for part in parts if _root(connected, part[1]) is root]
        result.append(
            Component(
                tuple(members),
                tuple(
                    Part(
                        labels,
                        _part_dims((*left, *right), shared),
                        (frozenset(left), frozenset(right)),
                    )
                    for labels, _, _, left, right in own
                ),
                shared,
            )
        )
    return tuple(result)


class FamilyError(TextError):
    """A mistake in the axes of a family.

    Attributes:
        place: place of the family.
    """

    def __init__(self, message: str, variant: Variant) -> None:
        super().__init__(message)
        self.place = variant.family.place


def _part_dims(dims: Sequence[str], shared: Sequence[str]) -> tuple[str, ...]:
    """Return the dims of a part, `...` last, because it stands for any number of columns."""
    distinct = [name for name in dict.fromkeys(dims) if name not in shared]
    return tuple(sorted(distinct, key=lambda name: name == "..."))


def _root(connected: dict[Variant, Variant], variant: Variant) -> Variant:
    while connected[variant] is not variant:
        variant = connected[variant]
    return variant


def _variants(family: Family) -> list[Variant]:
    result: list[Variant] = []
    axes = (*family.axes, *(hole.axis for hole in family.template.holes))
    if math.prod(map(count_alternatives, axes)) > _MOST_PARTS:
        raise FamilyError(f"there are more than {_MOST_PARTS} parts", Variant(family, (), (), ()))
    for combination in itertools.product(*(list(alternatives(hole.axis)) for hole in family.template.holes)):
        name_labels = [label for labels, _ in combination for label in labels]
        if any(label.startswith("~") for label in name_labels):
            continue  # no tensors have such names
        holes = tuple(axis for _, axis in combination)
        pieces: list[tuple[Labels | None, tuple[Axis, ...]]] = []
        for choice in itertools.product(*(list(alternatives(axis)) for axis in family.axes)):
            labels = [*family.labels, *name_labels, *(label for inner, _ in choice for label in inner)]
            padding = any(label.startswith("~") for label in labels)
            variant = Variant(family, holes, (), ())
            if not padding and len(set(labels)) < len(labels):
                raise FamilyError(f"{part_text(frozenset(labels))} has the same name twice", variant)
            pieces.append((None if padding else frozenset(labels), tuple(axis for _, axis in choice)))
        dims = tuple(name for axis in holes for name in dims_of(axis))
        result.append(Variant(family, holes, dims, tuple(pieces)))
    return result
