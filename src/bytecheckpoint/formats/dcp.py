"""Read checkpoints of PyTorch DCP as they lie: `.metadata` says which bytes are an item, each item is a file of torch.save.

The strides of a tensor are in its item only: DCP keeps a dense tensor as it is, and `.metadata` has no strides. So the head
of each item is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.alike_objects import column
from bytecheckpoint.formats.dcp_items import ItemReader, checked_boxes, decompressed, same_items
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.files import RangedFile, damage, open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import CONSTANTS, MEANINGS, dtype_name
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.formats.torch_save import numbered
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.formats.unpickling import MAX_PICKLE_BYTES, read_pickle
from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import row_order
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.representation.values.tree import MAX_DEPTH, TensorRef, key_of_path
from bytecheckpoint.storage import Storage

__all__ = [
    "METADATA",
    "DcpContent",
    "metadata_files",
    "place_of",
    "read_content",
    "read_dcp",
    "trees_of",
    "with_states",
]

METADATA: Final = ".metadata"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_ZSTD: Final = "stream.zstd"
#: Bytes of an item beside those of its tensor.
_MOST_BESIDE: Final = 1 << 20
#: States of a tensor or value that lies at the top of the saved dict.
_TOP, _REST = "model", "extra_states"
_WHOLE_STATES = ("optimizer", "optim")
#: States of folders of Lightning: the model, and the first optimizer, which is often the only one.
_OF_LIGHTNING: Final = "state_dict", "optimizer_0"


def metadata_files(names: list[str]) -> list[str]:
    """Return the files of metadata among the names of a folder: one, or one of each rank that saved by itself."""
    ranks = sorted((int(found[1]), name) for name in names if (found := _OF_RANK.fullmatch(name)))
    return [METADATA] if METADATA in names else [name for _, name in ranks]


def place_of(
    name: str, path: tuple[Any, ...] | None, nested: Container[Any], *, is_tensor: bool
) -> tuple[str, tuple[Any, ...]]:
    """Return the state of a name of DCP, and its path inside of the state.

    Args:
        name: name.
        path: path in the saved dict, if it is known.
        nested: first steps of the paths with several steps: the states of the saved dict.
        is_tensor: True for a tensor, False for a plain value.
    """
    if path is not None and len(path) > 1 and type(path[0]) is str:
        return path[0], path[1:]
    if path is None and (first := name.partition("."))[2] and first[0] in _WHOLE_STATES:
        return first[0], (first[2],)
    return (_TOP if is_tensor and _TOP not in nested else _REST), (name,)


def trees_of(items: Iterable[tuple[str, tuple[Any, ...], object]]) -> dict[str, Any]:
    """Return the nested value of each state, of (state, path, value).

    Dicts with the keys 0 to n - 1 are lists, but for the state of an optimizer's parameters, which may have any numbers.

    Raises:
        ValueError: two values have one path.
    """
    trees: dict[str, Any] = {}
    for state, path, value in items:
        _set(trees.setdefault(state, {}), path, value)
    return {state: _as_optimizer(found) or _with_lists(found) for state, found in trees.items()}


#: Place of an item: file, first byte, length, and the rank whose metadata say so.
_Place = tuple[str, int, int, int]


@dataclass
class _Described:
    """A tensor or plain value, as the metadata of all ranks describe it.

    Attributes:
        size: whole shape; None for a plain value.
        dtype: dtype of a tensor.
        requires_grad: flag of the tensor.
        chunks: extent of each stored box, by its offsets.
        stored: places of the items, by the offsets of their boxes.
        rivals: places of all items of the boxes that several ranks have stored.
    """

    size: tuple[int, ...] | None
    dtype: str = ""
    requires_grad: bool = False
    chunks: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    stored: dict[Any, _Place] = field(default_factory=dict)
    rivals: dict[Any, list[_Place]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True for a plain value, and for a tensor whose boxes are all of it."""
        return self.size is None or all(extent == self.size for extent in self.chunks.values())


