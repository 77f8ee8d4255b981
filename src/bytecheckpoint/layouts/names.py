"""Match the names of tensors with templates, and make names from templates.

A template is literal text with holes `{axis}` for numbers, texts `<x>`, alternatives `(a|b)` and options `(a.)?`. The first
alternative is the one to write, and an option is written. A backslash takes the next character as it is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.layouts.axes import Axis, TextError, alternatives, parse_axis
from bytecheckpoint.lazy import lazy

__all__ = ["ANY", "DIGIT", "Group", "Hole", "Piece", "Template", "Text", "parse_template"]

ANY, DIGIT = "any", "digit"  # classes of characters, beside single ones
_MOST_DIGITS = 15  # numbers of more digits, which no layout has, would not fit int64 columns
_MOST_PATHS = 1000
_MOST_DEEP = 20
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Hole:
    """A number in a name.

    Attributes:
        axis: axis along which the number is a coordinate.
        width: fewest digits to write, with zeros in front.
    """

    axis: Axis
    width: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a name that stands on both sides of a rule.

    Attributes:
        name: name of the text.
        choices: the only texts that fit, or () for any text of at least one character.
    """

    name: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Alternatives, the first of which is the one to write."""

    alternatives: tuple[tuple[Piece, ...], ...]


Piece = str | Hole | Text | Group


@dataclass(frozen=True)
class Template:
    """A template of names.

    Attributes:
        source: text of the template.
        pieces: parsed template.
    """

    source: str
    pieces: tuple[Piece, ...] = field(compare=False)

    @lazy
    def holes(self) -> tuple[Hole, ...]:
        """The holes, without repetitions."""
        return tuple(dict.fromkeys(piece for piece in _all(self.pieces) if isinstance(piece, Hole)))

    @lazy
    def texts(self) -> tuple[Text, ...]:
        """The texts, sorted by name."""
        found = {piece.name: piece for piece in _all(self.pieces) if isinstance(piece, Text)}
        return tuple(found[name] for name in sorted(found))

    @lazy
    def automaton(self) -> list[list[tuple[str, int]]]:
        """The moves of each state, as (class of characters or "" for none, next state), from state 0 to state 1."""
        return _automaton(self.pieces)

    @lazy
    def match(self) -> Callable[[str], tuple[list[int], list[str]] | None]:
        """A function of a name that returns the numbers of the holes and the texts, or None if the name does not fit."""
        places: dict[str, list[int]] = {}
        fullmatch = re.compile(_regex(self.pieces, places), re.DOTALL).fullmatch
        # A hole in each of several alternatives has several groups, all but one of which are empty.
        holes = [places[str(hole.axis)] for hole in self.holes]
        texts = [places[f"<{text.name}>"] for text in self.texts]

        def match(name: str) -> tuple[list[int], list[str]] | None:
            found = fullmatch(name)
            if not found:
                return None
            numbers = [int(next(filter(None, map(found.group, groups)))) for groups in holes]
            return numbers, [next(t for t in map(found.group, groups) if t is not None) for groups in texts]

        return match

    @lazy
    def skeleton(self) -> re.Pattern[str]:
        """The regular expression of the names in which `#` stands for each run of digits."""
        return re.compile(_skeleton_regex(self.pieces), re.DOTALL)

    def writer(self, texts: Mapping[str, str]) -> Callable[[Sequence[int]], str]:
        """Return a function that makes the name to write from the numbers of the holes."""
        parts: list[str] = []
        order: list[int] = []

        def add(pieces: Sequence[Piece]) -> None:
            for piece in pieces:
                match piece:
                    case str():
                        parts.append(piece.replace("%", "%%"))
                    case Hole(_, width):
                        parts.append(f"%0{width}d" if width else "%d")
                        order.append(self.holes.index(piece))
                    case Text(name):
                        parts.append(texts[name].replace("%", "%%"))
                    case Group(choices):
                        add(choices[0])

        add(self.pieces)
        pattern = "".join(parts)
        if order == list(range(len(order))):
            return lambda numbers: pattern % tuple(numbers)
        return lambda numbers: pattern % tuple(numbers[k] for k in order)

    def example(self, text: str) -> str:
        """Return a name that fits, with number 0 in each hole, and `text` for each text that may be any."""
        texts = {found.name: found.choices[0] if found.choices else text for found in self.texts}
        return self.writer(texts)([0] * len(self.holes))

    def renamed(self, name: str, other: Template) -> str | None:
        """Return the name of another template with the numbers and texts of a name, None if the name does not fit."""
        match = self.match(name)
        if match is None:
            return None
        holes = dict(zip((str(hole.axis) for hole in self.holes), match[0], strict=True))
        texts = dict(zip((text.name for text in self.texts), match[1], strict=True))
        try:
            return other.writer(texts)([holes[str(hole.axis)] for hole in other.holes])
        except KeyError:  # the other name needs a number or text that this one lacks
            return None

    def replaced(self, change: Callable[[Piece], Piece]) -> Template:
        """Return the template with each outermost piece replaced by `change(piece)`."""
        return Template(self.source, tuple(map(change, self.pieces)))


def parse_template(source: str) -> Template:
    """Parse a template."""
    pieces, at = _parse(source, 0, "")
    assert at == len(source)
    template = Template(source, pieces)
    _check(template)
    return template


def _parse(source: str, at: int, end: str) -> tuple[tuple[Piece, ...], int]:
    """Parse pieces up to one of the characters `end`, or to the end of the source."""
    pieces: list[Piece] = []
    literal = ""
    while at < len(source) and source[at] not in end:
        c = source[at]
        if c == "\\":
            if at + 1 == len(source):
                raise TextError("a backslash at the end of a name", at)
            literal += source[at + 1]
            at += 2
        elif c in "{<(":
            if literal:
                pieces.append(literal)
                literal = ""
            piece, at = {"{": _hole, "<": _text, "(": _group}[c](source, at)
            pieces.append(piece)
        elif c in "}>)?":
            raise TextError(f"'{c}' in a name without what it closes; write '\\{c}' for the character", at)
        else:
            literal += c
            at += 1
    return (*pieces, literal) if literal else tuple(pieces), at


def _hole(source: str, at: int) -> tuple[Piece, int]:
    end = source.find("}", at)
    if end < 0:
        raise TextError("'{' in a name without '}'", at)
    inside = source[at + 1 : end]
    width = re.search(r":0([0-9]{1,2})$", inside)
    try:
        axis = parse_axis(inside[: width.start()] if width else inside)
    except TextError as error:
        raise TextError(error.message, at + 1 + (error.column or 0)) from None
    return Hole(axis, int(width[1]) if width else 0), end + 1


def _text(source: str, at: int) -> tuple[Piece, int]:
    found = re.compile(r"<([^\W\d]\w*)>").match(source, at)
    if not found:
        raise TextError("'<' in a name without a name and '>'; write '\\<' for the character", at)
    return Text(found[1]), found.end()


def _group(source: str, at: int) -> tuple[Piece, int]:
    choices: list[tuple[Piece, ...]] = []
    start = at
    if source.count("(", 0, at) - source.count(")", 0, at) > _MOST_DEEP:
        raise TextError(f"alternatives are nested more than {_MOST_DEEP} deep", at)
    while True:
        pieces, at = _parse(source, at + 1, "|)")
        if at == len(source):
            raise TextError("'(' in a name without ')'; write '\\(' for the character", start)
        choices.append(pieces)
        if source[at] == ")":
            break
    at += 1
    if source[at : at + 1] == "?":
        choices.append(())
        at += 1
    if len(set(choices)) < len(choices):
        raise TextError("two equal alternatives in a name", start)
    return Group(tuple(choices)), at


def _all(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        if isinstance(piece, Group):
            for choice in piece.alternatives:
                yield from _all(choice)


def _count_paths(pieces: Sequence[Piece]) -> int:
    groups = [piece for piece in pieces if isinstance(piece, Group)]
    return math.prod(sum(map(_count_paths, group.alternatives)) for group in groups)


def _paths(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of each choice of alternatives."""
    options: list[list[list[Piece]]] = [
        [path for choice in piece.alternatives for path in _paths(choice)] if isinstance(piece, Group) else [[piece]]
        for piece in pieces
    ]
    for combination in itertools.product(*options):
        yield [piece for path in combination for piece in path]


