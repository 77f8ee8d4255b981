"""Read folders of Hugging Face as they lie: weights in one file or several with an index, as safetensors or of torch.save.

DCP writes such folders, too: each rank's file then says at which offsets its pieces lie, and `global_shape` of the whole
tensor only in new versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile, open_file
from bytecheckpoint.formats.foreign import FileSums, ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.torch_save import read_object
from bytecheckpoint.representation.header_reader import StorageHeader, header_bytes_needed, parse_header
from bytecheckpoint.storage import Storage

__all__ = ["SAFETENSORS", "read_huggingface", "weight_files"]

SAFETENSORS: Final = ".safetensors"
#: Names of the only file of a folder, those of most folders first.
_SINGLE: Final = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_INDEX = re.compile(r"[^/]+\.(safetensors|bin)\.index\.json")
_SHARDING: Final = "DCP_SHARDING_INFO"
#: Bytes of a safetensors file that are read first; few headers are longer.
_FIRST_READ: Final = 64 << 10
_MOST_JSON: Final = 64 << 20

_T = TypeVar("_T")
_Dims = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...]


class _WeightIndex(msgspec.Struct):
    """The index of several files: name of the file of each tensor."""

    weight_map: dict[str, str]


class _TensorPiece(msgspec.Struct):
    """The place of a piece in its tensor, as DCP says it."""

    saved_offsets: _Dims
    global_shape: _Dims | None = None


def weight_files(names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the index of a folder, None without one, and the files of weights if they need no index.

    Raises:
        IncompatibleCheckpointError: there are several sets of weights, and nothing says which one is meant.
    """
    for name in _SINGLE:
        if name in names:
            return None, [name]
        index = name.partition(".")[0] + "." + name.rpartition(".")[2] + ".index.json"
        if index in names:
            return index, []
    found = [name for name in names if name.endswith(SAFETENSORS) and "/" not in name]
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    if len(indexes) > 1:
        raise IncompatibleCheckpointError(f"it has several indexes ({', '.join(indexes[:5])}): keep one of them")
    return (indexes[0], []) if indexes else (None, found)


def read_huggingface(storage: Storage, name: str | None = None) -> ForeignCheckpoint:
    """Read the weights of a folder, as the state "model".

    Args:
        storage: the folder.
        name: the only file to read; None: those of the folder.

    Raises:
        CheckpointNotFoundError: the folder has no weights, or lacks a file that its index names.
        CorruptCheckpointError: a file is damaged, or differs from the index.
        IncompatibleCheckpointError: the folder holds what this package does not read; the message says what.
    """
    sizes = dict(storage.list())
    try:
        index, names = weight_files(list(sizes)) if name is None else (None, [name])
    except IncompatibleCheckpointError as error:
        raise IncompatibleCheckpointError(f"{storage.url}: {error}") from None
    wanted: dict[str, str] | None = None
    if index is not None:
        wanted = _json(storage, index, _WeightIndex).weight_map
        names = sorted(set(wanted.values()))
        if missing := [found for found in names if found not in sizes]:
            raise CheckpointNotFoundError(f"{storage.url} lacks the file {missing[0]!r}, which {index} names")
    if not names:
        raise CheckpointNotFoundError(f"{storage.url} has no weights")
    reader = _FolderReader(wanted)
    others = [found for found in sizes if found.endswith((".pt", ".pth")) and found not in names]
    if others and name is None:
        reader.notes.append(
            f"{', '.join(others[:5])}: not read, since the weights lie beside; give one of them by name"
        )
    for found in names:
        with open_file(storage, found) as file:
            reader.add(file)
    info: dict[str, Any] = {}
    if "config.json" in sizes:
        info["config"] = _json(storage, "config.json", dict[str, Any])
    return reader.checkpoint(f"{storage.url}/{index or names[0]}", info)


