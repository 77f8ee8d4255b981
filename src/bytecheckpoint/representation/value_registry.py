"""Opt-in registration of classes whose instances may stand among the plain values of a checkpoint."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError

__all__ = ["Registered", "register", "registered_class", "registered_name"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registered:
    """How the instances of one class are stored.

    Attributes:
        cls: the exact class; its subclasses need a registration of their own.
        name: what stands for the class in a checkpoint.
        encode: instance -> plain value (which may hold tensors and other registered instances).
        decode: that plain value -> instance.
    """

    cls: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_BY_CLASS: dict[type, Registered] = {}
_BY_NAME: dict[str, Registered] = {}


def register(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Allow instances of exactly `cls` in saved states. Call it in the program that saves and in the one that loads.

    Enums are stored by member name (flags by value), dataclasses and named tuples by their fields; any other class
    needs `encode` and `decode`. Loading a dataclass calls its constructor, then sets every saved field to the saved
    value; fields that were added since keep their defaults.

    Args:
        cls: the class. Usable as a decorator when no other argument is needed.
        name: what stands for the class in the checkpoint; default "module.qualname". Give one that stays the same
            when the class moves (a class of a script lives in `__main__`).
        encode: instance -> plain value.
        decode: plain value -> instance.

    Returns:
        `cls` itself.

    Raises:
        UsageError: the class needs `encode` and `decode`, or `name` stands for another class already.

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
        encode, decode = _defaults(cls)
    other = _BY_NAME.get(name)
    # A class defined again (a reloaded module, a notebook cell run twice) replaces its earlier self.
    if other is not None and _label(other.cls) != label:
        raise UsageError(f"register({label}): the name {name!r} stands for {_label(other.cls)} already; give another")
    entry = Registered(cls, name, encode, decode)
    earlier = _BY_CLASS.get(cls)
    if earlier is not None:
        _BY_NAME.pop(earlier.name, None)
    _BY_CLASS[cls] = entry
    _BY_NAME[name] = entry
    return cls


def registered_class(cls: type) -> Registered | None:
    """The registration of exactly `cls`."""
    return _BY_CLASS.get(cls)


def registered_name(name: str) -> Registered | None:
    """The registration under `name`."""
    return _BY_NAME.get(name)


def _label(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _defaults(cls: type) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return lambda member: member.value, cls
    if issubclass(cls, enum.Enum):
        return lambda member: member.name, lambda name: cls[name]
    if dataclasses.is_dataclass(cls):
        return _dataclass_codec(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda value: value._asdict(), lambda fields: cls(**fields)
    raise UsageError(
        f"register({_label(cls)}): give encode and decode; only enums, dataclasses and named tuples have defaults"
    )


def _dataclass_codec(cls: Any) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
    names = [f.name for f in dataclasses.fields(cls)]
    arguments = {f.name for f in dataclasses.fields(cls) if f.init}
    for parameter in inspect.signature(cls).parameters.values():
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if required and parameter.name not in arguments:
            raise UsageError(
                f"register({_label(cls)}): its constructor needs {parameter.name!r}, which is not a field; "
                "give encode and decode"
            )

    def encode(value: Any) -> object:
        return {name: getattr(value, name) for name in names}

    def decode(fields: dict[str, Any]) -> Any:
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise IncompatibleCheckpointError(f"{_label(cls)} has no field {', '.join(unknown)} (it was saved with)")
        value = cls(**{name: field for name, field in fields.items() if name in arguments})
        for name, field in fields.items():
            # Past __setattr__, which a frozen class refuses, and over whatever __post_init__ derived.
            object.__setattr__(value, name, field)
        return value

    return encode, decode
