"""Bind a layout to the names and shapes of both sides: number the parts, find all sizes, prove that nothing is missing.

The tensors that a rule's component connects are an instance. Instances of equal shapes share sizes and lowerings, so the
cost per tensor is that of matching its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts.axes import TextError
from bytecheckpoint.layouts.component import BoundComponent, Instances
from bytecheckpoint.layouts.config import Config, condition, dim_size
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.layouts.lowering import Lowering, PartPlaces
from bytecheckpoint.layouts.matching import (
    MatchedSide,
    Side,
    TextCodes,
    active_rules,
    check_left_over,
    match_side,
    text_error,
)  # fmt: skip
from bytecheckpoint.layouts.members import Expected, Members, Namer, members_of
from bytecheckpoint.layouts.names import parse_template
from bytecheckpoint.layouts.parsed import ParsedRule
from bytecheckpoint.layouts.parts import Component, Part, SourcePlace, family_dims, part_text
from bytecheckpoint.layouts.scaling import ScaleGrid, tensors_of_scales
from bytecheckpoint.layouts.sizes import numbering
from bytecheckpoint.layouts.statements import Alias, Rule
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["Binding", "BoundSide", "PartGroup", "bind"]


@dataclass(frozen=True, eq=False)
class PartGroup:
    """Parts of one name of one rule, which have consecutive numbers.

    Attributes:
        start: number of the first part.
        stop: number after the last part.
        rule: rule of the parts.
        part: name and dims of the parts.
        place: place of the rule in the source.
    """

    start: int
    stop: int
    rule: Rule
    part: Part
    place: SourcePlace

    def __str__(self) -> str:
        return f"{part_text(self.part.labels)} of {self.place}"


@dataclass(frozen=True, eq=False)
class BoundSide:
    """The tensors of a side, and the parts in them.

    Attributes:
        names: names of the tensors.
        shapes: shapes of the tensors, padded with -1, int64 [t, d].
        ndims: number of dimensions of each tensor, int64 [t].
        places: places of the parts.
        unbound: numbers of the tensors that hold no part.
        scales: scales of each scaled tensor, by its number. Its shape counts elements, of which a byte may hold two.
        ignored: numbers of the tensors that the layout lets lie.
    """

    names: Sequence[str]
    shapes: Int64s
    ndims: Int64s
    places: PartPlaces
    unbound: Int64s
    scales: Mapping[int, Sequence[ScaleGrid]]
    ignored: Sequence[int]

    @property
    def scale_tensors(self) -> list[int]:
        """Numbers of the tensors that hold scales, ascending."""
        return tensors_of_scales(self.scales)


@dataclass(frozen=True, eq=False)
class Binding:
    """A layout, bound to both sides.

    Attributes:
        layout: the layout.
        sizes: size of each part along its dims, padded with 1, int64 [p, k].
        groups: parts by rule, in ascending order.
        left: the left side.
        right: the right side.
        undecided: requirements whose keys no configuration has.
    """

    layout: Layout
    sizes: Int64s
    groups: Sequence[PartGroup]
    left: BoundSide
    right: BoundSide
    undecided: Sequence[str]

    def group(self, part: int) -> PartGroup:
        """Return the group of a part, for messages."""
        return next(group for group in self.groups if group.start <= part < group.stop)


def bind(layout: Layout, left: Side | None = None, right: Side | None = None, config: Config | None = None) -> Binding:
    """Bind a layout to the tensors of one side or of both.

    Args:
        layout: the layout.
        left: tensors of the left side, None to derive them from the right side.
        right: tensors of the right side, None to derive them from the left side.
        config: configurations of both sides, as {"hf.num_attention_heads": 32}.

    Raises:
        IncompatibleCheckpointError: names, shapes and layout do not fit together.
        UsageError: a requirement of the layout is not met.
    """
    if left is None and right is None:
        raise UsageError("a layout is bound to the tensors of a side: give `left` or `right`")
    config = config or {}
    undecided = layout.check_config(config)
    given = (left, right)
    codes = TextCodes()
    rules = active_rules(layout, config)
    matched = [
        None if side is None else match_side(layout, number, side, rules, codes, config, None in given)
        for number, side in enumerate(given)
    ]
    present = {rule for side in matched if side for rule, _ in side.rows}
    binder = ComponentBinder(layout, matched, config)
    groups: list[PartGroup] = []
    sizes: list[Int64s] = []
    bound: list[BoundComponent] = []
    count = 0
    for number, parsed in enumerate(rules):
        if number not in present:
            continue
        known = _known(layout, parsed, config)
        solved = numbering(parsed, number, matched, known)
        for component, made in binder.bind(parsed, number, codes.texts(number), known, solved):
            bound.append(made)
            for part, own in zip(component.parts, made.part_sizes, strict=True):
                groups.append(PartGroup(count, count + len(own), parsed.rule, part, parsed.families[0].place))
                count += len(own)
                sizes.append(own)
    binder.check_numbers()
    for number, side in enumerate(matched):
        if side is not None:
            check_left_over(layout, number, side, rules)
    starts = np.cumsum([0, *map(len, sizes)])
    table = _stacked(sizes, 1)
    ends = [
        _bound_side(layout, number, side, bound, starts, table.shape[1], config) for number, side in enumerate(matched)
    ]
    return Binding(layout, table, groups, ends[0], ends[1], undecided)


def _known(layout: Layout, parsed: ParsedRule, config: Config) -> dict[str, int]:
    """Return the sizes of a rule's dims that the layout and the configurations give."""
    known: dict[str, int] = {}
    for name in sorted({dim for family in parsed.families for dim in family_dims(family)} & set(layout.all_dims)):
        try:
            size = dim_size(layout.all_dims[name], config)
        except TextError as error:
            raise text_error(f"{layout.label}: dim '{name}'", error) from None
        if size is not None:
            known[name] = size
    return known | parsed.rule.sizes


