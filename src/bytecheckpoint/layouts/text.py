"""The text of `*.layout` files."""

from __future__ import annotations

import re
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.layouts.parts import SourcePlace
from bytecheckpoint.layouts.statements import Alias, Content, Prefix, Rule, Scales, Statement

__all__ = ["parse", "to_text"]

_COMMENT = re.compile(r"(?:^|\s)#.*")
_ARROW = re.compile(r"(?:^|(?<=\s))<->(?=\s|$)")
_OPTION = re.compile(r"(?:^|(?<=\s))(same|mean|add|with|names|when)(?=\s|$)")
_HEADER = re.compile(r"layout\s+(\S+)\s+(\S+)\s+<->\s+(\S+)(?:\s+for\s+(\S.*))?")
_DIM = re.compile(r"(\S+)\s*=\s*(\S.*)")
_ALIAS = re.compile(r"(\S+)\s+(\S+)\s+=\s+(\S+)(?:\s+beside\s+(\S+))?(?:\s+when\s+(\S.*))?")
_PREFIX = re.compile(r"(\S+)\s+(\S.*?)\s+=\s+(\S.*?)(?:\s+for\s+(\w+))?")
_NAMES = re.compile(r"(\S+)\s+(\S.*?)(?:\s+when\s+(\S.*))?")
_SCALES = re.compile(r"(\S+)\s+(\S+)\s+:(.*?)\s+of\s+(\S+)\s+:\s+(.+?)(?:\s+with\s+(.+?))?\s+->\s+(\w+)")
_SIZE = re.compile(r"\s*(\w+)\s*=\s*([0-9]+)\s*")
_FORMS = {
    "layout": "layout NAME LEFT <-> RIGHT [for CONDITION]",
    "alias": "alias SIDE NAME = NAME [beside NAME] [when CONDITION]",
    "prefix": "prefix SIDE PREFIX = PREFIX [for PART]",
    "scales": "scales SIDE NAME : AXES of NAME : AXES with a = 128 -> OPERATION",
    "ignore": "ignore SIDE REGEX [when CONDITION]",
    "optional": "optional SIDE REGEX [when CONDITION]",
    "require": "require CONDITION [when CONDITION]",
    "include": "include NAME",
}
_ARGUMENTS = {"alias": "aliases", "prefix": "prefixes"}
_WORDS = (*_FORMS, "dims", "rules")


