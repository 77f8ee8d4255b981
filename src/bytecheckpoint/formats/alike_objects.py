"""Alike objects that follow each other in a pickle, read as columns.

The metadata of DCP take three objects for each chunk, and two for each tensor. An object that has been interpreted gives a
regular expression, in which its classes and the names of its attributes are fixed, and its numbers and references are open.
Where the bytes that follow match it again and again, nothing is interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bytecheckpoint.formats.inert import AlikeObjects, CallRecord, GlobalName

__all__ = ["SKIPPED", "AlikeFinder", "SharedError", "column"]

SKIPPED: Final = object()
"""Object that stands in the memo of a pickle for each part of a run."""
#: Forms that are tried, and elements one after another that may give no run before the search ends.
_MOST_FORMS, _MOST_VAIN = 8, 1000
#: Bytes of the longest object, or key with its value, that gives a form.
_LONGEST: Final = 1024
_INT = rb"(K.|M..|J.{4}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}))"
#: A reference, or a text of ASCII that is remembered; its end is where no character of it can be.
_TEXT = rb"(h.|j.{4}|\x8c.[\x20-\x7e]*\x94)"
_TOKEN = re.compile(_INT + b"|" + _TEXT + rb"|([\x94)\x81}(ub\x85\x86\x87tRN\x88\x89\]ae])", re.DOTALL)
_LITERAL: Final = 0x8C
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


class SharedError(Exception):
    """A pickle uses a part of a run. Handler: read it without runs."""


def column(value: Any, name: str) -> list[Any]:
    """Return the values of an attribute of the objects of a run, or of one object; None where they lack it."""
    if type(value) is AlikeObjects:
        return value.columns.get(name) or [None] * len(next(iter(value.columns.values())))
    return [value.state.get(name)]


@dataclass
class _FormCall:
    """A call in a form: the token of the function, and the arguments."""

    function: Any
    args: Any


@dataclass
class _FormObject:
    """An object in a form: its class, and its attributes by their names, or a state that is a tuple.

    Classes and names are tokens, until the form is complete.
    """

    target: Any
    state: Any = None


@dataclass
class _Form:
    """The common form of the objects of a run.

    Attributes:
        pattern: regular expression of the objects that one element of the run consists of.
        objects: the objects. A text as a key is the token of its group, and then nothing is a column.
        columns: group of each open token.
        texts: groups that may be texts, each with the number of objects that an element remembers before it.
        remembered: objects that each element remembers beside texts.
    """

    pattern: re.Pattern[bytes]
    objects: list[Any]
    columns: dict[int, int]
    texts: list[tuple[int, int]]
    remembered: int

    def runs(self, data: bytes, i: int, memo: list[Any]) -> tuple[list[Any], int]:
        """Return the runs that begin at a position, one for each object of an element, and their end.

        Elements whose key is a text are keys and values one after the other.

        Raises:
            SharedError: an object refers to a part of another one.
        """
        rows, match = [], self.pattern.match
        while (found := match(data, i)) is not None:
            rows.append(found.groups())
            i = found.end()
        if not rows:
            return [], i
        columns = list(zip(*rows, strict=True))
        tokens = [set(column) for column in columns]
        if any(token[0] == _LITERAL for group, _ in self.texts for token in tokens[group]):
            self._remember(rows, memo)
        else:
            memo += [SKIPPED] * (self.remembered * len(rows))
        values = [_values(column, known, memo) for column, known in zip(columns, tokens, strict=True)]
        if type(self.objects[0]) is int:
            made = [self._made(part, values, len(rows)) for part in self.objects]
            return [one for element in zip(*made, strict=True) for one in element], i
        runs = [
            AlikeObjects(one.target, {name: self._made(part, values, len(rows)) for name, part in one.state.items()})
            for one in self.objects
        ]
        return runs, i

    def _made(self, part: Any, columns: list[list[Any]], count: int) -> list[Any]:
        """Return what a part of the form is in each of `count` elements, by the values of their open tokens."""
        if type(part) is int:
            return columns[self.columns[part]]
        if type(part) is tuple and part:
            return list(zip(*(self._made(one, columns, count) for one in part), strict=True))
        if type(part) is list:
            return list(map(list, zip(*(self._made(one, columns, count) for one in part), strict=True)))
        if type(part) is _FormCall:
            return _results(part.function, self._made(part.args, columns, count))
        if type(part) is _FormObject:
            target = part.target
            if type(part.state) is tuple:
                return _results(
                    lambda *state: CallRecord(target, (), None, state), self._made(part.state, columns, count)
                )
            attributes = zip(*(self._made(one, columns, count) for one in part.state.values()), strict=True)
            return [CallRecord(target, (), None, dict(zip(part.state, one, strict=True))) for one in attributes]
        return [part] * count

    def _remember(self, rows: list[tuple[bytes, ...]], memo: list[Any]) -> None:
        """Remember what the elements remember; of their parts the texts only."""
        for row in rows:
            done = 0
            for group, before in self.texts:
                if row[group][0] == _LITERAL:
                    memo += [SKIPPED] * (before - done)
                    memo.append(_value(row[group], memo))
                    done = before
            memo += [SKIPPED] * (self.remembered - done)


def _results(function: Any, args: list[Any]) -> list[Any]:
    """Return the result of a function for each tuple of arguments; the same object for equal ones."""
    known = {one: function(*one) for one in set(args)}
    return [known[one] for one in args]


def _values(column: Sequence[bytes], tokens: set[bytes], memo: list[Any]) -> list[Any]:
    """Return the numbers and objects that the tokens of a column stand for, of which `tokens` are the different ones."""
    known = {token: _value(token, memo) for token in tokens}
    return [known[token] for token in column]


def _value(token: bytes, memo: list[Any]) -> Any:
    if (kind := token[0]) in b"JKM":
        return int.from_bytes(token[1:], "little", signed=kind == b"J"[0])
    if kind == _LITERAL:
        if len(token) != token[1] + 3:
            raise SharedError  # two texts, between which no object is remembered
        return token[2:-1].decode("ascii")
    if token[:1] in b"hj":
        place = int.from_bytes(token[1:], "little")
        if place >= len(memo) or memo[place] is SKIPPED:
            raise SharedError
        return memo[place]
    return int.from_bytes(token[2:], "little", signed=True)  # of any length


@dataclass
class _FormReader:
    """The interpreter of the tokens of one element: numbers of tokens stand for their values."""

    tokens: list[bytes]
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    remembered: int = 0
    before: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Interpret all tokens. Raises IndexError, TypeError or ValueError: they are no objects of their own."""
        for number, token in enumerate(self.tokens):
            op = token[:1]
            if len(token) > 1:
                self.stack.append(number)
                self.before[number] = self.remembered
            elif op == b"\x94":
                self.remembered += 1
            elif op in _TUPLES:
                count = _TUPLES[op]
                self.stack[-count:] = [self._own(count)]
            elif op in b")}N\x88\x89]":
                self.stack.append({b")": (), b"}": {}, b"N": None, b"\x88": True, b"\x89": False, b"]": []}[op])
            elif op == b"(":
                self.marks.append(len(self.stack))
            elif op in b"R\x81":
                function, args = self._own(2)
                if op != b"R" and args:
                    raise TypeError
                self.stack[-2:] = [_FormCall(function, args) if op == b"R" else _FormObject(function)]
                self.fixed.add(function)
            elif op == b"a":
                item = self.stack.pop()
                self.stack[-1].append(item)
            elif op in b"ute":
                place = self.marks.pop()
                items = self.stack[place:]
                del self.stack[place:]
                if op == b"t":
                    self.stack.append(tuple(items))
                elif op == b"e":
                    self.stack[-1].extend(items)
                else:
                    self.stack[-1].update(zip(items[::2], items[1::2], strict=True))
                    self.fixed.update(items[::2])
            else:
                made, state = self._own(2)
                if made.state is not None:
                    raise TypeError
                self.stack.pop()
                made.state = state

    def _own(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError
        return tuple(self.stack[-count:])


def _form_of(data: bytes, memo: list[Any], count: int) -> _Form | None:
    """Return the form of one element of a run; None if it has none.

    Args:
        data: bytes of the element, which has been interpreted.
        memo: objects that the pickle remembers.
        count: number of objects that the element consists of.
    """
    tokens, i = [], 0
    while i < len(data) <= _LONGEST:
        if (found := _TOKEN.match(data, i)) is None:
            return None
        tokens.append(found[0])
        i = found.end()
    reader = _FormReader(tokens)

    def named(number: Any, kind: type) -> Any:
        if type(number) is not int or type(value := _value(tokens[number], memo)) is not kind:
            raise TypeError
        return value

    def bound(part: Any) -> Any:
        if type(part) is tuple or (type(part) is list and part):
            return type(part)(map(bound, part))
        if type(part) is _FormCall:
            meaning = named(part.function, GlobalName).meaning
            if meaning is None:
                raise TypeError
            return _FormCall(meaning, bound(part.args))
        if type(part) is _FormObject:
            target = named(part.target, GlobalName)
            if target.meaning is not None or not part.state:
                raise TypeError
            if type(part.state) is tuple:
                return _FormObject(target, bound(part.state))
            return _FormObject(target, {named(name, str): bound(one) for name, one in part.state.items()})
        if type(part) is not int and part not in (None, True, False):
            raise TypeError
        return part

    try:
        reader.run()
        objects = [*map(bound, reader.stack)]
        if type(objects[0]) is int:
            named(objects[0], str)
    except (IndexError, TypeError, ValueError, AttributeError, SharedError):
        return None
    kinds = [type(one) for one in objects]
    of_columns = all(kind is _FormObject and type(one.state) is dict for kind, one in zip(kinds, objects, strict=True))
    if len(objects) != count or reader.marks or not (of_columns or kinds == [int, _FormObject]):
        return None
    pieces, texts = [], []
    columns: dict[int, int] = {}
    for number, token in enumerate(tokens):
        if len(token) > 1 and number not in reader.fixed:
            columns[number] = len(columns)
            is_text = token[:1] in b"hj\x8c"
            pieces.append(_TEXT if is_text else _INT)
            if is_text:
                texts.append((columns[number], reader.before[number]))
        elif token[0] == _LITERAL:
            return None
        else:
            pieces.append(re.escape(token))
    return _Form(re.compile(b"".join(pieces), re.DOTALL), objects, columns, texts, reader.remembered)


@dataclass
class AlikeFinder:
    """The finder of runs in one pickle.

    Attributes:
        data: bytes that hold the pickle.
        memo: objects that the pickle remembers.
    """

    data: bytes
    memo: list[Any]
    _made: set[int] = field(default_factory=set)
    _ends: dict[int, int] = field(default_factory=dict)
    _forms: list[_Form] = field(default_factory=list)
    _vain: int = 0

    def place(self, items: list[Any]) -> None:
        """Note that a list or dict takes these items."""
        if self._made:
            self._made.difference_update(id(item) for item in items if type(item) is AlikeObjects)

    def end(self) -> None:
        """End the pickle. Raises SharedError: a run has gone elsewhere than into a list or dict."""
        if self._made:
            raise SharedError

    def after(self, i: int, stack: list[Any], marks: list[int]) -> int:
        """Read the runs after an object that ends at a position, the last one on the stack; return their end.

        Objects of a run are the items that are appended to a list, or keys and values of a dict.

        Raises as `_Form.runs`.
        """
        place = marks[-1] if marks else 0
        kind, count = type(stack[place - 1]) if place else None, len(stack) - place
        period = 1 if kind is list else 2
        if kind not in {list, dict} or count % period:
            return i
        start, self._ends[place] = self._ends.get(place, i), i
        for form in self._forms:
            if len(form.objects) == period and form.pattern.match(self.data, i) is not None:
                break
        else:
            if self._vain == _MOST_VAIN or count == period or not start < i <= start + _LONGEST:
                return i
            self._vain += 1
            if (found := _form_of(self.data[start:i], self.memo, period)) is None:
                return i
            form = found
            self._forms = [form, *self._forms[: _MOST_FORMS - 1]]
        runs, end = form.runs(self.data, i, self.memo)
        if runs:
            self._vain = 0
            self._made.update(id(run) for run in runs if type(run) is AlikeObjects)
        stack += runs
        self._ends[place] = end
        return end
