"""Describe numpy dtypes, scalars and arrays by simple values: a description of the dtype, a shape, bytes in C order."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.representation.values.tree import TensorRef

__all__ = [
    "TENSOR_DTYPES",
    "NotStorableError",
    "array_as_tensor",
    "array_from_simple",
    "array_of_tensor",
    "array_to_simple",
    "dtype_from_simple",
    "dtype_to_simple",
    "scalar_from_simple",
    "scalar_to_simple",
]

# The form of `dtype.str`: byte order, kind, item size, and the unit of a date. A wider pattern would let text from a file
# name any dtype that numpy can parse, object dtypes included.
_DTYPE_STR = re.compile(r"[<>|][biufcmMSUV][0-9]{0,10}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
# Long doubles have one name and several formats (80-bit, quad, pair of doubles), depending on the processor.
_MACHINE_BOUND = re.compile(r"[<>](f12|f16|c24|c32)")


TENSOR_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Dtypes of numpy that torch has too, in the byte order of this machine."""


class NotStorableError(Exception):
    """A value cannot be stored; the encoder adds its path to the message."""


def dtype_to_simple(dtype: np.dtype[Any]) -> object:
    """Describe `dtype` as a string, as [base, shape] for a subarray, or as a dict for a structure.

    Raises:
        NotStorableError: a dtype of objects or of another package, or one whose bytes differ between machines.
    """
    if dtype.hasobject:
        raise NotStorableError(f"numpy dtype {dtype} holds Python objects; convert it to a list or to a numeric dtype")
    description = _describe(dtype)
    try:
        same = dtype_from_simple(description) == dtype
    except (TypeError, ValueError):
        same = False
    if not same or dtype.type is np.record:
        raise NotStorableError(
            f"numpy dtype {dtype!r} has no portable form; convert it to a standard dtype, or use a tensor"
        )
    return description


def _describe(dtype: np.dtype[Any]) -> object:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_describe(base), list(shape)]
    if dtype.fields is None:
        if _MACHINE_BOUND.fullmatch(dtype.str):
            raise NotStorableError(f"numpy dtype {dtype} differs between machines; convert it to float64 or complex128")
        return dtype.str
    names = list(dtype.names or ())
    return {
        "names": names,
        "formats": [_describe(dtype.fields[name][0]) for name in names],
        "offsets": [dtype.fields[name][1] for name in names],
        "itemsize": dtype.itemsize,
    }


def dtype_from_simple(description: object) -> np.dtype[Any]:
    """Return the dtype that `dtype_to_simple` described; TypeError or ValueError for a malformed description."""
    if isinstance(description, str):
        if not _DTYPE_STR.fullmatch(description) or _MACHINE_BOUND.fullmatch(description):
            raise ValueError(f"dtype {description!r}")
        return np.dtype(description)
    if isinstance(description, list):
        base, shape = description
        return np.dtype((dtype_from_simple(base), _shape(shape)))
    if not isinstance(description, dict) or set(description) != {"names", "formats", "offsets", "itemsize"}:
        raise ValueError("dtype description")
    return np.dtype(
        {
            "names": description["names"],
            "formats": [dtype_from_simple(field) for field in description["formats"]],
            "offsets": description["offsets"],
            "itemsize": description["itemsize"],
        }
    )


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("shape")
    return tuple(shape)


def array_to_simple(array: np.ndarray[Any, Any]) -> list[object]:
    """Return [dtype, shape, bytes in C order]; padding between the fields of a structure becomes zeros."""
    description = dtype_to_simple(array.dtype)
    if array.dtype.itemsize == 0:
        raise NotStorableError(f"numpy dtype {array.dtype!r} has elements of no size")
    return [description, list(array.shape), _with_zeroed_padding(array).tobytes()]


def array_from_simple(fields: Any) -> np.ndarray[Any, Any]:
    """Return the array that `array_to_simple` described: writable, C-contiguous, with memory of its own."""
    description, shape, data = fields
    dtype, dims = dtype_from_simple(description), _shape(shape)
    if type(data) is not bytes or dtype.itemsize == 0 or dtype.itemsize * math.prod(dims) != len(data):
        raise ValueError("size of the array")
    # np.empty allocates one element even for an empty array, and hostile bytes choose the size of the element.
    array: np.ndarray[Any, Any] = np.ndarray(dims, dtype, buffer=data or bytearray())
    return array.copy() if data else array


class _Memory:
    """The memory of an array, without the flag that forbids writes: torch warns of it, and here nothing writes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def array_as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array, whose dtype is one of `TENSOR_DTYPES`, as a tensor: its memory if the elements are in C order."""
    # torch looks at numpy's type numbers, of which some dtypes have two (int64, longlong).
    array = np.require(array, requirements=["C", "A"]).view(array.dtype.str)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


def array_of_tensor(found: object) -> object:
    """Return what stands for an array, given what stands for the tensor that holds its elements: an array, of a tensor.

    Raises:
        CorruptCheckpointError: numpy has no such dtype.
    """
    if isinstance(found, TensorRef):
        return TensorRef(found.name, array=True)
    if not isinstance(found, torch.Tensor):
        return found
    try:
        return found.numpy()
    except (TypeError, RuntimeError) as error:
        raise CorruptCheckpointError(f"plain values are damaged: a numpy array of {found.dtype}") from error


def scalar_to_simple(value: np.generic) -> list[object]:
    """Return [dtype, bytes] of one scalar."""
    if type(value) is not value.dtype.type:
        raise NotStorableError(f"{type(value).__module__}.{type(value).__qualname__} is a subclass of a numpy scalar")
    description, _, data = array_to_simple(np.asarray(value))
    return [description, data]


def scalar_from_simple(fields: Any) -> object:
    """Return the scalar that `scalar_to_simple` described."""
    description, data = fields
    return array_from_simple([description, [1], data])[0]


def _with_zeroed_padding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `array`, with zeros between the fields of a structured dtype, where memory is arbitrary."""
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
