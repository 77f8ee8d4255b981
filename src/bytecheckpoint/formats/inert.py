"""Objects that a pickle describes, as data; and the values of simple opcodes."""

from __future__ import annotations

import codecs
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

__all__ = [
    "COUNTED",
    "GATHERED",
    "LINES",
    "ON_STACK",
    "SIMPLE",
    "AlikeObjects",
    "CallRecord",
    "Dtype",
    "GlobalName",
    "Meaning",
    "append_items",
    "build",
    "check_key",
    "frozenset_of",
    "is_module_state",
    "set_items",
]  # fmt: skip

#: Decimal digits of the longest int in text, as in `sys.int_info.default_max_str_digits`.
_MAX_DIGITS = 4300
#: Keys of dicts and sets hash in constant time, and only equal keys have equal hashes.
_MAX_KEY_DEPTH, _MAX_KEY_ITEMS, _MAX_KEY_INT = 4, 64, 1 << 60

Meaning = Callable[..., object]
"""The inert meaning of a call: takes its arguments, returns a plain value or an inert object. It raises any exception for
arguments that it cannot have."""


class GlobalName(msgspec.Struct, eq=False):
    """A class or function that a pickle names. Nothing looks it up.

    Attributes:
        module: name of the module.
        name: qualified name inside the module.
        meaning: inert meaning of a call, None: a call is a `CallRecord`.
    """

    module: str
    name: str
    meaning: Meaning | None = None

    @property
    def full(self) -> str:
        """The name with the module: "torch._utils._rebuild_tensor_v2"."""
        return f"{self.module}.{self.name}"


class CallRecord(msgspec.Struct, eq=False):
    """An object that calling a global would make. Nothing is called.

    Attributes:
        target: the class or function.
        args: positional arguments.
        kwargs: keyword arguments.
        state: state that the object would be given; None without one.
        items: items that would be appended or added, in order.
        pairs: items that would be set by key, in order.
    """

    target: GlobalName
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None
    state: Any = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None


class Dtype(msgspec.Struct, frozen=True):
    """A `torch.dtype`, by its name without "torch."."""

    name: str


class AlikeObjects(msgspec.Struct, eq=False):
    """Objects of one class that follow each other; see `formats.alike_objects`.

    Attributes:
        target: class of the objects.
        columns: values of each attribute, one for each object.
    """

    target: GlobalName
    columns: dict[str, list[Any]]


_PLAIN_KEYS = frozenset((str, bytes, bool, float, type(None), GlobalName, CallRecord, Dtype, AlikeObjects))


def check_key(key: object, depth: int = 0) -> int:
    """Check that a key of a dict or set hashes quickly and as it should; return the number of its items."""
    kind = type(key)
    if kind in _PLAIN_KEYS:
        return 1
    if kind is int:
        if not -_MAX_KEY_INT < key < _MAX_KEY_INT:  # type: ignore[operator]
            raise ValueError("an int of more than 60 bits as a key")
        return 1
    if not isinstance(key, tuple | frozenset):
        raise TypeError(f"a {kind.__name__} as a key")
    total = 1
    for item in key if depth < _MAX_KEY_DEPTH else ():
        total += check_key(item, depth + 1)
        if total > _MAX_KEY_ITEMS:
            break
    if depth >= _MAX_KEY_DEPTH or total > _MAX_KEY_ITEMS:
        raise ValueError("a nested or long tuple as a key")
    return total


def set_items(target: object, items: list[Any]) -> None:
    """Set keys and values, which alternate, in a dict, or record them in an inert object."""
    kind = type(target)
    alternating = iter(items)
    pairs = zip(alternating, alternating, strict=True)
    if kind is dict or kind is OrderedDict:
        for key, value in pairs:
            if type(key) not in _PLAIN_KEYS:
                check_key(key)
            target[key] = value  # type: ignore[index]
    elif type(target) is CallRecord:
        if target.pairs is None:
            target.pairs = []
        target.pairs.extend(pairs)
    else:
        raise TypeError(f"items set in a {kind.__name__}")


def append_items(target: object, items: list[Any]) -> None:
    """Append items to a list or set, or record them in an inert object."""
    if type(target) is list:
        target.extend(items)
    elif type(target) is set:
        target.update(item for item in items if check_key(item))
    elif type(target) is CallRecord:
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        raise TypeError(f"items appended to a {type(target).__name__}")


def build(target: object, state: object) -> None:
    """Give an object its state. Dicts and inert objects of other kinds have attributes that mean nothing here."""
    if type(target) is CallRecord:
        if target.state is not None:
            raise ValueError("two states of one object")
        target.state = state
    elif isinstance(target, GlobalName | AlikeObjects | list | tuple | set | str | int | float | bytes):
        raise TypeError(f"a state for a {type(target).__name__}")
    elif (take := getattr(target, "take_state", None)) is not None:
        take(state)
    elif type(target) is OrderedDict and isinstance(state, dict) and "_metadata" in state:
        target._metadata = None  # type: ignore[attr-defined]


def is_module_state(value: object) -> bool:
    """Return whether a value is what `state_dict` of a module returned, which has the versions of its modules."""
    return type(value) is OrderedDict and hasattr(value, "_metadata")


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _old_string(data: bytes) -> str | bytes:
    """Return a string of Python 2, which is text or bytes; in checkpoints it is text of ASCII."""
    return data.decode("ascii") if data.isascii() else data


def _quoted(line: bytes) -> str | bytes:
    if len(line) < 2 or line[:1] not in {b"'", b'"'} or line[-1:] != line[:1]:
        raise ValueError("a string without quotes")
    return _old_string(codecs.escape_decode(line[1:-1])[0])


def _decimal(line: bytes) -> int:
    if len(line) > _MAX_DIGITS:
        raise ValueError("an int of too many digits")
    return {b"00": False, b"01": True}[line] if line in {b"00", b"01"} else int(line.rstrip(b"L"))


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    set_items(made, items)
    return made


def frozenset_of(items: Iterable[Any]) -> frozenset[Any]:
    """Return a frozenset of items that may be keys."""
    return frozenset(item for item in items if check_key(item))


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    set_items(stack[-1], [key, value])


def _append(stack: list[Any]) -> None:
    item = stack.pop()
    append_items(stack[-1], [item])


COUNTED: dict[int, tuple[int, Callable[[bytes], object]]] = {
    0x58: (4, _text),
    0x8D: (8, _text),
    0x42: (4, bytes),
    0x43: (1, bytes),
    0x8E: (8, bytes),
    0x96: (8, bytearray),
    0x54: (4, _old_string),
    0x55: (1, _old_string),
    0x8A: (1, _signed),
    0x8B: (4, _signed),
}
"""Opcodes with a count of bytes: bytes of the count, and the value of the bytes."""
LINES: dict[int, Callable[[bytes], object]] = {
    0x56: lambda line: str(line, "raw-unicode-escape"),
    0x53: _quoted,
    0x49: _decimal,
    0x4C: _decimal,
    0x46: float,
}
"""Opcodes with a line of text."""
GATHERED: dict[int, Callable[[list[Any]], object]] = {0x74: tuple, 0x6C: list, 0x64: _dict_of, 0x91: frozenset_of}
"""Opcodes that make one object of all since the mark."""
SIMPLE: dict[int, object] = {0x4E: None, 0x88: True, 0x89: False}
"""Opcodes of one value."""
ON_STACK: dict[int, Callable[[list[Any]], None]] = {
    0x8F: lambda stack: stack.append(set()),
    0x32: lambda stack: stack.append(stack[-1]),
    0x73: _set_item,
    0x61: _append,
}
"""Opcodes that change the last objects only."""
