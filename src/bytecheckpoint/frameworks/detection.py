"""Find the objects of a framework among a program's states, without importing the framework."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["contains_module", "loaded_class", "loaded_version", "nested_objects"]

_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def nested_objects(value: object, types: type | tuple[type, ...] = object) -> Iterator[Any]:
    """Iterate over `value`, or over the objects in its nested dicts, lists and tuples.

    Args:
        value: one state.
        types: the types to look for.
    """
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if type(item) not in _CONTAINERS:
            if isinstance(item, types):
                yield item
        elif id(item) not in seen:
            seen.add(id(item))
            items = item.values() if isinstance(item, dict) else item
            pending.extend(x for x in items if type(x) in _CONTAINERS or isinstance(x, types))


def contains_module(root: nn.Module, types: type | tuple[type, ...]) -> bool:
    """Return whether `root` is, or contains, a module of one of `types`."""
    # Every save asks this of every module; named_modules() takes several times as long.
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if isinstance(module, types):
            return True
        if module is not None:
            pending.extend(module._modules.values())
    return False


def loaded_class(module: str, name: str) -> type | None:
    """Return a class by module and name, or None while that module is not imported.

    A class that is not imported has no instances, and importing a framework takes seconds.
    """
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def loaded_version(package: str) -> tuple[str, tuple[int, ...]]:
    """Return the version of an imported package, as it says it and as two or three numbers: (-1,) where it says none."""
    version = str(getattr(sys.modules.get(package), "__version__", "unknown"))
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return version, (-1,) if numbers is None else tuple(int(n) for n in numbers.groups() if n is not None)
