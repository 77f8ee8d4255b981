"""Copying the files of a checkpoint from one storage to another: every byte is verified on its way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
)
from ..representation.catalog import Catalog
from ..representation.checksums import block_sum, block_sums
from ..representation.names import CATALOG_NAME, generation_of, is_uri
from ..storage import FileReader, NewFile, Storage
from ..storage.limited import limited
from ..storage.parallel import within
from ..storage.uploading import UploadingStorage

__all__ = ["commit", "copy_file", "copy_unless_there", "own_files", "sound"]

_log = logging.getLogger("bytecheckpoint")
_PIECE = 8 << 20
_EVERYTHING = 1 << 62


def own_files(catalog: Catalog) -> list[int]:
    """Numbers of the files that lie in the checkpoint's own folder."""
    return [number for number, file in enumerate(catalog.files) if not is_uri(file.name)]


class _Verified:
    """The bytes of a file, header first, each piece verified before it is handed out; a range of them where wanted.

    Raises:
        CorruptCheckpointError: a checksum differs, or the file is cut.
    """

    def __init__(self, reader: FileReader, shown: str, catalog: Catalog, number: int) -> None:
        self._reader, self._shown = reader, shown
        self._file, self._sums = catalog.files[number], catalog.sums(number)
        if not self._file.block_bytes:
            raise CorruptCheckpointError(
                f"{shown} has no checksums: it cannot be copied with proof", file=self._file.name
            )

    def __call__(self, start: int = 0, stop: int = _EVERYTHING) -> Iterator[memoryview]:
        file = self._file
        step = max(_PIECE // file.block_bytes, 1) * file.block_bytes
        begins = [0, *range(file.data_offset, file.size, step)]
        for begin, end in zip(begins, [*begins[1:], file.size], strict=True):
            if begin < stop and end > start:
                piece = self._read(begin, end)
                yield piece[max(start - begin, 0) : max(stop - begin, 0)]

    def _read(self, begin: int, end: int) -> memoryview:
        file = self._file
        data = np.empty(end - begin, np.uint8)
        if self._reader.read_into(begin, [memoryview(data)]) != len(data):
            raise CorruptCheckpointError(f"{self._shown} ends before byte {end}; use another copy", file=file.name)
        first = -1
        if begin == 0:
            good = block_sum(memoryview(data)) == file.header_sum
        else:
            first = (begin - file.data_offset) // file.block_bytes
            found = block_sums(memoryview(data), file.block_bytes)
            good = bool(np.array_equal(found, self._sums[first : first + len(found)]))
        if not good:
            raise CorruptCheckpointError(
                f"checksum mismatch in {self._shown} between bytes {begin} and {end}; use another copy",
                file=file.name,
                block=first,
            )
        return memoryview(data)


def copy_file(source: Storage, target: Storage, catalog: Catalog, number: int) -> None:
    """Copy one file to where there is none of that name; the copy is durable when this returns.

    Raises:
        FileNotFoundError: `source` does not have it.
        CorruptCheckpointError: its bytes are not those of the catalog; `target` has no such file then.
        StorageError: either storage fails.
    """
    file = catalog.files[number]
    shown = f"{source.url}/{file.name}"
    reader = limited(source).open(file.name)
    try:
        if not reader.fits(file.size):
            raise CorruptCheckpointError(f"{shown} has {reader.size} bytes instead of {file.size}", file=file.name)
        if isinstance(target, UploadingStorage):
            upload = functools.partial(target.upload, file.name, file.size, _Verified(reader, shown, catalog, number))
            within(target.limit(file.size), upload, f"cannot upload {target.url}/{file.name}")
            return
        writer = limited(target).create(NewFile(file.name, file.size))
        try:
            position, header = 0, memoryview(b"")
            for piece in _Verified(reader, shown, catalog, number)():
                if position == 0:
                    header = piece  # goes last, as in a save
                else:
                    writer.write_at(position, [piece])
                position += len(piece)
            writer.write_at(0, [header])
            writer.finish(file.size)
        except BaseException:
            writer.abort()
            raise
        target.sync([file.name])
    finally:
        reader.close()


def sound(storage: Storage, catalog: Catalog, number: int) -> bool:
    """Whether `storage` has a file of the catalog, with the right bytes: all of them are read."""
    file = catalog.files[number]
    try:
        reader = limited(storage).open(file.name)
    except FileNotFoundError:
        return False
    try:
        if reader.size != file.size:
            return False
        for _ in _Verified(reader, f"{storage.url}/{file.name}", catalog, number)():
            pass
    except CorruptCheckpointError:
        return False
    finally:
        reader.close()
    return True


def copy_unless_there(
    source: Storage,
    target: Storage,
    catalog: Catalog,
    number: int,
    present: int | None,
    allowed: Callable[[], None] = lambda: None,
) -> int:
    """As `copy_file`, unless an earlier attempt has brought the file there already.

    Args:
        source: where from.
        target: where to.
        catalog: names and sums.
        number: of the file.
        present: bytes that `target` lists under the name, None when it lists none.
        allowed: called before `target` is changed; raises when that must not be.

    Returns:
        Bytes that were copied.
    """
    size = catalog.files[number].size
    if present == size and sound(target, catalog, number):
        return 0
    allowed()
    if present is not None:
        target.delete([catalog.files[number].name])
    copy_file(source, target, catalog, number)
    return size


def commit(target: Storage, catalog: Catalog, data: bytes, expected: str) -> None:
    """Publish the catalog of files that are all there, and remove what it replaces.

    Args:
        target: the folder.
        catalog: what is published.
        data: its bytes.
        expected: the version that it may replace. The same catalog there already is fine, too.

    Raises:
        StorageConflictError: another save replaced the checkpoint meanwhile.
        StorageError: a file is not there, or the storage fails.
    """
    present = dict(target.list())
    named = {catalog.files[number].name: catalog.files[number].size for number in own_files(catalog)}
    for name, size in named.items():
        if present.get(name) != size and _size(target, name) != size:
            raise StorageError(f"{target.url}: {name} is not there with its {size} bytes, so nothing is committed")
    if not _holds(target, data):
        try:
            target.publish(CATALOG_NAME, data, expected=expected)
        except (StorageConflictError, StorageUnavailableError):
            # An attempt whose answer got lost, or another machine that does the same.
            if not _holds(target, data):
                raise
    try:
        target.delete([name for name in present if generation_of(name) is not None and name not in named])
    except StorageError as error:  # it is committed: nothing may report a failure any more
        _log.warning("%s: old files could not be removed: %s", target.url, error)


def _size(storage: Storage, name: str) -> int:
    try:
        return storage.stat(name).size
    except FileNotFoundError:
        return -1


def _holds(storage: Storage, data: bytes) -> bool:
    try:
        return storage.read(CATALOG_NAME) == data
    except FileNotFoundError:
        return False
    except CheckpointError:
        return False
