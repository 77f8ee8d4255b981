"""Copy the files of a checkpoint to another storage, and verify every byte on its way."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.engine.earlier_files import read_header
from bytecheckpoint.engine.view_files import committed_view, copy_view
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
)
from bytecheckpoint.representation.catalog import DELTA, Catalog
from bytecheckpoint.representation.checksums import block_sum, block_sums
from bytecheckpoint.representation.names import (
    CATALOG_NAME,
    companions,
    delta_name,
    generation_of,
    is_of_values,
    is_uri,
    natural_order,
)
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import FileReader, NewFile, Storage, resolve
from bytecheckpoint.storage.base import call_timeout, file_size
from bytecheckpoint.storage.deltas.coding import PREFIX_BYTES
from bytecheckpoint.storage.deltas.reading import stored_differences
from bytecheckpoint.storage.optional import copy_on_server
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.storage.uploading import UploadingStorage
from bytecheckpoint.tracing.operation import span

__all__ = [
    "commit",
    "copy_file",
    "copy_files",
    "copy_if_missing",
    "has_adopted",
    "has_header",
    "is_sound",
    "link_if_beside",
    "own_files",
]

_log = logging.getLogger("bytecheckpoint")
_PIECE = 8 << 20
_EVERYTHING = 1 << 62
#: Function of the bytes of each piece that was copied. It may raise, which ends the copy.
Progress = Callable[[int], None]


def _ignore(nbytes: int) -> None:
    pass


def own_files(catalog: Catalog) -> list[int]:
    """Return the numbers of the files that lie in the checkpoint's own folder."""
    return [number for number, file in enumerate(catalog.files) if not is_uri(file.name)]


