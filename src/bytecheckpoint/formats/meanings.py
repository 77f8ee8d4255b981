"""The inert meanings of the globals that checkpoints of PyTorch hold: tensors, storages, dtypes, and a few plain values."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.inert import CallRecord, Dtype, GlobalName, Meaning, check_key, frozenset_of
from bytecheckpoint.representation.catalog import MAX_DIMS
from bytecheckpoint.representation.dtypes import dtype_names, itemsize

__all__ = [
    "CONSTANTS", "MEANINGS", "Dtype", "NumpyArray", "NumpyDtype", "NumpyScalar", "Size", "StorageRef", "StoredTensor",
    "TorchDevice", "dtype_name", "shape_of", "storage_of",
]  # fmt: skip

#: Bytes of the largest file, and elements of the largest tensor.
_MOST: Final = 1 << 62


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


class TorchDevice(msgspec.Struct, frozen=True):
    """A `torch.device`, by its text: "cuda:0"."""

    text: str


class StorageRef(msgspec.Struct, frozen=True):
    """A storage, or a part of one: bytes that lie outside of the pickle.

    Attributes:
        key: name of the storage in its file.
        dtype: dtype of its elements; "uint8" for a storage without dtype.
        nbytes: size of the whole storage.
        start: first byte of the part.
        size: bytes of the part.
    """

    key: str
    dtype: str
    nbytes: int
    start: int
    size: int


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor: a view of a storage.

    Attributes:
        storage: the storage.
        dtype: torch's name of the dtype without "torch.".
        start: first byte of the tensor in the storage.
        shape: extent of each dimension.
        strides: elements between two neighbours, one per dimension.
        requires_grad: True if the tensor requires a gradient.
        parameter: True for a `torch.nn.Parameter`.
    """

    storage: StorageRef
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return (last + 1) * itemsize(self.dtype)


class NumpyDtype(msgspec.Struct):
    """A numpy dtype, `text` as in `numpy.dtype.str`; "" for a dtype that is not understood."""

    text: str

    def take_state(self, state: Any) -> None:
        """Take the byte order."""
        if type(state) is tuple and len(state) > 1 and state[1] in {"<", ">", "|"} and self.text:
            self.text = state[1] + self.text[1:]


class NumpyArray(msgspec.Struct):
    """A numpy array; `array` is None until its state came, and for a dtype that is not understood."""

    array: np.ndarray[Any, Any] | None = None

    def take_state(self, state: Any) -> None:
        """Take shape, dtype, order and bytes."""
        _, shape, dtype, fortran, data = state
        if type(dtype) is NumpyDtype and dtype.text and type(data) is bytes:
            flat = np.frombuffer(data, np.dtype(dtype.text))
            self.array = flat.reshape(_dims(shape), order="F" if fortran else "C")


class NumpyScalar(msgspec.Struct, frozen=True):
    """A numpy scalar: dtype and bytes."""

    dtype: NumpyDtype
    data: bytes


_NUMPY_TEXT = re.compile(r"[<>|]?([biufcSUV][0-9]{1,6}|b1|\?)")


def _numpy_dtype(text: object, *_: object) -> NumpyDtype:
    found = _NUMPY_TEXT.fullmatch(text) if type(text) is str else None
    return NumpyDtype("<" + found[1].replace("?", "b1") if found else "")


def _dims(dims: Iterable[int]) -> tuple[int, ...]:
    result = tuple(dims)
    wrong = len(result) > MAX_DIMS
    for n in result:  # a generator would double the time of an index of DCP
        wrong |= type(n) is not int or not 0 <= n < _MOST
    if wrong:
        raise ValueError("a shape, or strides, that no tensor can have")
    return result


def shape_of(size: Iterable[int]) -> tuple[int, ...]:
    """Return a size as a shape. Raises ValueError: no tensor can have it."""
    shape = _dims(size)
    if math.prod(n or 1 for n in shape) >= _MOST:
        raise ValueError(f"a tensor of shape {list(shape)}")
    return shape


def storage_of(identity: object, prefix: str = "") -> StorageRef:
    """Return the storage of a persistent id: ("storage", class, key, location, elements), and in old files a view."""
    if type(identity) is not tuple or len(identity) not in {5, 6} or identity[0] != "storage":
        raise ValueError("a persistent id that is no storage")
    _, kind, key, _, count = identity[:5]
    if type(kind) is not GlobalName or type(count) is not int or not 0 <= count < _MOST or type(key) is not str:
        raise ValueError("a storage that cannot be")
    dtype = _STORAGES.get(kind.name)
    if dtype is None:
        raise IncompatibleCheckpointError(f"storages of the class {kind.full} are not supported")
    nbytes, start = count * itemsize(dtype), 0
    size = nbytes
    if len(identity) == 6 and identity[5] is not None:
        _, first, length = identity[5]
        start, size = first * itemsize(dtype), length * itemsize(dtype)
        if not 0 <= start <= start + size <= nbytes:
            raise ValueError("a part outside of its storage")
    return StorageRef(prefix + key, dtype, nbytes, start, size)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: bool = False, dtype: str | None = None
) -> StoredTensor:
    if type(storage) is not StorageRef or type(offset) is not int or not 0 <= offset < _MOST:
        raise TypeError("a tensor without a storage")
    shape, strides = shape_of(size), _dims(stride)
    dtype = dtype or storage.dtype
    start = storage.start + offset * itemsize(dtype)
    made = StoredTensor(storage, dtype, start, shape, strides, requires_grad is True)
    if len(shape) != len(strides) or start + made.span > storage.start + storage.size:
        text = f"shape {list(shape)}, strides {list(strides)}, offset {offset}"
        raise ValueError(f"a tensor outside of its storage of {storage.size} bytes: {text}")
    return made


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, _: Any, dtype: Any, bits: Any = None
) -> StoredTensor:
    if type(bits) is dict and any(bits.values()):
        raise IncompatibleCheckpointError(
            "a tensor with the bit 'conj' or 'neg' is not supported: resolve it, and save it"
        )
    return _tensor(storage, offset, size, stride, requires_grad, None if dtype is None else dtype_name(dtype))


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, _: Any = None, bits: Any = None
) -> StoredTensor:
    return _tensor_v3(storage, offset, size, stride, requires_grad, None, None, bits)


