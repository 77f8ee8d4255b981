"""Read files of `torch.save` (.pt, .bin, .ckpt) as they lie: tensors are views of byte ranges, all else plain values."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.archives import StoredMember, is_zip, locate, read_directory, read_member
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.files import RangedFile, open_file, refuse_pointer
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.inert import GlobalName, is_module_state
from bytecheckpoint.formats.meanings import CONSTANTS, MEANINGS, StorageRef, StoredTensor, storage_of
from bytecheckpoint.formats.sharded import ShardedValue, rebuilt_tensor
from bytecheckpoint.formats.trees import Tree, is_module
from bytecheckpoint.formats.unpickling import MAX_PICKLE_BYTES, PickleEndsError, read_pickle
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.storage import Storage

__all__ = [
    "SUFFIXES",
    "TorchFiles",
    "TorchObject",
    "numbered",
    "read_object",
    "read_torch_save",
    "states_beside",
    "states_of",
    "unpickle",
]

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
"""Ends of the names of files that programs write by `torch.save`."""
#: First value of a file before torch 1.6, and the version that follows.
_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001
#: Bytes of an old file that are read first; more while its pickles go on.
_FIRST_READ: Final = 1 << 20
_MEANINGS: Final = {**MEANINGS, "torch._tensor._rebuild_from_type_v2": rebuilt_tensor}
#: Keys under which programs keep the state_dict of the model in a larger dict.
_MODEL_KEYS: Final = ("state_dict", "model_state_dict", "model", "module")
#: Name of the state that holds what is neither a dict nor a list.
_REST: Final = "extra_states"


@dataclass(frozen=True, slots=True)
class TorchObject:
    """The object of one file of `torch.save`.

    Attributes:
        value: the object, inert; tensors are `StoredTensor`s.
        storages: place of each storage in the file, by key.
    """

    value: Any
    storages: Mapping[str, StoredMember]


class TorchFiles:
    """The files of `torch.save` in a folder that a reader has opened, with the place of each storage.

    Attributes:
        crcs: CRC32 of each storage, None where the file has none, by key, which begins with the name of the file.
        made: storages that are deflated, by the names of the files that show them.
    """

    def __init__(self, storage: Storage, columns: ForeignColumns) -> None:
        self._storage, self._columns = storage, columns
        self.crcs: dict[str, int | None] = {}
        self.made: dict[str, Decoded] = {}
        self._sums: list[tuple[int, int, int, int]] = []

    @contextlib.contextmanager
    def open(self, name: str, rank: int = 0, *, deflated: bool = False) -> Iterator[tuple[RangedFile, Any]]:
        """Open a file of a rank for the `with` block; yield it and its object. Raises as `read_object`."""
        with open_file(self._storage, name) as file:
            found = read_object(file, f"{name}/", deflated=deflated)
            number = self._columns.add_file(file.name, file.size, rank)
            for key, member in found.storages.items():
                self._columns.places[key], self.crcs[key] = (number, member.offset), member.crc
                if member.deflated:
                    inflated = f"{VALUES_NAME}-data-{len(self.made)}"
                    self.made[inflated] = Decoded(member.size, partial(_read_again, self._storage, name, member))
                    self._columns.places[key] = self._columns.add_file(inflated, member.size, rank), 0
                elif member.crc is not None:
                    self._sums.append((number, member.offset, member.size, member.crc))
            yield file, found.value

    def sums(self) -> Int64s:
        """Return file, first byte, length and CRC32 of all storages, int64 [n, 4]."""
        return np.array(self._sums, np.int64).reshape(-1, 4)


def read_torch_save(storage: Storage, name: str) -> ForeignCheckpoint:
    """Read a file of `torch.save`."""
    columns, tree = ForeignColumns(), Tree(f"{storage.url}/{name}")
    files = TorchFiles(storage, columns)
    with files.open(name, deflated=True) as (file, value):
        values = columns.add_states(states_of(value), tree, file.label)
    return ForeignCheckpoint("torch-save", columns, values, tree.notes, sums=files.sums(), made=files.made)


def _read_again(storage: Storage, name: str, member: StoredMember) -> bytes:
    with open_file(storage, name) as file:
        return read_member(file, member)


def states_of(value: object) -> dict[str, Any]:
    """Divide the object of a file into states.

    A dict in which one of the usual keys ("state_dict", "model_state_dict", "model", "module") holds a dict with tensors is
    the checkpoint of a program: that entry is the state "model", every other dict or list is a state under its own key,
    and the rest, with what is in an entry "extra_states", is the state "extra_states". The only `state_dict` of an
    optimizer is the state "optimizer", also in a list (Lightning); several of a list are "optimizer_0" and so on. A file of
    such a `state_dict` alone, or of a scheduler's, is the state "optimizer" or "scheduler", as a Trainer writes them.
    Without one of the usual keys, a dict with the `state_dict` of an optimizer or a plain value beside dicts of tensors is
    divided in the same way, and one in which each is the `state_dict` of a module: its only dict of tensors is the state
    "model", of several (GANs) none is.
    Anything else is the state "model" as a whole, of a module its `state_dict`.
    """
    if not isinstance(value, dict):
        return {"model": value}
    if optimizer := _optimizers(value):
        return {"optimizer": optimizer[0]}
    # Of ReduceLROnPlateau and of several in a sequence, too; before torch 1.4 no schedule had the first.
    if "_last_lr" in value or value.keys() >= {"last_epoch", "_step_count"}:
        return {"scheduler": value}
    model = next((key for key in _MODEL_KEYS if _holds_tensors(value.get(key))), None)
    if model is not None:
        return states_beside(value, model)
    others = [item for item in value.values() if not _holds_tensors(item)]
    models = [key for key, item in value.items() if type(key) is str and _holds_tensors(item)]
    if not models or any(isinstance(item, StoredTensor | ShardedValue) for item in others) or "model" in value:
        return {"model": value}
    alike = all(is_module_state(value[key]) for key in models)
    if not alike and all(isinstance(item, dict) and not _optimizers(item) for item in others):
        return {"model": value}
    return states_beside(value, models[0]) if len(models) == 1 else _divided({}, value)


def states_beside(value: object, model: str) -> dict[str, Any]:
    """Divide a dict whose entry `model` is the dict of the state "model" into states; anything else is that state."""
    if not isinstance(value, dict) or not (isinstance(value.get(model), dict) or is_module(value.get(model))):
        return {"model": value}
    return _divided({"model": value[model]}, {key: item for key, item in value.items() if key != model})


def _divided(states: dict[str, Any], others: dict[Any, Any]) -> dict[str, Any]:
    """Return `states` with those that other entries of a program's checkpoint are."""
    rest = {}
    optimizers = {key: found for key, item in others.items() if (found := _optimizers(item))}
    alone = sum(map(len, optimizers.values())) == 1
    for key, item in others.items():
        found = optimizers.get(key, [])
        numbered = {f"optimizer_{number}": one for number, one in enumerate(found)}
        if found and alone and (key == "optimizer" or "optimizer" not in others):
            states["optimizer"] = found[0]
        elif isinstance(item, list) and numbered and not numbered.keys() & others.keys():
            states |= numbered
        elif type(key) is str and key and key not in {"model", _REST} and _is_state(item):
            states[key] = item
        else:
            rest[key] = item
    if isinstance(own := rest.get(_REST), dict) and not own.keys() & rest.keys():  # as our export writes it
        rest = {**{key: item for key, item in rest.items() if key != _REST}, **own}
    return {**states, _REST: rest} if rest else states


