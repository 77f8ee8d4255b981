"""Layouts: check the statements, and find other layouts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import xxhash

from bytecheckpoint.errors import UsageError
from bytecheckpoint.layouts.axes import TextError, parse_axes
from bytecheckpoint.layouts.config import Config, check_condition, check_keys, check_size, condition, dim_size, said
from bytecheckpoint.layouts.names import Group, Piece, Text, parse_template
from bytecheckpoint.layouts.parsed import ParsedRule, conflicts
from bytecheckpoint.layouts.parts import Family, FamilyError, SourcePlace, components, family_dims
from bytecheckpoint.layouts.scaling import check_scales
from bytecheckpoint.layouts.statements import Alias, Content, Prefix, Rule, Scales, Statement
from bytecheckpoint.layouts.text import parse, to_text
from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.similar_names import SimilarNames

__all__ = ["KEY_IN_NAMES", "Layout", "LayoutArgument", "builtin_names", "find", "find_all", "identity_of"]

_BUILTIN = Path(__file__).parent / "builtin"

_AXES = re.compile(r"(?:([^=]*?)=)?(.*)", re.DOTALL)
_WORD = re.compile(r"[^\W\d]\w*")
#: A key of a configuration in a regular expression of names, in the place of its value: `layers\.<hf.num_layers>\..*`.
KEY_IN_NAMES = re.compile(r"<(\w+(?:\.\w+)+)>")


@dataclass(frozen=True)
class Layout(Content):
    """State how the tensors of one naming lie in those of another naming.

    The arguments are the attributes of `Content`.

    Raises:
        UsageError: the layout has a mistake; the message names line and column.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", {name: " ".join(text.split()) for name, text in self.dims.items()})
        for name in ("rules", "include", "require", "ignore", "optional", "aliases", "scales", "prefixes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()

    @property
    def sides(self) -> tuple[str, str]:
        """The names of both sides."""
        return self.left, self.right

    @property
    def label(self) -> str:
        """The name of the layout in messages: its file, or its own name."""
        return self.file.removeprefix(f"{_BUILTIN}{os.sep}") or self.name

    def to_text(self) -> str:
        """Return the layout as the text of a `*.layout` file."""
        return to_text(self)

    @staticmethod
    def from_text(text: str, file: str = "text") -> Layout:
        """Parse the text of a `*.layout` file, called `file` in messages."""
        return Layout(**parse(text, file.removeprefix(f"{_BUILTIN}{os.sep}")), file=file)

    @staticmethod
    def read(path: str | Path) -> Layout:
        """Read a `*.layout` file."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the layout {path}: {error}") from None
        return Layout.from_text(text, str(path))

    @lazy
    def parsed(self) -> tuple[ParsedRule, ...]:
        """The rules, parsed, with those of included layouts that no rule here replaces."""
        prefixes = [prefix for prefix in self.merged("prefixes") if isinstance(prefix, Prefix)]
        own = [self._parsed(number, self._with_prefixes(rule, prefixes)) for number, rule in enumerate(self.rules)]
        for first, second, name in conflicts(own):
            side = self.sides[first.side]
            raise UsageError(
                f"{second.place}: '{name}' of the {side} side fits '{first.template.source}' ({first.place}) too"
            )
        result = list(own)
        for included in self.included:
            for rule in included.parsed:
                if self.prefixes:
                    rule = self._parsed(len(result), self._with_prefixes(rule.rule, self.prefixes))
                if not any(True for _ in conflicts(result, [rule])):
                    result.append(rule)
        return tuple(result)

    @lazy
    def included(self) -> tuple[Layout, ...]:
        """The included layouts, from the folder of this file or from those that are built in."""
        result = tuple(find(name, self.file) for name in self.include)
        for layout in result:
            if layout.sides != self.sides:
                raise UsageError(f"{self.label} includes {layout.name}, whose sides are {' and '.join(layout.sides)}")
        return result

    def merged(self, name: str) -> Iterator[Statement | Alias | Scales | Prefix]:
        """Yield the statements of one sort, of this layout and of those that it includes."""
        yield from getattr(self, name)
        for layout in self.included:
            yield from layout.merged(name)

    @lazy
    def all_dims(self) -> dict[str, str]:
        """The expressions of sizes, of this layout and of those that it includes."""
        result: dict[str, str] = {}
        for layout in self.included:
            result |= layout.all_dims
        return result | dict(self.dims)

    def with_sizes(self, config: Config) -> Layout:
        """Return the layout with the sizes of dims that a configuration gives, for checkpoints that lack it."""
        found = {name: dim_size(text, config) for name, text in self.all_dims.items()}
        return replace(self, dims={**self.dims, **{name: str(n) for name, n in found.items() if n is not None}})

    def is_for(self, config: Config) -> bool:
        """Return whether the configurations say that this is the right layout."""
        return bool(self.fits) and condition(self.fits, config) is True

    def check_config(self, config: Config) -> list[str]:
        """Check the configurations of both sides; return the requirements that their keys do not decide.

        Raises:
            UsageError: a requirement is not met.
        """
        unknown: list[str] = []
        for statement in self.merged("require"):
            assert isinstance(statement, Statement)
            applies = condition(statement.when, config) if statement.when else True
            holds = True if applies is False else condition(statement.text, config)
            if holds is False and applies:
                values = said(statement.text, config)
                raise UsageError(f"{statement.place}: the layout {self.name} requires {statement.text}, but {values}")
            if not holds:
                unknown.append(statement.text)
        return unknown

    def _check(self) -> None:
        for name in (self.name, self.left, self.right, *self.include):
            if not re.fullmatch(r"[\w.-]+", name):
                raise UsageError(f"layout {self.name!r}: '{name}' is no name: use letters, digits, '_', '-' and '.'")
        if self.left == self.right:
            raise UsageError(f"layout {self.name}: both sides are called '{self.left}'")
        if self.stored and self.stored not in self.sides:
            raise UsageError(
                f"layout {self.name} has no side '{self.stored}': its sides are {' and '.join(self.sides)}"
            )
        start = SourcePlace(self.label)
        for key, text in self.dims.items():
            with _Placed(SourcePlace(f"{start}: dim '{key}'")):
                if not _WORD.fullmatch(key):
                    raise TextError("this is no name of a dim")
                check_size(text, self.sides)
        with _Placed(start):
            if self.fits:
                check_condition(self.fits, self.sides)
        statements: tuple[Statement | Alias | Scales | Prefix, ...] = (
            *self.require, *self.ignore, *self.optional, *self.aliases, *self.scales, *self.prefixes
        )  # fmt: skip
        for statement in statements:
            with _Placed(statement.place if statement.place.text else start):
                if statement.side not in (*self.sides, *([""] if statement in self.require else [])):
                    raise TextError(f"'{statement.side}' is no side: write {' or '.join(self.sides)}")
                self._check_statement(statement)
        used = {name for rule in self.parsed for f in rule.families for name in family_dims(f)}
        for key in self.dims:
            if key not in used:
                raise UsageError(f"{start}: dim '{key}' stands in no rule")

    def _check_statement(self, statement: Statement | Alias | Scales | Prefix) -> None:
        if isinstance(statement, Statement | Alias) and statement.when:
            check_condition(statement.when, self.sides)
        match statement:
            case Alias():
                for name in (statement.name, statement.of, *([statement.beside] if statement.beside else [])):
                    parse_template(name)
            case Prefix():
                parse_template(statement.becomes)
            case Scales():
                check_scales(statement)
            case Statement():
                if statement in self.require:
                    check_condition(statement.text, self.sides)
                    return
                check_keys(KEY_IN_NAMES.findall(statement.text), self.sides)
                try:
                    re.compile(statement.text)
                except re.error as error:
                    raise TextError(f"'{statement.text}' is no regular expression: {error}") from None

    def _with_prefixes(self, rule: Rule, prefixes: Sequence[Prefix]) -> Rule:
        """Return a rule with the prefixes that stand for those of its names."""
        result, places = copy(rule), iter(rule.places)
        result.left, result.right, result.places = {}, {}, ()
        for side, made, given in zip(self.sides, (result.left, result.right), (rule.left, rule.right), strict=True):
            for name, axes in given.items():
                fits = [prefix for prefix in prefixes if prefix.side == side and name.startswith(prefix.name)]
                names = {prefix.becomes + name.removeprefix(prefix.name): prefix.part for prefix in fits} or {name: ""}
                made |= {
                    name: f"{part} {axes if '=' in axes else f'= {axes}'}" if part else axes
                    for name, part in names.items()
                }
                result.places += (next(places),) * len(names) if rule.places else ()
        return result

    def _parsed(self, number: int, rule: Rule) -> ParsedRule:
        start = SourcePlace(f"{self.label}: rule {number + 1}")
        if not rule.left or not rule.right:
            raise UsageError(f"{rule.places[0] if rule.places else start}: a rule needs a name on each side")
        names = [(side, *item) for side, family in enumerate((rule.left, rule.right)) for item in family.items()]
        places = rule.places or (start,) * len(names)
        families = [_family(side, name, axes, place) for (side, name, axes), place in zip(names, places, strict=True)]
        with _Placed(places[0]):
            if rule.when:
                check_condition(rule.when, self.sides)
            families = _with_texts(families, rule)
            used = {name for family in families for name in family_dims(family)}
            for name, size in rule.sizes.items():
                if name not in used:
                    raise TextError(f"dim '{name}' does not stand in the rule")
                if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                    raise TextError(f"the size of '{name}' is {size!r}, which is no natural number")
            return ParsedRule(rule, tuple(families), components(families, self.sides, (*rule.same, *rule.mean)))


class _Placed:
    """Raise a mistake in a piece of text as the user's error, with its place."""

    def __init__(self, place: SourcePlace, column: int = 0) -> None:
        self._place, self._column = place, column

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, TextError):
            place = error.place if isinstance(error, FamilyError) else self._place
            column = "" if error.column is None else f" column {error.column + self._column + 1}:"
            raise UsageError(f"{place}:{column} {error.message}") from None


