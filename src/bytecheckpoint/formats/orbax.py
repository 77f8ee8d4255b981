"""Read checkpoints of Orbax (JAX) through tensorstore: chunks are decoded when they are read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from bytecheckpoint._distribution import install_command
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.meanings import StorageRef, StoredTensor
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.formats.torch_save import states_beside
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.representation.boxes import row_major_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.objects.aws import s3_access

__all__ = ["METADATA", "item_folder", "read_orbax"]

METADATA: Final = "_METADATA"
_STRINGS: Final = "_strings.json"
_MANIFEST: Final = "manifest.ocdbt"
_MOST_METADATA: Final = 256 << 20
_THREADS: Final = 8
_T = TypeVar("_T")


def item_folder(names: Sequence[str]) -> str | None:
    """Return the only folder of an item in a step of Orbax's manager, "" for the folder of an item itself, None if none."""
    items = [name.rpartition("/")[0] for name in names if name == METADATA or name.endswith(f"/{METADATA}")]
    return items[0] if len(items) == 1 else None


def read_orbax(storage: Storage, folder: str = "") -> ForeignCheckpoint:
    """Read a pytree of Orbax. Below "params", it is the state "model"; each other top-level dict is a state of its own."""
    reader = _Pytree(storage, folder)
    columns = ForeignColumns()
    tree = Tree(reader.label)
    states = states_beside(reader.tree(), "params")
    made = {f"{VALUES_NAME}-{key}": content for key, content in reader.contents.items()}
    for key, content in reader.contents.items():
        columns.places[key] = columns.add_file(f"{VALUES_NAME}-{key}", content.size), 0
    values = columns.add_states(states, tree, reader.label)
    notes = [*tree.notes, "nothing proves the bytes of Orbax's chunks, but what their compression notices"]
    return ForeignCheckpoint("orbax", columns, values, notes, made=made)


def _key_value_store(url: str) -> dict[str, Any]:
    """Return tensorstore's description of a folder.

    Raises:
        IncompatibleCheckpointError: tensorstore does not read such a storage.
    """
    scheme, _, place = url.partition("://")
    bucket, _, path = place.partition("/")
    path = f"{path.strip('/')}/" if path.strip("/") else ""
    if os.path.isdir(url):
        return {"driver": "file", "path": f"{os.path.normpath(url)}/"}
    if scheme in ("gs", "gcs"):
        return {"driver": "gcs", "bucket": bucket, "path": path}
    if scheme == "s3":
        access = s3_access(os.environ)
        given = {"endpoint": access.endpoint, "aws_region": access.region}
        return {"driver": "s3", "bucket": bucket, "path": path, **{key: value for key, value in given.items() if value}}
    raise IncompatibleCheckpointError(f"{url} is of Orbax, which is read on local file systems, S3 and GCS only")


class _Key(msgspec.Struct):
    """A step of a path; `key_type` 1 is the number of an item of a list."""

    key: str | int
    key_type: int


class _ValueKind(msgspec.Struct):
    """The kind of a value, as "jax.Array"."""

    value_type: str


class _Leaf(msgspec.Struct):
    """A value of the pytree."""

    key_metadata: list[_Key]
    value_metadata: _ValueKind

    @property
    def path(self) -> list[str]:
        return [str(one.key) for one in self.key_metadata]

    @property
    def kind(self) -> str:
        return self.value_metadata.value_type

    @property
    def name(self) -> str:
        """Name of its array in the key-value store."""
        return ".".join(self.path)


class _PytreeMetadata(msgspec.Struct):
    """The metadata of a pytree. If all arrays are stored, a chunk that is missing is lost; else one of zeros may be."""

    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None
    store_array_data_equal_to_fill_value: bool | None = None