def _check(template: Template) -> None:
    if _count_paths(template.pieces) > _MOST_PATHS:
        raise TextError(f"'{template.source}' has more than {_MOST_PATHS} choices of alternatives")
    names = {str(hole.axis) for hole in template.holes} | {f"<{text.name}>" for text in template.texts}
    for path in _paths(template.pieces):
        found = [f"<{p.name}>" if isinstance(p, Text) else str(p.axis) for p in path if isinstance(p, Text | Hole)]
        for name in sorted(names):
            shown = name if name.startswith("<") else f"{{{name}}}"
            if found.count(name) > 1:
                raise TextError(f"{shown} stands twice in '{template.source}'")
            if name not in found:
                raise TextError(f"an alternative in '{template.source}' lacks {shown}")
        for before, after in itertools.pairwise(path):
            ends = isinstance(before, Hole) or (isinstance(before, str) and before[-1].isdigit())
            begins = isinstance(after, Hole) or (isinstance(after, str) and after[0].isdigit())
            if ends and begins and (isinstance(before, Hole) or isinstance(after, Hole)):
                raise TextError(f"a number directly beside another digit in '{template.source}' has no clear end")
            if isinstance(before, Text) and isinstance(after, Text):
                raise TextError(f"<{before.name}> directly beside <{after.name}> has no clear end")
    for hole in template.holes:
        dims = [labels for labels, _ in alternatives(hole.axis)]
        if all(any(label.startswith("~") for label in labels) for labels in dims):
            raise TextError(f"{{{hole.axis}}} is padding for each number")


