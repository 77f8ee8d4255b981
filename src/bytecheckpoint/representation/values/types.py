"""Define the extension types of the value encoding: their codes, and two conversions for each type.

The payload of an extension is the encoding of a simpler value. A function in `TO_SIMPLE` makes that value of an instance,
and a function in `FROM_SIMPLE` makes the instance again. Hostile bytes may hold a malformed value: the function raises any
ordinary exception for it, and the decoder raises a CorruptCheckpointError.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.representation.values import numpy_values
from bytecheckpoint.representation.values.codes import Code
from bytecheckpoint.representation.values.numpy_values import NotStorableError

__all__ = ["FROM_SIMPLE", "NATIVE_TYPES", "STORE_INSTEAD", "STR_ONLY", "TO_SIMPLE", "factory_name"]

NATIVE_TYPES = frozenset((type(None), bool, int, float, str, bytes))
"""Scalar types that MessagePack has, except for ints of more than 64 bits and strings with lone surrogates."""

STR_ONLY = frozenset((str,))


_Conversion = Callable[[Any], object]

_FACTORIES: dict[str, Any] = {t.__name__: t for t in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)}
_FACTORIES |= {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter, "deque": collections.deque}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_TORCH_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_PATHS = {
    cls.__name__: cls
    for cls in (
        pathlib.PurePath,
        pathlib.Path,
        pathlib.PurePosixPath,
        pathlib.PosixPath,
        pathlib.PureWindowsPath,
        pathlib.WindowsPath,
    )
}

STORE_INSTEAD: dict[str, str] = {
    "torch._C.Generator": "save its get_state() instead",
    "torch.utils.data.dataloader.DataLoader": "it has no position to save; wrap it in "
    "bytecheckpoint.dataloader.ResumableLoader, or leave it out",
    "builtins.function": "save its name instead, or leave it out",
    "builtins.method": "save its name instead, or leave it out",
    "builtins.builtin_function_or_method": "save its name instead, or leave it out",
    "builtins.type": "save its name instead, or leave it out",
    "builtins.module": "save its name instead, or leave it out",
    "random.Random": "save its getstate() instead",
    "numpy.random._generator.Generator": "save its bit_generator.state instead",
    "numpy.random.mtrand.RandomState": "save its get_state() instead",
    "builtins.generator": "make it a list",
    "builtins.mappingproxy": "make it a dict",
    "builtins.memoryview": "make it bytes",
    "numpy.memmap": "wrap it in numpy.asarray(), or save a tensor",
}
"""Class that cannot be stored -> advice for the error message."""


def factory_name(factory: object) -> str | None:
    """Return the stored name of a defaultdict's factory; only harmless standard types have a name."""
    if factory is None:
        return None
    name = _FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
    if name is None:
        raise NotStorableError(f"a defaultdict with the factory {factory!r} cannot be stored; make it a dict")
    return name


