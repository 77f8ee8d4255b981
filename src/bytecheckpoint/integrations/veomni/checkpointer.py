"""VeOmni's checkpointer, with the writer and the reader of this package."""

from __future__ import annotations

from typing import Any

import torch
from veomni.checkpoint import checkpointer as registries
from veomni.checkpoint.dcp_checkpointer import DistributedCheckpointer, _normalize_key

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.dcp import Reader, Writer
from bytecheckpoint.opening import open as open_checkpoint

__all__ = ["VeomniCheckpointer"]


class VeomniCheckpointer(DistributedCheckpointer):  # type: ignore[misc]
    """Saves model and optimizer as an ordinary checkpoint in VeOmni's folder of a step; VeOmni writes its extra state."""

    @classmethod
    def _create_storage_writer(cls, checkpoint_dir: str) -> Writer:
        return Writer(checkpoint_dir)

    @classmethod
    def _create_storage_reader(cls, checkpoint_dir: str) -> Reader:
        return Reader(checkpoint_dir)


def _checkpointer(dist_backend: str) -> type[VeomniCheckpointer]:
    if dist_backend not in ("ddp", "fsdp2"):
        raise UsageError(f"VeOmni's backend {dist_backend!r} is not supported: use 'ddp' or 'fsdp2'")
    return VeomniCheckpointer


def _state_dict(save_checkpoint_path: str, **_: Any) -> dict[str, torch.Tensor]:
    """Return the whole model under its names in Hugging Face, for VeOmni's exports."""
    with open_checkpoint(save_checkpoint_path) as checkpoint:
        names = [key.removeprefix("model/") for key in checkpoint.tensors if key.startswith("model/")]
        return {_normalize_key(f"model.{name}"): checkpoint.tensors[f"model/{name}"][...] for name in names}


# Several places of VeOmni ask for the name "dcp", so it stays.
registries.CHECKPOINTER_REGISTRY.register("dcp", _checkpointer)
registries.CHECKPOINT_TO_STATE_DICT_REGISTRY.register("dcp", _state_dict)
