"""numpy dtypes, scalars and arrays as plain values, without pickle: a described dtype, a shape, C-order bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

__all__ = ["Refusal", "dump_array", "dump_dtype", "dump_scalar", "load_array", "load_dtype", "load_scalar"]

# Byte order, kind, item size, and the unit of a date: the form of `dtype.str`. Anything wider would hand text from a
# file to numpy's own small language of dtypes, objects included.
_DTYPE_STR = re.compile(r"[<>|][biufcmMSUV][0-9]{0,10}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
# Long doubles have other formats on other processors under the same name (80-bit, quad, pair of doubles).
_MACHINE_BOUND = re.compile(r"[<>](f12|f16|c24|c32)")


class Refusal(Exception):
    """Why a value cannot be stored; the encoder adds where it stands."""


def dump_dtype(dtype: np.dtype[Any]) -> object:
    """`dtype` as plain values: a string, [base, shape] for a subarray, or a dict for a structure.

    Raises:
        Refusal: object dtypes, dtypes of other packages, and those whose bytes mean nothing on another machine.
    """
    if dtype.hasobject:
        raise Refusal(f"numpy dtype {dtype} holds Python objects; convert it to a list or to a numeric dtype")
    form = _form(dtype)
    try:
        same = load_dtype(form) == dtype
    except (TypeError, ValueError):
        same = False
    if not same or dtype.type is np.record:
        raise Refusal(f"numpy dtype {dtype!r} has no portable form; convert it to a standard dtype, or use a tensor")
    return form


def _form(dtype: np.dtype[Any]) -> object:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_form(base), list(shape)]
    if dtype.fields is None:
        if _MACHINE_BOUND.fullmatch(dtype.str):
            raise Refusal(f"numpy dtype {dtype} differs between machines; convert it to float64 or complex128")
        return dtype.str
    names = list(dtype.names or ())
    return {
        "names": names,
        "formats": [_form(dtype.fields[name][0]) for name in names],
        "offsets": [dtype.fields[name][1] for name in names],
        "itemsize": dtype.itemsize,
    }


def load_dtype(form: object) -> np.dtype[Any]:
    """The dtype that `dump_dtype` described. Raises TypeError or ValueError when the description is malformed."""
    if isinstance(form, str):
        if not _DTYPE_STR.fullmatch(form) or _MACHINE_BOUND.fullmatch(form):
            raise ValueError(f"dtype {form!r}")
        return np.dtype(form)
    if isinstance(form, list):
        base, shape = form
        return np.dtype((load_dtype(base), _shape(shape)))
    if not isinstance(form, dict) or set(form) != {"names", "formats", "offsets", "itemsize"}:
        raise ValueError("dtype description")
    return np.dtype(
        {
            "names": form["names"],
            "formats": [load_dtype(field) for field in form["formats"]],
            "offsets": form["offsets"],
            "itemsize": form["itemsize"],
        }
    )


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("shape")
    return tuple(shape)


def dump_array(array: np.ndarray[Any, Any]) -> list[object]:
    """[dtype, shape, C-order bytes]; the gaps of a padded structure are written as zeros."""
    form = dump_dtype(array.dtype)
    if array.dtype.itemsize == 0:
        raise Refusal(f"numpy dtype {array.dtype!r} has elements of no size")
    return [form, list(array.shape), _without_gaps(array).tobytes()]


def load_array(fields: Any) -> np.ndarray[Any, Any]:
    """The array that `dump_array` described: writable, C-contiguous, owning its memory."""
    form, shape, data = fields
    dtype, dims = load_dtype(form), _shape(shape)
    if type(data) is not bytes or dtype.itemsize == 0 or dtype.itemsize * math.prod(dims) != len(data):
        raise ValueError("size of the array")
    # Not np.empty: for an array without elements it would still allocate one, of whatever size the bytes claim.
    array: np.ndarray[Any, Any] = np.ndarray(dims, dtype, buffer=data or bytearray())
    return array.copy() if data else array


def dump_scalar(value: np.generic) -> list[object]:
    """[dtype, bytes] of one scalar."""
    if type(value) is not value.dtype.type:
        raise Refusal(f"{type(value).__module__}.{type(value).__qualname__} is a subclass of a numpy scalar")
    form, _, data = dump_array(np.asarray(value))
    return [form, data]


def load_scalar(fields: Any) -> object:
    """The scalar that `dump_scalar` described."""
    form, data = fields
    return load_array([form, [1], data])[0]


def _without_gaps(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array`, copied field by field onto zeros when its dtype is structured: what lies between fields is arbitrary."""
    if array.dtype.names is None:
        return array
    clean: np.ndarray[Any, Any] = np.zeros(array.shape, array.dtype)
    _copy_fields(clean, array)
    return clean


def _copy_fields(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    for name in source.dtype.names or ():
        if source[name].dtype.names is None:
            target[name][...] = source[name]
        else:
            _copy_fields(target[name], source[name])
