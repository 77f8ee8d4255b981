"""Description of a Hugging Face model in its checkpoint, which an export turns into configuration files and names."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from bytecheckpoint.engine.view_files import view_files
from bytecheckpoint.errors import UsageError
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.names import CATALOG_NAME

__all__ = [
    "AdapterDescription", "ModelDescription", "configuration_files", "files_beside", "files_of", "fitted",
    "texts_written_by",
]  # fmt: skip

_STATE = "huggingface"
_KEY = f"{_STATE}/description"
_CONFIG = "config.json"
#: Endings of files that hold weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class AdapterDescription(msgspec.Struct, omit_defaults=True):
    """One adapter of PEFT.

    PEFT writes a tensor without the name of the adapter: `q_proj.lora_A.default.weight` as `q_proj.lora_A.weight`, and
    `lm_head.modules_to_save.default.weight` as `lm_head.weight`.

    Attributes:
        files: texts of its configuration files, by name.
        exceptions: names in PEFT's file of tensors for which this rule does not hold, by their names in the checkpoint;
            None for those that PEFT does not write.
    """

    files: dict[str, str] = {}
    exceptions: dict[str, str | None] = {}

    def name(self, adapter: str, key: str) -> str | None:
        """Return the name of a tensor in PEFT's file, or None for one that does not belong to the adapter."""
        if key in self.exceptions:
            return self.exceptions[key]
        head, found, tail = key.partition(f".{adapter}.")
        if found:
            return f"{head.removesuffix('.modules_to_save')}.{tail}"
        return key.removesuffix(f".{adapter}") if key.endswith(f".{adapter}") else None


class ModelDescription(msgspec.Struct, omit_defaults=True):
    """A model of Hugging Face beside its tensors.

    Attributes:
        files: texts of the configuration files of a model without adapters, by name.
        adapters: adapters of PEFT, by name.
        active: name of the adapter in training; "" for a model without adapters.
    """

    files: dict[str, str] = {}
    adapters: dict[str, AdapterDescription] = {}
    active: str = ""

    def state(self) -> dict[str, str]:
        """Return the state to save under the name "huggingface"."""
        return {"description": msgspec.json.encode(self).decode()}

    @classmethod
    def of(cls, source: CheckpointView) -> ModelDescription:
        """Return the description in a checkpoint, an empty one if there is none."""
        text: Any = source[_KEY] if _KEY in source.keys_of(_STATE) else None
        try:
            return msgspec.json.decode(text, type=cls) if isinstance(text, str) else cls()
        except msgspec.MsgspecError:  # a state of the user's that has this name
            return cls()

    def adapter(self, wanted: str | None) -> tuple[str, AdapterDescription | None]:
        """Return the name and description of the adapter to export; ("", None) for a model without adapters.

        Args:
            wanted: name that the user gives; None for the active one.

        Raises:
            UsageError: there are other adapters.
        """
        name = self.active if wanted is None else wanted
        if self.adapters and name not in self.adapters:
            raise UsageError(f"there is no adapter {name!r}: the checkpoint has {', '.join(sorted(self.adapters))}")
        return name, (self.adapters.get(name, AdapterDescription()) if name else None)


def configuration_files(model: Any) -> dict[str, str]:
    """Return the texts of the configuration files of a model of transformers by name, of other models none."""
    config: Any = getattr(model, "config", None)
    generation = getattr(model, "generation_config", None)
    if not hasattr(config, "save_pretrained"):
        return {}
    config = copy.deepcopy(config)  # not before: one of Megatron holds process groups when a training has begun
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard prepends that to the class's name

    def save(folder: str) -> None:
        config.save_pretrained(folder)
        if generation is not None and model.can_generate():
            generation.save_pretrained(folder)

    try:
        return texts_written_by(save)
    except ValueError as error:  # settings that contradict each other
        raise UsageError(f"the configuration of {type(model).__name__} cannot be saved: {error}") from error


def texts_written_by(save: Callable[[str], object]) -> dict[str, str]:
    """Return the texts that a function writes into a folder, by the names of the files."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        texts = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                texts[name] = file.read()
    return texts


def fitted(files: Mapping[str, str | bytes], dtype: torch.dtype | None, *, quantised: bool) -> dict[str, bytes]:
    """Return files beside weights with a `config.json` that says of the weights what is true.

    Args:
        files: their contents.
        dtype: dtype to which floating tensors are converted; None if they are not.
        quantised: True if some weights have fewer bits than a dtype to compute in.
    """
    found = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    config: Any = None
    with contextlib.suppress(msgspec.DecodeError):  # a user's file may hold anything
        config = msgspec.json.decode(found.get(_CONFIG, b""))
    if isinstance(config, dict):
        true = dict(config)
        if dtype is not None:
            true |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in config}
        if not quantised:
            true.pop("quantization_config", None)
        if true != config:
            found[_CONFIG] = msgspec.json.format(msgspec.json.encode(true), indent=2) + b"\n"
    return found


def files_of(source: CheckpointView) -> dict[str, bytes]:
    """Return the configuration and tokenizer in the folder of a checkpoint whose tensors have Hugging Face's names there.

    That is a folder of Hugging Face, or a step with a view. Through a layout the tensors have other names.

    Raises:
        CorruptCheckpointError: a file of a view is damaged.
    """
    if source.is_renamed:
        return {}
    if source.info.get("format") == "huggingface":
        return {name: source.storage.read(name) for name in _without_weights(name for name, _ in source.storage.list())}
    return view_files(source.storage, source.info, source.catalog.fqns("model"))


def files_beside(folder: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files of a local folder that hold no weights: configuration and tokenizer.

    Raises:
        UsageError: there is no such folder, or no such file in it.
    """
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [one for one in _without_weights(names) if os.path.isfile(os.path.join(folder, one))]
    if not names:
        raise UsageError(f"{os.fspath(folder)} holds no files to copy: give the local folder of a Hugging Face model")
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            yield name, file.read()


def _without_weights(names: Iterable[str]) -> list[str]:
    """Return the names of files in a folder of Hugging Face that hold no weights."""
    hidden = (CATALOG_NAME, ".")
    return [one for one in names if not one.endswith(_WEIGHTS) and not one.startswith(hidden) and "/" not in one]
