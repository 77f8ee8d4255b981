"""Read runs of equal objects in a pickle by regular expressions: two thirds of DCP's metadata are three classes of objects.

An object of a class that was seen before is one match instead of twenty opcodes. A text that does not match is left to the
interpreter, so this changes no result.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from bytecheckpoint.formats.inert import CallRecord, GlobalName

__all__ = ["NEW_WITH_DICT", "RecordTemplates"]

NEW_WITH_DICT = b")\x81\x94}\x94("
"""Opcodes of a new object, and of the dict of its state: EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK."""
_GET = rb"h.|j...."
_INT = rb"K.|M..|J...[\x00-\x7f]"
#: A torch.Size of one to three ints, behind the GET of its class: TUPLE MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE.
_SIZE = rb"(?:(?:%s)(?:\x85|(?:%s)(?:\x86|(?:%s)\x87)))\x94\x85\x94R\x94" % ((_INT,) * 3)
_VALUE = rb"(?:%s)(?:%s)?|%s|N" % (_GET, _SIZE, _INT)
_FIELD = re.compile(rb"(%s)(?:%s)" % (_GET, _VALUE), re.DOTALL).match
_END = b"ub"  # SETITEMS BUILD
_MOST_FIELDS, _MOST_TEMPLATES, _MOST_OBJECTS = 8, 4, 4096
_INT_BYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5}
_UINT32 = struct.Struct("<I").unpack_from


class _RecordForm:
    """The form of the objects of one class: a pattern from the GET of the class to the end, and the names of the values.

    Attributes:
        following: the form of the object that followed last time.
    """

    __slots__ = ("following", "match", "names", "target")

    def __init__(self, target: GlobalName, pattern: bytes, names: list[str]) -> None:
        self.target = target
        self.match = re.compile(pattern, re.DOTALL).match
        self.names = names
        self.following: _RecordForm | None = None


class RecordTemplates:
    """The forms of the objects that one pickle holds.

    An object is a GET of the class, `NEW_WITH_DICT`, GETs of keys with values, and the end.
    """

    def __init__(self, memo: list[Any], size: GlobalName) -> None:
        self._memo = memo
        self._size = size
        self._known: dict[GlobalName, list[_RecordForm]] = {}
        self._sizes: dict[bytes, tuple[Any, ...]] = {}
        self._last: _RecordForm | None = None
        self._end = -1  # position behind the last object of `_last`

    def read(self, stack: list[Any], data: bytes, i: int) -> int:
        """Replace the class on the stack by its object, push those that follow, and return the position behind them.

        Args:
            stack: objects, of which the last is the class.
            data: the pickle.
            i: position behind `NEW_WITH_DICT`. It is returned if the object has to be interpreted.
        """
        target = stack[-1]
        start = i - len(NEW_WITH_DICT) - 2
        if start < 0 or data[start] != 0x68 or self._memo[data[start + 1]] is not target:
            start -= 3
            if start < 0 or data[start] != 0x6A or self._memo[_UINT32(data, start + 1)[0]] is not target:
                return i
        for template in self._known.get(target, ()):
            if found := template.match(data, start):
                break
        else:
            learned = self._learn(target, data, start, i)
            if learned is None:
                return i
            template = learned
            found = template.match(data, start)
        if self._end == start and self._last is not None:
            self._last.following = template
        end, count = i, 0
        while found and (made := self._object(template, found.groups())) is not None:
            if count:
                stack.append(made)
            else:
                stack[-1] = made
            end = found.end()
            count += 1
            self._last, self._end = template, end
            if template.following is None or count == _MOST_OBJECTS:
                break
            template = template.following
            found = template.match(data, end)
        return end

    def _object(self, template: _RecordForm, texts: tuple[bytes, ...]) -> CallRecord | None:
        """Make an object of the texts of its values; None if it has to be interpreted."""
        memo, sizes = self._memo, self._sizes
        state: dict[str, Any] = {}
        made = CallRecord(template.target, (), None, state)
        new: list[Any] = [made, state]
        for name, text in zip(template.names, texts, strict=True):
            first = text[0]
            if first == 0x68 or first == 0x6A:  # noqa: PLR1714 - a set would take longer
                length = 2 if first == 0x68 else 5
                if len(text) == length:
                    state[name] = memo[text[1] if first == 0x68 else _UINT32(text, 1)[0]]
                    continue
                three = sizes.get(text)
                if three is None:
                    if memo[text[1] if first == 0x68 else _UINT32(text, 1)[0]] is not self._size:
                        return None
                    three = sizes[text] = self._three(text[length:])
                new += three
                state[name] = three[2]
            elif first == 0x4B:
                state[name] = text[1]
            else:
                state[name] = None if first == 0x4E else int.from_bytes(text[1:], "little")
        memo += new
        return made

    def _learn(self, target: GlobalName, data: bytes, start: int, i: int) -> _RecordForm | None:
        known = self._known.setdefault(target, [])
        names: list[str] = []
        pattern, at = re.escape(data[start:i]), i
        while len(known) < _MOST_TEMPLATES and len(names) < _MOST_FIELDS and (field := _FIELD(data, at)):
            key = field[1]
            place = key[1] if key[0] == 0x68 else _UINT32(key, 1)[0]
            name = self._memo[place] if place < len(self._memo) else None
            if type(name) is not str or name in names:
                return None
            names.append(name)
            pattern += re.escape(key) + b"(" + _VALUE + b")"
            at = field.end()
        if not names or data[at : at + 2] != _END:
            return None
        known.append(_RecordForm(target, pattern + _END, names))
        return known[-1]

    def _three(self, text: bytes) -> tuple[Any, ...]:
        """Return the three objects that a Size adds to the memo: its ints, its arguments, and itself."""
        dims, i = [], 0
        while text[i] in _INT_BYTES:
            end = i + _INT_BYTES[text[i]]
            dims.append(int.from_bytes(text[i + 1 : end], "little"))
            i = end
        args = (tuple(dims),)
        return args[0], args, self._size.meaning(*args) if self._size.meaning else CallRecord(self._size, args)