class _LayoutReader:
    """Read a text line by line.

    Attributes:
        header: name, sides and condition of the layout.
        statements: statements by name of the layout's argument.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.header: tuple[str, str, str, str] | None = None
        self.dims: dict[str, str] = {}
        self.rules: list[Rule] = []
        self.include: list[str] = []
        self.statements: dict[str, list[Statement | Alias | Scales | Prefix]] = {}
        self._section = ""
        self._pending: _Pending | None = None
        for number, line in enumerate(text.splitlines(), 1):
            self._number = number
            line = _COMMENT.sub("", line).rstrip()
            if line.strip():
                self._line(line)
        self._finish()

    def error(self, message: str, column: int | None = None) -> UsageError:
        return UsageError(f"{self.file}:{self._number}:{'' if column is None else f' column {column + 1}:'} {message}")

    def _line(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "layout" and " : " not in line:
            if self.header is not None:
                raise self.error("a file has one layout")
            found = self._match(_HEADER, "layout", line.strip())
            self.header = (found[1], found[2], found[3], " ".join((found[4] or "").split()))
        elif self.header is None:
            raise self.error(f"expected '{_FORMS['layout']}' before everything else", 0)
        elif word in ("dims", "rules") and not rest:
            self._finish()
            self._section = word
        elif word in _FORMS and not _ARROW.search(line) and (word in ("scales",) or " : " not in line):
            self._finish()
            self._statement(word, rest)
        elif word in ("dims", "rules") and " : " not in line and " = " not in line:
            raise self.error(f"expected '{word}' alone, found '{rest}' after it")
        elif self._section == "dims":
            dim = _DIM.fullmatch(line.strip())
            if not dim:
                raise self.error(f"expected 'DIM = SIZE', found '{line.strip()}'")
            if dim[1] in self.dims:
                raise self.error(f"dim '{dim[1]}' has a size already")
            self.dims[dim[1]] = dim[2]
        elif self._section == "rules":
            self._rule_line(line)
        else:
            raise self.error(f"expected {', '.join(map(repr, _WORDS[1:]))}, found '{word}'", line.index(word))

    def _match(self, pattern: re.Pattern[str], word: str, text: str) -> re.Match[str]:
        found = pattern.fullmatch(text)
        if not found:
            raise self.error(f"expected '{_FORMS[word]}'")
        return found

    def _statement(self, word: str, rest: str) -> None:
        place = SourcePlace(f"{self.file}:{self._number}")
        if not rest or word == "layout":
            raise self.error(
                f"expected '{_FORMS[word]}'" if self.header is None or not rest else "a file has one layout"
            )
        if word == "include":
            self.include += rest.split()
            return
        made: Statement | Alias | Scales | Prefix
        if word == "alias":
            found = self._match(_ALIAS, word, rest)
            made = Alias(found[1], found[2], found[3], " ".join((found[5] or "").split()), found[4] or "", place)
        elif word == "prefix":
            found = self._match(_PREFIX, word, rest)
            made = Prefix(found[1], found[2], found[3], found[4] or "", place)
        elif word == "scales":
            found = self._match(_SCALES, word, rest)
            axes, of_axes = (" ".join(found[k].split()) for k in (3, 5))
            sizes = tuple(self._sizes(found[6] or "").items())
            made = Scales(found[1], found[2], axes, found[4], of_axes, sizes, found[7], place)
        elif word == "require":
            text, _, when = " ".join(rest.split()).partition(" when ")
            made = Statement("", text, when, place)
        else:
            found = self._match(_NAMES, word, rest)
            made = Statement(found[1], found[2], " ".join((found[3] or "").split()), place)
        self.statements.setdefault(_ARGUMENTS.get(word, word), []).append(made)

    def _sizes(self, text: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for item in text.split(",") if text else ():
            found = _SIZE.fullmatch(item)
            if not found:
                raise self.error(f"expected 'with DIM = NUMBER, ...', found '{item.strip()}'")
            sizes[found[1]] = int(found[2])
        return sizes

    def _rule_line(self, line: str) -> None:
        if _OPTION.match(line.strip()) and " : " not in line:
            if not self._pending or not self._pending.sides[1]:
                raise self.error(f"'{line.split(maxsplit=1)[0]}' without a rule before it")
            self._options(line)
            return
        at = 0
        arrow = _ARROW.search(line)
        left, right = (line[: arrow.start()], line[arrow.end() :]) if arrow else (line, None)
        if left.strip():
            if self._pending and self._pending.sides[1]:
                self._finish()
            self._pending = self._pending or _Pending()
            self._family(0, left, at)
        if right is not None:
            if self._pending is None:
                raise self.error("'<->' without a name on the left side before it")
            assert arrow
            option = _OPTION.search(right, right.find(" : ") + 1)
            self._family(1, right[: option.start()] if option else right, arrow.end())
            if option:
                self._options(right[option.start() :])

    def _family(self, side: int, text: str, start: int) -> None:
        assert self._pending
        name, colon, axes = (
            re.split(r"(\s:(?:\s|$))", text, maxsplit=1) if re.search(r"\s:(\s|$)", text) else (text, "", "")
        )
        if not colon:
            raise self.error(f"expected 'NAME : AXES', found '{text.strip()}'", start + len(text) - len(text.lstrip()))
        place = SourcePlace(
            f"{self.file}:{self._number}",
            start + len(name) - len(name.lstrip()),
            start + len(name) + len(colon) + len(axes) - len(axes.lstrip()),
        )
        if not name.strip():
            raise self.error("a name is missing before ':'", start)
        if name.strip() in self._pending.sides[side]:
            raise self.error(f"'{name.strip()}' stands in this rule already")
        self._pending.sides[side][name.strip()] = axes.strip()
        self._pending.places[side].append(place)

    def _options(self, text: str) -> None:
        assert self._pending
        found = list(_OPTION.finditer(text))
        # `when` is last, because its condition may have any words.
        for option, following in zip(found, [*found[1:], None], strict=True):
            word = option[1]
            value = text[option.end() : following.start() if following and word != "when" else len(text)].strip()
            if not value:
                raise self.error(f"'{word}' without what it is about")
            options = self._pending.options
            if word in ("same", "mean"):
                options[word] = (*options.get(word, ()), *value.replace(",", " ").split())  # type: ignore[misc]
            elif word == "add":
                try:
                    options["add"] = float(value)
                except ValueError:
                    raise self.error(f"expected a number after 'add', found '{value}'") from None
            elif word == "with":
                self._pending.sizes |= self._sizes(value)
            elif word == "names":
                left, equal, right = value.partition(" = ")
                if not equal:
                    raise self.error(f"expected 'names TEXT = TEXT', found '{value}'")
                self._pending.names[left.strip()] = right.strip()
            else:
                options["when"] = value
                break

    def _finish(self) -> None:
        if self._pending is None:
            return
        left, right = self._pending.sides
        if not right:
            raise self.error(f"the rule of '{next(iter(left))}' has no right side: write '<-> NAME : AXES' after it")
        rule = Rule(left, right, names=self._pending.names, **self._pending.options, **self._pending.sizes)  # type: ignore[arg-type]
        rule.places = (*self._pending.places[0], *self._pending.places[1])
        self.rules.append(rule)
        self._pending = None


class _Pending:
    def __init__(self) -> None:
        self.sides: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.places: tuple[list[SourcePlace], list[SourcePlace]] = ([], [])
        self.options: dict[str, object] = {}
        self.sizes: dict[str, int] = {}
        self.names: dict[str, str] = {}


def parse(text: str, file: str) -> dict[str, Any]:
    """Return the content of a layout by argument of `Layout`, from its text, called `file` in messages."""
    read = _LayoutReader(text, file)
    if read.header is None:
        raise UsageError(f"{file}: expected '{_FORMS['layout']}'")
    content = dict(zip(("name", "left", "right", "fits"), read.header, strict=True))
    return {**content, "dims": read.dims, "rules": read.rules, "include": read.include, **read.statements}


def to_text(layout: Content) -> str:
    """Return the text of a layout."""
    lines = [
        f"layout {layout.name}  {layout.left} <-> {layout.right}" + (f"  for {layout.fits}" if layout.fits else "")
    ]
    lines += [f"include {name}" for name in layout.include]
    lines += [f"require {s.text}" + (f" when {s.when}" if s.when else "") for s in layout.require]
    if layout.dims:
        lines += ["dims", *(f"    {name} = {text}" for name, text in layout.dims.items())]
    for word, statements in (("ignore", layout.ignore), ("optional", layout.optional)):
        lines += [f"{word} {s.side} {s.text}" + (f" when {s.when}" if s.when else "") for s in statements]
    for prefix in layout.prefixes:
        text = f"prefix {prefix.side} {prefix.name} = {prefix.becomes}"
        lines.append(text + (f" for {prefix.part}" if prefix.part else ""))
    for alias in layout.aliases:
        text = f"alias {alias.side} {alias.name} = {alias.of}" + (f" beside {alias.beside}" if alias.beside else "")
        lines.append(text + (f" when {alias.when}" if alias.when else ""))
    for scales in layout.scales:
        sizes = ", ".join(f"{name} = {size}" for name, size in scales.sizes)
        sizes = f" with {sizes}" if sizes else ""
        axes, of = f"{scales.name} : {scales.axes}".rstrip(), f"{scales.of} : {scales.of_axes}"
        lines.append(f"scales {scales.side} {axes} of {of}{sizes} -> {scales.operation}")
    if layout.rules:
        lines.append("rules")
    for rule in layout.rules:
        lines += [f"{name} : {axes}" for name, axes in rule.left.items()]
        lines += [f"    <-> {name} : {axes}" for name, axes in rule.right.items()]
        lines += [f"    {word} {' '.join(dims)}" for word, dims in (("same", rule.same), ("mean", rule.mean)) if dims]
        lines += [f"    add {rule.add!r}"] if rule.add else []
        sizes = ", ".join(f"{name} = {size}" for name, size in rule.sizes.items())
        lines += [f"    with {sizes}"] if sizes else []
        lines += [f"    names {left} = {right}" for left, right in rule.names.items()]
        lines += [f"    when {rule.when}"] if rule.when else []
    return "\n".join(lines) + "\n"