def _family(side: int, name: str, text: str, place: SourcePlace) -> Family:
    with _Placed(place, place.name_column):
        template = parse_template(name)
    found = _AXES.fullmatch(text)
    assert found
    with _Placed(place, place.axes_column + found.start(2)):
        axes = parse_axes(found[2])
    with _Placed(place, place.axes_column):
        labels = tuple((found[1] or "").split())
        for label in labels:
            if not _WORD.fullmatch(label.removeprefix("~")):
                raise TextError(f"'{label}' is no name of a part", text.index(label))
        if found[1] is not None and not labels:
            raise TextError("'=' without the name of a part", 0)
    return Family(side, template, labels, axes, place)


def _with_texts(families: list[Family], rule: Rule) -> list[Family]:
    """Return the families in which alternatives that all names share are texts, and texts have the choices of `names`."""
    # Alternatives that all names have mean the same one on both sides.
    groups = [[p for p in f.template.pieces if isinstance(p, Group)] for f in families]
    texts = {
        group: Text(f"alternatives {number}", tuple("".join(choice) for choice in group.alternatives))  # type: ignore[arg-type]
        for number, group in enumerate(groups[0])
        if all(found.count(group) == 1 for found in groups)
        and all(isinstance(piece, str) for choice in group.alternatives for piece in choice)
    }
    changed: list[Family] = []
    for family in families:

        def change(piece: Piece, side: int = family.side) -> Piece:
            if isinstance(piece, Group):
                return texts.get(piece, piece)
            if isinstance(piece, Text) and rule.names:
                return Text(piece.name, tuple(rule.names.values() if side else rule.names.keys()))
            return piece

        changed.append(replace(family, template=family.template.replaced(change)))
    names = [tuple(text.name for text in family.template.texts) for family in changed]
    for found in names:
        if missing := sorted(set(names[0]) ^ set(found)):
            raise TextError(f"<{missing[0]}> does not stand in all names of the rule")
    plain = [name for name in names[0] if not name.startswith("alternatives")]
    if rule.names and len(plain) != 1:
        advice = ": write the others as alternatives, as (weight|bias)" if plain else ""
        raise TextError(f"'names' needs one text, as <x>, in each name of the rule, which has {len(plain)}{advice}")
    if len(set(rule.names.values())) < len(rule.names):
        raise TextError("'names' gives one name twice")
    return changed


