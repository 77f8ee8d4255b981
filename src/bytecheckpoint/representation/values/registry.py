"""Register classes whose instances may be stored among the plain values of a checkpoint.

Classes that are enums, dataclasses, named tuples or dict subclasses need none to be saved (`default_registration`). A load
makes instances of such a class only where the program shows it the class, in a live value (`HeldClasses`): the name of a
class in a checkpoint is never looked up in modules.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError

__all__ = [
    "Registration",
    "default_registration",
    "register",
    "registration_named",
    "registration_of",
    "unregistered_error",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registration:
    """The registration of one class.

    Attributes:
        cls: the exact class; each subclass needs its own registration.
        name: name of the class in a checkpoint.
        encode: instance -> plain value, which may hold tensors and instances of registered classes.
        decode: plain value -> instance.
    """

    cls: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]

    def restore(self, saved: object) -> object:
        """Make the instance from its plain value.

        Raises:
            IncompatibleCheckpointError: the class refuses the value.
        """
        try:
            return self.decode(saved)
        except CheckpointError:
            raise
        except Exception as error:  # any class, any exception
            raise IncompatibleCheckpointError(
                f"the class {self.name!r} refuses the saved value ({type(error).__name__}: {error})"
            ) from error


#: Methods by which objects directly in a state describe themselves; their attributes are not their state.
_OWN_PROTOCOLS = ("state_dict", "__bytecheckpoint_shards__")
#: Dict classes that the encoding has itself.
_STANDARD_DICTS = frozenset({dict, collections.OrderedDict, collections.Counter, collections.defaultdict})
#: Classes with content of their own besides the fields of a dataclass.
_BUILTIN = (dict, list, tuple, set, frozenset, str, bytes, int, float, BaseException)

_DEFAULTS: dict[type, Registration] = {}
_BY_CLASS: dict[type, Registration] = {}
_BY_NAME: dict[str, Registration] = {}


def register(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Allow instances of `cls`, but not of its subclasses, in saved states.

    Call it in the program that saves and in the program that loads. Enums are stored by member name, flags by value,
    dataclasses and named tuples by their fields, dict subclasses by their items; any other class needs `encode` and
    `decode`. A load of a dataclass calls its constructor, then sets every saved field to the saved value; a field that
    the class got after the save keeps its default. A load of a dict subclass calls its constructor without arguments,
    then sets every item.

    Classes that need no functions are saved without registration, too. A load makes instances of them if the states
    that it fills hold an instance of the same class; otherwise register the class in the program that loads.

    Args:
        cls: the class. Usable as a decorator when no other argument is needed.
        name: name of the class in the checkpoint; by default "module.qualname". Give a name that stays the same when
            the class moves to another module (a class of a script lives in `__main__`).
        encode: instance -> plain value.
        decode: plain value -> instance.

    Returns:
        `cls` itself.

    Raises:
        UsageError: the class needs `encode` and `decode`, or `name` already belongs to another class.

    >>> import enum
    >>> class Phase(enum.Enum):
    ...     WARMUP = 1
    >>> register(Phase, name="docs.Phase") is Phase
    True
    """
    if not isinstance(cls, type):
        raise UsageError(f"register() takes a class, not an instance of {type(cls).__name__}")
    label = _label(cls)
    name = label if name is None else name
    if not isinstance(name, str) or not name:
        raise UsageError(f"register({label}): the name must be a non-empty str, not {name!r}")
    if not (encode is None or callable(encode)) or not (decode is None or callable(decode)):
        raise UsageError(f"register({label}): encode and decode must be functions")
    if (encode is None) != (decode is None):
        raise UsageError(f"register({label}): give both encode and decode, or neither")
    if issubclass(cls, (torch.Tensor, np.generic, np.ndarray)):
        raise UsageError(f"register({label}): tensors, numpy arrays and numpy scalars are stored as such")
    if encode is None or decode is None:
        try:
            encode, decode = _default_codec(cls)
        except UsageError as reason:
            raise UsageError(f"register({label}): {reason}; give encode and decode") from None
    other = _BY_NAME.get(name)
    # A class that is defined again (a reloaded module, a notebook cell run twice) replaces its earlier definition.
    if other is not None and _label(other.cls) != label:
        raise UsageError(f"register({label}): the name {name!r} already belongs to {_label(other.cls)}; give another")
    registration = Registration(cls, name, encode, decode)
    earlier = _BY_CLASS.get(cls)
    if earlier is not None:
        _BY_NAME.pop(earlier.name, None)
    _BY_CLASS[cls] = registration
    _BY_NAME[name] = registration
    return cls


