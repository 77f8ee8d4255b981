"""Bind the components of rules to the names of both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.component import BoundComponent, Expected, Instances, Members, Namer
from bytecheckpoint.layouts.config import Config, condition
from bytecheckpoint.layouts.layout import Layout, ParsedRule
from bytecheckpoint.layouts.matching import MatchedSide
from bytecheckpoint.layouts.parts import Component, Variant
from bytecheckpoint.layouts.sizes import decode
from bytecheckpoint.layouts.statements import Alias
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["ComponentBinder"]


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
        self._expected = Expected(layout, matched)
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
                made = None if side is None else _members(side, rule, family, variant, component.shared, numbers)
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


def _members(
    side: MatchedSide, rule: int, family: int, variant: Variant, shared: Sequence[str], numbers: Mapping[str, int]
) -> tuple[Members, Mask]:
    """Return the tensors of a variant, and the mask of the family's names that belong to it."""
    own_dims = tuple(name for name in variant.dims if name not in shared)
    rows = side.rows.get((rule, family))
    if rows is None:
        empty = np.zeros(0, np.int64)
        key, own = np.zeros((0, len(shared) + 1), np.int64), np.zeros((0, len(own_dims)), np.int64)
        return Members(variant, empty, key, own, own_dims), np.zeros(0, bool)
    values: dict[str, Int64s] = {}
    mask = np.ones(len(rows.tensor), bool)
    for k, axis in enumerate(variant.holes):
        try:
            mask &= decode(axis, rows.numbers[:, k], numbers, values)
        except KeyError as error:
            hole = variant.family.template.holes[k].axis
            raise IncompatibleCheckpointError(
                f"{variant.family.place}: the size of {error} in {{{hole}}} does not follow from the names: "
                "give it under 'dims'"
            ) from None
    at = np.flatnonzero(mask)
    key = np.stack([rows.code[at], *(values[name][at] for name in shared)], axis=1)
    own = np.stack([values[name][at] for name in own_dims], axis=1) if own_dims else np.zeros((len(at), 0), np.int64)
    return Members(variant, rows.tensor[at], key, own, own_dims), mask