def _is_state(value: object) -> bool:
    return is_module(value) or isinstance(value, dict) or (isinstance(value, list) and bool(value))


def _optimizers(value: object) -> list[Any]:
    """Return the `state_dict` of an optimizer, or those in a list of nothing else; [] for any other value."""
    found: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) and isinstance(one.get("param_groups"), list) and "state" in one for one in found):
        return []
    return [one | {"state": numbered(one["state"], one["param_groups"])} for one in found]


def numbered(state: Any, groups: Any) -> Any:
    """Return the state of an optimizer with the numbers of `groups` as keys, of which DCP makes texts."""
    lists = [group.get("params") for group in groups if isinstance(group, dict)]
    params = [p for found in lists if isinstance(found, list | tuple) for p in found]
    numbers = {str(p): p for p in params if type(p) is int and p.bit_length() < 64}
    return {numbers.get(p, p): slots for p, slots in state.items()} if numbers and isinstance(state, dict) else state


def _holds_tensors(value: object) -> bool:
    return is_module(value) or (
        isinstance(value, dict) and any(isinstance(item, StoredTensor | ShardedValue) for item in value.values())
    )


def read_object(file: RangedFile, prefix: str = "", *, deflated: bool = False) -> TorchObject:
    """Read the object of a file of `torch.save`, of any version.

    Args:
        file: the file, or a part of one.
        prefix: text before the keys of its storages.
        deflated: allow storages that are deflated.

    Raises:
        CorruptCheckpointError: the file is damaged.
        IncompatibleCheckpointError: the file holds what this package does not read; the message says what.
    """
    first = file.read(0, min(file.size, 512))
    refuse_pointer(file, first)
    if is_zip(first):
        return _read_zip(file, prefix, deflated=deflated)
    if first[257:262] == b"ustar":
        raise IncompatibleCheckpointError(
            f"{file.label} is a tar file, as torch before 0.1.10 wrote: load it with torch, and save it again"
        )
    return _read_old(file)