def _stacked(arrays: Sequence[Int64s], fill: int) -> Int64s:
    """Return matrices of different widths below each other."""
    width = max((a.shape[1] for a in arrays), default=1) or 1
    wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=fill) for a in arrays]
    return np.concatenate(wide) if wide else np.zeros((0, width), np.int64)


def _bound_side(
    layout: Layout,
    number: int,
    matched: MatchedSide | None,
    bound: Sequence[BoundComponent],
    starts: Int64s,
    width: int,
    config: Config,
) -> BoundSide:
    names: Sequence[str]
    if matched is not None:
        names, shapes, ndims, copies = matched.side.names, matched.shapes, matched.ndims, matched.copies
    else:
        names = [name for component in bound for name in component.names]
        written = _written_twice(layout, number, names, config)
        copies = dict(zip(range(len(names), len(names) + len(written)), written.values(), strict=True))
        names += written
        shapes = _stacked([component.shapes for component in bound], -1)
        shapes = shapes[[*range(len(shapes)), *copies.values()]]
        ndims = (shapes >= 0).sum(1)
    tensor, part, lowering, fixed, virtual = [], [], [], [], [np.zeros(0, bool)]
    lowerings: list[Lowering] = []
    group, derived = 0, 0
    for component in bound:
        for rows in component.rows[number]:
            tensor.append(rows.tensor + (derived if matched is None else 0))
            part.append(np.where(rows.index < 0, -1, rows.index + starts[group + rows.part] if rows.part >= 0 else -1))
            lowering.append(rows.lowering + len(lowerings))
            fixed.append(rows.fixed)
            virtual.append(rows.virtual)
            lowerings += rows.lowerings
        group += len(component.part_sizes)
        derived += len(component.names)
    empty = np.zeros(0, np.int64)
    columns = [np.concatenate([empty, *arrays]) for arrays in (tensor, part, lowering)]
    copy = np.zeros(len(columns[0]), bool)
    tensors, parts, numbers = columns
    places = PartPlaces(tensors, parts, numbers, _stacked(fixed, 0), copy, np.concatenate(virtual), lowerings, width)
    places = _sorted(places, np.argsort(places.tensor, kind="stable"))
    if copies:
        places = _with_copies(places, copies, names, shapes)
    scales = {} if matched is None else matched.scales
    used = np.append(places.tensor, np.array(tensors_of_scales(scales), np.int64))
    unbound = np.setdiff1d(np.arange(len(names)), used)
    return BoundSide(names, shapes, ndims, places, unbound, scales, () if matched is None else matched.ignored)


def _sorted(p: PartPlaces, order: Int64s) -> PartPlaces:
    tensor, part, lowering, fixed = (column[order] for column in (p.tensor, p.part, p.lowering, p.fixed))
    return PartPlaces(tensor, part, lowering, fixed, p.copy[order], p.virtual[order], p.lowerings, p.width)


def _written_twice(layout: Layout, number: int, names: Sequence[str], config: Config) -> dict[str, int]:
    """Return the second names to write on a side that is derived, and the numbers of the tensors that they name."""
    result: dict[str, int] = {}
    for alias in layout.merged("aliases"):
        assert isinstance(alias, Alias)
        holds = alias.side == layout.sides[number] and (not alias.when or condition(alias.when, config))
        if holds and alias.beside:
            second, first, beside = map(parse_template, (alias.name, alias.of, alias.beside))
            of = next((k for k, name in enumerate(names) if first.match(name)), None)
            found = [beside.renamed(name, second) for name in names] if of is not None else []
            result |= {name: of for name in found if name and of is not None}
    return result