class _VerifiedPieces:
    """The pieces of a file, each verified before it is yielded.

    A call yields the bytes [start, stop) of the file, or all of them; the header is the first piece.

    Raises:
        CorruptCheckpointError: a checksum differs, or the file is cut.
    """

    def __init__(
        self, reader: FileReader, label: str, catalog: Catalog, number: int, progress: Progress = _ignore
    ) -> None:
        self._reader, self._label, self._progress = reader, label, progress
        self._file, self._sums = catalog.files[number], catalog.sums(number)
        if not self._file.block_bytes:
            raise CorruptCheckpointError(
                f"{label} has no checksums: it cannot be copied with proof", file=self._file.name
            )

    def __call__(self, start: int = 0, stop: int = _EVERYTHING) -> Iterator[memoryview]:
        file = self._file
        step = max(_PIECE // file.block_bytes, 1) * file.block_bytes
        begins = [0, *range(file.data_offset, file.size, step)]
        for begin, end in zip(begins, [*begins[1:], file.size], strict=True):
            if begin < stop and end > start:
                piece = self._read(begin, end)
                self._progress(len(piece))
                yield piece[max(start - begin, 0) : max(stop - begin, 0)]

    def _read(self, begin: int, end: int) -> memoryview:
        file = self._file
        data = np.empty(end - begin, np.uint8)
        if self._reader.read_into(begin, [memoryview(data)]) != len(data):
            raise CorruptCheckpointError(f"{self._label} ends before byte {end}; use another copy", file=file.name)
        first = -1
        if begin == 0:
            good = block_sum(memoryview(data)) == file.header_sum
        else:
            first = (begin - file.data_offset) // file.block_bytes
            found = block_sums(memoryview(data), file.block_bytes)
            good = bool(np.array_equal(found, self._sums[first : first + len(found)]))
        if not good:
            raise CorruptCheckpointError(
                f"checksum mismatch in {self._label} between bytes {begin} and {end}; use another copy",
                file=file.name,
                block=first,
            )
        return memoryview(data)


def _pieces_of(
    reader: FileReader, label: str, catalog: Catalog, number: int, progress: Progress = _ignore
) -> Callable[..., Iterator[memoryview]]:
    """Return the proven pieces of a file as it is stored, as `_VerifiedPieces` yields them."""
    if catalog.files[number].format != DELTA:
        return _VerifiedPieces(reader, label, catalog, number, progress)
    return functools.partial(_pieces_of_differences, reader, label, catalog.files[number].name, progress)


def _pieces_of_differences(
    reader: FileReader, label: str, name: str, progress: Progress, start: int = 0, stop: int = _EVERYTHING
) -> Iterator[memoryview]:
    data = stored_differences(label, name, reader)
    progress(len(data))
    yield from (part for part in (data[:PREFIX_BYTES][start:stop], data[max(start, PREFIX_BYTES) : stop]) if part)


def copy_file(source: Storage, target: Storage, catalog: Catalog, number: int, progress: Progress = _ignore) -> None:
    """Copy one file to a storage that has none of that name. The copy is durable when this returns.

    Args:
        source: the storage that has the file.
        target: the storage that gets it.
        catalog: names and checksums.
        number: number of the file.
        progress: function of the bytes of each piece.

    Raises:
        FileNotFoundError: `source` does not have it.
        CorruptCheckpointError: its bytes do not match the catalog; `target` then has no such file.
        StorageError: either storage fails.
    """
    file = catalog.files[number]
    with span("transfer", nbytes=file.stored_bytes, subject=file.name):
        _copy_file(source, target, catalog, number, progress)


def _copy_file(source: Storage, target: Storage, catalog: Catalog, number: int, progress: Progress) -> None:
    file = catalog.files[number]
    label = f"{source.url}/{file.name}"
    reader = with_time_limits(source).open(file.name)
    try:
        size = file.stored_bytes
        if not reader.match_size(size):
            raise CorruptCheckpointError(f"{label} has {reader.size} bytes instead of {size}", file=file.name)
        _write(target, file.name, size, _pieces_of(reader, label, catalog, number, progress))
    finally:
        reader.close()


def _write(target: Storage, name: str, size: int, pieces: Callable[..., Iterator[memoryview]]) -> None:
    """Write a file that consists of pieces, and make it durable."""
    if isinstance(target, UploadingStorage):
        upload = functools.partial(target.upload, name, size, pieces)
        call_with_timeout(call_timeout(target, size), upload, f"cannot upload {target.url}/{name}")
        return
    writer = with_time_limits(target).create(NewFile(name, size))
    try:
        position, header = 0, memoryview(b"")
        for piece in pieces():
            if position == 0:
                header = piece  # written last, as in a save
            else:
                writer.write_at(position, [piece])
            position += len(piece)
        writer.write_at(0, [header])
        writer.finish(size)
    except BaseException:
        writer.abort()
        raise
    target.sync([name])


def _copy_beside(source: Storage, target: Storage, file: str) -> None:
    """Copy the differences beside a whole file, if it has some. Followers read whole files without them: never raise."""
    name = delta_name(file)
    label = f"{source.url}/{name}"
    try:
        with contextlib.closing(with_time_limits(source).open(name)) as reader:
            target.delete([name])  # a copy that was killed has left it
            _write(target, name, reader.size, functools.partial(_pieces_of_differences, reader, label, name, _ignore))
    except FileNotFoundError:
        pass  # the file had no earlier version
    except CheckpointError as error:
        _log.warning("%s was not copied to %s, so followers read the whole file: %s", label, target.url, error)


def is_sound(storage: Storage, catalog: Catalog, number: int) -> bool:
    """Read all bytes of a file, and return whether they match the catalog."""
    file = catalog.files[number]
    try:
        reader = with_time_limits(storage).open(file.name)
    except FileNotFoundError:
        return False
    try:
        if reader.size != file.stored_bytes:
            return False
        for _ in _pieces_of(reader, f"{storage.url}/{file.name}", catalog, number)():
            pass
    except CorruptCheckpointError:
        return False
    finally:
        reader.close()
    return True


def link_if_beside(target: Storage, catalog: Catalog, number: int) -> bool:
    """Give `target` a file that another step of its run has, because an incremental save had adopted it from there.

    Args:
        target: folder of a step, which has no file of that name.
        catalog: catalog of the step.
        number: number of the file.

    Returns:
        Whether it has the file now. Its header was compared with the catalog; its data were verified when they came there.
    """
    file = catalog.files[number]
    if not target.capabilities.links or not has_adopted(catalog):
        return False
    run = resolve(target.url.rpartition("/")[0] or "/")
    for folder in sorted(run.folders(), key=natural_order, reverse=True):
        if target.adopt(file.name, f"{run.url.rstrip('/')}/{folder}"):
            if has_header(target, catalog, number):
                target.sync([file.name])
                return True
            target.delete([file.name])
    return False


def has_adopted(catalog: Catalog) -> bool:
    """Return whether a checkpoint has files of earlier saves."""
    return len({file.generation for file in catalog.files}) > 1


def has_header(storage: Storage, catalog: Catalog, number: int) -> bool:
    """Return whether a file has the size and the header that the catalog says."""
    file = catalog.files[number]
    try:
        text, size = read_header(storage, file.name)
    except (FileNotFoundError, CorruptCheckpointError):
        return False
    return size == file.size and block_sum(text) == file.header_sum


def copy_if_missing(
    source: Storage,
    target: Storage,
    catalog: Catalog,
    number: int,
    present: int | None,
    check: Callable[[], None] = lambda: None,
    progress: Progress = _ignore,
) -> int:
    """Copy one file, unless `target` has a sound copy already, or another step of its run has the file.

    The differences beside a file are copied before it, so that a copy that is killed makes up for them.

    Args:
        source: the storage that has the file.
        target: the storage that gets it.
        catalog: names and checksums.
        number: number of the file.
        present: bytes that `target` lists under the name, None when it lists none.
        check: function to call before `target` is changed; it raises if the change is not allowed.
        progress: function of the bytes of each piece.

    Returns:
        Bytes that were copied.
    """
    size, name = catalog.files[number].stored_bytes, catalog.files[number].name
    if present is None:
        check()
        if catalog.has_differences_beside and not is_of_values(name):
            _copy_beside(source, target, name)
        if copy_on_server(source, target, name, size):
            present = size  # and verified next
    if present == size and is_sound(target, catalog, number):
        return 0
    if present is not None:
        check()
        target.delete([name])
    elif link_if_beside(target, catalog, number):
        return 0
    copy_file(source, target, catalog, number, progress)
    return size


def copy_files(
    source: Storage,
    target: Storage,
    catalog: Catalog,
    *,
    check: Callable[[], None],
    progress: Progress,
    read_back: bool = False,
) -> int:
    """Copy the files of a checkpoint that lie in its own folder and that `target` lacks, several at a time.

    Args:
        source: folder of the checkpoint.
        target: folder that gets the files.
        catalog: names and checksums.
        check: function to call before `target` is changed; it raises if the change is not allowed.
        progress: function of the bytes that were copied or found in `target`, piece by piece.
        read_back: flag to read the copies again, because the source is removed next.

    Returns:
        Bytes that were copied.

    Raises:
        CorruptCheckpointError: `source` lacks a file, a checksum differs, or a copy does not read back as it was written.
        StorageError: either storage fails.
    """
    present, stopped = dict(target.list()), threading.Event()

    def moved(nbytes: int) -> None:
        if stopped.is_set():  # by Ctrl-C or an error in another thread, whose error is raised
            raise StorageError(f"the copy to {target.url} was stopped")
        progress(nbytes)

    def copy(number: int) -> int:
        file = catalog.files[number]
        try:
            copied = copy_if_missing(source, target, catalog, number, present.get(file.name), check, moved)
            if not copied:
                moved(file.stored_bytes)
            elif read_back and not is_sound(target, catalog, number):
                raise CorruptCheckpointError(
                    f"{target.url}/{file.name} does not read back as it was written; check that storage", file=file.name
                )
        except BaseException:
            stopped.set()
            raise
        return copied

    try:
        return sum(parallel_map(copy, own_files(catalog), settings().storage.write_threads, "bytecheckpoint-copy"))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{source.url} lacks {error.filename}, so it cannot be copied") from error


def commit(source: Storage, target: Storage, catalog: Catalog, data: bytes, expected: str) -> None:
    """Publish a catalog whose files are all in the folder, and remove the files of the checkpoint that it replaces.

    Args:
        source: folder whose view for other programs, if it has one, is copied behind the commit.
        target: the folder.
        catalog: to publish.
        data: its bytes.
        expected: the version that it may replace. The same catalog may also be there already.

    Raises:
        StorageConflictError: another save replaced the checkpoint meanwhile.
        StorageError: a file is not there, or the storage fails.
    """
    present = dict(target.list())
    named = {catalog.files[number].name: catalog.files[number].stored_bytes for number in own_files(catalog)}
    for name, size in named.items():
        if present.get(name) != size and file_size(target, name) != size:
            raise StorageError(f"{target.url}: {name} is not there with its {size} bytes, so nothing is committed")
    kept = {*named, *companions(named)}
    stale = [name for name in present if generation_of(name) is not None and name not in kept]
    if not _has_catalog(target, data):
        view = committed_view(target, present)
        target.delete(view[:1])  # the index, which would show the weights of the replaced checkpoint
        stale = [*view[1:], *stale]
        try:
            target.publish(CATALOG_NAME, data, expected=expected)
        except (StorageConflictError, StorageUnavailableError):
            # The answer of an earlier attempt was lost, or another machine commits the same.
            if not _has_catalog(target, data):
                raise
    try:
        target.delete(stale)
    except StorageError as error:  # the checkpoint is committed, so this is no failure
        _log.warning("%s: old files could not be removed: %s", target.url, error)
    try:
        copy_view(source, target, catalog.info)
    except (StorageError, FileNotFoundError, CorruptCheckpointError) as error:  # nor is this
        _log.warning("%s is committed without its view for other programs: %s", target.url, error)


def _has_catalog(storage: Storage, data: bytes) -> bool:
    try:
        return storage.read(CATALOG_NAME) == data
    except (FileNotFoundError, CheckpointError):
        return False
