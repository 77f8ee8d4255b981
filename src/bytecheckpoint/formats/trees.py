"""Encode trees of foreign values as plain values (docs/format-values.md), take the tensors out, and decode the containers.

Torch is not imported.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.inert import CallRecord, GlobalName
from bytecheckpoint.formats.meanings import (
    Dtype,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Size,
    StorageRef,
    StoredTensor,
    TorchDevice,
)
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.representation.values.codes import Code
from bytecheckpoint.representation.values.tree import MAX_DEPTH, TENSOR_CLASS, TensorRef, key_of_path

__all__ = ["BYTES_PER_VALUE", "Tree", "decode_containers", "is_module", "with_references"]

#: Values of all trees of one file, if it is no metadata of many tensors; long ones are counted by their bytes. A pickle may
#: refer to one object from many places, so a small pickle can be a huge tree.
_MOST_VALUES: Final = 500_000
BYTES_PER_VALUE: Final = 64
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
#: Calls in pickles that make tensors without a place in the file -> what these are.
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the device 'meta'",
}
#: Module of the classes of TorchScript.
_SCRIPT = re.compile(r"__torch__(\.|$)")
#: Names of the factories of defaultdicts in pickles, those of protocol 2 too -> in encoded values.
_FACTORIES = {
    **{f"builtins.{name}": name for name in ("bool", "bytes", "dict", "float", "frozenset", "int", "list", "set")},
    **{f"collections.{name}": name for name in ("OrderedDict", "Counter", "deque")},
    "builtins.str": "str", "builtins.tuple": "tuple", "builtins.long": "int", "builtins.unicode": "str",
}  # fmt: skip
_NUMBERS = frozenset((type(None), bool, int, float))
_PATHS = frozenset(("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"))

_pack = msgspec.msgpack.Encoder().encode
_unpack: Callable[[Any], Any] = msgspec.msgpack.Decoder().decode


class Tree:
    """The encoder of the trees of one file.

    Args:
        file: address of the file, for messages.
        metadata_bytes: bytes of metadata, in proportion to which there may be more values than usual.

    Attributes:
        tensors: tensors of the tree that was encoded last, by name.
        sharded: its tensors of which a file holds parts, by name.
        notes: values that were left out, in words.
    """

    def __init__(self, file: str, metadata_bytes: int = 0) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.sharded: dict[str, ShardedValue] = {}
        self.notes: list[str] = []
        self._file = file
        self._left = self._most = max(_MOST_VALUES, metadata_bytes // BYTES_PER_VALUE)
        self._path: list[object] = []
        # Ids of the objects that hold the value, outermost first, and whether a note says that they lack one.
        self._around: dict[int, bool] = {}
        self._taken: Collection[str] = ()

    def encode(self, value: object, taken: Collection[str] = ()) -> bytes:
        """Return a value as an encoded value; references in it name its tensors by their paths.

        Args:
            value: the value.
            taken: names that other tensors of the state have.

        Raises:
            IncompatibleCheckpointError: the tree has too many values, or too many levels.
        """
        self.tensors, self.sharded, self._taken = {}, {}, taken
        return bytes((0xC1, 1)) + _pack(self._native(value, 0))

    def _native(self, value: Any, depth: int) -> object:
        self._charge(0)
        if depth > MAX_DEPTH:
            self._refuse(
                f"its values are nested more than {MAX_DEPTH} levels deep below {key_of_path(tuple(self._path[:8]))!r}"
            )
        encode = _ENCODERS.get(type(value))
        return self._left_out(f"a {type(value).__name__}") if encode is None else encode(self, value, depth + 1)

    def _charge(self, nbytes: int) -> None:
        self._left -= 1 + nbytes // BYTES_PER_VALUE
        if self._left < 0:
            self._refuse(f"it holds more than {self._most} values, or values of too many bytes")

    def _refuse(self, what: str) -> NoReturn:
        raise IncompatibleCheckpointError(f"{self._file}: {what}")

    def _left_out(self, what: str) -> object:
        outermost = next(iter(self._around), 0)
        if len(self.notes) < 100 and not self._around.get(outermost):
            more = "; this object may hold more that is" if outermost else ""
            self.notes.append(f"{key_of_path(tuple(self._path)) or 'the value'}: {what} is left out{more}")
        if outermost:
            self._around[outermost] = True
        return None

    def _int(self, value: int, _: int) -> object:
        if _INT64_MIN <= value <= _UINT64_MAX:
            return value
        self._charge(value.bit_length() // 8)
        return _ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))

    def _bytes(self, value: bytes | bytearray, _: int) -> object:
        self._charge(len(value))
        return value if type(value) is bytes else _ext(Code.BYTEARRAY, bytes(value))

    def _str(self, value: str, _: int) -> object:
        self._charge(len(value))
        try:
            value.encode()
        except UnicodeEncodeError:
            return _ext(Code.SURROGATE_STR, value.encode("utf-8", "surrogatepass"))
        return value

    def _items(self, items: Iterable[object], depth: int, steps: Iterable[object] | None = None) -> Any:
        kinds = set(map(type, items)) if type(items) is list else {object}
        if kinds and kinds <= _NUMBERS:
            try:
                packed = _pack(items)
            except OverflowError:  # of an int, which has a code of its own
                pass
            else:
                self._charge(len(packed))
                return msgspec.Raw(packed)
        native = []
        self._path.append(None)
        for step, item in enumerate(items) if steps is None else zip(steps, items, strict=True):
            self._path[-1] = step
            native.append(self._native(item, depth))
        self._path.pop()
        return native

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[Any]:
        return [self._items(value, depth), self._items(value.values(), depth, value)]

    def _dict(self, value: dict[Any, Any], depth: int) -> object:
        if all(type(key) is str and key.isascii() for key in value):
            self._charge(sum(map(len, value)))
            return dict(zip(value, self._items(value.values(), depth, value), strict=True))
        native = self._pairs(value, depth)
        if all(type(key) is str for key in native[0]):
            return dict(zip(*native, strict=True))
        return _ext(Code.DICT, native)

    def _members(self, value: set[object] | frozenset[object], depth: int) -> object:
        packed = sorted(_pack(self._native(item, depth)) for item in value)
        code = Code.SET if isinstance(value, set) else Code.FROZENSET
        return _ext(code, [msgspec.Raw(item) for item in packed])

    def _tensor(self, value: StoredTensor | ShardedValue, _: int) -> object:
        plain = name = key_of_path(tuple(self._path))
        self._charge(len(name))
        number = 1
        while name in self.tensors or name in self.sharded or name in self._taken:
            number += 1
            name = f"{plain}#{number}"
        if type(value) is ShardedValue:
            self.sharded[name] = value
        else:
            assert type(value) is StoredTensor
            self.tensors[name] = value
        return _reference(TensorRef(name, value.parameter, value.requires_grad))

    def _numpy_scalar(self, value: NumpyScalar, _: int) -> object:
        text = value.dtype.text
        if not text or np.dtype(text).itemsize != len(value.data):
            return self._left_out("a numpy scalar")
        return _ext(Code.NUMPY_SCALAR, [np.dtype(text).str, value.data])

    def _numpy_array(self, value: NumpyArray, _: int) -> object:
        array = value.array
        if array is None:
            return self._left_out("a numpy array of objects or structures")
        self._charge(array.nbytes)
        return _ext(Code.NUMPY_ARRAY, [array.dtype.str, list(array.shape), array.tobytes()])

    def _state_dict(self, module: CallRecord) -> dict[str, object]:
        """Return what the `state_dict` of a module that a pickle holds whole would have, by name."""
        found: dict[str, object] = {}
        ahead: list[tuple[str, int, CallRecord]] = [("", 0, module)]
        while ahead:
            prefix, depth, one = ahead.pop()
            if depth > MAX_DEPTH:  # a module may be in itself
                self._refuse(f"its modules are nested more than {MAX_DEPTH} levels deep below {prefix[:80]!r}")
            unsaved = one.state.get("_non_persistent_buffers_set")
            children = []
            for part, members in _parts(one).items():
                for key, value in members.items():
                    if type(key) is not str:
                        self._refuse("a module has a name that is no text")
                    name = f"{prefix}{key}"
                    self._charge(len(name))
                    if part != "_modules":
                        if value is not None and not (
                            part == "_buffers" and isinstance(unsaved, set) and key in unsaved
                        ):
                            found[name] = value
                    elif is_module(value):
                        children.append((f"{name}.", depth + 1, value))
                    elif value is not None:
                        found[name] = value  # of a class that pickles in a way of its own
            ahead += reversed(children)
        return found

    def _call(self, value: CallRecord, depth: int) -> object:
        """Encode an instance of a class: by a code of its own, or as an instance of an unknown class."""
        target, args, state = value.target, value.args, value.state
        if target.module.startswith("pathlib") and target.name in _PATHS and all(type(part) is str for part in args):
            text = (
                "/".join(args).replace("//", "/") if "Posix" in target.name else "\\".join(args).replace("\\\\", "\\")
            )
            return _ext(Code.PATH, [target.name, text or "."])
        if is_module(value):
            return self._dict(self._state_dict(value), depth)
        if (other := _OTHER_TENSORS.get(target.full)) is not None:
            return self._left_out(other)
        if target.full == "argparse.Namespace" and type(state) is dict:
            return _ext(Code.ARGPARSE_NAMESPACE, self._native(state, depth))
        match target.full, args, state:
            case "collections.defaultdict", (), _:
                return _ext(Code.DEFAULT_DICT, [None, *self._pairs(dict(value.pairs or ()), depth)])
            case "collections.defaultdict", (GlobalName(full=factory),), _ if factory in _FACTORIES:
                return _ext(Code.DEFAULT_DICT, [_FACTORIES[factory], *self._pairs(dict(value.pairs or ()), depth)])
            case "collections.defaultdict", _, _:  # of a function of the program
                return self._dict(dict(value.pairs or ()), depth)
            case "collections.Counter", (dict() as counts,), None:
                return _ext(Code.COUNTER, self._pairs(counts, depth))
            case "collections.deque", () | ((), int()), None:
                return _ext(Code.DEQUE, [args[1] if args else None, self._items(value.items or [], depth)])
            case "types.SimpleNamespace", (), dict():
                return _ext(Code.SIMPLE_NAMESPACE, self._dict(state, depth))
            case "datetime.timedelta", (int(), int(), int()), None:
                return _ext(Code.TIMEDELTA, list(args))
            case "datetime.date", (bytes() as packed,), None if len(packed) == 4:
                return _ext(Code.DATE, [packed[0] << 8 | packed[1], *packed[2:]])
            case "datetime.timezone", (CallRecord() as offset, *name), None if (
                offset.target.full == "datetime.timedelta"
            ):
                return _ext(Code.TIMEZONE, [self._native(offset, depth), *name])
            case "datetime.datetime", (bytes() as packed, *zone), None if len(packed) == 10 and all(
                map(_is_zone, zone)
            ):
                year, micro = packed[0] << 8 | packed[1], int.from_bytes(packed[7:], "big")
                known = self._native(zone[0], depth) if zone else None
                return _ext(Code.DATETIME, [year, packed[2] & 127, *packed[3:7], micro, packed[2] >> 7, known])
            case "torch.torch_version.TorchVersion", (str(text),), None:
                return text
            case "decimal.Decimal", (str(text),), None:
                return _ext(Code.DECIMAL, text)
        if id(value) in self._around:
            return self._left_out("a reference to an object around it")
        self._around[id(value)] = False
        if not args and not value.kwargs and value.items is None and (value.pairs is None or state is None):
            saved = self._native(dict(value.pairs) if value.pairs is not None else state, depth)
        else:
            parts = {"args": args, "kwargs": value.kwargs, "state": state, "items": value.items, "pairs": value.pairs}
            saved = self._dict({name: part for name, part in parts.items() if part}, depth)
        del self._around[id(value)]
        return _ext(Code.REGISTERED, [target.full, saved])


def _is_zone(value: object) -> bool:
    return isinstance(value, CallRecord) and value.target.full == "datetime.timezone"


def is_module(value: object) -> bool:
    """Return whether a value is a `torch.nn.Module` that a pickle holds whole, or one of TorchScript."""
    return bool(_parts(value))


def _is_scripted(value: object) -> bool:
    return isinstance(value, CallRecord) and isinstance(value.state, dict) and bool(_SCRIPT.match(value.target.module))


def _parts(value: object) -> dict[str, dict[Any, Any]]:
    """Return the parts of a module by name, {} for any other value."""
    state = value.state if isinstance(value, CallRecord) else None
    if not isinstance(state, dict):
        return {}
    if _is_scripted(value):  # its attributes lie together, and each tensor among them is saved
        tensors = {key: item for key, item in state.items() if type(item) is StoredTensor}
        return {"_buffers": tensors, "_modules": {key: item for key, item in state.items() if _is_scripted(item)}}
    parts: dict[str, Any] = {part: state.get(part) for part in _MODULE_PARTS}
    return parts if all(isinstance(part, dict) for part in parts.values()) else {}


def decode_containers(blob: bytes) -> Any:
    """Decode an encoded value as far as its lists, tuples, dicts and references to tensors.

    Any other value with a code stays an `Ext`, which `Tree.encode` takes, an instance of a class among them.
    """
    return _decoded(_unpack(blob[2:]))


def _decoded(value: Any) -> Any:
    if type(value) is list:
        return [_decoded(item) for item in value]
    if type(value) is dict:
        return {key: _decoded(item) for key, item in value.items()}
    if type(value) is not Ext or value.code not in _CONTAINERS:
        return value
    found = _decoded(_unpack(value.data))
    if value.code == Code.TENSOR:
        return TensorRef(found)
    if value.code == Code.TUPLE:
        return tuple(found)
    if value.code == Code.REGISTERED:
        match found:
            case [name, [TensorRef(name=tensor), bool(parameter), bool(requires_grad)]] if name == TENSOR_CLASS:
                return TensorRef(tensor, parameter, requires_grad)
        return value
    try:
        pairs = (OrderedDict if value.code == Code.ORDERED_DICT else dict)(zip(*found[-2:], strict=True))
    except TypeError:  # a key is an `Ext`, which has no hash
        return value
    return pairs if len(pairs) == len(found[-1]) else value


def with_references(value: Any, renamed: Callable[[str], str]) -> Any:
    """Return a value of `decode_containers` with other names of the tensors inside of its `Ext`s."""
    if type(value) is list:
        return [with_references(item, renamed) for item in value]
    if type(value) is dict:
        return {key: with_references(item, renamed) for key, item in value.items()}
    if type(value) is not Ext or value.code not in _NESTED:
        return value
    inner = _unpack(value.data)
    return Ext(value.code, _pack(renamed(inner) if value.code == Code.TENSOR else with_references(inner, renamed)))


_CONTAINERS = frozenset((Code.TENSOR, Code.TUPLE, Code.REGISTERED, Code.DICT, Code.ORDERED_DICT, Code.DEFAULT_DICT))
# Codes of values that may hold tensors.
_NESTED = _CONTAINERS | {Code.DEQUE, Code.SIMPLE_NAMESPACE, Code.ARGPARSE_NAMESPACE}


def _reference(value: TensorRef) -> Ext:
    reference = _ext(Code.TENSOR, value.name)
    if value.parameter or value.requires_grad:
        return _ext(Code.REGISTERED, [TENSOR_CLASS, [reference, value.parameter, value.requires_grad]])
    return reference


def _ext(code: Code, native: object) -> Ext:
    return Ext(code.value, _pack(native))


_Encoder = Callable[[Tree, Any, int], object]
_ENCODERS: dict[type, _Encoder] = {
    **dict.fromkeys((type(None), bool, float), lambda _, v, __: v),
    **dict.fromkeys((bytes, bytearray), Tree._bytes),
    int: Tree._int,
    str: Tree._str,
    list: Tree._items,
    tuple: lambda tree, v, depth: _ext(Code.TUPLE, tree._items(v, depth)),
    dict: Tree._dict,
    OrderedDict: lambda tree, v, depth: _ext(Code.ORDERED_DICT, tree._pairs(v, depth)),
    set: Tree._members,
    frozenset: Tree._members,
    StoredTensor: Tree._tensor,
    ShardedValue: Tree._tensor,
    StorageRef: lambda tree, v, depth: tree._tensor(StoredTensor(v, "uint8", v.start, (v.size,), (1,)), depth),
    TensorRef: lambda _, v, __: _reference(v),
    Ext: lambda _, v, __: v,
    CallRecord: Tree._call,
    GlobalName: lambda tree, v, _: tree._left_out(f"the function or class {v.full}"),
    NumpyArray: Tree._numpy_array,
    NumpyScalar: Tree._numpy_scalar,
    NumpyDtype: lambda tree, v, _: _ext(Code.NUMPY_DTYPE, v.text) if v.text else tree._left_out("a numpy dtype"),
    Dtype: lambda _, v, __: _ext(Code.TORCH_DTYPE, v.name),
    TorchDevice: lambda _, v, __: _ext(Code.TORCH_DEVICE, v.text),
    Size: lambda _, v, __: _ext(Code.TORCH_SIZE, list(v)),
    complex: lambda _, v, __: _ext(Code.COMPLEX, [v.real, v.imag]),
    range: lambda _, v, __: _ext(Code.RANGE, [v.start, v.stop, v.step]),
    slice: lambda _, v, __: _ext(Code.SLICE, [v.start, v.stop, v.step]),
}
