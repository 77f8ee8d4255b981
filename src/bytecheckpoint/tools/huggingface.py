"""Export a checkpoint to Hugging Face safetensors: consolidated files and an index, in bounded memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import xxhash

from bytecheckpoint.concurrency import Workers, call_with_timeout
from bytecheckpoint.engine.tensor_bytes import flat_bytes
from bytecheckpoint.engine.view_files import VIEW_INDEX as _INDEX
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.loading.live_names import names_below_wrappers
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.storage.posix.files import fsync_directory
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.storage.time_limits import TimeLimitedStorage, with_time_limits
from bytecheckpoint.storage.wrappers import Call
from bytecheckpoint.tools.export_target import ExportReport, check_target, translated
from bytecheckpoint.tools.huggingface_description import (
    ModelDescription,
    files_beside,
    files_of,
    fitted,
)
from bytecheckpoint.tools.huggingface_layout import (
    ADAPTER_FILE,
    SINGLE_FILE,
    OutputFile,
    OutputTensor,
    distribute,
    export_dtype,
    header_bytes,
    tensors_to_export,
)
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.ranks import ToolRanks, tool_ranks
from bytecheckpoint.tools.subject import Subject, opened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["WeightFiles", "export_huggingface", "index_of"]

_CHUNK_BYTES = 16 << 20
_WEIGHTS = re.compile(
    r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors(\.index\.json)?|adapter_(model\.safetensors|config\.json)"
)


def export_huggingface(
    checkpoint: Subject,
    target: str | os.PathLike[str],
    *,
    state: str,
    dtype: torch.dtype | str | None,
    max_shard_bytes: int,
    adapter: str | None,
    files_from: str | os.PathLike[str] | None,
    force: bool,
    progress: Progress | None,
    process_group: ProcessGroup | None,
) -> ExportReport:
    """Write all tensors of one state as consolidated safetensors; see `export`."""
    storage = resolve(target)

    def look() -> list[str]:
        what = f"cannot look into {storage.url}"
        return call_with_timeout(call_timeout(storage), lambda: check_target(storage, force), what)

    def prepare(ranks: ToolRanks, stack: contextlib.ExitStack, present: Sequence[str]) -> tuple[_Export, ExportReport]:
        copied = {} if files_from is None else dict(files_beside(files_from))
        wanted = export_dtype(dtype)
        if max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes is {max_shard_bytes}: give a positive number of bytes")
        source = stack.enter_context(opened(checkpoint))
        if (
            storage.url in (source.path, source.path.rpartition("/")[0])
            and CheckpointView.of(source).catalog.is_foreign
        ):
            raise UsageError(f"{storage.url} holds the checkpoint itself: export into another folder")
        if state not in source.states:
            raise UsageError(f"{source.path} has no {state!r}; it holds {', '.join(source.states)}")
        view = CheckpointView.of(source)
        description = ModelDescription.of(view) if state == "model" else ModelDescription()
        name, described = description.adapter(adapter)
        below = names_below_wrappers(view.catalog) if view.catalog.is_foreign else {}
        bare = {stored.removeprefix(f"{state}/"): live.removeprefix(f"{state}/") for live, stored in below.items()}
        renamed = (lambda fqn: bare.get(fqn, fqn)) if described is None else partial(described.name, name)
        tensors, skipped, left_out = tensors_to_export(view, state, wanted, renamed, all_names=described is not None)
        if described is not None and not tensors:
            raise UsageError(
                f"{source.path} has no tensors of an adapter {name!r} in {state!r} that are those of PEFT's file: if the "
                "model has that adapter, load them into it, and call save_pretrained"
            )
        files = distribute(tensors, *((max_shard_bytes, ranks.count) if described is None else (sys.maxsize, 1)))
        if described is not None:
            files[0].name = ADAPTER_FILE
        if files_from is None and state == "model" and described is None:
            copied = files_of(view)
        others = fitted(
            {**copied, **(described or description).files},
            wanted,
            quantised=any(tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool for tensor in tensors),
        )
        others = {name: data for name, data in others.items() if name not in present or _WEIGHTS.fullmatch(name)}
        weights = WeightFiles(view, files, ranks, progress)
        running = _Export(weights, [file.name for file in files], others)
        report = ExportReport(
            storage.url,
            tuple(running.names),
            len(tensors),
            weights.nbytes,
            sum(tensor.cast for tensor in tensors),
            (),
            tuple(skipped),
            tuple(left_out),
            tuple(others),
        )
        return running, report

    with tool_ranks("export", process_group, storage.url) as ranks, contextlib.ExitStack() as stack:
        present = ranks.agree("look", lambda: look() if ranks.rank == 0 else [], lambda found: found[0])
        running, report = ranks.all_succeed("prepare", lambda: prepare(ranks, stack, present))
        with translated(f"export to {storage.url}"):
            if isinstance(storage, LocalStorage):
                overflowed = _export_to_folder(running, storage.url, force)
            else:
                overflowed = _export_to_storage(running, storage, filter(_WEIGHTS.fullmatch, present))
    return replace(report, overflowed=tuple(overflowed))


def _export_to_folder(export: _Export, folder: str, force: bool) -> list[str]:
    """Write all files to a temporary folder beside the target, then move them into place."""
    token = export.ranks.agree("token", lambda: None, lambda _: secrets.token_hex(6))
    temporary = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.exporting-{token}")
    storage = TimeLimitedStorage(LocalStorage(temporary))

    def install() -> None:
        storage.around(Call("install"), lambda: _install(temporary, folder, [*export.others, *export.names], force))

    try:
        return export.write_all(storage, install)
    finally:
        if export.ranks.rank == 0:
            storage.around_close(lambda: shutil.rmtree(temporary, ignore_errors=True))


def _export_to_storage(export: _Export, storage: Storage, old: Iterable[str]) -> list[str]:
    """Remove old weights, write the files one by one, and publish the index last."""
    export.ranks.agree("old", lambda: None, lambda _: storage.delete(old))
    try:
        return export.write_all(with_time_limits(storage), lambda: None)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            storage.delete([*export.names, *export.others, _INDEX])
        raise


class WeightFiles:
    """The files of weights that ranks write together, each its share.

    Args:
        source: open checkpoint.
        files: all files.
        ranks: the ranks.
        progress: function of (bytes read, bytes in all).

    Attributes:
        ranks: the ranks.
        own: files of this rank.
        overflowed: names of tensors of this rank in which the conversion made finite elements infinite.
    """

    def __init__(
        self,
        source: CheckpointView,
        files: Sequence[OutputFile],
        ranks: ToolRanks,
        progress: Progress | None = None,
    ) -> None:
        self.ranks = ranks
        self.own = [files[position] for position in ranks.share([file.nbytes for file in files])]
        self.overflowed: dict[str, None] = {}
        self._source = source
        self._files = files
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.stored_bytes for file in self.own for tensor in file.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in all files."""
        return sum(file.nbytes for file in self._files)

    def index(
        self, sums: Mapping[str, object] | None = None, held: Mapping[str, str] | None = None, held_bytes: int = 0
    ) -> bytes:
        """Return the index of the files, with their sums if these are known, and of tensors that other files hold."""
        weights = {tensor.name: file.name for file in self._files for tensor in file.tensors}
        return index_of(self.nbytes + held_bytes, dict(sorted({**(held or {}), **weights}.items())), sums)

    def write(self, storage: Storage) -> dict[str, tuple[int, str]]:
        """Write the files of this rank; return the size and xxh3_64 of each."""
        return {file.name: self._write(storage, file) for file in self.own}

    def _write(self, storage: Storage, file: OutputFile) -> tuple[int, str]:
        """Write one file. The next batch is read while one is written. The header goes last, as storages want it."""
        header = header_bytes(file)
        digest = xxhash.xxh3_64(header)
        writer = storage.create(NewFile(file.name, len(header) + file.nbytes))
        try:
            with contextlib.ExitStack() as stack:
                pool = Workers(1, "bytecheckpoint-export")
                stack.callback(pool.shutdown)
                last: Future[None] | None = None
                position = len(header)
                for batch in self._batches(file):
                    if last is not None:
                        last.result()
                    buffers = [memoryview(flat_bytes(d).numpy()) for d in batch]
                    last = pool.submit(writer.write_at, position, buffers)
                    for buffer in buffers:
                        digest.update(buffer)
                    position += sum(d.numel() * d.element_size() for d in batch)
                if last is not None:
                    last.result()
            writer.write_at(0, [memoryview(header)])
            writer.finish(len(header) + file.nbytes)
            return len(header) + file.nbytes, digest.hexdigest()
        except BaseException:
            writer.abort()
            raise

    def _batches(self, file: OutputFile) -> Iterator[list[torch.Tensor]]:
        """Yield converted elements in file order, about 16 MiB at a time."""
        by_key: Mapping[str, OutputTensor] = {tensor.key: tensor for tensor in file.tensors}
        batch: list[torch.Tensor] = []
        batched = 0
        for key, _, data in self._source.stream(by_key, _CHUNK_BYTES):
            tensor = by_key[key]
            self._done += data.numel() * data.element_size()
            if data.dtype != tensor.dtype:
                converted = data.to(tensor.dtype)
                infinite = ~_finite(converted)
                if bool(infinite.any()) and bool((infinite & _finite(data)).any()):
                    self.overflowed[tensor.name] = None
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


