"""Export a checkpoint to Hugging Face safetensors: consolidated files and an index, in bounded memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from bytecheckpoint.engine.tensor_bytes import flat_bytes
from bytecheckpoint.errors import (
    CheckpointError,
    IncompatibleCheckpointError,
    StorageError,
    StorageFullError,
    UsageError,
)
from bytecheckpoint.opening import Checkpoint, Entry
from bytecheckpoint.representation.dtypes import safetensors_code
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.representation.storage_file import MAX_HEADER_BYTES
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.storage.threads import call_with_timeout
from bytecheckpoint.storage.time_limits import TimeLimitedStorage, with_time_limits
from bytecheckpoint.storage.wrappers import Call

__all__ = ["ExportReport", "export_huggingface"]

_CHUNK_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the folder.
        files: names of the files, in order.
        tensors: number of tensors.
        nbytes: bytes of tensors, without headers.
        cast: number of converted tensors.
        overflowed: names of tensors in which the conversion made finite elements infinite.
        skipped: keys of plain values, which the format cannot hold.
    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    cast: int
    overflowed: tuple[str, ...]
    skipped: tuple[str, ...]


Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Item:
    """One tensor to write.

    Attributes:
        name: name in the exported file.
        key: key in the checkpoint.
        shape: global shape.
        dtype: dtype to write.
        nbytes: bytes to write.
        stored_bytes: bytes that the checkpoint stores.
        cast: whether the elements are converted.
        start: byte offset in the data section of its file.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    stored_bytes: int
    cast: bool
    start: int = 0


@dataclass(slots=True)
class _File:
    """One file to write, in the order of `items`."""

    items: list[_Item] = field(default_factory=list)
    nbytes: int = 0


