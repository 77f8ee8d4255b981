"""`attach`: put a subclass of an accelerator's own class in its place.

Hooks of accelerate cannot save and load: they run after models of FSDP are written, and cannot stop the other files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.accelerate.checkpoints import AcceleratorCheckpoints
from bytecheckpoint.integrations.accelerate.loaders import refuse_copies, remaining
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
_MANAGER_OPTIONS = frozenset({"on_error", "grace", "save_options", "load_options"})


def attach(
    accelerator: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: Any = None,
    async_checkpoint: bool = True,
    **options: Any,
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
        async_checkpoint: as for `save`.
        **options: `on_error`, `grace` (by default 0: old steps are deleted at once), `save_options` and `load_options` of
            `CheckpointManager`.

    Raises:
        UsageError: the accelerator is set up in a way that is not supported.
    """
    _check(accelerator, options)
    project = accelerator.project_configuration
    if root is None:
        if not project.automatic_checkpoint_naming or accelerator.project_dir is None:
            raise UsageError("attach needs a root=, or an Accelerator with project_dir and automatic_checkpoint_naming")
        root = os.path.join(accelerator.project_dir, "checkpoints")
    if keep is None and project.total_limit is not None:
        keep = Latest(project.total_limit)
    checkpoints = AcceleratorCheckpoints(
        accelerator, root, {"grace": 0.0, "keep": keep, "async_checkpoint": async_checkpoint, **options}
    )
    checkpoints.positions()
    refuse_copies(accelerator.gradient_state)
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_AttachedAccelerator, kind), {"__module__": kind.__module__})
    accelerator.bytecheckpoint = checkpoints
    return checkpoints


def _check(accelerator: Any, options: Mapping[str, Any]) -> None:
    import accelerate

    if lacking := [name for name in _USED if not hasattr(accelerator, name)]:
        raise UsageError(
            f"a {type(accelerator).__name__} of accelerate {accelerate.__version__} has no {lacking[0]}: pass an "
            "accelerate.Accelerator, of version 1.10 or newer"
        )
    if hasattr(accelerator, "bytecheckpoint"):
        raise UsageError("the accelerator is attached already: call attach once")
    if unknown := options.keys() - _MANAGER_OPTIONS:
        raise UsageError(f"unknown option {min(unknown)!r}; there are {', '.join(sorted(_MANAGER_OPTIONS))}")
    if (kind := accelerator.distributed_type.name) in _UNSUPPORTED:
        raise UsageError(f"an Accelerator is not supported with {_UNSUPPORTED[kind]}")
    if accelerator.gradient_state.in_dataloader:
        raise UsageError("a data loader is being iterated over, so its position is not known: attach before the loop")


class _AttachedAccelerator(Accelerator):  # type: ignore[misc]
    """What `attach` puts in front of an accelerator's class."""

    bytecheckpoint: AcceleratorCheckpoints

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        return self.bytecheckpoint.save_state(*args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> int | None:
        if self.bytecheckpoint.is_of_accelerate(input_dir):
            super().load_state(input_dir, *args, **kwargs)
            return None
        return self.bytecheckpoint.load_state(input_dir, *args, **kwargs)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().prepare_data_loader(*args, **kwargs)
        self.bytecheckpoint.follow(loader)
        return loader

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        self.bytecheckpoint.follow(dataloader)
        return remaining(dataloader, num_batches)

    def end_training(self) -> None:
        self.bytecheckpoint.close()
        super().end_training()
