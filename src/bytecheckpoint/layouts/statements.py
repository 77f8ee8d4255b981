"""The statements of a layout: its rules, and lines about names and configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.layouts.parts import SourcePlace

__all__ = ["Alias", "Content", "Prefix", "Rule", "Scales", "Statement"]


class Rule:
    """State how the tensors of some names lie in those of other names.

    Each name is a template with holes `{l}` for numbers, texts `<x>`, alternatives `(a|b)` and options `(a.)?`. Its value
    is the axis of each dimension, after the name of the part and `=` where the other side has several parts. A rule has no
    direction.

        Rule({"h.{l}.c_proj.weight": "a h"}, {"decoder.layers.{l}.linear_proj.weight": "h a"})

    Args:
        left: axes by name, on the left side.
        right: axes by name, on the right side.
        names: right texts by left texts, if the text `<x>` of the names differs between the sides.
        same: dims that one side lacks, because all elements along them are equal. The first ones are read.
        mean: dims that one side lacks, because it has the mean of the elements along them.
        add: number that is added to each element of the left side to get that of the right side.
        when: condition under which the rule holds, as "hf.tie_word_embeddings".
        sizes: sizes of dims, as `t=2`.
    """

    def __init__(
        self,
        left: Mapping[str, str],
        right: Mapping[str, str],
        *,
        names: Mapping[str, str] | None = None,
        same: Sequence[str] = (),
        mean: Sequence[str] = (),
        add: float = 0,
        when: str = "",
        **sizes: int,
    ) -> None:
        self.left = {name: " ".join(axes.split()) for name, axes in left.items()}
        self.right = {name: " ".join(axes.split()) for name, axes in right.items()}
        self.names = dict(names or {})
        self.same = tuple(same.split() if isinstance(same, str) else same)
        self.mean = tuple(mean.split() if isinstance(mean, str) else mean)
        self.add, self.when, self.sizes = add, " ".join(when.split()), sizes
        self.places: tuple[SourcePlace, ...] = ()

    def _fields(self) -> tuple[object, ...]:
        ordered = [tuple(d.items()) for d in (self.left, self.right, self.names)]
        return (*ordered, self.same, self.mean, self.add, self.when, tuple(sorted(self.sizes.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Rule({self.left!r}, {self.right!r})"


@dataclass(frozen=True)
class Statement:
    """A line of a layout that is about names or configurations.

    Attributes:
        side: side that the line is about, "" for both.
        text: regular expression of names, or condition.
        when: condition under which the line holds.
        place: place of the line in the source.
    """

    side: str
    text: str
    when: str = ""
    place: SourcePlace = field(default=SourcePlace(""), compare=False)


@dataclass(frozen=True)
class Alias:
    """A second name of a tensor.

    Attributes:
        side: side that has both names.
        name: template of the second name.
        of: template of the first name.
        when: condition under which the tensor has two names.
        beside: template of a tensor beside which the second name is written too, "" if a tensor is written once.
        place: place of the line in the source.
    """

    side: str
    name: str
    of: str
    when: str = ""
    beside: str = ""
    place: SourcePlace = field(default=SourcePlace(""), compare=False)


@dataclass(frozen=True)
class Prefix:
    """A prefix of names that stands in rules for another prefix, or for several.

    Attributes:
        side: side of the names.
        name: prefix in the rules, as it is written there.
        becomes: prefix in its place.
        part: name of the part that the tensors with this prefix hold.
        place: place of the line in the source.
    """

    side: str
    name: str
    becomes: str
    part: str = ""
    place: SourcePlace = field(default=SourcePlace(""), compare=False)


@dataclass(frozen=True)
class Scales:
    """Tensors that hold one scale for each block of other tensors' elements.

    Attributes:
        side: side that has the tensors.
        name: template of their names.
        axes: axes of the scales.
        of: template of the scaled tensors' names.
        of_axes: axes of the scaled tensors, in which `(i b)` is a dimension in blocks of `b`.
        sizes: sizes of dims.
        operation: kind of elements and scales, as "blocks".
        place: place of the line in the source.
    """

    side: str
    name: str
    axes: str
    of: str
    of_axes: str
    sizes: tuple[tuple[str, int], ...]
    operation: str
    place: SourcePlace = field(default=SourcePlace(""), compare=False)


@dataclass(frozen=True)
class Content:
    """The content of a layout.

    Attributes:
        name: name of the layout.
        left: name of the left side, as "hf".
        right: name of the right side, as "megatron".
        dims: expressions of sizes by dim, as {"v": "hf.vocab_size | megatron.vocab_size"}.
        rules: the rules.
        fits: condition under which the layout is the right one, as "hf.model_type in llama qwen2".
        include: names of layouts whose rules hold too, unless a rule here has the same names.
        require: conditions that the configurations must meet.
        ignore: regular expressions of names that may be there and are not used.
        optional: regular expressions of names that may be missing.
        aliases: second names of tensors.
        scales: tensors of scales.
        prefixes: prefixes of names in the rules, also in those of included layouts.
        file: name of the file that the layout comes from.
        stored: name of the side whose names checkpoints have, for names that fit both sides; it is in no text.
    """

    name: str
    left: str
    right: str
    dims: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    fits: str = ""
    include: Sequence[str] = ()
    require: Sequence[Statement] = ()
    ignore: Sequence[Statement] = ()
    optional: Sequence[Statement] = ()
    aliases: Sequence[Alias] = ()
    scales: Sequence[Scales] = ()
    prefixes: Sequence[Prefix] = ()
    file: str = field(default="", compare=False)
    stored: str = ""
