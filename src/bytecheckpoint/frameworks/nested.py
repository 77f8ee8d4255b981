"""Looking for the objects of a framework among what a program wants saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

__all__ = ["inside"]

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def inside(value: object) -> Iterator[object]:
    """`value`, or what stands in its nested dicts, lists and tuples."""
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if type(item) not in _CONTAINERS:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            pending.extend(item.values() if isinstance(item, dict) else item)