def export_huggingface(
    source: Checkpoint,
    target: str | os.PathLike[str],
    *,
    kind: str = "model",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write all tensors of one state as consolidated safetensors that Hugging Face tools read.

    One `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index. Tied tensors are written once, under
    the name under which the checkpoint stores them. Tensors are streamed, so the memory needed depends neither on the
    size of the model nor on its largest tensor. In a local folder the files appear together, once all are durable. On
    other storages they appear one by one, the index last.

    Args:
        source: an open checkpoint.
        target: folder or URL; it must not exist or be empty unless `force` is set.
        kind: which state.
        dtype: convert floating tensors to this dtype ("bfloat16", torch.bfloat16); None leaves all as they are.
        max_shard_bytes: bytes of tensors per file; a larger tensor has a file of its own.
        force: replace weights at the target. Other files of the folder stay. On storages other than local folders the
            old weights are removed first.
        progress: called as (bytes read, bytes in all).

    Raises:
        UsageError: wrong arguments, or the target is not empty.
        IncompatibleCheckpointError: a dtype or name that safetensors cannot hold.
        CorruptCheckpointError: a block is damaged; nothing is left at `target`.
        StorageError: the files cannot be written.
    """
    storage = resolve(target)
    old = call_with_timeout(storage.call_timeout(), lambda: _present(storage, force), f"cannot look into {storage.url}")
    wanted = _cast_dtype(dtype)
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: give a positive number of bytes")
    if kind not in source.kinds:
        raise UsageError(f"{source.path} has no {kind!r}; it holds {', '.join(source.kinds)}")
    items, skipped = _items(source, kind, wanted)
    files_to_write = _distribute(items, max_shard_bytes)
    count = len(files_to_write)
    names = [_SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    total = sum(item.nbytes for item in items)
    export = _Export(source, sum(i.stored_bytes for i in items), progress)
    with _translated(f"export to {storage.url}"):
        if isinstance(storage, LocalStorage):
            _export_to_folder(export, storage.url, names, files_to_write, total)
        else:
            _export_to_storage(export, storage, names, files_to_write, total, old)
    files = (*names, _INDEX) if count > 1 else tuple(names)
    return ExportReport(
        storage.url, files, len(items), total, sum(i.cast for i in items), tuple(export.overflowed), tuple(skipped)
    )


def _export_to_folder(
    export: _Export, folder: str, names: Sequence[str], files_to_write: Sequence[_File], total: int
) -> None:
    """Write all files to a temporary folder beside the target, then move them into place."""
    temporary = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.exporting-{secrets.token_hex(6)}")
    storage = TimeLimitedStorage(LocalStorage(temporary))
    try:
        files = export.write_all(storage, names, files_to_write, total)
        storage.around(Call("install"), lambda: _install(temporary, folder, files))
    finally:
        storage.around_close(lambda: shutil.rmtree(temporary, ignore_errors=True))


def _export_to_storage(
    export: _Export,
    storage: Storage,
    names: Sequence[str],
    files_to_write: Sequence[_File],
    total: int,
    old: Iterable[str],
) -> None:
    """Remove old weights, write the files one by one, and publish the index last."""
    storage.delete(old)
    try:
        export.write_all(with_time_limits(storage), names, files_to_write, total)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            storage.delete([*names, _INDEX])
        raise


# --- what to write ----------------------------------------------------------------------------------------------------


def _present(storage: Storage, force: bool) -> list[str]:
    """Return the names of the weight files at the target.

    Raises:
        UsageError: the target cannot take an export.
    """
    tier = storage.tier_to_flush()
    if tier is not None:
        raise UsageError(f"export writes to the storage itself: give {tier.durable.url}, without the tier")
    if isinstance(storage, LocalStorage) and os.path.lexists(storage.url) and not os.path.isdir(storage.url):
        raise UsageError(f"{storage.url} is a file: give a folder")
    if isinstance(storage, LocalStorage):
        with _translated(f"look into {storage.url}"):
            present = sorted(os.listdir(storage.url)) if os.path.isdir(storage.url) else []
    else:
        present = sorted({*(name for name, _ in storage.list() if "/" not in name), *storage.folders()})
    if CATALOG_NAME in present:
        raise UsageError(f"{storage.url} is a checkpoint: export into another folder")
    if present and not force:
        raise UsageError(
            f"{storage.url} is not empty (it holds {present[0]!r}): give a new folder, or force the export"
        )
    return [name for name in present if _WEIGHTS.fullmatch(name)]


def _cast_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    name = str(found).removeprefix("torch.")
    if not isinstance(found, torch.dtype) or not found.is_floating_point or safetensors_code(name) is None:
        known = "float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2"
        raise UsageError(f"{dtype!r} is not a dtype to export to: use one of {known}")
    return found


def _items(source: Checkpoint, kind: str, wanted: torch.dtype | None) -> tuple[list[_Item], list[str]]:
    items: list[_Item] = []
    skipped: list[str] = []
    numbers: set[object] = set()
    for key in source.keys_of(kind):
        stored = source.stored_under(key)
        if stored is None:
            skipped.append(key)
            continue
        if stored in numbers:
            continue  # another name of a tied tensor
        numbers.add(stored)
        entry = source[key]
        assert isinstance(entry, Entry)
        name = key.removeprefix(f"{kind}/")
        own = str(entry.dtype).removeprefix("torch.")
        # Packed and scale formats are not numbers to convert one by one.
        cast = wanted is not None and entry.dtype.is_floating_point and safetensors_code(own) is not None
        dtype = wanted if cast and wanted is not None else entry.dtype
        if safetensors_code(str(dtype).removeprefix("torch.")) is None:
            raise IncompatibleCheckpointError(
                f"{key} is {own}, which safetensors tools do not read: it cannot be exported"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise IncompatibleCheckpointError(
                f"{key!r} is not valid Unicode: safetensors cannot hold the name"
            ) from None
        if name == "__metadata__":
            raise IncompatibleCheckpointError(f"{key!r} has a name that safetensors reserves")
        nbytes = entry.shape.numel() * dtype.itemsize
        items.append(_Item(name, key, tuple(entry.shape), dtype, nbytes, entry.nbytes, dtype != entry.dtype))
    return items, skipped


def _distribute(items: Iterable[_Item], most: int) -> list[_File]:
    """Distribute tensors to files in order. Within a file, wide elements come first, so that all are aligned."""
    files_to_write = [_File()]
    for item in items:
        if files_to_write[-1].items and files_to_write[-1].nbytes + item.nbytes > most:
            files_to_write.append(_File())
        files_to_write[-1].items.append(item)
        files_to_write[-1].nbytes += item.nbytes
    for shard in files_to_write:
        shard.items.sort(key=lambda item: -item.dtype.itemsize)
        position = 0
        for item in shard.items:
            item.start = position
            position += item.nbytes
    return files_to_write


def _header(items: Sequence[_Item]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for item in items:
        code = safetensors_code(str(item.dtype).removeprefix("torch."))
        offsets = [item.start, item.start + item.nbytes]
        table[item.name] = {"dtype": code, "shape": list(item.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(f"the names of {len(items)} tensors make too long a header: use a smaller max_shard_bytes")
    return struct.pack("<Q", len(text)) + text


# --- writing ----------------------------------------------------------------------------------------------------------


class _Export:
    """One export: what is read, what overflowed, and the progress."""

    def __init__(self, source: Checkpoint, total: int, progress: Progress | None) -> None:
        self.source = source
        self.overflowed: dict[str, None] = {}
        self._total = total
        self._progress = progress
        self._done = 0

    def write_all(
        self, storage: Storage, names: Sequence[str], files_to_write: Sequence[_File], total: int
    ) -> list[str]:
        """Write the files, and an index if there are several. Return their names."""
        files = list(names)
        for name, shard in zip(names, files_to_write, strict=True):
            self._write(storage, name, shard)
        if len(names) > 1:
            files.append(_INDEX)
            weights = {
                item.name: name for name, shard in zip(names, files_to_write, strict=True) for item in shard.items
            }
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            storage.publish(_INDEX, json.dumps(index, indent=2).encode() + b"\n")
        storage.sync(files)
        return files

    def _write(self, storage: Storage, name: str, shard: _File) -> None:
        """Write one file. The next batch is read while one is written. The header goes last, as storages want it."""
        header = _header(shard.items)
        writer = storage.create(NewFile(name, len(header) + shard.nbytes))
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-export") as pool:
                last: Future[None] | None = None
                position = len(header)
                for batch in self._batches(shard):
                    if last is not None:
                        last.result()
                    last = pool.submit(writer.write_at, position, [memoryview(flat_bytes(d).numpy()) for d in batch])
                    position += sum(d.numel() * d.element_size() for d in batch)
                if last is not None:
                    last.result()
            writer.write_at(0, [memoryview(header)])
            writer.finish(len(header) + shard.nbytes)
        except BaseException:
            writer.abort()
            raise

    def _batches(self, shard: _File) -> Iterator[list[torch.Tensor]]:
        """Yield converted elements in file order, about 16 MiB at a time."""
        by_key: Mapping[str, _Item] = {item.key: item for item in shard.items}
        batch: list[torch.Tensor] = []
        batched = 0
        for key, _, data in self.source.stream(by_key, _CHUNK_BYTES):
            item = by_key[key]
            self._done += data.numel() * data.element_size()
            if data.dtype != item.dtype:
                converted = data.to(item.dtype)
                infinite = ~_finite(converted)
                if bool(infinite.any()) and bool((infinite & _finite(data)).any()):
                    self.overflowed[item.name] = None
                data = converted
            if data.numel():
                batch.append(data)
                batched += data.numel() * data.element_size()
            if batched >= _CHUNK_BYTES // 2:
                yield batch
                batch, batched = [], 0
            if self._progress is not None:
                self._progress(self._done, self._total)
        if batch:
            yield batch


def _finite(data: torch.Tensor) -> torch.Tensor:
    return (data if data.element_size() > 1 else data.float()).isfinite()


def _install(temporary: str, folder: str, files: Sequence[str]) -> None:
    """Move complete files into the target folder."""
    parent = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.listdir(folder):
        os.rename(temporary, folder)  # replaces an empty folder
        _sync_folder(parent)
        return
    old = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name)]
    # Remove the old index first, so that a reader never sees new files under the old index.
    if _INDEX in old:
        os.unlink(os.path.join(folder, _INDEX))
    if len(files) > 1 and _SINGLE in old:
        os.unlink(os.path.join(folder, _SINGLE))
    _sync_folder(folder)
    for name in files:
        os.replace(os.path.join(temporary, name), os.path.join(folder, name))
    for name in old:
        if name not in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    _sync_folder(folder)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        text = f"cannot {action}: {error.strerror or error}"
        raise (StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError)(text) from error