def _read_zip(file: RangedFile, prefix: str, *, deflated: bool) -> TorchObject:
    directory = read_directory(file)
    entry = directory.get("data.pkl")
    if entry is None:
        raise IncompatibleCheckpointError(f"{file.label} is a zip file without 'data.pkl', which torch.save writes")
    pickle = read_member(file, locate(file, [entry], deflated=True)[entry.filename])
    if order := directory.get("byteorder"):
        text = read_member(file, locate(file, [order], deflated=True)[order.filename]) if order.file_size < 16 else b""
        if text != b"little":
            raise IncompatibleCheckpointError(f"{file.label} has the byte order {text!r}, only 'little' is supported")
    refs: dict[str, StorageRef] = {}
    value, _ = unpickle(file, pickle, 0, refs, prefix)
    wanted = {}
    for key in refs:
        if (found := directory.get(f"data/{key.removeprefix(prefix)}")) is None:
            raise file.damaged(f"its pickle names the storage {key[:200]!r}, which it lacks")
        wanted[key] = found
    members = locate(file, wanted.values(), deflated=deflated)
    storages = {key: members[found.filename] for key, found in wanted.items()}
    for key, ref in refs.items():
        if storages[key].size != ref.nbytes:
            raise file.damaged(f"its storage {key!r} has {storages[key].size} bytes, its pickle says {ref.nbytes}")
    return TorchObject(value, storages)


def unpickle(
    file: RangedFile, data: bytes, start: int, refs: dict[str, StorageRef], prefix: str = ""
) -> tuple[Any, int]:
    """Return the value of a pickle and its end; add its storages, each at its full size, to `refs`."""

    def persistent(identity: object) -> StorageRef | GlobalName:
        if (
            type(identity) is tuple
            and len(identity) == 4
            and identity[0] == "module"
            and type(identity[1]) is GlobalName
        ):
            return identity[1]  # the class of a module in an old file, of which the others are the source code
        ref = storage_of(identity, prefix)
        known = refs.setdefault(ref.key, ref)
        if known.nbytes != ref.nbytes:
            raise ValueError(f"two sizes of storage {ref.key!r}")
        return ref

    label = file.label
    return read_pickle(data, file=label, meanings=_MEANINGS, constants=CONSTANTS, persistent=persistent, start=start)


def _read_old(file: RangedFile) -> TorchObject:
    """Read a file as torch before 1.6 wrote it: five pickles, then the number of elements and the bytes of each storage."""
    length = min(file.size, _FIRST_READ)
    while True:
        data = file.read(0, length)
        refs: dict[str, StorageRef] = {}
        try:
            value, keys, at = _old_pickles(file, data, refs)
            break
        except PickleEndsError:
            if length == file.size or length >= MAX_PICKLE_BYTES:
                raise
            length = min(file.size, 4 * length)
    if type(keys) is not list or set(map(type, keys)) - {str} or len(set(keys)) != len(keys):
        raise file.damaged("its list of storages is none")
    if missing := refs.keys() - set(keys):
        raise file.damaged(f"its pickle names the storage {min(missing)[:200]!r}, which it lacks")
    storages = {}
    counts = {}
    for key in keys:
        if key not in refs:
            raise file.damaged(f"its storage {key[:200]!r} has no size")
        ref = refs[key]
        counts[at] = ref.nbytes // itemsize(ref.dtype)
        storages[key] = StoredMember(at + 8, ref.nbytes, None)
        at += 8 + ref.nbytes
        if at > file.size:
            raise file.damaged(f"it has {file.size} bytes, and its storages end at byte {at}")
    if at != file.size:
        raise file.damaged(f"{file.size - at} bytes follow its last storage")
    for (place, count), text in zip(counts.items(), file.read_many([(place, 8) for place in counts]), strict=True):
        if struct.unpack("<q", text) != (count,):
            raise file.damaged(f"the storage at byte {place} has {struct.unpack('<q', text)[0]} elements, not {count}")
    return TorchObject(value, storages)


def _old_pickles(file: RangedFile, data: bytes, refs: dict[str, StorageRef]) -> tuple[Any, Any, int]:
    try:
        magic, at = unpickle(file, data, 0, refs)
    except CorruptCheckpointError as error:
        if isinstance(error, PickleEndsError) and len(data) < file.size:
            raise
        raise IncompatibleCheckpointError(f"{file.label} is no file of torch.save: {error}") from None
    if magic != _MAGIC:
        raise IncompatibleCheckpointError(f"{file.label} is no file of torch.save: it is another pickle")
    protocol, at = unpickle(file, data, at, refs)
    system, at = unpickle(file, data, at, refs)
    if protocol != _PROTOCOL:
        raise IncompatibleCheckpointError(f"{file.label} has version {protocol!r} of the old format, not {_PROTOCOL}")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise IncompatibleCheckpointError(f"{file.label} was written with another byte order than little endian")
    value, at = unpickle(file, data, at, refs)
    keys, at = unpickle(file, data, at, refs)
    return value, keys, at