def dtype_name(dtype: object) -> str:
    """Return the name of a `torch.dtype`. Raises IncompatibleCheckpointError: this package does not have the dtype."""
    if type(dtype) is Dtype:
        return dtype.name
    name = dtype.full if type(dtype) is GlobalName else type(dtype).__name__
    raise IncompatibleCheckpointError(f"tensors of the dtype {name!r} are not supported")


def _parameter(data: object, requires_grad: object, *_: object) -> object:
    if type(data) is not StoredTensor:
        return CallRecord(GlobalName("torch._utils", "_rebuild_parameter"), (data, requires_grad))
    return msgspec.structs.replace(data, requires_grad=requires_grad is True, parameter=True)


def _quantised(*_: object) -> object:
    raise IncompatibleCheckpointError("quantised tensors are not supported: save int_repr() with scale and zero point")


def _attribute(target: Any, name: Any) -> GlobalName:
    """Return a class inside a class, or a member of an enum."""
    if type(target) is not GlobalName or type(name) is not str:
        raise TypeError("an attribute of an object")
    return GlobalName(target.module, f"{target.name}.{name}")


def _ordered_dict(pairs: Iterable[Any] = ()) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    for key, value in pairs:
        check_key(key)
        made[key] = value
    return made


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return the bytes that protocol 2 has as text."""
    if encoding not in {"latin1", "latin-1", "utf8", "utf-8"}:
        raise ValueError("an encoding")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(data if type(data) is bytes else _encoded(data, encoding))


def _numbers(kind: type, kinds: tuple[type, ...]) -> Meaning:
    def make(*args: object) -> object:
        if len(args) > 3 or not all(type(arg) in kinds for arg in args):
            raise TypeError(f"a {kind.__name__}")
        return kind(*args)

    return make


def _device(kind: str, index: int | None = None) -> TorchDevice:
    return TorchDevice(kind if index is None else f"{kind}:{int(index)}")


def _numpy_scalar(dtype: Any, data: Any = b"") -> NumpyScalar:
    if type(dtype) is not NumpyDtype:
        raise TypeError("a numpy scalar without a dtype")
    return NumpyScalar(dtype, _encoded(data) if type(data) is str else data)


def _object_of(target: Any, *_: object) -> CallRecord:
    """Return the object that `copyreg._reconstructor` would make, without state."""
    if type(target) is not GlobalName:
        raise TypeError("an object without a class")
    return CallRecord(target, ())


_STORAGES: dict[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}  # fmt: skip

CONSTANTS: dict[str, object] = {
    **{f"torch.{name}": Dtype(name) for name in dtype_names()},
    "torch.strided": "torch.strided",
}
"""Values of globals that nothing calls."""

_NUMPY: dict[str, Meaning] = {"_reconstruct": lambda *_: NumpyArray(), "scalar": _numpy_scalar}
MEANINGS: dict[str, Meaning] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch.serialization._get_layout": lambda text: text,
    "torch.Size": lambda dims=(): Size(_dims(dims)),
    "torch.device": _device,
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": lambda items=(): set(frozenset_of(items)),
    "builtins.frozenset": lambda items=(): frozenset_of(items),
    "builtins.bytes": lambda: b"",  # of protocol 0
    "builtins.bytearray": _bytearray,
    "builtins.complex": _numbers(complex, (float, int)),
    **dict.fromkeys(("builtins.range", "builtins.xrange"), _numbers(range, (int,))),
    "builtins.slice": _numbers(slice, (int, type(None))),
    "builtins.getattr": _attribute,
    "_codecs.encode": _encoded,
    "copyreg._reconstructor": _object_of,
    "copyreg.__newobj__": lambda target, *args: target.meaning(*args) if target.meaning else CallRecord(target, args),
    "numpy.dtype": _numpy_dtype,
    **{f"numpy.{core}.multiarray.{name}": made for core in ("core", "_core") for name, made in _NUMPY.items()},
}
"""Inert meanings of calls, by the full name of the global. Every other call is recorded."""
