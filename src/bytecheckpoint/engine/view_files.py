"""The view of a step: files in its folder by which another program reads the tensors, beside the checkpoint's own files.

The catalog names them under `info["view"]`: the small ones with size and sum, and the generation of the large ones, whose
sizes and sums are in the index. The index comes last and goes first: without it there is no view.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from bytecheckpoint.engine.catalogs import read_outline
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.header_reader import parse_header
from bytecheckpoint.representation.names import CATALOG_NAME, is_uri, view_generation_of
from bytecheckpoint.storage import FileReader, NewFile, Storage

__all__ = [
    "VIEW_INDEX", "VIEW_KEY", "committed_view", "copy_view", "named_in", "publish_view", "sum_of", "view_files",
    "view_info", "view_names", "view_sums",
]  # fmt: skip

#: The file without which a view is none.
VIEW_INDEX = "model.safetensors.index.json"
#: Key of the view in the info of a catalog.
VIEW_KEY = "view"
_PIECE = 8 << 20


def view_info(files: Mapping[str, bytes], generation: str) -> dict[str, Any]:
    """Return the part of a catalog's info that names a view.

    Args:
        files: its small files.
        generation: generation of the save, and of the view's large files.
    """
    sums = {name: [len(data), xxhash.xxh3_64_hexdigest(data)] for name, data in files.items()}
    return {VIEW_KEY: {"generation": generation, "files": sums}}


def view_names(info: Mapping[str, Any], present: Iterable[str]) -> list[str]:
    """Return those names of a folder that belong to the view of the catalog with this info; the index first."""
    view = info.get(VIEW_KEY)
    if not isinstance(view, dict):
        return []
    known = {VIEW_INDEX, *view["files"]}
    found = [name for name in present if name in known or view_generation_of(name) == view["generation"]]
    return sorted(found, key=lambda name: name != VIEW_INDEX)


def committed_view(storage: Storage, present: Iterable[str]) -> list[str]:
    """Return those names of a folder that belong to the view of its committed checkpoint, or are left of another view."""
    beside = [name for name in present if "/" not in name and not name.startswith((CATALOG_NAME, "."))]
    found: list[str] = []
    if beside:
        with contextlib.suppress(CheckpointError):
            found = view_names(read_outline(storage).info, beside)
    return [*found, *(name for name in beside if view_generation_of(name) is not None and name not in found)]


def view_files(storage: Storage, info: Mapping[str, Any], names: Collection[str]) -> dict[str, bytes]:
    """Return the small files of a view that shows tensors under these names, none of another view or without an index.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    if not isinstance(view := info.get(VIEW_KEY), dict):
        return {}
    try:
        shown = json.loads(storage.read(VIEW_INDEX))["weight_map"].keys()
        found = {name: storage.read(name) for name in view["files"] if name != VIEW_INDEX}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{VIEW_INDEX} is damaged: {error}", file=VIEW_INDEX) from error
    for name, data in found.items():
        if [len(data), xxhash.xxh3_64_hexdigest(data)] != [*view["files"][name]]:
            raise CorruptCheckpointError(f"{storage.url}/{name} is damaged: its sum differs", file=name)
    return found if shown <= set(names) else {}


def view_sums(storage: Storage, info: Mapping[str, Any]) -> dict[str, tuple[int, str]] | None:
    """Return the size and sum of each file of a view but an index that nobody knows; None if there is no view.

    Raises:
        CorruptCheckpointError: the index is damaged.
        StorageError: the storage fails.
    """
    if not isinstance(view := info.get(VIEW_KEY), dict):
        return None
    try:
        index = storage.read(VIEW_INDEX)
    except FileNotFoundError:
        return None
    try:
        found = {**view["files"], **json.loads(index)["metadata"].get("files", {})}
        return {name: (int(size), str(digest)) for name, (size, digest) in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{storage.url}/{VIEW_INDEX} is damaged: {error}", file=VIEW_INDEX) from error


def named_in(storage: Storage, catalog: Catalog, state: str) -> dict[str, str]:
    """Return the file of each tensor of another program that the files of a state hold whole, by their headers.

    Raises:
        CorruptCheckpointError: a header is damaged.
        StorageError: the storage fails.
    """
    found: dict[str, str] = {}
    for file in catalog.files:
        if file.state != state or is_uri(file.name) or file.format != "safetensors":
            continue
        with contextlib.closing(storage.open(file.name)) as reader:
            data = np.empty(file.data_offset, np.uint8)
            reader.read_into(0, [memoryview(data)])
        found.update(dict.fromkeys(parse_header(data.tobytes(), file=file.name).names, file.name))
    return found


def publish_view(storage: Storage, files: Mapping[str, bytes]) -> None:
    """Write the small files of a view, the index last."""
    for name in sorted(files, key=lambda name: name == VIEW_INDEX):
        storage.publish(name, files[name])


def copy_view(source: Storage, target: Storage, info: Mapping[str, Any]) -> None:
    """Copy a view, as far as it is there, the index last.

    Args:
        source: folder of the checkpoint.
        target: folder of its copy.
        info: info of its catalog.

    Raises:
        FileNotFoundError, CorruptCheckpointError: a file of the view is missing or damaged; the copy has no index then.
        StorageError: a storage fails.
    """
    sums, small = view_sums(source, info), info.get(VIEW_KEY, {}).get("files", {})
    for name in small:
        if name != VIEW_INDEX:
            target.publish(name, source.read(name))
    if sums is not None:
        for name in sums.keys() - small.keys():
            _copy_large(source, target, name, sums[name])
        target.publish(VIEW_INDEX, source.read(VIEW_INDEX))


def _copy_large(source: Storage, target: Storage, name: str, known: tuple[int, str]) -> None:
    target.delete([name])  # a copy that was killed has left it
    with contextlib.closing(source.open(name)) as reader:
        writer = target.create(NewFile(name, known[0]))
        try:
            digest, head, size = xxhash.xxh3_64(), b"", 0
            for piece in _pieces(reader):
                digest.update(piece)
                if size:
                    writer.write_at(size, [piece])
                else:
                    head = bytes(piece)  # which comes last
                size += len(piece)
            if (size, digest.hexdigest()) != known:
                raise CorruptCheckpointError(f"{source.url}/{name} is damaged: make the view anew", file=name)
            writer.write_at(0, [memoryview(head)])
            writer.finish(size)
        except BaseException:
            writer.abort()
            raise


def sum_of(storage: Storage, name: str) -> tuple[int, str]:
    """Return the size and sum of a file.

    Raises:
        FileNotFoundError: there is none.
        StorageError: the storage fails.
    """
    digest, size = xxhash.xxh3_64(), 0
    with contextlib.closing(storage.open(name)) as reader:
        for piece in _pieces(reader):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def _pieces(reader: FileReader) -> Iterator[memoryview]:
    for begin in range(0, reader.size, _PIECE):
        data = memoryview(np.empty(min(_PIECE, reader.size - begin), np.uint8))
        yield data[: reader.read_into(begin, [data])]
