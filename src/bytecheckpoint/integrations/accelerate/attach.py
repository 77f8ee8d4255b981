"""Attach an accelerator, by a monkey patch: the accelerator gets a subclass of its own class.

Hooks of accelerate cannot save and load: they run after models of FSDP are written, and cannot stop the other files.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.accelerate.checkpoints import AcceleratorCheckpoints
from bytecheckpoint.integrations.accelerate.loaders import refuse_copies
from bytecheckpoint.integrations.attaching import ManagerArguments, Mixin, check_has, subclass_in_place
from bytecheckpoint.manager import Cadence, Latest, LoadOptions, SaveOptions

__all__ = ["attach"]

#: Attributes of an Accelerator that this package uses. Other versions may lack some of them.
_USED = (
    "save_state", "load_state", "prepare_data_loader", "skip_first_batches", "end_training", "gradient_state",
    "project_configuration", "step", "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects",
    "_save_model_state_pre_hook", "_load_model_state_pre_hook",
)  # fmt: skip
_UNSUPPORTED = {
    "DEEPSPEED": "DeepSpeed: save its engine with bytecheckpoint.save",
    "MEGATRON_LM": "Megatron-LM: save its model with bytecheckpoint.save",
    "XLA": "XLA",
}


def attach(
    accelerator: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: Any = None,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> AcceleratorCheckpoints:
    """Let an accelerator save and load with this package; then call `save_state` and `load_state` as always.

    A checkpoint holds all prepared objects (models, optimizers, schedulers, the positions of data loaders), the gradient
    scaler if there is one, the registered objects, the counters of the accelerator, and the random number generators.
    `load_state()` loads the newest step that verifies, or a higher one that accelerate itself has saved, and returns its
    number, or None if the run begins. A loop over a prepared loader then continues behind the last batch of a step.
    `end_training` waits for the save in flight. All ranks call all of these.

    Args:
        accelerator: an `accelerate.Accelerator`, before its training loop.
        root: folder or URL of the run; by default `project_dir/checkpoints`, with automatic_checkpoint_naming.
        keep: steps to keep, as for `CheckpointManager`; by default `total_limit` steps. With `Retention(..., grace=0)`
            the files of old steps go at once.
        save_options: options of all saves.
        load_options: options of all loads.

    Raises:
        UsageError: the accelerator is set up in a way that is not supported.
    """
    check_has(accelerator, _USED, "accelerate", "pass an accelerate.Accelerator, of version 1.10 or newer")
    if hasattr(accelerator, "bytecheckpoint"):
        raise UsageError("the accelerator is attached already: call attach once")
    unsupported = _UNSUPPORTED.get(accelerator.distributed_type.name)
    if unsupported:
        raise UsageError(f"an Accelerator is not supported with {unsupported}")
    if accelerator.gradient_state.in_dataloader:
        raise UsageError("a data loader is being iterated over, so its position is not known: attach before the loop")
    project = accelerator.project_configuration
    if root is None:
        if not project.automatic_checkpoint_naming or accelerator.project_dir is None:
            raise UsageError("attach needs a root=, or an Accelerator with project_dir and automatic_checkpoint_naming")
        root = os.path.join(accelerator.project_dir, "checkpoints")
    limit = None if project.total_limit is None else Latest(project.total_limit)
    arguments = ManagerArguments.of(root, keep, limit, Cadence(), None, save_options, load_options)
    checkpoints = AcceleratorCheckpoints(accelerator, arguments)
    refuse_copies(accelerator.gradient_state)
    subclass_in_place(accelerator, _AttachedAccelerator, importlib.import_module("accelerate").Accelerator)
    accelerator.bytecheckpoint = checkpoints
    return checkpoints


class _AttachedAccelerator(Mixin):  # type: ignore[misc]
    """Methods that `attach` overrides in an accelerator."""

    bytecheckpoint: AcceleratorCheckpoints

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        return self.bytecheckpoint.save_state(*args, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> int | None:
        stock = self.bytecheckpoint.folder_of_accelerate(input_dir)
        if stock is None:
            return self.bytecheckpoint.load_state(input_dir, **kwargs)
        super().load_state(stock, load_kwargs, **kwargs)
        return self.bytecheckpoint.begin_behind(stock)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().prepare_data_loader(*args, **kwargs)
        self.bytecheckpoint.follow(loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        self.bytecheckpoint.follow(dataloader).skip(num_batches)
        return dataloader

    def end_training(self) -> None:
        self.bytecheckpoint.close()
        super().end_training()
