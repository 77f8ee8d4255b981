"""Match the names of a side with the rules of a layout, as columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts.axes import TextError
from bytecheckpoint.layouts.config import Config, condition
from bytecheckpoint.layouts.layout import KEY_IN_NAMES, Layout
from bytecheckpoint.layouts.names import parse_template
from bytecheckpoint.layouts.parsed import ParsedRule, conflicts
from bytecheckpoint.layouts.parts import Family
from bytecheckpoint.layouts.scaling import ScaleGrid, find_scales, logical_shape, tensors_of_scales
from bytecheckpoint.layouts.statements import Alias, Scales, Statement
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.similar_names import SimilarNames

__all__ = [
    "MatchedSide",
    "Rows",
    "Side",
    "TextCodes",
    "active_rules",
    "check_left_over",
    "ignored_patterns",
    "match_side",
    "scales_of",
    "skeletons",
    "text_error",
]

_DIGITS = re.compile(r"[0-9]+")
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Side:
    """The tensors of one side.

    Attributes:
        names: names of the tensors.
        shapes: shapes of the tensors.
        partial: these are some of the side's tensors, as those of one rank: others may be missing.
        strict: refuse names that fit no rule; False lets their tensors lie.
    """

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    partial: bool = False
    strict: bool = True


@dataclass(frozen=True)
class Rows:
    """The names that fit one family.

    Attributes:
        tensor: number of each tensor, int64 [n].
        code: number of each name's texts among those of the rule, int64 [n].
        numbers: numbers in each name, int64 [n, holes].
    """

    tensor: Int64s
    code: Int64s
    numbers: Int64s


@dataclass
class MatchedSide:
    """The names of a side, matched with rules.

    Attributes:
        side: the side.
        shapes: shapes, padded with -1, int64 [n, d].
        ndims: number of dimensions of each tensor, int64 [n].
        rows: names that fit each family, by number of the rule and of the family in it.
        left_over: numbers of the tensors whose names fit no rule.
        virtual: missing second names of tensors.
        copies: numbers of the tensors that are second names, and those of the tensors that they name.
        scales: scales of each scaled tensor, by its number.
        ignored: numbers of the tensors that the layout lets lie.
    """

    side: Side
    shapes: Int64s
    ndims: Int64s
    rows: dict[tuple[int, int], Rows] = field(default_factory=dict)
    left_over: list[int] = field(default_factory=list)
    virtual: set[str] = field(default_factory=set)
    copies: dict[int, int] = field(default_factory=dict)
    scales: Mapping[int, Sequence[ScaleGrid]] = field(default_factory=dict)
    ignored: Sequence[int] = ()


class TextCodes:
    """Numbers of the texts in the names of each rule."""

    def __init__(self) -> None:
        self._codes: dict[int, dict[tuple[str, ...], int]] = defaultdict(dict)

    def code(self, rule: int, texts: tuple[str, ...]) -> int:
        """Return the number of some texts."""
        codes = self._codes[rule]
        return codes.setdefault(texts, len(codes))

    def texts(self, rule: int) -> list[tuple[str, ...]]:
        """Return the texts of a rule by number."""
        return list(self._codes[rule]) or [()]


def active_rules(layout: Layout, config: Config) -> list[ParsedRule]:
    """Return the rules whose conditions hold."""
    active = [parsed for parsed in layout.parsed if not parsed.rule.when or condition(parsed.rule.when, config)]
    conditional = [parsed for parsed in active if parsed.rule.when]
    for first, second, name in conflicts(conditional, all_hold=True):
        raise UsageError(f"{second.place}: '{name}' fits {first.place} too, and the conditions of both rules hold")
    return active


def match_side(
    layout: Layout, number: int, side: Side, rules: Sequence[ParsedRule], codes: TextCodes, config: Config, alone: bool
) -> MatchedSide:
    """Match the names of a side.

    Args:
        layout: the layout.
        number: 0 for the left side, 1 for the right one.
        side: the tensors.
        rules: rules that hold.
        codes: numbers of texts, to which those of these names are added.
        config: configurations of both sides.
        alone: the other side is to be derived from this one.
    """
    if len(side.names) != len(side.shapes):
        raise UsageError(f"the {layout.sides[number]} side has {len(side.names)} names and {len(side.shapes)} shapes")
    scales = find_scales(scales_of(layout, number), side.names, side.shapes)
    if any(grid.packed for grids in scales.values() for grid in grids):
        packed = [any(grid.packed for grid in scales.get(k, ())) for k in range(len(side.names))]
        side = replace(side, shapes=[logical_shape(s, p) for s, p in zip(side.shapes, packed, strict=True)])
    ndims = np.fromiter(map(len, side.shapes), np.int64, len(side.shapes))
    shapes = np.full((len(ndims), int(ndims.max(initial=1))), -1, np.int64)
    shapes[np.arange(shapes.shape[1]) < ndims[:, None]] = np.fromiter(
        (size for shape in side.shapes for size in shape), np.int64, int(ndims.sum())
    )
    patterns = ignored_patterns(layout, number, config)
    ignored = [k for k, name in enumerate(side.names) if any(pattern.fullmatch(name) for pattern in patterns)]
    matched = MatchedSide(side, shapes, ndims, scales=scales, ignored=ignored)
    no_parts = {*ignored, *tensors_of_scales(scales)}
    tensors = [tensor for tensor in range(len(side.names)) if tensor not in no_parts]
    names = [side.names[tensor] for tensor in tensors]
    for alias in layout.merged("aliases"):
        assert isinstance(alias, Alias)
        if alias.side == layout.sides[number] and (not alias.when or condition(alias.when, config)):
            _add_alias(alias, side.names, names, tensors, matched, alone)
    families = [
        (r, f, family)
        for r, parsed in enumerate(rules)
        for f, family in enumerate(parsed.families)
        if family.side == number
    ]
    texts_of = [{right: left for left, right in parsed.rule.names.items()} if number else {} for parsed in rules]
    found: dict[tuple[int, int], tuple[list[int], list[int], list[list[int]]]] = {}
    candidates: dict[str, list[tuple[int, int, Family]]] = {}
    for tensor, name, skeleton in zip(tensors, names, skeletons(names), strict=True):
        if alone and tensor in matched.copies:
            continue
        possible = candidates.get(skeleton)
        if possible is None:
            possible = [item for item in families if item[2].template.skeleton.fullmatch(skeleton)]
            candidates[skeleton] = possible
        for r, f, family in possible:
            match = family.template.match(name)
            if match is not None:
                numbers, texts = match
                lists = found.get((r, f)) or found.setdefault((r, f), ([], [], []))
                lists[0].append(tensor)
                lists[1].append(codes.code(r, tuple(texts_of[r].get(text, text) for text in texts)) if texts else 0)
                lists[2].append(numbers)
                break
        else:
            if name not in matched.virtual:  # a second name that no rule needs
                matched.left_over.append(tensor)
    for key, (tensor_list, code_list, number_lists) in found.items():
        numbers_of = np.array(number_lists, np.int64).reshape(len(tensor_list), -1)
        matched.rows[key] = Rows(np.array(tensor_list, np.int64), np.array(code_list, np.int64), numbers_of)
    return matched


def scales_of(layout: Layout, number: int) -> list[Scales]:
    """Return the `scales` lines of a side, 0 for the left one."""
    return [s for s in layout.merged("scales") if isinstance(s, Scales) and s.side == layout.sides[number]]


def ignored_patterns(layout: Layout, number: int, config: Config) -> list[re.Pattern[str]]:
    """Return the patterns of the names of a side that may be there and are not used."""
    found = []
    for statement in layout.merged("ignore"):
        assert isinstance(statement, Statement)
        keys = KEY_IN_NAMES.findall(statement.text)
        if statement.when and not condition(statement.when, config):
            continue
        if statement.side == layout.sides[number] and all(config.get(key) is not None for key in keys):
            text = KEY_IN_NAMES.sub(lambda key: re.escape(str(config[key[1]])), statement.text)
            found.append(re.compile(text))
    return found


def skeletons(names: Sequence[str]) -> list[str]:
    """Return the names with `#` for each run of digits, so that most names of a model are equal."""
    joined = "\0".join(names)
    if joined.count("\0") != len(names) - 1:
        return [_DIGITS.sub("#", name) for name in names]
    return _DIGITS.sub("#", joined).split("\0") if names else []


def _add_alias(
    alias: Alias, given: Sequence[str], names: list[str], tensors: list[int], matched: MatchedSide, alone: bool
) -> None:
    """Find the second names that are there, and add those that are missing to `names`."""
    second, first = parse_template(alias.name), parse_template(alias.of)
    numbers = {name: number for number, name in enumerate(given)}

    for name, number in numbers.items():
        of = second.renamed(name, first)
        if of in numbers:
            matched.copies[number] = numbers[of]
        missing = first.renamed(name, second)
        if missing is not None and missing not in numbers and not alone:
            names.append(missing)
            tensors.append(number)
            matched.virtual.add(missing)


def check_left_over(layout: Layout, number: int, matched: MatchedSide, rules: Sequence[ParsedRule]) -> None:
    """Refuse names that fit no rule and that the layout does not expect."""
    side = layout.sides[number]
    left = [matched.side.names[tensor] for tensor in matched.left_over if tensor not in matched.copies]
    if not left or not matched.side.strict:
        return
    families = [f for parsed in rules for f in parsed.families if f.side == number]
    written = {f.template.example(left[0].rpartition(".")[2]): f for f in families}
    near = [written[name] for name in SimilarNames(written).of(left[0], cutoff=0) if name in written]
    advice = f"; the most similar is '{near[0].template.source}' ({near[0].place})" if near else ""
    if matched.side.partial:
        advice += "; a load with strict=False, or with exclude= for them, lets them lie"
    more = f" and {len(left) - _MOST_SHOWN} more" if len(left) > _MOST_SHOWN else ""
    raise IncompatibleCheckpointError(
        f"{layout.label}: no rule fits {', '.join(left[:_MOST_SHOWN])}{more} of the {side} side{advice}"
    )


def text_error(place: object, error: TextError) -> IncompatibleCheckpointError:
    """Return the user's error for a mistake that showed with configurations."""
    return IncompatibleCheckpointError(f"{place}: {error.message}")
