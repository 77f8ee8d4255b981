"""Say which format a folder has, by the names of its files. Nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from bytecheckpoint.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.dcp import metadata_files, read_dcp
from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.formats.huggingface import SAFETENSORS, read_huggingface, weight_files
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage

__all__ = ["FormatReader", "detect"]

_TORCH: Final = (".pt", ".pth", ".bin", ".ckpt")
#: Pattern of a file's name -> description of a folder that has such a file. The first that fits counts.
_PROGRAMS: Final = {
    re.escape(CATALOG_NAME): "a checkpoint of this package: load or open it as such",
    r"(.*/)?(bf16_)?zero_pp_rank_.*|(.*/)?mp_rank_\d+_model_states\.pt": "of DeepSpeed, which is not read yet",
    r"latest(_universal)?": "the folder of a DeepSpeed run, which is not read yet",
    r"(.*/)?mp_rank_\d+(_\d+)*/(model_optim_rng|distrib_optim)\.pt": "of Megatron, by ranks, which is not read yet",
    r"latest_checkpointed_iteration\.txt": "the folder of a Megatron run: give the folder of one iteration",
    r".*world_size_\d+_rank_\d+\.(pt|pth)": "a folder with files of ranks, which is not read yet",
    r"_CHECKPOINT_METADATA|manifest\.ocdbt|(.*/)?ocdbt\.process_.*": "of Orbax, which is not read yet",
}
#: The same for folders without weights that are read.
_OTHERS: Final = {
    r".*\.(gguf|onnx)|.*\.h5|flax_model.*\.msgpack": "a model of another framework: take the safetensors of the same model",
}


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
    """Return the reader of a foreign checkpoint.

    Args:
        storage: folder of the checkpoint.
        name: the file, if the checkpoint is one file of the folder.

    Raises:
        CheckpointNotFoundError: the folder is empty, or has no such file.
        IncompatibleCheckpointError: the folder has a format that is not read, or none that is known.
    """
    names = [found for found, _ in storage.list()]
    if name is not None:
        return _of_file(storage, name, names)
    if not names:
        raise CheckpointNotFoundError(f"{storage.url} is empty, or there is no such folder")
    if metadata_files(names):
        return FormatReader("dcp", read_dcp)
    _refuse(storage, names, _PROGRAMS)
    try:
        index, files = weight_files(names)
    except IncompatibleCheckpointError as error:
        raise IncompatibleCheckpointError(f"{storage.url}: {error}") from None
    if index or files:
        return FormatReader("huggingface", read_huggingface)
    _refuse(storage, names, _OTHERS)
    torch_files = [name for name in names if name.endswith(_TORCH)]
    if len(torch_files) == 1:
        return FormatReader("torch-save", partial(read_torch_save, name=torch_files[0]))
    if torch_files:
        listed = ", ".join(torch_files[:5])
        raise IncompatibleCheckpointError(
            f"{storage.url} has {len(torch_files)} files of torch.save ({listed}, ...): give one"
        )
    raise IncompatibleCheckpointError(
        f"{storage.url} has no checkpoint of a known format (it has {', '.join(names[:5])})"
    )


def _refuse(storage: Storage, names: list[str], known: Mapping[str, str]) -> None:
    for pattern, what in known.items():
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            raise IncompatibleCheckpointError(f"{storage.url} is {what} (it has {found!r})")


def _of_file(storage: Storage, name: str, names: list[str]) -> FormatReader:
    if name not in names:
        raise CheckpointNotFoundError(f"{storage.url}/{name}: there is no such file")
    if name.endswith(SAFETENSORS):
        return FormatReader("huggingface", partial(read_huggingface, name=name))
    if name.endswith(_TORCH):
        return FormatReader("torch-save", partial(read_torch_save, name=name))
    raise IncompatibleCheckpointError(f"{storage.url}/{name} is no file of safetensors or torch.save by its name")