def _expect(kind: type, value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def _expect_list(simple: object) -> list[Any]:
    return _expect(list, simple)  # type: ignore[no-any-return]


def _fields(simple: object, count: int, kind: type | None = None) -> list[Any]:
    fields = _expect_list(simple)
    if len(fields) != count:
        raise ValueError(f"{count} fields expected, {len(fields)} found")
    return fields if kind is None else [_expect(kind, field) for field in fields]


def _pairs(keys: object, values: object) -> dict[Any, Any]:
    pairs = dict(zip(_expect_list(keys), _expect_list(values), strict=True))
    if len(pairs) != len(_expect_list(keys)):
        raise ValueError("duplicate key")
    return pairs


def _members(simple: object) -> set[Any]:
    members = set(_expect_list(simple))
    if len(members) != len(_expect_list(simple)):
        raise ValueError("duplicate member")
    return members


def _counter_from_simple(simple: Any) -> collections.Counter[Any]:
    counter: collections.Counter[Any] = collections.Counter()
    # Counter.update would add counts, and refuse counts that are not numbers.
    dict.update(counter, _pairs(*simple))
    return counter


def _defaultdict_from_simple(simple: Any) -> collections.defaultdict[Any, Any]:
    factory, keys, values = simple
    return collections.defaultdict(None if factory is None else _FACTORIES[factory], _pairs(keys, values))


def _namespace_from_simple(cls: type) -> _Conversion:
    def from_simple(simple: object) -> object:
        value = cls()
        vars(value).update(_expect(dict, simple))
        return value

    return from_simple


def _storable_tz(tz: datetime.tzinfo | None) -> datetime.tzinfo | None:
    if tz is not None and type(tz) not in (datetime.timezone, zoneinfo.ZoneInfo):
        raise NotStorableError(
            f"time zones of class {type(tz).__module__}.{type(tz).__qualname__} cannot be stored; use zoneinfo.ZoneInfo"
        )
    return tz


def _datetime_to_simple(t: datetime.datetime) -> object:
    return [t.year, t.month, t.day, t.hour, t.minute, t.second, t.microsecond, t.fold, _storable_tz(t.tzinfo)]


def _datetime_from_simple(simple: Any) -> datetime.datetime:
    year, month, day, hour, minute, second, micro, fold, tz = _expect_list(simple)
    return datetime.datetime(year, month, day, hour, minute, second, micro, tzinfo=tz, fold=fold)


def _time_from_simple(simple: Any) -> datetime.time:
    hour, minute, second, micro, fold, tz = _expect_list(simple)
    return datetime.time(hour, minute, second, micro, tzinfo=tz, fold=fold)


def _timezone_to_simple(tz: Any) -> object:
    # Only the documented pickle arguments tell a given name from the name that Python derives from the offset.
    return list(tz.__getinitargs__())


def _zoneinfo_to_simple(zone: zoneinfo.ZoneInfo) -> object:
    if zone.key is None:
        raise NotStorableError("a ZoneInfo without a key cannot be stored; open it by its key")
    return zone.key


def _zoneinfo_from_simple(key: Any) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(_expect(str, key))
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise IncompatibleCheckpointError(f"time zone {key!r} is not known here; install the tzdata package") from error


def _path_from_simple(simple: Any) -> pathlib.PurePath:
    name, text = simple
    cls = _PATHS[name]
    try:
        return cls(text)
    except NotImplementedError:
        # A concrete path of another operating system cannot exist here; the pure class keeps its text.
        pure = pathlib.PureWindowsPath if cls is pathlib.WindowsPath else pathlib.PurePosixPath
        return pure(text)


def _torch_dtype_from_simple(name: Any) -> torch.dtype:
    dtype = _TORCH_DTYPES.get(_expect(str, name))
    if dtype is None:
        raise IncompatibleCheckpointError(f"torch {torch.__version__} has no dtype {name!r}; use a newer torch")
    return dtype


def _deque_from_simple(simple: Any) -> collections.deque[Any]:
    maxlen, items = simple
    queue = collections.deque(_expect_list(items), maxlen)
    if len(queue) != len(items):
        raise ValueError("more items than the deque may hold")
    return queue


TO_SIMPLE: dict[type, tuple[Code, _Conversion]] = {
    complex: (Code.COMPLEX, lambda z: [z.real, z.imag]),
    bytearray: (Code.BYTEARRAY, bytes),
    range: (Code.RANGE, lambda r: [r.start, r.stop, r.step]),
    slice: (Code.SLICE, lambda s: [s.start, s.stop, s.step]),
    types.SimpleNamespace: (Code.SIMPLE_NAMESPACE, vars),
    argparse.Namespace: (Code.ARGPARSE_NAMESPACE, vars),
    datetime.datetime: (Code.DATETIME, _datetime_to_simple),
    datetime.date: (Code.DATE, lambda d: [d.year, d.month, d.day]),
    datetime.time: (
        Code.TIME,
        lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold, _storable_tz(t.tzinfo)],
    ),
    datetime.timedelta: (Code.TIMEDELTA, lambda d: [d.days, d.seconds, d.microseconds]),
    datetime.timezone: (Code.TIMEZONE, _timezone_to_simple),
    zoneinfo.ZoneInfo: (Code.ZONEINFO, _zoneinfo_to_simple),
    uuid.UUID: (Code.UUID, lambda u: u.bytes),
    decimal.Decimal: (Code.DECIMAL, str),
    fractions.Fraction: (Code.FRACTION, lambda f: [f.numerator, f.denominator]),
    torch.dtype: (Code.TORCH_DTYPE, lambda d: str(d).removeprefix("torch.")),
    torch.device: (Code.TORCH_DEVICE, str),
    torch.Size: (Code.TORCH_SIZE, lambda size: [int(n) for n in size]),
    np.ndarray: (Code.NUMPY_ARRAY, numpy_values.array_to_simple),
    # str() of a numpy string drops the NULs at its end.
    np.str_: (Code.NUMPY_STR, str.__str__),
    np.bytes_: (Code.NUMPY_BYTES, bytes),
    **{cls: (Code.PATH, lambda p: [type(p).__name__, str(p)]) for cls in _PATHS.values()},
}
"""Exact class -> its code and conversion, for the types that the encoder does not handle itself."""


