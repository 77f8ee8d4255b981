"""Show a checkpoint of another program as a storage with a catalog, so that all that reads checkpoints reads it too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from bytecheckpoint.formats.archives import is_zip
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.representation.boxes import BoxTable, widened
from bytecheckpoint.representation.catalog import FOREIGN, SHARED, VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.base import FileReader, FileStat, Storage
from bytecheckpoint.storage.wrappers import WrappedStorage, wrapped_like

__all__ = ["ForeignStorage", "as_checkpoint"]

#: First byte of a pickle since protocol 2.
_PICKLE: Final = b"\x80"
_VALUES_NAME: Final = ".bytecheckpoint-values"


class ForeignStorage(WrappedStorage):
    """A folder of another program, with the catalog and the files of plain values that a reader makes of it, in memory.

    Args:
        inner: storage of the folder.
        read: function that reads the folder.
        url: address that the user gave; by default that of the folder.
    """

    follows_links = True  # the cache of Hugging Face consists of links

    def __init__(self, inner: Storage, read: Callable[[Storage], ForeignCheckpoint], url: str = "") -> None:
        super().__init__(inner)
        self.url = url or inner.url
        self._read = read
        self._lock = threading.Lock()
        self._files: Mapping[str, bytes] | None = None

    def _made(self, name: str) -> bytes | None:
        """Return the bytes of a file that the folder does not hold, None for one that it may hold."""
        if name != CATALOG_NAME and not name.startswith(_VALUES_NAME):
            return None
        with self._lock:
            if self._files is None:
                catalog, values = _with_values(self._read(self.inner))
                self._files = {CATALOG_NAME: encode(catalog), **values}
            return self._files.get(name)

    def open(self, name: str) -> FileReader:  # noqa: D102 (the base describes it)
        data = self._made(name)
        return super().open(name) if data is None else _BytesReader(data)

    def read(self, name: str) -> bytes:  # noqa: D102
        data = self._made(name)
        return super().read(name) if data is None else data

    def stat(self, name: str) -> FileStat:  # noqa: D102
        data = self._made(name)
        return super().stat(name) if data is None else FileStat(len(data), 0.0, str(len(data)))


def as_checkpoint(storage: Storage) -> ForeignStorage | None:
    """Return a folder of another program, or a single file at its address, as a checkpoint; None if it is none."""
    folder, _, name = storage.url.rpartition("/")
    if not folder or not name:
        return None
    around = wrapped_like(storage, resolve(folder))
    try:
        around.stat(name)
        with open_file(around, name) as file:
            head = file.read(0, min(file.size, 4))
    except FileNotFoundError:
        return None
    if not (is_zip(head) or head[:1] == _PICKLE):
        return None
    return ForeignStorage(around, partial(read_torch_save, name=name), storage.url)


class _BytesReader(FileReader):
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        begin = offset
        for buffer in buffers:
            part = self._data[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            offset += len(part)
        return offset - begin

    def other_copies(self) -> Iterator[FileReader]:
        return iter(())

    def close(self) -> None:
        pass


def _with_values(checkpoint: ForeignCheckpoint) -> tuple[Catalog, dict[str, bytes]]:
    """Return the catalog with a tensor for the plain values of each state, and the files that hold these, by name."""
    catalog = checkpoint.catalog
    contents = {f"{_VALUES_NAME}-{number}": item for number, item in enumerate(checkpoint.values.items())}
    values = {name: blob for name, (_, blob) in contents.items()}
    states = [state for state, _ in contents.values()]
    sizes = np.array([len(blob) for blob in values.values()], np.int64)
    count, width = len(states), catalog.boxes.ndim
    columns: dict[str, Any] = {
        "states": states, "fqns": [""] * count, "slots": [VALUES_SLOT] * count, "dtypes": ["uint8"] * count,
    }  # fmt: skip
    names = {"state": "states", "fqn": "fqns", "slot": "slots", "dtype": "dtypes"}
    strings = {given: [*getattr(catalog, name).to_list(), *columns[given]] for name, given in names.items()}
    more = widened(sizes[:, None], width, 1)
    tensors = TensorTable.of(
        **strings,
        shapes=np.concatenate([catalog.shapes, more]),
        ndims=np.concatenate([catalog.ndims, np.ones(count, np.int64)]),
        owner=np.concatenate([catalog.owner, np.full(count, SHARED, np.int32)]),
        requires_grad=np.concatenate([catalog.requires_grad, np.zeros(count, bool)]),
    )
    files = [StorageFile(name, state, 0, len(blob), 0, 0, 0, "", FOREIGN) for name, (state, blob) in contents.items()]
    boxes = BoxTable(catalog.count + np.arange(count), np.zeros_like(more), more)
    built = Catalog.build(
        tensors,
        boxes=BoxTable.concat([catalog.boxes, boxes]),
        file=np.concatenate([catalog.file, len(catalog.files) + np.arange(count, dtype=np.int32)]),
        byte_offset=np.concatenate([catalog.byte_offset, np.zeros(count, np.int64)]),
        byte_length=np.concatenate([catalog.byte_length, sizes]),
        files=[*catalog.files, *files],
        sums=[np.zeros(0, np.uint64)] * (len(catalog.files) + count),
        aliases=catalog.aliases,
        info=catalog.info,
    )
    strides = checkpoint.strides
    if strides is not None:  # the rows keep their order, and those of the values follow
        strides = np.concatenate([widened(strides, width, 1), np.ones((count, width), np.int64)])
    return replace(built, strides=strides), values