def index_of(nbytes: int, weights: Mapping[str, str], sums: Mapping[str, object] | None = None) -> bytes:
    """Return the index of files of safetensors.

    Args:
        nbytes: bytes of all tensors.
        weights: file of each tensor.
        sums: size and sum of each file that no catalog names; None if these are not known.
    """
    metadata = {"total_size": nbytes} | ({} if sums is None else {"files": sums})
    return json.dumps({"metadata": metadata, "weight_map": dict(weights)}, indent=1).encode() + b"\n"


class _Export:
    """One export: files of weights, and others beside them."""

    def __init__(self, weights: WeightFiles, names: Sequence[str], others: Mapping[str, bytes]) -> None:
        self.ranks = weights.ranks
        self.others = others
        self.names = [*names, *([_INDEX] if len(names) > 1 else [])]
        self._weights = weights

    def write_all(self, storage: Storage, install: Callable[[], None]) -> list[str]:
        """Write the files, each rank its share, and on rank 0 an index if there are several; then install all.

        Returns:
            Names of tensors in which the conversion made finite elements infinite.
        """

        def write() -> list[str]:
            self._weights.write(storage)
            return list(self._weights.overflowed)

        def finish(overflowed: list[list[str]]) -> list[str]:
            for name, data in self.others.items():
                storage.publish(name, data)
            if _INDEX in self.names:
                storage.publish(_INDEX, self._weights.index())
            storage.sync([*self.others, *self.names])
            install()
            return [name for names in overflowed for name in names]

        return self.ranks.agree("write", write, finish)


