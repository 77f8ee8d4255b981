"""Paths through nested values: how they are walked and how they are shown."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import UsageError

__all__ = ["MAX_DEPTH", "TensorRef", "dotted", "leaves"]

MAX_DEPTH = 100
"""Largest number of containers inside one another; real states need about ten."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that is stored elsewhere, under `name`. `decode(..., on_tensor=TensorRef)` leaves these in its place."""

    name: str


def dotted(path: tuple[object, ...]) -> str:
    """`path` as one key: str steps as they are, other steps by their repr, joined with dots.

    Not injective: ("a", 0), ("a", "0") and ("a.0",) look the same.

    >>> dotted(("layers", 0, (1, 2)))
    'layers.0.(1, 2)'
    """
    return ".".join(step if type(step) is str else _shown(step) for step in path)


def _shown(step: object) -> str:
    try:
        text = repr(step)
    except ValueError:
        # An int of more digits than Python is willing to print in decimal.
        return hex(step) if isinstance(step, int) else f"<{type(step).__name__}>"
    return text


def leaves(value: object) -> Iterator[tuple[tuple[object, ...], object]]:
    """The leaves of nested dicts (OrderedDicts), lists and tuples with their paths, depth first, in order.

    Everything else is a leaf, sets and empty containers too. Exact types, as in `encode`.

    Raises:
        UsageError: nested more than `MAX_DEPTH` levels deep, as a cycle is.

    >>> list(leaves({"a": [1, {}], "b": ()}))
    [(('a', 0), 1), (('a', 1), {}), (('b',), ())]
    """
    stack: list[Iterator[tuple[tuple[object, ...], object]]] = [iter([((), value)])]
    while stack:
        for path, item in stack[-1]:
            below = _children(path, item)
            if below is None:
                yield path, item
                continue
            if len(stack) > MAX_DEPTH:
                raise UsageError(f"{dotted(path[:8])}: containers nested more than {MAX_DEPTH} levels deep, or a cycle")
            stack.append(below)
            break
        else:
            stack.pop()


def _children(path: tuple[object, ...], item: Any) -> Iterator[tuple[tuple[object, ...], object]] | None:
    kind = type(item)
    if kind is dict or kind is collections.OrderedDict:
        pairs = item.items()
    elif kind is list or kind is tuple:
        pairs = enumerate(item)
    else:
        return None
    return (((*path, key), child) for key, child in pairs) if item else None
