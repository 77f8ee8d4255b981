"""Make rules from examples: numbers that vary alike in all names of some examples become holes."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.layouts.statements import Rule

__all__ = ["NUMBER", "Example", "escaped", "rules_of"]

#: A number in a name: all that stands between two dots.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def escaped(name: str) -> str:
    """Return the template that only one name fits."""
    return re.sub(r"([\\{}<>()|])", r"\\\1", name)


@dataclass(frozen=True)
class Example:
    """A rule for the names of one layer, say.

    Attributes:
        left: axes by the template of each name, on the left side.
        right: axes by template, on the right side.
        sizes: sizes of dims.
    """

    left: Mapping[str, str]
    right: Mapping[str, str]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The templates of both sides, those of the right side first."""
        return [*self.right, *self.left]

    @property
    def kind(self) -> tuple[object, ...]:
        """The names but for numbers, the axes and the sizes, which examples of one rule have in common."""
        names = [NUMBER.sub("*", name) for name in self.names]
        return (*names, *self.right.values(), *self.left.values(), *self.sizes.items())


def rules_of(examples: Sequence[Example]) -> list[Rule]:
    """Return the rules.

    Numbers stand for themselves where they do not run from 0, or where a number varies in some of the names only.
    """
    alike: dict[tuple[object, ...], list[Example]] = defaultdict(list)
    for example in examples:
        alike[example.kind].append(example)
    groups = [_Alike(found) for found in alike.values()]
    values: dict[str, set[int]] = defaultdict(set)
    for prefix, column in itertools.chain(*(group.varying.items() for group in groups)):
        values[prefix].update(column)
    dims = {prefix: f"n{k}" for k, (prefix, found) in enumerate(values.items()) if found == set(range(len(found)))}
    return [rule for group in groups for rule in group.rules(dims)]


class _Alike:
    """Examples whose names differ by numbers only.

    Attributes:
        varying: numbers of the first name that differ between the examples, by what stands before them.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples
        self._columns = [
            list(zip(*([int(n) for n in NUMBER.findall(name)] for name in names), strict=True))
            for names in zip(*(example.names for example in examples), strict=True)
        ]
        first = examples[0].names[0]
        prefixes = [NUMBER.sub("*", first[: match.start()]) for match in NUMBER.finditer(first)]
        pairs = zip(prefixes, self._columns[0], strict=True)
        self.varying = {prefix: column for prefix, column in pairs if len(set(column)) > 1}

    def rules(self, dims: Mapping[str, str]) -> Iterator[Rule]:
        """Yield the rules, with holes for the numbers after some prefixes."""
        holes = {column: dims[prefix] for prefix, column in self.varying.items() if prefix in dims}
        others = {column for columns in self._columns for column in columns if len(set(column)) > 1}
        if others != set(self.varying.values()) or len(holes) < len(self.varying):
            for example in self._examples:
                yield Rule(example.left, example.right, **dict[str, Any](example.sizes))
            return
        example = self._examples[0]
        names = [self._template(k, name, holes) for k, name in enumerate(example.names)]
        axes = [*example.right.values(), *example.left.values()]
        both = list(zip(names, axes, strict=True))
        yield Rule(dict(both[len(example.right) :]), dict(both[: len(example.right)]), **dict[str, Any](example.sizes))

    def _template(self, number: int, name: str, holes: Mapping[tuple[int, ...], str]) -> str:
        columns = iter(self._columns[number])

        def hole(match: re.Match[str]) -> str:
            dim = holes.get(next(columns))
            return match[0] if dim is None else f"{{{dim}}}"

        return NUMBER.sub(hole, name)
