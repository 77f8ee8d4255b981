"""Parsed rules, and pairs of rules that one name fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.layouts.names import ANY, DIGIT, Template
from bytecheckpoint.layouts.parts import Component, Family
from bytecheckpoint.layouts.statements import Rule

__all__ = ["ParsedRule", "common_name", "conflicts"]


@dataclass(frozen=True)
class ParsedRule:
    """A rule whose texts are parsed and checked.

    Attributes:
        rule: the rule.
        families: families of both sides.
        components: components of the rule.
    """

    rule: Rule
    families: tuple[Family, ...]
    components: tuple[Component, ...]


def conflicts(
    rules: Sequence[ParsedRule], others: Sequence[ParsedRule] | None = None, *, all_hold: bool = False
) -> Iterator[tuple[Family, Family, str]]:
    """Yield the pairs of families of a side that fit a common name, with that name.

    Args:
        rules: rules to compare.
        others: rules to compare them with, None for `rules` among themselves.
        all_hold: all conditions of the rules hold. Otherwise, two rules with conditions may have the same names.
    """
    families = [(rule, family) for rule in rules for family in rule.families]
    added = [(rule, family) for rule in others or () for family in rule.families]
    pairs = itertools.product(added, families) if others is not None else itertools.combinations(families, 2)
    for (rule, a), (other, b) in pairs:
        if a.side != b.side or (rule is not other and rule.rule.when and other.rule.when and not all_hold):
            continue
        if (name := common_name(a.template, b.template)) is not None:
            yield a, b, name


def common_name(left: Template, right: Template) -> str | None:
    """Return a name that both templates match, None if there is none. A number may have zeros in front here."""
    ends = [_ends(template) for template in (left, right)]
    for k in (0, 1):  # most pairs differ in the text that all their names begin or end with
        short = min(len(end[k]) for end in ends)
        a, b = (end[k][:short] if k == 0 else end[k][len(end[k]) - short :] for end in ends)
        if a != b:
            return None
    a_moves, b_moves = left.automaton, right.automaton
    names = {(0, 0): ""}
    queue = [(0, 0)]
    for at in queue:
        if at == (1, 1):
            return names[at]
        reached = [((state, at[1]), "") for c, state in a_moves[at[0]] if not c]
        reached += [((at[0], state), "") for c, state in b_moves[at[1]] if not c]
        reached += [
            ((p, q), c)
            for a, p in a_moves[at[0]]
            if a
            for b, q in b_moves[at[1]]
            if b and (c := _common_character(a, b))
        ]
        for state, c in reached:
            if state not in names:
                names[state] = names[at] + c
                queue.append(state)
    return None


def _ends(template: Template) -> tuple[str, str]:
    pieces = template.pieces
    first, last = (pieces[0], pieces[-1]) if pieces else ("", "")
    return first if isinstance(first, str) else "", last if isinstance(last, str) else ""


def _common_character(a: str, b: str) -> str:
    """Return a character of both classes, "" if there is none."""
    if a in (ANY, b):
        a, b = b, a
    if b in (ANY, a) or (b == DIGIT and a.isdecimal()):
        return {ANY: "x", DIGIT: "0"}.get(a, a)
    return b if a == DIGIT and b.isdecimal() else ""