@dataclass
class _JoinedMetadata:
    """The metadata of all ranks.

    Attributes:
        tensors: descriptions of the tensors, by name.
        values: descriptions of the plain values, by name.
        paths: path of each name in the saved dict.
        compressed: items that zstd has compressed, each by its tensor or value and the offsets of its box.
        notes: facts that a user should know.
        nbytes: length of all pickles.
    """

    tensors: dict[str, _Described] = field(default_factory=dict)
    values: dict[str, _Described] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    compressed: list[tuple[_Described, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    nbytes: int = 0

    def add(self, state: Any, rank: int = 0) -> None:
        """Add the metadata of one rank, or of all."""
        for name, described in state["state_dict_metadata"].items():
            facts = described.state
            if described.target.name != "TensorStorageMetadata":
                self.values.setdefault(name, _Described(None))
                continue
            dtype, layout, requires_grad = facts["properties"].state[:3]
            name_of_dtype = dtype_name(dtype)
            if layout != "torch.strided":
                raise IncompatibleCheckpointError(f"tensor {name!r} has the layout {layout!r}, which is not supported")
            tensor = self.tensors.setdefault(name, _Described(facts["size"], name_of_dtype, requires_grad is True))
            if (tensor.size, tensor.dtype) != (facts["size"], name_of_dtype):
                raise ValueError(f"two shapes or dtypes of {name!r}")
            for chunks in facts["chunks"]:
                tensor.chunks.update(zip(column(chunks, "offsets"), column(chunks, "sizes"), strict=True))
        for indices, infos in state["storage_data"].items():
            names, offsets = column(indices, "fqn"), column(indices, "offset")
            columns = (column(infos, name) for name in ("relative_path", "offset", "length"))
            places = zip(*columns, [rank] * len(names), strict=True)
            for name, offset, place, what in zip(
                names, offsets, places, column(infos, "transform_descriptors"), strict=True
            ):
                described = self.tensors.get(name) or self.values[name]
                if (first := described.stored.setdefault(offset, place)) is not place:
                    described.rivals.setdefault(offset, [first]).append(place)
                if what:
                    if [text.partition("/")[0] for text in what] != [_ZSTD]:
                        raise IncompatibleCheckpointError(f"{name!r} is stored through {what}, which is not supported")
                    if first is place:
                        self.compressed.append((described, offset))
        paths = state.get("planner_data")
        for name, path in paths.items() if type(paths) is dict else ():
            if type(path) is not tuple or not 0 < len(path) < MAX_DEPTH or not {type(s) for s in path} <= {str, int}:
                raise ValueError(f"a path of {name!r}")
            self.paths[name] = path

    def files(self) -> Iterator[str]:
        """Yield the files of all items."""
        for described in (*self.tensors.values(), *self.values.values()):
            for places in (described.stored.values(), *described.rivals.values()):
                yield from (place[0] for place in places)

    def settle(self, storage: Storage) -> None:
        """Keep one of several items that are alike, and those of whole tensors that differ for each rank.

        Args:
            storage: folder of the checkpoint, which has the files of all items.

        Raises:
            IncompatibleCheckpointError: ranks have stored one part of a tensor differently.
        """
        compressed = {(id(described), offset) for described, offset in self.compressed}
        for name, described in (*self.tensors.items(), *self.values.items()):
            for offset, items in [*described.rivals.items()]:
                if same_items(storage, [place[:3] for place in items]):
                    del described.rivals[offset]
                elif described.size is None:
                    self.notes.append(
                        f"ranks have stored different values of {name!r}: that of the lowest rank is kept"
                    )
                elif not described.whole or (id(described), offset) in compressed:
                    ranks = [place[3] for place in items]
                    raise IncompatibleCheckpointError(
                        f"ranks {ranks} have stored the part of {name!r} at {list(offset)} differently: files of several "
                        "saves may lie in one folder"
                    )

    @lazy
    def _nested(self) -> set[Any]:
        """The first steps of the paths with several steps: the states of the saved dict."""
        return {path[0] for path in self.paths.values() if len(path) > 1}

    def place(self, name: str) -> tuple[str, tuple[Any, ...]]:
        """Return the state of a name, and its path inside of the state."""
        state, path = place_of(name, self.paths.get(name), self._states, is_tensor=name in self.tensors)
        return self._usual.get(state, state), path

    @lazy
    def _states(self) -> set[Any]:
        """The states of the saved dict, also by their usual names."""
        return self._nested | {*self._usual.values()}

    @lazy
    def _usual(self) -> dict[str, str]:
        """The usual names of the states that Lightning calls otherwise."""
        found, (model, optimizer) = self._nested, _OF_LIGHTNING
        if model not in found or _TOP in found:
            return {}
        is_only = optimizer in found and not found & {"optimizer", "optimizer_1"}
        return {model: _TOP, **({optimizer: "optimizer"} if is_only else {})}


@dataclass
class DcpContent:
    """The content of a checkpoint of DCP, before it is given the form of states.

    Attributes:
        columns: the tensors and files.
        rows: the rows of the tensors.
        names: name of each tensor in the metadata.
        values: plain values by name.
        metadata: the metadata.
        file: first file of metadata, closed, for messages.
        sums: places of the items, as in `ForeignCheckpoint`.
        made: contents of the items that are compressed, by the names of the files that show them.
        beside: files of torch.save in the folder that are not DCP's.
    """

    columns: ForeignColumns
    rows: RowColumns
    names: list[str]
    values: dict[str, Any]
    metadata: _JoinedMetadata
    file: RangedFile
    sums: Int64s
    made: dict[str, Decoded] = field(default_factory=dict)
    beside: Sequence[str] = ()


def read_dcp(storage: Storage) -> ForeignCheckpoint:
    """Read a checkpoint of DCP."""
    return with_states(storage, read_content(storage))


def with_states(storage: Storage, content: DcpContent) -> ForeignCheckpoint:
    """Return the content of a checkpoint of DCP in the form of states."""
    tree = Tree(storage.url, content.metadata.nbytes)
    with damage(content.file, "DCP"):
        values = _values(content, tree)
    tree.notes += content.metadata.notes
    if content.beside:  # of Lightning, say
        tree.notes.append(f"{listed(content.beside)}: not read, since DCP's files lie beside; give one by name")
    return ForeignCheckpoint("dcp", content.columns, values, tree.notes, content.rows, content.sums, made=content.made)


def read_content(storage: Storage) -> DcpContent:
    """Read the metadata, the heads and the plain values of a checkpoint of DCP; see `read_dcp`."""
    sizes = dict(storage.list())
    names = metadata_files(list(sizes))
    if not names:
        raise CheckpointNotFoundError(f"{storage.url} holds no {METADATA} of DCP")
    metadata, files = _JoinedMetadata(), list[RangedFile]()
    for rank, name in enumerate(names):
        with open_file(storage, name) as file:
            files.append(file)
            if file.size > MAX_PICKLE_BYTES:
                raise IncompatibleCheckpointError(f"{file.label} has {file.size} bytes, more than {MAX_PICKLE_BYTES}")
            data = file.read(0, file.size)
            metadata.nbytes += file.size
            with damage(file, "DCP"):
                value: Any = read_pickle(data, file=file.label, meanings=MEANINGS, constants=CONSTANTS, alike=True)[0]
                metadata.add(value.state, rank)
                del value, data
    with damage(files[0], "DCP"):
        # Before any item is read: the names come from a pickle, and may lead out of the folder.
        for missing in (name for name in dict.fromkeys(metadata.files()) if name not in sizes):
            raise CorruptCheckpointError(f"{storage.url} lacks {missing!r}, which the metadata names", file=missing)
        metadata.settle(storage)
        return _content(storage, files[0], sizes, metadata)


def _content(storage: Storage, file: RangedFile, sizes: Mapping[str, int], metadata: _JoinedMetadata) -> DcpContent:
    """Read the heads and plain values that the metadata describe; `file` stands in errors."""
    columns, made = ForeignColumns(), _decompressed(storage, metadata)
    tensor: list[int] = []
    offsets: list[tuple[int, ...]] = []
    lengths: list[tuple[int, ...]] = []
    stored_at: list[_Place] = []
    tensors: list[str] = []
    for name, found in metadata.tensors.items():
        state, path = metadata.place(name)
        if found.chunks.keys() - found.stored.keys():
            raise ValueError(f"no file holds a part of {name!r}")
        # Whole tensors that differ between ranks are one of each rank.
        for items in [{at: place} for at, places in found.rivals.items() for place in places] or [found.stored]:
            fqn, shape = key_of_path(path), tuple(found.size or ())
            number = columns.add_tensor(state, fqn, found.dtype, shape, found.requires_grad)
            if found.rivals:
                columns.owners[number] = next(iter(items.values()))[3]
            tensors.append(name)
            tensor += [number] * len(items)
            offsets += items
            lengths += [found.chunks[offset] for offset in items]
            stored_at += items.values()
    if len({(key, columns.owners.get(number)) for number, key in enumerate(columns.keys)}) != len(columns.keys):
        raise ValueError("two tensors have one name")
    names, begins, lengths_in_file, _ = zip(*stored_at, strict=True) if stored_at else ((),) * 4
    boxes = checked_boxes(columns, tensor, offsets, lengths)
    values = [found.stored[None] for found in metadata.values.values()]
    numbers: dict[str, int] = {}
    for name in dict.fromkeys([*names, *(place[0] for place in values)]):
        numbers[name] = columns.add_file(name, made[name].size if name in made else sizes[name])
    at = np.fromiter(map(numbers.__getitem__, names), np.int32, len(names))
    begin, size = np.array(begins, np.int64), np.array(lengths_in_file, np.int64)
    if (order := row_order(boxes)) is not None:
        boxes, at, begin, size = boxes.take(order), at[order], begin[order], size[order]
    places = [(numbers[name], first, count) for name, first, count, _ in values]
    reader = ItemReader(storage, columns, made)
    rows = reader.rows(boxes, at, begin, size)
    plain = dict(zip(metadata.values, reader.values(places), strict=True))
    archives = np.concatenate([np.stack([at, begin, size], axis=1), np.array(places, np.int64).reshape(-1, 3)])
    stored = np.array([one.name not in made for one in columns.files], bool)
    sums = np.pad(archives[stored[archives[:, 0]]], ((0, 0), (0, 1)), constant_values=-1)
    beside = [
        name for name in sizes if name.endswith((".pt", ".pth", ".bin")) and "/" not in name and name not in numbers
    ]
    return DcpContent(columns, rows, tensors, plain, metadata, file, sums, made, beside)


def _decompressed(storage: Storage, metadata: _JoinedMetadata) -> dict[str, Decoded]:
    """Return the contents of the compressed items, by names of files in which they are the items from now on."""
    places = []
    for one, offset in metadata.compressed:
        most = MAX_PICKLE_BYTES
        if one.size is not None:
            most = _MOST_BESIDE + math.prod(one.chunks[offset]) * itemsize(one.dtype)
        places.append((*one.stored[offset][:3], most))
    contents = decompressed(storage, places)
    made: dict[str, Decoded] = {}
    for number, ((one, offset), content) in enumerate(zip(metadata.compressed, contents, strict=True)):
        name = f"{VALUES_NAME}-item-{number}"
        made[name] = content
        one.stored[offset] = name, 0, content.size, one.stored[offset][3]
    return made


def _values(content: DcpContent, tree: Tree) -> dict[str, bytes]:
    """Return the encoded tree of each state, with references to its tensors."""
    columns, place = content.columns, content.metadata.place
    found = {**dict(zip(content.names, (TensorRef(key.fqn) for key in columns.keys), strict=True)), **content.values}
    return columns.add_states(trees_of((*place(name), value) for name, value in found.items()), tree)


def _set(tree: dict[Any, Any], path: tuple[Any, ...], value: object) -> None:
    """Put a value at its path, in dicts that are made where they lack."""
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    if path[-1] in tree:
        raise ValueError(f"two values at {key_of_path(path)!r}")
    tree[path[-1]] = value


def _as_optimizer(tree: Any) -> dict[str, Any] | None:
    """Return the state_dict of an optimizer that a tree is; None if it is none."""
    if type(tree) is not dict or "param_groups" not in tree:
        return None
    if "state" not in tree and len(tree) == 1:  # of an optimizer without state: DCP leaves out empty dicts
        tree = {"state": {}, **tree}
    if type(tree.get("state")) is not dict:
        return None
    found = {key: _with_lists(value) for key, value in tree.items() if key != "state"}
    state = numbered(tree["state"], found["param_groups"])
    found["state"] = {p: _with_lists(slots) for p, slots in state.items()}
    return {key: found[key] for key in tree}


def _with_lists(tree: Any) -> Any:
    """Return a tree in which dicts with the keys 0 to n - 1 are lists: DCP's other keys are strings."""
    if type(tree) is not dict:
        return tree
    content = {key: _with_lists(value) for key, value in tree.items()}
    if content and all(type(key) is int for key in content):
        return [content[key] for key in sorted(content)]
    return content