#: What functions take as `layout=`: a layout, the name of one, a file, or several, each of which leads on from the names to
#: which the one before led.
LayoutArgument = Layout | str | os.PathLike[str] | Sequence[Layout | str | os.PathLike[str]]

#: The layouts that are being read, each of which includes the next one.
_reading: ContextVar[tuple[Path, ...]] = ContextVar("reading", default=())


@cache
def _built_in(path: Path) -> Layout:
    return Layout.read(path)


def find(name: str, beside: str = "") -> Layout:
    """Return the layout `name`: a file beside the file `beside`, or a layout that is built in."""
    folders = [Path(beside).parent] if Path(beside).is_file() else []
    for folder in (*folders, _BUILTIN):
        if (path := folder / f"{name}.layout").is_file() and path != Path(beside):
            reading = _reading.get()
            if path in reading:
                raise UsageError(f"{' includes '.join(file.name for file in (*reading, path))}: a circle")
            token = _reading.set((*reading, path))
            try:
                return _built_in(path) if folder == _BUILTIN else Layout.read(path)
            finally:
                _reading.reset(token)
    near = SimilarNames(builtin_names()).of(name)
    raise UsageError(f"there is no layout '{name}'{f': did you mean {near[0]}?' if near else ''}")


def find_or_read(text: str) -> Layout:
    """Return the layout that a user names: the file if the text has a slash or ends in ".layout", else one built in.

    After a colon may stand the side whose names the checkpoint has.
    """
    name, colon, side = text.rpartition(":")
    if colon and _WORD.fullmatch(side) and (name.endswith(".layout") or os.sep not in name):
        return replace(find_or_read(name), stored=side)
    return Layout.read(text) if os.sep in text or text.endswith(".layout") else find(text)


def find_all(text: str) -> tuple[Layout, ...]:
    """Return the layouts of which a user gives the names or files, joined by commas."""
    return tuple(find_or_read(name.strip()) for name in text.split(","))


def identity_of(layouts: Sequence[Layout] | Literal["auto"] | None) -> str:
    """Return an argument of a call in a form that ranks compare, and that a message shows."""
    if layouts is None or layouts == "auto":
        return repr(layouts)
    text = "\n".join(f"{layout.to_text()}{layout.stored}" for layout in layouts)
    return f"{'+'.join(layout.name for layout in layouts)} ({xxhash.xxh3_64_hexdigest(text.encode())[:8]})"


def builtin_names() -> list[str]:
    """Return the names of the layouts that are built in."""
    return sorted(path.stem for path in _BUILTIN.glob("*.layout"))
