"""The extension types of the value encoding: their codes, and how each type becomes simpler values and back.

Every extension payload is one encoded value, so a type is described by two functions: `dump` (instance -> simpler
value) and `load` (back). Loading functions are handed bytes that may be hostile: they raise any ordinary exception
for a malformed payload, and the decoder turns it into one error.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
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
from bytecheckpoint.representation import value_numpy
from bytecheckpoint.representation.value_numpy import Refusal

__all__ = ["DUMP", "HINTS", "LOAD", "NATIVE", "STR", "Code", "factory_name"]

NATIVE = frozenset((type(None), bool, int, float, str, bytes))
"""Scalar types that MessagePack has itself (an int of more than 64 bits and a str with lone surrogates excepted)."""

STR = frozenset((str,))


class Code(enum.IntEnum):
    """MessagePack extension codes (docs/format-values.md). A code is never given a second meaning."""

    TUPLE = 1
    DICT = 2
    ORDERED_DICT = 3
    DEFAULT_DICT = 4
    COUNTER = 5
    SET = 6
    FROZENSET = 7
    DEQUE = 8
    BIG_INT = 9
    COMPLEX = 10
    BYTEARRAY = 11
    SURROGATE_STR = 12
    RANGE = 13
    SLICE = 14
    SIMPLE_NAMESPACE = 15
    ARGPARSE_NAMESPACE = 16
    DATETIME = 20
    DATE = 21
    TIME = 22
    TIMEDELTA = 23
    TIMEZONE = 24
    ZONEINFO = 25
    PATH = 26
    UUID = 27
    DECIMAL = 28
    FRACTION = 29
    NUMPY_DTYPE = 40
    NUMPY_SCALAR = 41
    NUMPY_STR = 42
    NUMPY_BYTES = 43
    NUMPY_ARRAY = 44
    TORCH_DTYPE = 50
    TORCH_DEVICE = 51
    TORCH_SIZE = 52
    TENSOR = 60
    REGISTERED = 61


Dump = Callable[[Any], object]
Load = Callable[[Any], object]

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

HINTS: dict[str, str] = {
    "torch._C.Generator": "save its get_state() instead",
    "random.Random": "save its getstate() instead",
    "numpy.random._generator.Generator": "save its bit_generator.state instead",
    "numpy.random.mtrand.RandomState": "save its get_state() instead",
    "builtins.generator": "make it a list",
    "builtins.mappingproxy": "make it a dict",
    "builtins.memoryview": "make it bytes",
    "numpy.memmap": "wrap it in numpy.asarray(), or save a tensor",
}


def factory_name(factory: object) -> str | None:
    """The stored name of a defaultdict's factory; only harmless standard types have one."""
    if factory is None:
        return None
    name = _FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
    if name is None:
        raise Refusal(f"a defaultdict with the factory {factory!r} cannot be stored; make it a dict")
    return name


