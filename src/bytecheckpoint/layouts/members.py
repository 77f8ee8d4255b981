"""The tensors of a variant, their names, and those that may be missing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.axes import Dim, affine
from bytecheckpoint.layouts.config import Config, condition
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.layouts.matching import MatchedSide
from bytecheckpoint.layouts.parts import Variant
from bytecheckpoint.layouts.sizes import decode
from bytecheckpoint.layouts.statements import Statement
from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["Expected", "Members", "Namer", "members_of", "unknown_number"]


@dataclass(eq=False)
class Members:
    """The tensors of a variant.

    Attributes:
        variant: the variant.
        tensor: number of each tensor, int64 [n].
        key: number of its texts, and the values of the shared dims, int64 [n, 1 + s].
        own: values of the other dims in its name, int64 [n, o].
        own_dims: names of these dims.
    """

    variant: Variant
    tensor: Int64s
    key: Int64s
    own: Int64s
    own_dims: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Namer:
    """Make the names of a variant's tensors, for messages and for sides that are derived.

    Attributes:
        variant: the variant.
        shared: dims whose values stand in keys.
        texts: texts by number.
        names: right texts by left texts.
    """

    variant: Variant
    shared: Sequence[str]
    texts: Sequence[tuple[str, ...]]
    names: Mapping[str, str]

    def name(self, key: Int64s, values: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> str:
        """Return the name of one tensor, "" if the sizes do not give its numbers."""
        values = {**values, **{name: int(key[k + 1]) for k, name in enumerate(self.shared)}}
        numbers: list[int] = []
        for axis in self.variant.holes:
            try:
                base, weights = affine(axis, sizes or {}) if not isinstance(axis, Dim) else (0, {axis.name: 1})
                numbers.append(base + sum(weight * values.get(name, 0) for name, weight in weights.items()))
            except KeyError:
                return ""
        return self.writer(int(key[0]))(numbers)

    def writer(self, code: int) -> Callable[[Sequence[int]], str]:
        """Return the function that makes a name from the numbers in it, for the texts of a number."""
        template = self.variant.family.template
        found = self.texts[code] if self.texts else ()
        if self.variant.family.side:
            found = tuple(self.names.get(text, text) for text in found)
        return template.writer({text.name: value for text, value in zip(template.texts, found, strict=True)})


class Expected:
    """The tensors that may be missing or unused.

    Args:
        layout: the layout.
        matched: the names of each side, None for a side that is derived.
        config: configurations of both sides.
    """

    def __init__(self, layout: Layout, matched: Sequence[MatchedSide | None], config: Config) -> None:
        self.sides, self.dims, self._matched = layout.sides, layout.all_dims, matched
        self._patterns: dict[tuple[str, str], list[re.Pattern[str]]] = defaultdict(list)
        for word in ("ignore", "optional"):
            for statement in layout.merged(word):
                assert isinstance(statement, Statement)
                if not statement.when or condition(statement.when, config):
                    self._patterns[word, statement.side].append(re.compile(statement.text))

    def matched(self, variant: Variant) -> MatchedSide:
        """Return the names of the variant's side, which are given."""
        side = self._matched[variant.family.side]
        assert side is not None
        return side

    def excuse(self, variant: Variant, name: str, present: Sequence[tuple[Variant, str, int]]) -> bool:
        """Return whether a tensor may be missing.

        Args:
            variant: variant of the tensor.
            name: name of the tensor.
            present: variants, names and numbers of the tensors that belong to it.
        """
        if self._fits("optional", variant.family.side, name):
            return True
        others = [item for item in present if item[0].family.side != variant.family.side]
        return bool(others) and len(others) == len(present) and all(
            self._fits("ignore", other.family.side, found)
            or found in self.matched(other).virtual
            or tensor in self.matched(other).copies
            for other, found, tensor in others
        )  # fmt: skip

    def missing(
        self, variant: Variant, name: str, present: Sequence[tuple[Variant, str, int]]
    ) -> IncompatibleCheckpointError:
        """Return the error for a tensor that is missing."""
        sides, side = self.sides, variant.family.side
        other = next((item for item in present if item[0].family.side != side), present[0])
        return IncompatibleCheckpointError(
            f"{variant.family.place}: {name} is missing on the {sides[side]} side: "
            f"{other[1]} of the {sides[other[0].family.side]} side needs it"
        )

    def _fits(self, word: str, side: int, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._patterns[word, self.sides[side]])


def unknown_number(variant: Variant, hole: int, error: KeyError) -> IncompatibleCheckpointError:
    """Return the error for a number in names that needs the size of a dim, which `error` names."""
    axis = variant.family.template.holes[hole].axis
    return IncompatibleCheckpointError(
        f"{variant.family.place}: the size of {error} in {{{axis}}} does not follow from the names: give it under 'dims'"
    )


def members_of(
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
            raise unknown_number(variant, k, error) from None
    at = np.flatnonzero(mask)
    key = np.stack([rows.code[at], *(values[name][at] for name in shared)], axis=1)
    own = np.stack([values[name][at] for name in own_dims], axis=1) if own_dims else np.zeros((len(at), 0), np.int64)
    return Members(variant, rows.tensor[at], key, own, own_dims), mask
