"""Let a load make instances of unregistered classes of which the live value holds instances.

A checkpoint names the class of an enum, dataclass, named tuple or dict subclass. A load never looks that name up in
modules: it makes instances of classes that the program has registered, or that it shows in what the load fills.
"""

from __future__ import annotations

import collections
import enum
from dataclasses import replace
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.objects.capture import is_stateful
from bytecheckpoint.frameworks.tensors.plain import is_tensor_like
from bytecheckpoint.representation.values.registry import (
    Registration,
    default_registration,
    registration_of,
    unregistered_error,
)
from bytecheckpoint.representation.values.tree import leaves_with_paths
from bytecheckpoint.representation.values.types import NATIVE_TYPES

__all__ = ["HeldClasses"]

_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


class HeldClasses:
    """Makes instances of classes that are not registered, for `decode(..., on_unregistered=)`.

    Args:
        live: objects that the load fills.
        lenient: put placeholders in the places of instances that it cannot make.
        pickled: another program wrote the values; pickles hold enums and named tuples as calls.

    Attributes:
        unknown: name of the class of each placeholder that is in no other, by its id.
    """

    def __init__(self, live: object, *, lenient: bool = False, pickled: bool = False) -> None:
        self.unknown: dict[int, str] = {}
        self._lenient = lenient
        self._pickled = pickled
        self._placeholders: list[object] = []  # keeps their ids in use
        self._live = live
        self._found: dict[str, Registration] | None = None
        self._state_dicts: dict[int, Any] = {}

    def __call__(self, name: str, saved: object) -> object:
        """Make an instance of the class `name` from its plain value.

        Raises:
            IncompatibleCheckpointError: the live value has no instance of the class, or the class refuses the value.
        """
        if self._found is None:
            self._found = self._find()
        registration = self._found.get(name)
        if registration is None and self._lenient:
            for _, leaf in leaves_with_paths(saved):
                self.unknown.pop(id(leaf), None)  # it is left out with this instance
            self._placeholders.append(object())
            self.unknown[id(self._placeholders[-1])] = name
            return self._placeholders[-1]
        if registration is None:
            raise unregistered_error(name)
        if self._pickled and isinstance(saved, dict) and saved.keys() == {"args"}:
            cls: Any = registration.cls
            if issubclass(cls, enum.Enum | tuple):
                return replace(registration, decode=lambda args: cls(*args)).restore(saved["args"])
        return registration.restore(saved)

    def state_dict(self, live: Any) -> Any:
        """Return the state_dict of an object inside the live value, which is asked for it once."""
        if id(live) not in self._state_dicts:
            self._state_dicts[id(live)] = live.state_dict()
        return self._state_dicts[id(live)]

    def _find(self) -> dict[str, Registration]:
        found: dict[str, Registration] = {}
        seen: dict[int, object] = {}  # keeps temporary values alive, so that no other one gets their id
        stack = [self._live]
        while stack:
            item = stack.pop()
            if type(item) in NATIVE_TYPES or id(item) in seen or is_tensor_like(item):
                continue
            seen[id(item)] = item
            if registration_of(type(item)) is not None:
                continue
            if is_stateful(item):
                stack.append(self.state_dict(item))
                continue
            try:
                registration = default_registration(item)
            except UsageError:
                if isinstance(item, dict):
                    stack += (*item.keys(), *item.values())
                elif isinstance(item, _SEQUENCES):
                    stack += item
                continue
            found[registration.name] = registration
            stack.append(registration.encode(item))
        return found