def _exactly(kind: type, value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def _load_list(payload: object) -> list[Any]:
    return _exactly(list, payload)  # type: ignore[no-any-return]


def _load_pairs(keys: object, values: object) -> dict[Any, Any]:
    pairs = dict(zip(_load_list(keys), _load_list(values), strict=True))
    if len(pairs) != len(_load_list(keys)):
        raise ValueError("a key twice")
    return pairs


def _load_members(payload: object) -> set[Any]:
    members = set(_load_list(payload))
    if len(members) != len(_load_list(payload)):
        raise ValueError("a member twice")
    return members


def _load_counter(payload: Any) -> collections.Counter[Any]:
    counter: collections.Counter[Any] = collections.Counter()
    # dict.update: Counter's own would add, and refuse counts that are not numbers.
    dict.update(counter, _load_pairs(*payload))
    return counter


def _load_defaultdict(payload: Any) -> collections.defaultdict[Any, Any]:
    factory, keys, values = payload
    return collections.defaultdict(None if factory is None else _FACTORIES[factory], _load_pairs(keys, values))


def _load_namespace(cls: type) -> Load:
    def load(payload: object) -> object:
        value = cls()
        vars(value).update(_exactly(dict, payload))
        return value

    return load


def _dump_tz(tz: datetime.tzinfo | None) -> datetime.tzinfo | None:
    if tz is not None and type(tz) not in (datetime.timezone, zoneinfo.ZoneInfo):
        raise Refusal(
            f"time zones of class {type(tz).__module__}.{type(tz).__qualname__} cannot be stored; use zoneinfo.ZoneInfo"
        )
    return tz


def _dump_datetime(t: datetime.datetime) -> object:
    return [t.year, t.month, t.day, t.hour, t.minute, t.second, t.microsecond, t.fold, _dump_tz(t.tzinfo)]


def _load_datetime(payload: Any) -> datetime.datetime:
    *fields, fold, tz = _load_list(payload)
    year, month, day, hour, minute, second, micro = fields
    return datetime.datetime(year, month, day, hour, minute, second, micro, tzinfo=tz, fold=fold)


def _load_time(payload: Any) -> datetime.time:
    hour, minute, second, micro, fold, tz = _load_list(payload)
    return datetime.time(hour, minute, second, micro, tzinfo=tz, fold=fold)


def _load_date(payload: Any) -> datetime.date:
    year, month, day = _load_list(payload)
    return datetime.date(year, month, day)


def _load_timedelta(payload: Any) -> datetime.timedelta:
    days, seconds, micro = (_exactly(int, field) for field in _load_list(payload))
    return datetime.timedelta(days, seconds, micro)


def _dump_timezone(tz: Any) -> object:
    # The documented pickle arguments are the only way to tell a given name from the one made of the offset.
    return list(tz.__getinitargs__())


def _dump_zoneinfo(zone: zoneinfo.ZoneInfo) -> object:
    if zone.key is None:
        raise Refusal("a ZoneInfo without a key cannot be stored; open it by its key")
    return zone.key


def _load_zoneinfo(key: Any) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(_exactly(str, key))
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise IncompatibleCheckpointError(f"time zone {key!r} is not known here; install the tzdata package") from error


def _load_path(payload: Any) -> pathlib.PurePath:
    name, text = payload
    cls = _PATHS[name]
    try:
        return cls(text)
    except NotImplementedError:
        # A concrete path of the other family of systems: what it names is not here, its spelling is.
        pure = pathlib.PureWindowsPath if cls is pathlib.WindowsPath else pathlib.PurePosixPath
        return pure(text)


def _dump_fraction(value: fractions.Fraction) -> object:
    return [value.numerator, value.denominator]


def _load_fraction(payload: Any) -> fractions.Fraction:
    numerator, denominator = (_exactly(int, part) for part in _load_list(payload))
    return fractions.Fraction(numerator, denominator)


def _load_torch_dtype(name: Any) -> torch.dtype:
    dtype = _TORCH_DTYPES.get(_exactly(str, name))
    if dtype is None:
        raise IncompatibleCheckpointError(f"torch {torch.__version__} has no dtype {name!r}; use a newer torch")
    return dtype


def _load_complex(payload: Any) -> complex:
    real, imag = (_exactly(float, part) for part in _load_list(payload))
    return complex(real, imag)


def _load_range(payload: Any) -> range:
    start, stop, step = (_exactly(int, part) for part in _load_list(payload))
    return range(start, stop, step)


def _load_slice(payload: Any) -> slice:
    start, stop, step = _load_list(payload)
    return slice(start, stop, step)


def _load_deque(payload: Any) -> collections.deque[Any]:
    maxlen, items = payload
    queue = collections.deque(_load_list(items), maxlen)
    if len(queue) != len(items):
        raise ValueError("more items than the deque may hold")
    return queue


DUMP: dict[type, tuple[Code, Dump]] = {
    complex: (Code.COMPLEX, lambda z: [z.real, z.imag]),
    bytearray: (Code.BYTEARRAY, bytes),
    range: (Code.RANGE, lambda r: [r.start, r.stop, r.step]),
    slice: (Code.SLICE, lambda s: [s.start, s.stop, s.step]),
    types.SimpleNamespace: (Code.SIMPLE_NAMESPACE, vars),
    argparse.Namespace: (Code.ARGPARSE_NAMESPACE, vars),
    datetime.datetime: (Code.DATETIME, _dump_datetime),
    datetime.date: (Code.DATE, lambda d: [d.year, d.month, d.day]),
    datetime.time: (
        Code.TIME,
        lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold, _dump_tz(t.tzinfo)],
    ),
    datetime.timedelta: (Code.TIMEDELTA, lambda d: [d.days, d.seconds, d.microseconds]),
    datetime.timezone: (Code.TIMEZONE, _dump_timezone),
    zoneinfo.ZoneInfo: (Code.ZONEINFO, _dump_zoneinfo),
    uuid.UUID: (Code.UUID, lambda u: u.bytes),
    decimal.Decimal: (Code.DECIMAL, str),
    fractions.Fraction: (Code.FRACTION, _dump_fraction),
    torch.dtype: (Code.TORCH_DTYPE, lambda d: str(d).removeprefix("torch.")),
    torch.device: (Code.TORCH_DEVICE, str),
    torch.Size: (Code.TORCH_SIZE, lambda size: [int(n) for n in size]),
    np.ndarray: (Code.NUMPY_ARRAY, value_numpy.dump_array),
    # str() of a numpy string drops the NULs at its end.
    np.str_: (Code.NUMPY_STR, str.__str__),
    np.bytes_: (Code.NUMPY_BYTES, bytes),
    **{cls: (Code.PATH, lambda p: [type(p).__name__, str(p)]) for cls in _PATHS.values()},
}
"""Exact class -> its code and dump function, for the types that the encoder does not open itself."""


