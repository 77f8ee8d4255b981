"""Say which format a folder has, by the names of its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.archives import is_zip
from bytecheckpoint.formats.dcp import METADATA, metadata_files, read_dcp
from bytecheckpoint.formats.deepspeed import OPTIMIZER_FILE, UNIVERSAL_FILE, read_deepspeed
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.formats.foreign_storage import ForeignStorage
from bytecheckpoint.formats.huggingface import NUMBERED_FILE, SAFETENSORS, read_huggingface, weight_files
from bytecheckpoint.formats.megatron import MARKER, read_megatron
from bytecheckpoint.formats.megatron_ranks import MODEL_FILE, read_megatron_ranks
from bytecheckpoint.formats.orbax import METADATA as METADATA_OF_ORBAX
from bytecheckpoint.formats.orbax import item_folder, read_orbax
from bytecheckpoint.formats.rank_files import CONSOLIDATED, RANK_FILE, are_numbered, read_consolidated, read_rank_files
from bytecheckpoint.formats.torch_checkpointing import describes_safetensors
from bytecheckpoint.formats.torch_save import SUFFIXES, read_torch_save
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.wrappers import wrapped_like

__all__ = ["FormatReader", "as_checkpoint", "detect", "find_checkpoint", "find_instead"]

#: The only file of DeepSpeed without ZeRO and without parallel models: it holds the optimizer, too.
_WITHOUT_ZERO: Final = "mp_rank_00_model_states.pt"
#: First byte of a pickle since protocol 2.
_PICKLE: Final = b"\x80"
#: Pattern of a file's name -> description of a folder that has such a file. The first that fits counts.
_PROGRAMS: Final = {
    r"latest(_universal)?|.*/(bf16_)?zero_pp_rank_.*": "the folder of a DeepSpeed run: give the folder of one step",
    r"(zero_pp_rank|mp_rank_\d+_model_states|layer_\d+).*\.pt": "of DeepSpeed without the optimizer's files: give one file",
    r"latest_checkpointed_iteration\.txt": "the folder of a run of Megatron or verl: give the folder of one step",
    r"_CHECKPOINT_METADATA|manifest\.ocdbt|(.*/)?ocdbt\.process_.*": "of Orbax, without the '_METADATA' of one item",
}
#: The same for folders without weights that are read.
_OTHERS: Final = {
    r"blobs/[0-9a-f]{40,64}": "a repository in the cache of Hugging Face: give one of the folders in its 'snapshots'",
    r".*\.(gguf|onnx)|.*\.h5|flax_model.*\.msgpack": "a model of another framework: take the safetensors of the same model",
}
#: Files of other checkpoints in folders below, with the name of the folder.
_BELOW: Final = re.compile(
    r"(.+)/(?:\.metadata|[^/]+\.(?:pth?|bin|ckpt)|(?:adapter_|pytorch_)?model[^/]*\.safetensors)"
)


@dataclass(frozen=True, slots=True)
class FormatReader:
    """The reader of one format.

    Attributes:
        format: name of the format.
        read: function that reads the checkpoint of a storage.
    """

    format: str
    read: Callable[[Storage], ForeignCheckpoint]


def detect(storage: Storage, name: str | None = None) -> FormatReader:
    """Return the reader of a foreign checkpoint: a folder, or one file of it.

    Raises:
        CheckpointNotFoundError: the folder is empty, has no such file, or has no format that is known.
        IncompatibleCheckpointError: the folder has a format that is not read.
    """
    if name is not None:
        if (reader := _of_file(storage, name)) is None:
            raise CheckpointNotFoundError(f"{storage.url}/{name}: there is no such file")
        return reader
    names = [found for found, _ in storage.list()]
    if CATALOG_NAME in names:
        raise CheckpointNotFoundError(f"{storage.url} is a checkpoint of this package, not of another program")
    if not names:
        raise CheckpointNotFoundError(f"{storage.url} has no files, nor have its folders, or there is no such folder")
    if METADATA in names:
        # Values of Megatron are known by their names, too.
        marked = MARKER in names
        return FormatReader("megatron" if marked else "dcp", partial(read_megatron, has_marker=marked))
    if metadata_files(names):
        return FormatReader("dcp", read_dcp)
    if UNIVERSAL_FILE in names or any(OPTIMIZER_FILE.fullmatch(name) for name in names):
        return FormatReader("deepspeed", read_deepspeed)
    if METADATA_OF_ORBAX in {name.rpartition("/")[2] for name in names}:
        folder = item_folder(names)
        if folder is None:
            raise IncompatibleCheckpointError(
                f"{storage.url} has several checkpoints of Orbax: give the folder of one item"
            )
        return FormatReader("orbax", partial(read_orbax, folder=folder))
    if any(MODEL_FILE.fullmatch(name) for name in names):
        return FormatReader("megatron-ranks", read_megatron_ranks)
    torch_files = [name for name in names if name.endswith(SUFFIXES)]
    if torch_files == [_WITHOUT_ZERO]:
        return FormatReader("torch-save", _read_without_zero)
    _refuse(storage, names, _PROGRAMS)
    try:
        index, files = weight_files(names)
    except IncompatibleCheckpointError as error:
        raise IncompatibleCheckpointError(f"{storage.url}: {error}") from None
    # One file without a number has whole tensors; any program may call a file beside it so, too.
    whole = index or (len(files) == 1 and not NUMBERED_FILE.fullmatch(files[0]))
    if not whole and describes_safetensors(names):
        return FormatReader("rank-files", read_rank_files)
    if index or files:
        return FormatReader("huggingface", read_huggingface)
    if any(RANK_FILE.fullmatch(name) for name in names):
        return FormatReader("rank-files", read_rank_files)
    _refuse(storage, names, _OTHERS)
    if any(name.endswith(".distcp") and "/" not in name for name in names):  # perhaps beside Megatron's common.pt
        raise CheckpointNotFoundError(
            f"{storage.url} lacks {METADATA}, which DCP and Megatron write last: a save was killed"
        )
    below = {name: found[1] for name in names if (found := _BELOW.fullmatch(name))}
    if len(torch_files) == 1 and not below.keys() - set(torch_files):
        return FormatReader("torch-save", partial(read_torch_save, name=torch_files[0]))
    if torch_files and all(map(CONSOLIDATED.fullmatch, torch_files)):
        return FormatReader("rank-files", partial(read_consolidated, names=torch_files))
    if torch_files and are_numbered(torch_files):
        return FormatReader("rank-files", read_rank_files)
    if torch_files or below:
        here, folders = [name for name in torch_files if "/" not in name], sorted(set(below.values()))
        what = [f"files of torch.save ({listed(here)})"] if here else []
        what += [f"checkpoints in folders ({listed([*map(repr, folders)])})"] if folders else []
        kind = IncompatibleCheckpointError if torch_files else CheckpointNotFoundError
        raise kind(f"{storage.url} has {' and '.join(what)}: give one")
    raise CheckpointNotFoundError(f"{storage.url} has no checkpoint of a known format (it has {', '.join(names[:5])})")


def _read_without_zero(storage: Storage) -> ForeignCheckpoint:
    found = read_torch_save(storage, _WITHOUT_ZERO)
    if "param_shapes" in found.values:  # by which ZeRO divides the optimizer
        _refuse(storage, [_WITHOUT_ZERO], _PROGRAMS)
    return found


def _refuse(storage: Storage, names: list[str], known: Mapping[str, str]) -> None:
    for pattern, what in known.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            raise IncompatibleCheckpointError(f"{storage.url} is {what} (it has {found!r})")


def _of_file(storage: Storage, name: str) -> FormatReader | None:
    """Return the reader of a file; None if there is no such file."""
    try:
        storage.stat(name)
    except FileNotFoundError:
        return None
    if name == METADATA or name.endswith(".distcp"):
        raise CheckpointNotFoundError(f"{storage.url}/{name} is one file of a checkpoint of DCP: give its folder")
    if name.endswith(SAFETENSORS):
        return FormatReader("huggingface", partial(read_huggingface, name=name))
    with open_file(storage, name) as file:
        head = file.read(0, min(file.size, 4))
    if is_zip(head) or head[:1] == _PICKLE:
        return FormatReader("torch-save", partial(read_torch_save, name=name))
    raise CheckpointNotFoundError(f"{storage.url}/{name} is no file of safetensors or torch.save")


def find_checkpoint(storage: Storage) -> ForeignStorage:
    """Return a folder of another program, or a single file at its address, as a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none; the message says what lies there.
        IncompatibleCheckpointError: it has a format that is not read.
    """
    folder, _, name = storage.url.rpartition("/")
    of_file: CheckpointNotFoundError | None = None
    if folder and name and not folder.endswith(":/"):  # else a bucket
        try:
            around = wrapped_like(storage, resolve(folder))
            if (reader := _of_file(around, name)) is not None:
                return ForeignStorage(around, reader.read, storage.url)
        except CheckpointNotFoundError as error:  # an object store may have a folder of the same name
            of_file = error
    try:
        return ForeignStorage(storage, detect(storage).read)
    except CheckpointNotFoundError as error:
        raise of_file or error from None


def find_instead(storage: Storage, error: CheckpointNotFoundError) -> ForeignStorage:
    """Return what `find_checkpoint` finds where there is no checkpoint of this package.

    Args:
        storage: the folder, or the address of a single file.
        error: says that there is no checkpoint of this package.

    Raises:
        CheckpointNotFoundError: there is none either; the message is that of `error`, and what lies there.
        IncompatibleCheckpointError: it has a format that is not read.
    """
    try:
        return find_checkpoint(storage)
    except CheckpointNotFoundError as reason:
        raise CheckpointNotFoundError(f"{error}; {reason}") from None


def as_checkpoint(storage: Storage) -> ForeignStorage | None:
    """Return what `find_checkpoint` finds, None if there is none.

    Raises:
        IncompatibleCheckpointError: it has a format that is not read.
    """
    with contextlib.suppress(CheckpointNotFoundError):
        return find_checkpoint(storage)
    return None
