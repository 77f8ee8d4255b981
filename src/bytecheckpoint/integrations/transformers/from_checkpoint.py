"""Make a model of Transformers from a checkpoint of any layout, on one process or distributed over many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools.huggingface_description import ModelDescription

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig

__all__ = ["from_checkpoint"]

_CONFIG = "config.json"


def from_checkpoint(
    path: str | os.PathLike[str],
    *,
    config: PretrainedConfig | str | os.PathLike[str] | None = None,
    distribute: Callable[[Any], object] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: LayoutArgument | None = "auto",
    state: str = "model",
    process_group: ProcessGroup | None = None,
) -> Any:
    """Return a model of Transformers with the weights of a checkpoint. Every rank of the process group calls it.

    No rank holds the whole model: it is built without memory, distributed, and each rank reads its part once.

    Args:
        path: folder or URL of a checkpoint of any layout, or of another program, as for `load`.
        config: configuration of the model, or its folder or name on the hub. None: that of the checkpoint, in its state
            "huggingface" (`describe_pretrained`; `attach` saves it), or the `config.json` beside its files. One without
            architectures is of a causal language model.
        distribute: function that distributes the model in place, or returns it distributed: `fully_shard` of its layers,
            `parallelize_module`. None: each rank has all of it.
        device: device of the parameters.
        dtype: dtype of the parameters, to which the weights are converted; None: that of the configuration.
        layout: layout by which the names of the checkpoint lead to those of the model, as for `load`.
        state: name of the state that is the model.
        process_group: ranks that load together; by default all.

    Returns:
        The model in evaluation mode, as from `from_pretrained`.

    Raises:
        UsageError: the checkpoint has no configuration, and none was given; or it names no class of Transformers.
        IncompatibleCheckpointError: the checkpoint does not fit the configuration.
        CorruptCheckpointError: bytes differ from what was written.
    """
    import transformers
    from accelerate import init_empty_weights

    described = _configuration(path, config)
    names = described.architectures or []
    kind = next((found for name in names if (found := getattr(transformers, name, None))), None)
    if kind is None and names:
        raise UsageError(f"the configuration names {names}, which transformers does not have: give config=")
    make = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with init_empty_weights(include_buffers=False):  # buffers that no checkpoint holds are computed here
        model: Any = make(described, **({} if dtype is None else {"dtype": dtype}))
    if distribute is not None:
        model = distribute(model) or model
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.tie_weights()
    report = bytecheckpoint.load(
        path, {state: model}, layout=layout, cast=dtype is not None, prepare_save=False, process_group=process_group
    )
    model.bytecheckpoint_report = report
    return model.eval()


def _configuration(path: str | os.PathLike[str], given: Any) -> Any:
    """Return the configuration that was given, or that of the checkpoint."""
    from transformers import AutoConfig

    if given is not None:
        return AutoConfig.from_pretrained(given) if isinstance(given, str | os.PathLike) else given
    with bytecheckpoint.open(path) as checkpoint:
        view = CheckpointView.of(checkpoint)
        files: Mapping[str, str] = ModelDescription.of(view).files
        text = files.get(_CONFIG)
        if text is None:
            text = _beside(checkpoint.path)
    if text is None:
        raise UsageError(f"{path} has no configuration of its model: give config=, a configuration, a folder or a name")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _CONFIG).write_text(text, encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder)
        except ValueError as error:
            raise IncompatibleCheckpointError(
                f"{path}: transformers does not take its configuration: {error}"
            ) from error


def _beside(path: str) -> str | None:
    """Return the config.json beside the files of a checkpoint."""
    try:
        return resolve(path).read(_CONFIG).decode()
    except FileNotFoundError:
        return None