LOAD: dict[int, Load] = {
    Code.TUPLE: lambda p: tuple(_load_list(p)),
    Code.DICT: lambda p: _load_pairs(*p),
    Code.ORDERED_DICT: lambda p: collections.OrderedDict(_load_pairs(*p)),
    Code.DEFAULT_DICT: _load_defaultdict,
    Code.COUNTER: _load_counter,
    Code.SET: _load_members,
    Code.FROZENSET: lambda p: frozenset(_load_members(p)),
    Code.DEQUE: _load_deque,
    Code.BIG_INT: lambda p: int.from_bytes(_exactly(bytes, p), "big", signed=True),
    Code.COMPLEX: _load_complex,
    Code.BYTEARRAY: lambda p: bytearray(_exactly(bytes, p)),
    Code.SURROGATE_STR: lambda p: _exactly(bytes, p).decode("utf-8", "surrogatepass"),
    Code.RANGE: _load_range,
    Code.SLICE: _load_slice,
    Code.SIMPLE_NAMESPACE: _load_namespace(types.SimpleNamespace),
    Code.ARGPARSE_NAMESPACE: _load_namespace(argparse.Namespace),
    Code.DATETIME: _load_datetime,
    Code.DATE: _load_date,
    Code.TIME: _load_time,
    Code.TIMEDELTA: _load_timedelta,
    Code.TIMEZONE: lambda p: datetime.timezone(*_load_list(p)),
    Code.ZONEINFO: _load_zoneinfo,
    Code.PATH: _load_path,
    Code.UUID: lambda p: uuid.UUID(bytes=_exactly(bytes, p)),
    Code.DECIMAL: lambda p: decimal.Decimal(_exactly(str, p)),
    Code.FRACTION: _load_fraction,
    Code.NUMPY_DTYPE: value_numpy.load_dtype,
    Code.NUMPY_SCALAR: value_numpy.load_scalar,
    Code.NUMPY_STR: lambda p: np.str_(_exactly(str, p)),
    Code.NUMPY_BYTES: lambda p: np.bytes_(_exactly(bytes, p)),
    Code.NUMPY_ARRAY: value_numpy.load_array,
    Code.TORCH_DTYPE: _load_torch_dtype,
    Code.TORCH_DEVICE: lambda p: torch.device(_exactly(str, p)),
    Code.TORCH_SIZE: lambda p: torch.Size([_exactly(int, n) for n in _load_list(p)]),
}
"""Code -> load function. `Code.TENSOR` and `Code.REGISTERED` are the decoder's own."""