def _regex(pieces: Sequence[Piece], places: dict[str, list[int]]) -> str:
    """Return the regular expression of the pieces; add the number of each hole's and text's group to `places`."""
    result = ""
    for piece in pieces:
        if isinstance(piece, str):
            result += re.escape(piece)
        elif isinstance(piece, Group):
            result += f"(?:{'|'.join(_regex(choice, places) for choice in piece.alternatives)})"
        else:
            name = str(piece.axis) if isinstance(piece, Hole) else f"<{piece.name}>"
            places.setdefault(name, []).append(sum(map(len, places.values())) + 1)
            result += f"({_piece_regex(piece)})"
    return result


def _piece_regex(piece: Hole | Text) -> str:
    if isinstance(piece, Text):
        return "|".join(map(re.escape, piece.choices)) or ".+"
    if piece.width:
        return f"[0-9]{{{piece.width}}}|[1-9][0-9]{{{piece.width},{_MOST_DIGITS}}}"
    return f"0|[1-9][0-9]{{0,{_MOST_DIGITS - 1}}}"


def _skeleton_regex(pieces: Sequence[Piece]) -> str:
    result = ""
    for piece in pieces:
        match piece:
            case str():
                result += re.escape(_DIGITS.sub("#", piece)).replace(r"\#", "#?")
            case Hole():
                result += "#?"  # "?", because digits of two pieces may be one run in a name
            case Text(_, choices):
                result += f"(?:{'|'.join(_skeleton_regex([choice]) for choice in choices)})" if choices else ".+"
            case Group(options):
                result += f"(?:{'|'.join(map(_skeleton_regex, options))})"
    return result


def _automaton(pieces: Sequence[Piece]) -> list[list[tuple[str, int]]]:
    """Return the moves of each state, as (class of characters or "" for none, next state), from state 0 to state 1."""
    moves: list[list[tuple[str, int]]] = [[], []]

    def new() -> int:
        moves.append([])
        return len(moves) - 1

    def add(pieces: Sequence[Piece], at: int) -> int:
        for piece in pieces:
            match piece:
                case Text(_, ()) | Hole():
                    kind = DIGIT if isinstance(piece, Hole) else ANY
                    state = new()
                    moves[at].append((kind, state))
                    moves[state].append((kind, state))
                    at = state
                case str():
                    for c in piece:
                        state = new()
                        moves[at].append((c, state))
                        at = state
                case Group(options) | Text(_, options):
                    end = new()
                    for option in options:
                        start = new()
                        moves[at].append(("", start))
                        moves[add([option] if isinstance(option, str) else option, start)].append(("", end))
                    at = end
        return at

    moves[add(pieces, 0)].append(("", 1))
    return moves
