"""Export a step as one file of Lightning's."""

from __future__ import annotations

import os
from typing import Any

import torch

from bytecheckpoint.collectives import SingleProcess, use
from bytecheckpoint.integrations.lightning.steps import HYPERPARAMETERS, POSITION, WRAPPED_NAMES, LightningState
from bytecheckpoint.loading import load
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.tools.state_dicts import mapped, state_dict_of

__all__ = ["export_ckpt"]

#: Entries without use in a file that holds no optimizers.
_LEFT_OUT = (POSITION, WRAPPED_NAMES, "callbacks", "loops", "lr_schedulers")


def export_ckpt(step: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the weights and hyperparameters of a step to a file, for `load_from_checkpoint` of a module or data module.

    One process calls it, of any job. All tensors are in its memory for a moment. The file appears whole or not at all.

    Args:
        step: path or URL of the step.
        file: local path, usually with the ending `.ckpt`. An existing file is replaced.

    Raises:
        CheckpointError: the step cannot be read, or another tool has saved it.
    """
    state = LightningState()
    with use(SingleProcess()):  # although other ranks may do something else
        load(step, {"lightning": state})
    found: dict[str, Any] = {name: value for name, value in state.loaded.items() if name not in _LEFT_OUT}
    for key, kind in HYPERPARAMETERS.items():
        if key in found and not isinstance(found[key], dict):
            found[kind] = type(found[key])
    with open_checkpoint(step) as checkpoint:
        weights = state_dict_of(CheckpointView.of(checkpoint), "model")
        names = state.loaded.get(WRAPPED_NAMES, {})
        found["state_dict"] = mapped({names.get(key, key): one for key, one in weights.items()}, lambda one: one[...])
    temporary = f"{os.fspath(file)}.{os.getpid()}.tmp"
    try:
        torch.save(found, temporary)  # noqa: TID251  the format of Lightning
        os.replace(temporary, file)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
