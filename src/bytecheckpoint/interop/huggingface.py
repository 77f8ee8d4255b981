"""Export to consolidated Hugging Face safetensors: shards and an index, streamed in bounded memory."""

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

from ..engine.staging import flat_bytes
from ..errors import CheckpointError, IncompatibleCheckpointError, StorageError, StorageFullError, UsageError
from ..opening import Checkpoint, Entry
from ..representation.dtypes import safetensors_code
from ..representation.names import CATALOG_NAME
from ..representation.storage_file import MAX_HEADER_BYTES
from ..storage import NewFile, Storage, resolve
from ..storage.limited import LimitedStorage, limited
from ..storage.local import LocalStorage
from ..storage.parallel import within
from ..storage.tier import TierStorage
from ..storage.wrappers import Call

__all__ = ["ExportReport", "export_huggingface"]

_PIECE = 16 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written.

    Attributes:
        path: the folder.
        files: names of the files, in order.
        tensors: number of tensors.
        nbytes: bytes of tensors, headers not counted.
        cast: number of tensors that were converted.
        overflowed: names of tensors of which finite elements became infinite in the conversion.
        skipped: keys of plain values, for which the format has no place.
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
    """A tensor to write: under `name`, as `dtype`, `start` bytes into its file's data section; `read` bytes stored."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    read: int
    cast: bool
    start: int = 0


@dataclass(slots=True)
class _Shard:
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
    """Write all tensors of one state as consolidated safetensors, as Hugging Face tools read them.

    One `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index. Tied tensors are written once, under
    the name under which the checkpoint stores them. Tensors are streamed: memory does not grow with the model, nor
    with its largest tensor. In a local folder the files appear when all are complete and durable; elsewhere one by one,
    the index last.

    Args:
        source: an open checkpoint.
        target: folder or URL; it must not exist or be empty unless `force` is set.
        kind: which state.
        dtype: convert floating tensors to this dtype ("bfloat16", torch.bfloat16); None leaves all as they are.
        max_shard_bytes: bytes of tensors per file; a larger tensor has a file of its own.
        force: replace weights that are there (elsewhere than in a local folder they are removed first); other files of
            the folder stay.
        progress: called as (bytes read, bytes in all).

    Raises:
        UsageError: wrong arguments, or files are there.
        IncompatibleCheckpointError: a dtype or name that safetensors cannot hold.
        CorruptCheckpointError: a block is damaged; nothing is left at `target`.
        StorageError: the files cannot be written.
    """
    storage = resolve(target)
    old = within(storage.limit(), lambda: _present(storage, force), f"cannot look into {storage.url}")
    wanted = _cast_dtype(dtype)
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: give a positive number of bytes")
    if kind not in source.kinds:
        raise UsageError(f"{source.path} has no {kind!r}; it holds {', '.join(source.kinds)}")
    items, skipped = _items(source, kind, wanted)
    shards = _shards(items, max_shard_bytes)
    count = len(shards)
    names = [_SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    total = sum(item.nbytes for item in items)
    job = _Job(source, sum(i.read for i in items), progress)
    with _translated(f"export to {storage.url}"):
        if isinstance(storage, LocalStorage):
            _export_to_folder(job, storage.url, names, shards, total)
        else:
            _export_to_storage(job, storage, names, shards, total, old)
    files = (*names, _INDEX) if count > 1 else tuple(names)
    return ExportReport(
        storage.url, files, len(items), total, sum(i.cast for i in items), tuple(job.overflowed), tuple(skipped)
    )


def _export_to_folder(job: _Job, folder: str, names: Sequence[str], shards: Sequence[_Shard], total: int) -> None:
    """All files beside the folder first, then into their place."""
    temporary = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.exporting-{secrets.token_hex(6)}")
    storage = LimitedStorage(LocalStorage(temporary))
    try:
        files = job.write_all(storage, names, shards, total)
        storage.around(Call("install"), lambda: _install(temporary, folder, files))
    finally:
        storage.ending(lambda: shutil.rmtree(temporary, ignore_errors=True))


def _export_to_storage(
    job: _Job, storage: Storage, names: Sequence[str], shards: Sequence[_Shard], total: int, old: Iterable[str]
) -> None:
    """No storage but a local folder can show several files at once: old weights go first, the index comes last."""
    storage.delete(old)
    try:
        job.write_all(limited(storage), names, shards, total)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            storage.delete([*names, _INDEX])
        raise


# --- what to write ----------------------------------------------------------------------------------------------------


def _present(storage: Storage, force: bool) -> list[str]:
    """Names of the weights that are at the target.

    Raises:
        UsageError: nothing may be exported there.
    """
    if isinstance(storage, TierStorage):
        raise UsageError(f"export writes to the storage itself: give {storage.durable.url}, without the tier")
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


def _shards(items: Iterable[_Item], most: int) -> list[_Shard]:
    """Fill files in the order of the tensors; within a file, wide elements come first so that all are aligned."""
    shards = [_Shard()]
    for item in items:
        if shards[-1].items and shards[-1].nbytes + item.nbytes > most:
            shards.append(_Shard())
        shards[-1].items.append(item)
        shards[-1].nbytes += item.nbytes
    for shard in shards:
        shard.items.sort(key=lambda item: -item.dtype.itemsize)
        position = 0
        for item in shard.items:
            item.start = position
            position += item.nbytes
    return shards


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


class _Job:
    def __init__(self, source: Checkpoint, total: int, progress: Progress | None) -> None:
        self.source = source
        self.overflowed: dict[str, None] = {}
        self._total = total
        self._progress = progress
        self._done = 0

    def write_all(self, storage: Storage, names: Sequence[str], shards: Sequence[_Shard], total: int) -> list[str]:
        """Write the files, and an index if there are several; their names."""
        files = list(names)
        for name, shard in zip(names, shards, strict=True):
            self._write(storage, name, shard)
        if len(names) > 1:
            files.append(_INDEX)
            weights = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard.items}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            storage.publish(_INDEX, json.dumps(index, indent=2).encode() + b"\n")
        storage.sync(files)
        return files

    def _write(self, storage: Storage, name: str, shard: _Shard) -> None:
        """One file: tensors as they are read, the next piece while one is written; the header last, as storages want."""
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

    def _batches(self, shard: _Shard) -> Iterator[list[torch.Tensor]]:
        """Converted elements in the order of the file's bytes, some 16 MiB at a time."""
        by_key: Mapping[str, _Item] = {item.key: item for item in shard.items}
        batch: list[torch.Tensor] = []
        held = 0
        for key, _, data in self.source.stream(by_key, _PIECE):
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
                held += data.numel() * data.element_size()
            if held >= _PIECE // 2:
                yield batch
                batch, held = [], 0
            if self._progress is not None:
                self._progress(self._done, self._total)
        if batch:
            yield batch


def _finite(data: torch.Tensor) -> torch.Tensor:
    return (data if data.element_size() > 1 else data.float()).isfinite()


def _install(temporary: str, folder: str, files: Sequence[str]) -> None:
    """Put complete files in their place."""
    parent = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.listdir(folder):
        os.rename(temporary, folder)  # takes the place of an empty folder
        _sync_folder(parent)
        return
    old = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name)]
    # Without its index a sharded model is not there: no moment shows the new files under the old index.
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
