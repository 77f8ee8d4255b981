"""`attach`: put a subclass of an accelerator's own class in its place.

Hooks of accelerate cannot save and load: they run after models of FSDP are written, and cannot stop the other files.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.accelerate.checkpoints import AcceleratorCheckpoints
from bytecheckpoint.integrations.accelerate.loaders import refuse_copies
from bytecheckpoint.integrations.attaching import check_has, manager_options, put_in_front
from bytecheckpoint.manager import Latest

if TYPE_CHECKING:
    from accelerate import Accelerator
else:
    Accelerator = object  # the class of the accelerator follows it

__all__ = ["attach"]

#: What this package uses of an Accelerator. Other versions may lack some of it.
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
    accelerator: Any, root: str | os.PathLike[str] | None = None, *, keep: Any = None, **options: Any
) -> AcceleratorCheckpoints:
    """Let an accelerator save and load with this package; then call `save_state` and `load_state` as always.

    A checkpoint holds what was prepared (models, optimizers, schedulers, the positions of data loaders), the gradient
    scaler if there is one, the registered objects, the counters of the accelerator, and the random number generators.
    `load_state()` loads the newest step that verifies, and returns its number; None if the run begins. A loop over a
    prepared loader then goes on behind the last batch. `end_training` waits for the save in flight. All ranks call all
    of these.

    Args:
        accelerator: an `accelerate.Accelerator`; before the training loop.
        root: folder or URL of the run; by default `project_dir/checkpoints`, with automatic_checkpoint_naming.
        keep: which steps to keep; as for `CheckpointManager`. By default what `total_limit` says.
        **options: `async_checkpoint`, `on_error`, `grace` (by default 0: old steps are deleted at once), `save_options` and
            `load_options` of `CheckpointManager`.

    Raises:
        UsageError: the accelerator is set up in a way that is not supported.
    """
    check_has(accelerator, _USED, "accelerate", "pass an accelerate.Accelerator, of version 1.10 or newer")
    if hasattr(accelerator, "bytecheckpoint"):
        raise UsageError("the accelerator is attached already: call attach once")
    if (kind := accelerator.distributed_type.name) in _UNSUPPORTED:
        raise UsageError(f"an Accelerator is not supported with {_UNSUPPORTED[kind]}")
    if accelerator.gradient_state.in_dataloader:
        raise UsageError("a data loader is being iterated over, so its position is not known: attach before the loop")
    project = accelerator.project_configuration
    if root is None:
        if not project.automatic_checkpoint_naming or accelerator.project_dir is None:
            raise UsageError("attach needs a root=, or an Accelerator with project_dir and automatic_checkpoint_naming")
        root = os.path.join(accelerator.project_dir, "checkpoints")
    if keep is None and project.total_limit is not None:
        keep = Latest(project.total_limit)
    # "overlap" is for saves that a rule wants: each `save_state` saves.
    checkpoints = AcceleratorCheckpoints(accelerator, root, manager_options(options, but=["overlap"], keep=keep))
    refuse_copies(accelerator.gradient_state)
    put_in_front(accelerator, _AttachedAccelerator)
    accelerator.bytecheckpoint = checkpoints
    return checkpoints


class _AttachedAccelerator(Accelerator):  # type: ignore[misc]
    """What `attach` puts in front of an accelerator's class."""

    bytecheckpoint: AcceleratorCheckpoints

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        return self.bytecheckpoint.save_state(*args, **kwargs)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> int | None:
        if self.bytecheckpoint.is_of_accelerate(input_dir):
            super().load_state(input_dir, load_kwargs, **kwargs)
            return None
        return self.bytecheckpoint.load_state(input_dir, **kwargs)

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
