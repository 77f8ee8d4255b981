"""Registration of classes whose instances may be stored among the plain values of a checkpoint."""

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

__all__ = ["Registration", "register", "registration_named", "registration_of"]

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
    dataclasses and named tuples by their fields; any other class needs `encode` and `decode`. A load of a dataclass
    calls its constructor, then sets every saved field to the saved value; a field that the class got after the save
    keeps its default.

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
        encode, decode = _default_codec(cls)
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


def _label(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _default_codec(cls: type) -> tuple[Callable[[Any], object], Callable[[Any], Any]]:
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
            raise IncompatibleCheckpointError(
                f"{_label(cls)} has no field {', '.join(unknown)}, which the checkpoint holds"
            )
        value = cls(**{name: field for name, field in fields.items() if name in arguments})
        for name, field in fields.items():
            # A frozen class refuses __setattr__. The saved value replaces one that __post_init__ derived.
            object.__setattr__(value, name, field)
        return value

    return encode, decode