FROM_SIMPLE: dict[int, _Conversion] = {
    Code.TUPLE: lambda s: tuple(_expect_list(s)),
    Code.DICT: lambda s: _pairs(*s),
    Code.ORDERED_DICT: lambda s: collections.OrderedDict(_pairs(*s)),
    Code.DEFAULT_DICT: _defaultdict_from_simple,
    Code.COUNTER: _counter_from_simple,
    Code.SET: _members,
    Code.FROZENSET: lambda s: frozenset(_members(s)),
    Code.DEQUE: _deque_from_simple,
    Code.BIG_INT: lambda s: int.from_bytes(_expect(bytes, s), "big", signed=True),
    Code.COMPLEX: lambda s: complex(*_fields(s, 2, float)),
    Code.BYTEARRAY: lambda s: bytearray(_expect(bytes, s)),
    Code.SURROGATE_STR: lambda s: _expect(bytes, s).decode("utf-8", "surrogatepass"),
    Code.RANGE: lambda s: range(*_fields(s, 3, int)),
    Code.SLICE: lambda s: slice(*_fields(s, 3)),
    Code.SIMPLE_NAMESPACE: _namespace_from_simple(types.SimpleNamespace),
    Code.ARGPARSE_NAMESPACE: _namespace_from_simple(argparse.Namespace),
    Code.DATETIME: _datetime_from_simple,
    Code.DATE: lambda s: datetime.date(*_fields(s, 3)),
    Code.TIME: _time_from_simple,
    Code.TIMEDELTA: lambda s: datetime.timedelta(*_fields(s, 3, int)),
    Code.TIMEZONE: lambda s: datetime.timezone(*_expect_list(s)),
    Code.ZONEINFO: _zoneinfo_from_simple,
    Code.PATH: _path_from_simple,
    Code.UUID: lambda s: uuid.UUID(bytes=_expect(bytes, s)),
    Code.DECIMAL: lambda s: decimal.Decimal(_expect(str, s)),
    Code.FRACTION: lambda s: fractions.Fraction(*_fields(s, 2, int)),
    Code.NUMPY_DTYPE: numpy_values.dtype_from_simple,
    Code.NUMPY_SCALAR: numpy_values.scalar_from_simple,
    Code.NUMPY_STR: lambda s: np.str_(_expect(str, s)),
    Code.NUMPY_BYTES: lambda s: np.bytes_(_expect(bytes, s)),
    Code.NUMPY_ARRAY: numpy_values.array_from_simple,
    Code.TORCH_DTYPE: _torch_dtype_from_simple,
    Code.TORCH_DEVICE: lambda s: torch.device(_expect(str, s)),
    Code.TORCH_SIZE: lambda s: torch.Size([_expect(int, n) for n in _expect_list(s)]),
}
"""Code -> conversion back; the decoder handles the codes of tensors and of registered classes itself."""