def _json(storage: Storage, name: str, kind: type[_T]) -> _T:
    with open_file(storage, name) as file:
        if file.size > _MOST_JSON:
            raise IncompatibleCheckpointError(f"{file.label} has {file.size} bytes, more than {_MOST_JSON}")
        try:
            return msgspec.json.decode(file.read(0, file.size), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise file.damaged(f"it cannot be read ({error})") from error


class _FolderReader:
    """The reader of the files of one folder.

    Attributes:
        wanted: file of each tensor by the index; None without an index.
        notes: facts that a user should know.
    """

    def __init__(self, wanted: Mapping[str, str] | None) -> None:
        self.wanted = wanted
        self._columns = ForeignColumns()
        self._numbers: dict[str, int] = {}
        self._volumes: dict[int, int] = {}
        self._sums: list[tuple[int, int, int, int]] = []
        self.notes: list[str] = []
        self._guessed: set[int] = set()

    def add(self, file: RangedFile) -> None:
        """Add the tensors of a file that the index has there, or all without an index."""
        if file.name.endswith(SAFETENSORS):
            self._add_safetensors(file)
        else:
            self._add_torch(file)

    def checkpoint(self, label: str, info: Mapping[str, Any]) -> ForeignCheckpoint:
        """Return the checkpoint, when all tensors are whole.

        Args:
            label: address of the index or of the only file, for messages.
            info: facts about the checkpoint.
        """
        columns = self._columns
        if missing := sorted(
            (self.wanted or {}).keys() - self._numbers.keys() - columns.aliases.get("model", {}).keys()
        ):
            text = f"{label} names {missing[0]!r} in {(self.wanted or {})[missing[0]]!r}, which lacks it"
            raise CheckpointNotFoundError(text)
        for name, number in self._numbers.items():
            whole = math.prod(columns.shapes[number])
            if self._volumes[number] != whole:
                text = f"the parts of {name!r} have {self._volumes[number]} of {whole} elements"
                raise IncompatibleCheckpointError(f"{label}: {text}: a file of another rank lacks, or was saved twice")
        if self._guessed:
            names = sorted(columns.fqns[number] for number in self._guessed)
            info = {**info, "guessed_shapes": names}
            what = "no file says the whole shape, so the lack of a tail does not show"
            self.notes.append(f"{len(names)} tensors, such as {names[0]!r}: {what}")
        return ForeignCheckpoint("huggingface", columns, {}, self.notes, sums=FileSums.of(self._sums), facts=info)

    def _number(self, file: RangedFile, name: str, dtype: str, shape: tuple[int, ...], whole: bool) -> int:
        """Return the number of a tensor, which is new if it is whole."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._columns.add_tensor("model", name, dtype, shape)
            self._volumes[number] = 0
        elif whole or self._columns.dtypes[number] != dtype:
            raise file.damaged(f"another file has the tensor {name!r}, too")
        return number

    def _expected(self, file: RangedFile, name: str) -> bool:
        """Return whether the tensor of a file is the one that the index means."""
        if self.wanted is None or self.wanted.get(name) == file.name:
            return True
        if name not in self.wanted and len(self.notes) < 100:
            self.notes.append(f"{name}: {file.name} has it, the index does not")
        return False

    def _add_safetensors(self, file: RangedFile) -> None:
        header = _header(file)
        columns = self._columns
        number = columns.add_file(file.name, file.size)
        pieces = _pieces(file, header)
        for entry in header.entries:
            name, shape = entry.key.fqn, entry.global_shape
            if not self._expected(file, name):
                continue
            piece = pieces.get(name) if pieces is not None else None
            if pieces is None:
                tensor = self._number(file, name, entry.dtype, shape, True)
                offsets = (0,) * len(shape)
            elif piece is None or len(piece.saved_offsets) != len(shape):
                raise file.damaged(f"its {_SHARDING} does not describe {name!r}")
            else:
                offsets = piece.saved_offsets
                ends = tuple(o + n for o, n in zip(offsets, shape, strict=True))
                tensor = self._number(file, name, entry.dtype, piece.global_shape or ends, False)
                self._widen(file, tensor, ends, piece.global_shape)
            self._volumes[tensor] += math.prod(shape)
            begin = header.data_offset + entry.byte_offset
            columns.rows.append((tensor, offsets, shape, number, begin, _row_major(shape)))
        for name, kept in header.metadata.items():  # by safetensors.torch.save_model, for tied tensors
            if kept in self._numbers and name not in self._numbers and name != _SHARDING:
                columns.aliases.setdefault("model", {})[name] = kept

    def _widen(self, file: RangedFile, tensor: int, ends: tuple[int, ...], stated: tuple[int, ...] | None) -> None:
        """Take the end of a piece into the shape of its tensor, or compare it with the stated shape."""
        shape = self._columns.shapes[tensor]
        if len(shape) != len(ends):
            raise file.damaged(f"the pieces of {self._columns.fqns[tensor]!r} have different numbers of dimensions")
        if stated is None:
            self._guessed.add(tensor)
            self._columns.shapes[tensor] = tuple(map(max, shape, ends))
        elif stated != shape or any(end > size for end, size in zip(ends, stated, strict=True)):
            raise file.damaged(f"a piece of {self._columns.fqns[tensor]!r} lies outside of its shape {list(shape)}")

    def _add_torch(self, file: RangedFile) -> None:
        columns = self._columns
        number = columns.add_file(file.name, file.size)
        found = read_object(file, f"{number}/")
        value = found.value
        if not isinstance(value, dict) or not all(type(name) is str for name in value):
            raise IncompatibleCheckpointError(f"{file.label} is no dict of tensors by name")
        tensors = {
            name: tensor
            for name, tensor in value.items()
            if isinstance(tensor, StoredTensor) and self._expected(file, name)
        }
        places = {key: (number, member.offset) for key, member in found.storages.items()}
        self._sums += [(number, m.offset, m.size, m.crc) for m in found.storages.values() if m.crc is not None]
        tied = columns.aliases.get("model", {})
        if twice := sorted(tensors.keys() & (self._numbers.keys() | tied.keys())):
            raise file.damaged(f"another file has the tensor {twice[0]!r}, too")
        before = len(columns.fqns)
        columns.add_whole("model", tensors, places)
        for new in range(before, len(columns.fqns)):
            self._numbers[columns.fqns[new]] = new
            self._volumes[new] = math.prod(columns.shapes[new])


def _pieces(file: RangedFile, header: StorageHeader) -> dict[str, _TensorPiece] | None:
    """Return the places of the pieces in a file of DCP; None for a file of whole tensors."""
    text = header.metadata.get(_SHARDING)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, _TensorPiece])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise file.damaged(f"its {_SHARDING} cannot be read ({error})") from error


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(shape[k + 1], 1)
    return tuple(strides)


def _header(file: RangedFile) -> StorageHeader:
    first = file.read(0, min(file.size, _FIRST_READ))
    needed = header_bytes_needed(first[:8], file=file.label)
    if needed > len(first) and needed <= file.size:
        first += file.read(len(first), needed - len(first))
    header = parse_header(first[:needed], file=file.label)
    if not header.foreign:
        raise IncompatibleCheckpointError(
            f"{file.label} is a file of this package: open the checkpoint that it belongs to"
        )
    if header.data_offset + header.data_length != file.size:
        raise file.damaged(f"it has {file.size} bytes, and its header says {header.data_offset + header.data_length}")
    return header
