"""Read folders of Hugging Face as they lie: weights in one file or several with an index, as safetensors or of torch.save.

DCP writes such folders, too: each rank's file then says at which offsets its pieces lie, and `global_shape` of the whole
tensor only in new versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from operator import add
from typing import Annotated, Any, Final

import msgspec

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.files import RangedFile, open_file, refuse_pointer
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import StorageRef, StoredTensor
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.representation.boxes import row_major_of
from bytecheckpoint.representation.header_reader import StorageHeader, header_bytes_needed, parse_header
from bytecheckpoint.representation.names import view_generation_of
from bytecheckpoint.storage import Storage

__all__ = ["NUMBERED_FILE", "SAFETENSORS", "read_huggingface", "safetensors_header", "weight_files"]

SAFETENSORS: Final = ".safetensors"
#: Names of the only file of a folder, those of most folders first.
_SINGLE: Final = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_INDEX = re.compile(r"[^/]+\.(safetensors|bin)\.index\.json")
NUMBERED_FILE: Final = re.compile(r"([^/]+)_(0|[1-9]\d{0,6})\.(?:pt|safetensors)")
"""Usual name of a rank's file of torch_checkpointing: state, rank."""
#: Name of one of several files; those of DCP have the number of the rank in front.
_OF_SEVERAL = re.compile(r"(?:shard-\d+-)?(.*)-(\d{1,9})-of-(\d{1,9})\.safetensors")
#: Files in which a hub has the same weights once more.
_SAME_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_SHARDING: Final = "DCP_SHARDING_INFO"
#: Bytes of a safetensors file that are read first; few headers are longer.
_FIRST_READ: Final = 64 << 10

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
    # Without an index, files of a step's view are what a kill or a removal has left.
    found = [name for name in found if view_generation_of(name) is None]
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    if len(indexes) > 1:
        raise IncompatibleCheckpointError(f"it has several indexes ({', '.join(indexes[:5])}): keep one of them")
    return (indexes[0], []) if indexes else (None, found)


def read_huggingface(storage: Storage, name: str | None = None) -> ForeignCheckpoint:
    """Read the weights of a folder, as the state "model".

    Args:
        storage: the folder.
        name: the only file to read; None: those of the folder.
    """
    sizes = dict(storage.list())
    try:
        index, names = weight_files(list(sizes)) if name is None else (None, [name])
    except IncompatibleCheckpointError as error:
        raise IncompatibleCheckpointError(f"{storage.url}: {error}") from None
    wanted: dict[str, str] | None = None
    if index is not None:
        with open_file(storage, index) as file:
            wanted = file.json(_WeightIndex).weight_map
        names = sorted(set(wanted.values()))
        if missing := [found for found in names if found not in sizes]:
            raise CheckpointNotFoundError(f"{storage.url} lacks the file {missing[0]!r}, which {index} names")
    if not names:
        raise CheckpointNotFoundError(f"{storage.url} has no weights")
    if wanted is None and name is None:
        _check_numbers(storage, names)
    reader = _FolderReader(storage, wanted)
    # Other safetensors may be those of an adapter, or of another save.
    others = [
        found
        for found in sizes
        if found not in names
        and (found.endswith((".pt", ".pth")) or (found.endswith((SAFETENSORS, ".bin")) and "/" not in found))
        and not _SAME_WEIGHTS.fullmatch(found)
        and view_generation_of(found) is None
    ]
    facts: dict[str, Any] = {}
    if others and name is None:
        text = f"{', '.join(others[:5])}: not read, since the weights lie beside; give one of them by name"
        reader.notes.append(text)
        facts["left_out"] = [text]
    for found in names:
        reader.add(found)
    if "config.json" in sizes:
        with open_file(storage, "config.json") as file:
            facts["config"] = file.json(dict[str, Any])
    return reader.checkpoint(f"{storage.url}/{index or names[0]}", facts)