def registration_of(cls: type) -> Registration | None:
    """Return the registration of exactly `cls`, or None."""
    return _BY_CLASS.get(cls)


def registration_named(name: str) -> Registration | None:
    """Return the registration under `name`, or None."""
    return _BY_NAME.get(name)


def default_registration(value: object) -> Registration:
    """Return the registration by which an instance of an unregistered class is stored: that of `register(cls)`.

    Raises:
        UsageError: the class needs functions; the message is only the reason.
    """
    cls = type(value)
    registration = _DEFAULTS.get(cls)
    if registration is None:
        for name in _OWN_PROTOCOLS:
            if hasattr(cls, name):
                raise UsageError(f"its {name} is used only directly in a state, or in dicts, lists and tuples there")
        registration = _DEFAULTS[cls] = Registration(cls, _label(cls), *_default_codec(cls))
    if not isinstance(value, enum.Enum):
        _check_attributes(value)
    return registration


def unregistered_error(name: str) -> IncompatibleCheckpointError:
    """Return the error for an instance of the class `name`, which a load cannot make."""
    short = name.rpartition(".")[2]
    return IncompatibleCheckpointError(
        f"the checkpoint holds an instance of {name!r}, which is not registered here, and of which the states hold no "
        f"instance: call bytecheckpoint.register({short}) before loading, with name={name!r} if the class has moved"
    )


def _check_attributes(value: object) -> None:
    """Refuse an instance with attributes that neither its fields nor its items hold: they would be lost."""
    slots = (c.__dict__.get("__slots__", ()) for c in type(value).__mro__)
    names = [n for found in slots for n in ((found,) if isinstance(found, str) else found)]
    attributes = {n: getattr(value, n) for n in names if hasattr(value, n) and n not in ("__dict__", "__weakref__")}
    attributes |= getattr(value, "__dict__", {})
    if isinstance(value, dict):
        lost = [a for a, item in attributes.items() if not (a in value and dict.__getitem__(value, a) is item)]
        if lost:
            raise UsageError(f"its attribute {lost[0]!r} is none of its items")
        return
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if lost := sorted(attributes.keys() - set(fields)):
        raise UsageError(f"its attribute {lost[0]!r} is no field")
    if unset := [name for name in fields if not hasattr(value, name)]:
        raise UsageError(f"its field {unset[0]!r} is not set")


def _label(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _default_codec(cls: type) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return lambda member: member.value, cls
    if issubclass(cls, enum.Enum):
        return lambda member: member.name, lambda name: cls[name]
    if dataclasses.is_dataclass(cls) and not issubclass(cls, _BUILTIN):
        return _dataclass_codec(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda value: value._asdict(), lambda fields: cls(**fields)
    if _is_simple_dict(cls):
        return _dict_codec(cls)
    raise UsageError("only enums, dataclasses, named tuples and simple subclasses of dict have a form of their own")


def _is_simple_dict(cls: type) -> bool:
    """Return whether `cls` is a dict subclass that its constructor makes from nothing."""
    if not issubclass(cls, dict) or issubclass(cls, collections.defaultdict) or cls in _STANDARD_DICTS:
        return False
    return not (dataclasses.is_dataclass(cls) or _required_arguments(cls))


def _dict_codec(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
    # Not by methods of the class, which may show other items.
    items = collections.OrderedDict.items if issubclass(cls, collections.OrderedDict) else dict.items

    def decode(saved: dict[Any, Any]) -> Any:
        value = cls()
        for key, item in saved.items():
            value[key] = item
        return value

    return lambda value: dict(items(value)), decode


def _required_arguments(cls: type) -> list[str]:
    """Return the names of the arguments without which the constructor of `cls` fails."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:  # a constructor that is not written in Python
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _dataclass_codec(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
    names = [f.name for f in dataclasses.fields(cls)]
    arguments = {f.name for f in dataclasses.fields(cls) if f.init}
    for name in _required_arguments(cls):
        if name not in arguments:
            raise UsageError(f"its constructor needs {name!r}, which is not a field")

    def encode(value: Any) -> object:
        return {name: getattr(value, name) for name in names}

    def decode(fields: dict[str, Any]) -> Any:
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise IncompatibleCheckpointError(
                f"{_label(cls)} has no field {', '.join(unknown)}, which the checkpoint holds"
            )
        value = cls(**{name: field for name, field in fields.items() if name in arguments})
        for name, field in fields.items():
            # A frozen class refuses __setattr__. The saved value replaces one that __post_init__ derived.
            object.__setattr__(value, name, field)
        return value

    return encode, decode