def _with_copies(places: PartPlaces, copies: Mapping[int, int], names: Sequence[str], shapes: Int64s) -> PartPlaces:
    """Give second names that hold no part of their own the parts of the tensors that they name."""
    places_of: list[Int64s] = []
    tensors: list[Int64s] = []
    for tensor, of in copies.items():
        at = np.flatnonzero(places.tensor == of)
        if tensor in places.tensor or not len(at):
            continue
        here, there = ([size for size in shapes[k].tolist() if size >= 0] for k in (tensor, of))
        if here != there:
            raise IncompatibleCheckpointError(
                f"{names[tensor]} is a second name of {names[of]}, but has shape {here}, not {there}"
            )
        places_of.append(at)
        tensors.append(np.full(len(at), tensor))
    index = np.concatenate([np.arange(len(places)), *places_of])
    joined = _sorted(places, index)
    added = np.concatenate([places.tensor, *tensors])
    joined = replace(joined, tensor=added, copy=np.arange(len(index)) >= len(places))
    return _sorted(joined, np.argsort(joined.tensor, kind="stable"))


class ComponentBinder:
    """Bind the components of rules to the names of both sides.

    Args:
        layout: the layout.
        matched: the names of each side, None for a side that is derived.
        config: configurations of both sides.
    """

    def __init__(self, layout: Layout, matched: Sequence[MatchedSide | None], config: Config) -> None:
        self._layout, self._matched = layout, matched
        self._numbers: dict[tuple[int, str], list[tuple[Namer, Int64s, int]]] = defaultdict(list)
        self._expected = Expected(layout, matched, config)
        self._aliases = {
            (layout.sides.index(alias.side), alias.name)
            for alias in layout.merged("aliases")
            if isinstance(alias, Alias) and (not alias.when or condition(alias.when, config))
        }
        self._known: dict[str, int] = {}

    def bind(
        self,
        parsed: ParsedRule,
        rule: int,
        texts: Sequence[tuple[str, ...]],
        known: Mapping[str, int],
        numbers: Mapping[str, int],
    ) -> Iterator[tuple[Component, BoundComponent]]:
        """Bind each component of a rule that has tensors.

        Args:
            parsed: the rule.
            rule: number of the rule.
            texts: texts in the names of the rule, by number.
            known: sizes that are given.
            numbers: sizes that the numbers in names need.
        """
        claimed: dict[int, list[Mask]] = defaultdict(list)
        self._known |= known
        for component in parsed.components:
            members: list[Members | None] = []
            namers = [Namer(variant, component.shared, texts, parsed.rule.names) for variant in component.variants]
            for variant in component.variants:
                family = parsed.families.index(variant.family)
                side = self._matched[variant.family.side]
                made = None if side is None else members_of(side, rule, family, variant, component.shared, numbers)
                members.append(made[0] if made else None)
                if made:
                    claimed[family].append(made[1])
                    if side and not side.side.partial and len(made[0].key):
                        for k, name in enumerate(component.shared):
                            self._numbers[variant.family.side, name].append(
                                (namers[len(members) - 1], made[0].key, k + 1)
                            )
            derived = [v.family for v, m in zip(component.variants, members, strict=True) if m is None]
            if any((family.side, family.template.source) in self._aliases for family in derived):
                continue  # a tensor is written once
            if any(m is not None and len(m.tensor) for m in members):
                yield component, Instances(component, members, namers, dict(numbers), self._expected).bound()
        for f, masks in claimed.items():
            side = self._matched[parsed.families[f].side]
            rows = side.rows.get((rule, f)) if side else None
            if side and rows:
                side.left_over += rows.tensor[~np.logical_or.reduce(masks)].tolist()

    def check_numbers(self) -> None:
        """Refuse a side in whose names a number is missing between 0 and the largest one."""
        for (side, name), noted in self._numbers.items():
            found = np.unique(np.concatenate([key[:, column] for _, key, column in noted]))
            count = max(int(found[-1]) + 1, self._known.get(name, 0))
            if len(found) == count <= self._known.get(name, count):
                continue
            namer, key, column = noted[0]
            where = f"{namer.variant.family.place}: {{{name}}} in the names of the {self._layout.sides[side]} side"
            if count > self._known.get(name, count):
                raise IncompatibleCheckpointError(
                    f"{where} runs from 0 to {count - 1}, but {name} is {self._known[name]}"
                )
            missing = next(number for number, there in enumerate([*found.tolist(), -1]) if number != there)
            row = key[0].copy()
            row[column] = missing
            example = namer.name(row, {})
            raise IncompatibleCheckpointError(
                f"{where} runs from 0 to {count - 1}, but {missing} is missing{f', as in {example}' if example else ''}"
            )
