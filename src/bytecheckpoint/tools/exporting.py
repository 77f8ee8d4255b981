"""Export a checkpoint to the formats of other programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bytecheckpoint.errors import UsageError
from bytecheckpoint.formats.megatron import MARKER
from bytecheckpoint.formats.optimizer_dicts import flat_optimizer
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.tools.export_target import ExportReport, check_target, new_folder, translated
from bytecheckpoint.tools.huggingface import export_huggingface
from bytecheckpoint.tools.megatron import megatron_content
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.ranks import tool_ranks
from bytecheckpoint.tools.state_dicts import state_dict_of
from bytecheckpoint.tools.subject import Subject, opened
from bytecheckpoint.tools.torch_files import Advance, DcpFiles, Written, write_dcp, write_items, write_torch_file
from bytecheckpoint.tools.universal import universal_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["export"]

#: Content of the file by which Megatron knows a checkpoint of its own.
_MEGATRON = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def export(
    checkpoint: Subject,
    target: str | os.PathLike[str],
    *,
    format: Literal["hf", "dcp", "torchtitan", "torch", "deepspeed-universal", "megatron"] = "hf",
    state: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    adapter: str | None = None,
    files_from: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> ExportReport:
    """Write a checkpoint for other programs: of Hugging Face, DCP, `torch.save`, DeepSpeed, or Megatron-Core.

    "dcp" and "torch" hold all states in nested dicts, as `get_state_dict` returns them: optimizers with their parameters by
    name, and plain values. `dcp.load` and `torch.load(weights_only=True)` take them. Positions of data loaders in streams
    are left out, because only this package knows them. "torch" writes one file, on a local file system. "torchtitan" is
    "dcp" with the model at the top and flat optimizers, as torchtitan has them.

    "deepspeed-universal" writes a local folder for `engine.load_checkpoint` of a configuration with `"checkpoint":
    {"load_universal": True}`: a model with its optimizer, which DeepSpeed loads at any stage of ZeRO and number of ranks.

    "megatron" writes a folder for Megatron-Core's `dist_checkpointing.load` ("torch_dist", 0.19): a model under Megatron's
    names with a fully reshardable optimizer, which Megatron loads at any tensor, pipeline and data parallelism. The groups
    of the optimizer have to be Megatron's.

    "hf" holds all tensors of one state as consolidated safetensors.
    Steps of a Trainer, and others with a state `describe_pretrained(model)` under the name "huggingface", hold the model's
    configuration too: then the folder is complete for `from_pretrained`, or, for a model with adapters, for
    `PeftModel.from_pretrained`. A folder of Hugging Face, and a step with a view, give theirs, and a tokenizer.

    One `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index. Tied tensors are written once, under
    the name under which the checkpoint stores them. Tensors are streamed, so the memory needed depends neither on the
    size of the model nor on its largest tensor. In a local folder the files appear together, once all are durable. On
    other storages they appear one by one, the index last.

    Args:
        checkpoint: path, storage or open checkpoint.
        target: folder or URL, for "torch" a file; it must not exist or be empty unless `force` is set.
        format: format of the result.
        state: name of the state to export alone, of "megatron" a model; for "deepspeed-universal" that of the model
            with its optimizer. None for "model" of it and of "hf", and for all states of the others.
        dtype: "hf" only: convert floating tensors to this dtype ("bfloat16", torch.bfloat16); None leaves all as they are.
        max_shard_bytes: bytes of tensors per file; a larger tensor has a file of its own.
        adapter: "hf" only: name of the adapter of PEFT to export, under the names that PEFT reads; None for the one in
            training that the checkpoint describes, and for all tensors if it describes none.
        files_from: "hf" only: local folder of a model, from which all files but the weights are copied: configuration,
            tokenizer. None for those in the checkpoint's own folder, where the weights have the same names.
        force: "hf" and "torch" only: replace weights at the target. Other files of the folder stay. On storages other than
            local folders the old weights are removed first.
        progress: function of (bytes read, bytes in all).
        process_group: ranks that write "hf", "dcp" or "megatron" together, which all make this call; each reads and writes
            its share of the files, and rank 0 the index, last. None for this process alone.

    Raises:
        UsageError: wrong arguments, or the target is not empty.
        IncompatibleCheckpointError: a dtype or name that safetensors cannot hold.
        CorruptCheckpointError: a block is damaged; nothing is left at `target`.
        StorageError: the files cannot be written.
    """
    if process_group is not None and format in ("torch", "deepspeed-universal"):
        raise UsageError(f"process_group= is for 'hf', 'dcp' and 'megatron': {format!r} is written by one process")
    if format == "hf":
        return export_huggingface(
            checkpoint, target, state="model" if state is None else state, dtype=dtype, max_shard_bytes=max_shard_bytes,
            adapter=adapter, files_from=files_from, force=force, progress=progress, process_group=process_group,
        )  # fmt: skip
    if format not in _PREPARED:
        raise UsageError(f"format={format!r}: use 'hf', {', '.join(map(repr, _PREPARED))}")
    for name, value in (("dtype", dtype), ("adapter", adapter), ("files_from", files_from)):
        if value is not None:
            raise UsageError(f"{name}= is for format='hf'; {format!r} keeps tensors as they are")
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: give a positive number of bytes")
    storage = resolve(target)
    if format == "torch":
        if not isinstance(storage, LocalStorage):
            raise UsageError(f"{storage.url}: a file of torch.save is written to a local file system")
        if os.path.isdir(storage.url) or (os.path.lexists(storage.url) and not force):
            raise UsageError(f"{storage.url} exists: give the path of a new file")
    with tool_ranks("export", process_group, storage.url) as ranks, contextlib.ExitStack() as stack:

        def prepare() -> _Prepared:
            if format != "torch" and ranks.rank == 0:
                check_target(storage, None)
            view = CheckpointView.of(stack.enter_context(opened(checkpoint)))
            return _PREPARED[format](view, DcpFiles(storage, max_shard_bytes, ranks), state)

        prepared = ranks.all_succeed("prepare", prepare)  # before any rank writes
        with translated(f"export to {storage.url}"):
            written = prepared.write(
                lambda done: progress(min(done, prepared.nbytes), prepared.nbytes) if progress is not None else None
            )
    return ExportReport(
        storage.url, tuple(written.files), written.tensors, written.nbytes, 0, (), tuple(prepared.skipped)
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An export that can begin.

    Attributes:
        nbytes: bytes of tensors to read.
        skipped: names of states and values that the format cannot hold.
        write: function that writes all files, given a function of the bytes read so far.
    """

    nbytes: int
    skipped: Sequence[str]
    write: Callable[[Advance], Written]


def _trees(
    view: CheckpointView, state: str | None, *, param_names: bool = False
) -> tuple[dict[str, Any], list[str], int]:
    """Return the states for programs of torch, the names of those that are left out, and the bytes of tensors."""
    if state is not None and state not in view.states:
        raise UsageError(f"{view.path} has no {state!r}; it holds {', '.join(view.states)}")
    chosen = [state] if state is not None else list(view.states)
    skipped = [name for name in chosen if view.has_streams(name)]
    kept = [name for name in chosen if name not in skipped]
    tree: dict[str, Any] = {name: state_dict_of(view, name, param_names=param_names) for name in kept}
    return tree, skipped, sum(view[k].nbytes for name in tree for k in view.keys_of(name) if view.stored_under(k))


def _prepare_dcp(view: CheckpointView, files: DcpFiles, state: str | None) -> _Prepared:
    tree, skipped, total = _trees(view, state, param_names=True)
    return _Prepared(total, skipped, lambda advance: write_dcp(view, tree, files, advance))


def _prepare_torchtitan(view: CheckpointView, files: DcpFiles, state: str | None) -> _Prepared:
    tree, skipped, total = _trees(view, state)
    model = tree.pop("model", {})
    if both := model.keys() & tree.keys():
        raise UsageError(f"{view.path}: torchtitan has the model beside the other states, and {min(both)!r} is in both")
    others = {k: flat_optimizer(item) if f"{k}/param_groups" in view else item for k, item in tree.items()}
    return _Prepared(total, skipped, lambda advance: write_dcp(view, model | others, files, advance))


def _prepare_torch(view: CheckpointView, files: DcpFiles, state: str | None) -> _Prepared:
    tree, skipped, total = _trees(view, state)

    def write(advance: Advance) -> Written:
        os.makedirs(os.path.dirname(files.storage.url), exist_ok=True)
        return write_torch_file(view, tree, files.storage.url, advance)

    return _Prepared(total, skipped, write)


def _prepare_universal(view: CheckpointView, files: DcpFiles, state: str | None) -> _Prepared:
    if not isinstance(files.storage, LocalStorage):
        raise UsageError(f"{files.storage.url}: DeepSpeed reads a local file system")
    found = universal_of(view, "model" if state is None else state)

    def write(advance: Advance) -> Written:
        with new_folder(files.storage.url) as folder:
            return found.write(folder, advance)

    return _Prepared(found.nbytes, found.skipped, write)


def _prepare_megatron(view: CheckpointView, files: DcpFiles, state: str | None) -> _Prepared:
    found = megatron_content(view, "model" if state is None else state, alone=state is not None)
    total = sum(view[key].nbytes for key in {view.stored_under(item.key): item.key for item in found.items}.values())
    markers = {MARKER: _MEGATRON}
    return _Prepared(
        total,
        found.skipped,
        lambda advance: write_items(view, found.items, found.blobs, files, advance, markers=markers),
    )


_PREPARED: Mapping[str, Callable[[CheckpointView, DcpFiles, str | None], _Prepared]] = {
    "dcp": _prepare_dcp, "torchtitan": _prepare_torchtitan, "torch": _prepare_torch,
    "deepspeed-universal": _prepare_universal, "megatron": _prepare_megatron,
}  # fmt: skip