class _Pytree:
    """The arrays of one pytree.

    Attributes:
        label: address of the folder, for messages.
        contents: the chunks that `tree` has found, by key.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        try:
            import tensorstore
        except ImportError:
            raise IncompatibleCheckpointError(
                f"{storage.url} is of Orbax, whose chunks tensorstore decodes: {install_command('orbax')}"
            ) from None
        self._ts = tensorstore
        self._storage, self._prefix = storage, f"{folder}/" if folder else ""
        self.label = f"{storage.url}/{folder}" if folder else storage.url
        self._base = _key_value_store(self.label)
        self.contents: dict[str, Decoded] = {}
        found = self._json(METADATA, _PytreeMetadata, None)
        stored_so = f"{self._prefix}{_MANIFEST}" in dict(storage.list())
        self._ocdbt = stored_so if found.use_ocdbt is None else found.use_ocdbt
        self._driver = "zarr3" if found.use_zarr3 else "zarr"
        self._all_stored = found.store_array_data_equal_to_fill_value is True
        self._leaves = list(found.tree_metadata.values())
        for key, leaf in found.tree_metadata.items():
            if not leaf.path or any(name in ("", "..") or "/" in name or "\0" in name for name in leaf.path):
                raise CorruptCheckpointError(f"{self.label}/{METADATA} has the key {key}", file=METADATA)

    def _json(self, name: str, kind: type[_T], default: _T | None) -> _T:
        try:
            if self._storage.stat(self._prefix + name).size > _MOST_METADATA:
                raise IncompatibleCheckpointError(f"{self.label}/{name} has more than {_MOST_METADATA} bytes")
            return msgspec.json.decode(self._storage.read(self._prefix + name), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if isinstance(error, FileNotFoundError) and default is not None:
                return default
            raise CorruptCheckpointError(f"{self.label}/{name} is damaged: {error}", file=name) from None

    def tree(self) -> object:
        """Return the pytree: `ShardedValue`s for arrays, plain values for scalars, strings and None."""
        strings = self._json(_STRINGS, dict[str, Any], {})
        arrays = [leaf for leaf in self._leaves if leaf.kind not in ("None", "string")]
        values = dict(
            zip((leaf.name for leaf in arrays), parallel_map(self._value, arrays, _THREADS, "orbax"), strict=True)
        )
        root: dict[str, Any] = {}
        lists: list[tuple[dict[str, Any], str]] = []
        for leaf in self._leaves:
            node = root
            for depth, name in enumerate(leaf.path[:-1]):
                if name not in node and leaf.key_metadata[depth + 1].key_type == 1:
                    lists.append((node, name))
                node = node.setdefault(name, {})
                if not isinstance(node, dict):
                    raise CorruptCheckpointError(f"{self.label}: {leaf.name} lies below a value", file=METADATA)
            if leaf.kind == "string" and leaf.name not in strings:
                raise CorruptCheckpointError(f"{self.label}/{_STRINGS} lacks the text {leaf.name}", file=_STRINGS)
            node[leaf.path[-1]] = (strings if leaf.kind == "string" else values).get(leaf.name)
        for node, name in reversed(lists):  # the innermost first
            items = node[name]
            if set(items) == {str(k) for k in range(len(items))}:
                node[name] = [items[str(k)] for k in range(len(items))]
        return root

    def _value(self, leaf: _Leaf) -> object:
        array = self._opened(leaf.name)
        if self._all_stored and not self._call(
            leaf.name, lambda: array.storage_statistics(query_fully_stored=True).result().fully_stored
        ):
            raise CorruptCheckpointError(f"{self.label} is damaged: chunks of {leaf.name} are missing", file=leaf.name)
        if leaf.kind == "scalar" and not array.shape:
            return self._read(leaf.name, array).item()
        dtype, shape = array.dtype.name, tuple(array.shape)
        try:
            element = itemsize(dtype)
        except UsageError:
            raise IncompatibleCheckpointError(f"{self.label}: {leaf.name} is stored as {dtype}") from None
        chunk = tuple(array.chunk_layout.read_chunk.shape or shape)
        parts = []
        grid = [range(0, length, max(step, 1)) for length, step in zip(shape, chunk, strict=True)]
        for number, offsets in enumerate(itertools.product(*grid)):
            extent = tuple(min(n, length - o) for n, o, length in zip(chunk, offsets, shape, strict=True))
            nbytes = element * math.prod(extent)
            key = f"{leaf.name}-{number}"
            box = tuple(slice(o, o + n) for o, n in zip(offsets, extent, strict=True))
            self.contents[key] = Decoded(nbytes, partial(self._bytes_of, leaf.name, array[box] if box else array))
            ref = StorageRef(key, dtype, nbytes, 0, nbytes)
            parts.append((offsets, StoredTensor(ref, dtype, 0, extent, row_major_of(extent))))
        return ShardedValue(dtype, shape, tuple(parts))

    def _opened(self, name: str) -> Any:
        plain = {**self._base, "path": f"{self._base['path']}{name}/"}
        kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{name}/"} if self._ocdbt else plain
        spec = {"driver": self._driver, "kvstore": kvstore}
        return self._call(name, lambda: self._ts.open(spec, open=True, read=True).result())

    def _bytes_of(self, name: str, box: Any) -> bytes:
        return bytes(self._read(name, box).tobytes())

    def _read(self, name: str, array: Any) -> Any:
        return self._call(name, lambda: array.read().result())

    def _call(self, name: str, function: Any) -> Any:
        try:
            return function()
        except (ValueError, RuntimeError, OSError) as error:
            text = str(error).partition("[")[0].strip()
            raise CorruptCheckpointError(f"{self.label} is damaged: {name}: {text}", file=name) from error