def _finite(data: torch.Tensor) -> torch.Tensor:
    return (data if data.element_size() > 1 else data.float()).isfinite()


def _install(temporary: str, folder: str, files: Sequence[str], force: bool) -> None:
    """Move complete files into the target folder."""
    parent = os.path.dirname(folder)
    if not force or not os.path.isdir(folder) or not os.listdir(folder):
        os.rename(temporary, folder)  # replaces an empty folder, and fails if another export has filled it
        fsync_directory(parent)
        return
    with contextlib.ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of two exports at once, one comes after the other as a whole
        _replace(temporary, folder, files)


def _replace(temporary: str, folder: str, files: Sequence[str]) -> None:
    """Replace the weights in a folder by complete files."""
    old = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name)]
    old.sort(key=lambda name: name != _INDEX)

    def remove(names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))

    # The old index goes first, so that a reader never sees new files under it. Before several new files all old ones
    # go: a kill between them leaves no mixture of both.
    early = old if _INDEX in files else [name for name in (_INDEX, SINGLE_FILE) if name in old and name not in files]
    remove(early)
    fsync_directory(folder)
    for name in files:
        os.replace(os.path.join(temporary, name), os.path.join(folder, name))
    remove(name for name in old if name not in files and name not in early)
    fsync_directory(folder)