def _check_numbers(storage: Storage, names: Sequence[str]) -> None:
    """Refuse files "model-00001-of-00003.safetensors" of which some lack, where no index says which there are."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := _OF_SEVERAL.fullmatch(name):
            numbers.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    for (of, count), have in numbers.items():
        if len(have) < count:
            raise CheckpointNotFoundError(
                f"{storage.url} has {len(have)} of the {count} files '{of}-...-of-{count:05}.safetensors', and no index"
            )


class _FolderReader:
    """The reader of the files of one folder.

    Attributes:
        wanted: file of each tensor by the index; None without an index.
        notes: facts that a user should know.
    """

    def __init__(self, storage: Storage, wanted: Mapping[str, str] | None) -> None:
        self._storage, self.wanted = storage, wanted
        self.notes: list[str] = []
        self._columns = ForeignColumns()
        self._files = TorchFiles(storage, self._columns)
        self._names: set[str] = set()  # of whole tensors
        self._pieces: dict[str, list[tuple[_TensorPiece, StoredTensor]]] = {}

    def add(self, name: str) -> None:
        """Add the tensors of a file that the index has there, or all without an index."""
        if name.endswith(SAFETENSORS):
            with open_file(self._storage, name) as file:
                self._add_safetensors(file)
            return
        with self._files.open(name) as (file, value):
            if not isinstance(value, dict) or not all(type(key) is str for key in value):
                raise IncompatibleCheckpointError(f"{file.label} is no dict of tensors by name")
            tensors = {key: tensor for key, tensor in value.items() if isinstance(tensor, StoredTensor)}
            if others := sorted(value.keys() - tensors.keys()):
                self.notes.append(f"{file.name}: {listed(others)} not read, since only plain tensors are")
            self._add_whole(file, {key: tensor for key, tensor in tensors.items() if self._expected(file, key)})

    def checkpoint(self, label: str, facts: Mapping[str, Any]) -> ForeignCheckpoint:
        """Return the checkpoint, when all tensors are whole; `label` is the address of the files, for messages."""
        missing = (self.wanted or {}).keys() - self._names - self._pieces.keys()
        if self.wanted is not None and missing:
            text = f"{label} names {min(missing)!r} in {self.wanted[min(missing)]!r}, which lacks it"
            raise CheckpointNotFoundError(text)
        if not self._names and not self._pieces:
            raise IncompatibleCheckpointError(f"{label} has no tensors")
        for name, pieces in self._pieces.items():
            self._columns.add_sharded("model", _joined(label, name, pieces), label)
        guessed = sorted(n for n, pieces in self._pieces.items() if any(one.global_shape is None for one, _ in pieces))
        if guessed:
            facts = {**facts, "guessed_shapes": guessed}
            what = "no file says the whole shape, so the lack of a tail does not show"
            self.notes.append(f"{len(guessed)} tensors, such as {guessed[0]!r}: {what}")
        return ForeignCheckpoint("huggingface", self._columns, {}, self.notes, sums=self._files.sums(), facts=facts)

    def _expected(self, file: RangedFile, name: str) -> bool:
        """Return whether the tensor of a file is the one that the index means."""
        if self.wanted is None or self.wanted.get(name) == file.name:
            return True
        if name not in self.wanted and len(self.notes) < 100:
            self.notes.append(f"{name}: {file.name} has it, the index does not")
        return False

    def _add_safetensors(self, file: RangedFile) -> None:
        header, tensors = safetensors_header(file), {}
        self._columns.places[file.name] = self._columns.add_file(file.name, file.size), 0
        for entry in header.entries:
            if self._expected(file, entry.key.fqn):
                ref = StorageRef(file.name, entry.dtype, file.size, 0, file.size)
                shape, begin = entry.global_shape, header.data_offset + entry.byte_offset
                tensors[entry.key.fqn] = StoredTensor(ref, entry.dtype, begin, shape, row_major_of(shape))
        if (text := header.metadata.get(_SHARDING)) is None:
            self._add_whole(file, tensors)
        else:  # a file of DCP
            places = file.decoded_json(f"its {_SHARDING}", text, dict[str, _TensorPiece])
            self._refuse_twice(file, self._names & tensors.keys())
            for name, tensor in tensors.items():
                place = places.get(name)
                if place is None or len(place.saved_offsets) != len(tensor.shape):
                    raise file.damaged(f"its {_SHARDING} does not describe {name!r}")
                self._pieces.setdefault(name, []).append((place, tensor))
        for name, kept in header.metadata.items():  # by safetensors.torch.save_model, for tied tensors
            if kept in self._names and name not in self._names and name != _SHARDING:
                self._columns.aliases.setdefault("model", {})[name] = kept
                self._names.add(name)

    def _add_whole(self, file: RangedFile, tensors: Mapping[str, StoredTensor]) -> None:
        self._refuse_twice(file, tensors.keys() & (self._names | self._pieces.keys()))
        self._names |= tensors.keys()
        self._columns.add_whole("model", tensors)

    def _refuse_twice(self, file: RangedFile, names: Set[str]) -> None:
        if names and self.wanted is None and NUMBERED_FILE.fullmatch(file.name):
            raise IncompatibleCheckpointError(
                f"{file.label} and another file have the tensor {min(names)!r}: if they are parts of ranks, nothing here "
                "says their places. torch_checkpointing writes them to 'metadata.pkl' if the item has a resharder, "
                "its synchronous saver in the first step of a run only: a copy of that file serves all its steps"
            )
        if names:
            raise IncompatibleCheckpointError(
                f"{file.label} and another file have the tensor {min(names)!r}, and no index says which one counts: give "
                "one of the files, or move those of another variant away"
            )


def _joined(
    label: str, name: str, pieces: Sequence[tuple[_TensorPiece, StoredTensor]]
) -> list[dict[str, ShardedValue]]:
    """Return the pieces of a tensor with its shape: the stated one, or else that of the box around all pieces.

    Raises:
        IncompatibleCheckpointError: the pieces do not add up.
    """
    ends = [tuple(map(add, piece.saved_offsets, tensor.shape)) for piece, tensor in pieces]
    stated = [piece.global_shape for piece, _ in pieces if piece.global_shape is not None]
    shape = stated[0] if stated else tuple(map(max, zip(*ends, strict=False)))
    if (have := sum(math.prod(tensor.shape) for _, tensor in pieces)) != math.prod(shape):
        text = f"the parts of {name!r} have {have} of {math.prod(shape)} elements"
        raise IncompatibleCheckpointError(f"{label}: {text}: a file of another rank lacks, or was saved twice")
    return [
        {name: ShardedValue(tensor.dtype, piece.global_shape or shape, ((piece.saved_offsets, tensor),))}
        for piece, tensor in pieces
    ]


def safetensors_header(file: RangedFile) -> StorageHeader:
    """Return the header of a file of safetensors.

    Raises:
        CorruptCheckpointError: the file is damaged, or has another size than its header says.
        IncompatibleCheckpointError: it is a file of this package.
    """
    first = file.read(0, min(file.size, _FIRST_READ))
    refuse_pointer(file, first)
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
