"""Let the strategy of a trainer load steps of a run. Lightning's own files load as before.

Lightning's `CheckpointIO` serves rank 0 only, and strategies that shard do not ask it. So the strategy is monkey-patched:
its class is replaced by a subclass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.lightning.package import pl

__all__ = ["Nothing", "checkpointed", "refuse_edits", "states_of_model"]

#: Strategies whose states another library holds.
_UNSUPPORTED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


class Nothing(dict[str, Any]):
    """Result of a load that restores nothing. It is false, so that Lightning restores nothing either."""

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": pl.__version__})

    def __bool__(self) -> bool:
        return False


def states_of_model(strategy: Any) -> Any:
    """Return the module to save: the user's, or the wrapper of FSDP1, which holds the parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return strategy.model if isinstance(strategy.model, FullyShardedDataParallel) else strategy.lightning_module


def checkpointed(kind: Any) -> Any:
    """Return the subclass of a strategy that loads steps by `strategy.bytecheckpoint`, a `TrainerSteps`.

    Raises:
        UsageError: the strategy is not supported.
    """
    unsupported = {one.__name__ for one in kind.__mro__} & {*_UNSUPPORTED}
    if unsupported:
        raise UsageError(
            f"strategy {min(unsupported)} is not supported: use DDPStrategy, ModelParallelStrategy or FSDPStrategy"
        )
    return kind if hasattr(kind, "loads_bytecheckpoints") else _subclass(kind)


@functools.cache
def _subclass(kind: Any) -> Any:
    class Checkpointed(kind):  # type: ignore[misc]
        loads_bytecheckpoints = True
        bytecheckpoint: Any
        _of_step = False  # weights and optimizers are loaded by this package
        shown: Any = None  # weights that were shown to hooks of the user
        is_set_up = False
        weights_only: bool | None = None  # argument of `fit` and the like

        @property
        def restore_checkpoint_after_setup(self) -> bool:
            # The weights are loaded where they are sharded to, together with the optimizer. Lightning asks before the setup
            # and after it, and passes `weights_only` before it alone.
            return self.is_set_up

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.is_set_up = True

        def teardown(self) -> None:
            super().teardown()
            self.is_set_up, self.weights_only = False, None

        @property
        def lightning_restore_optimizer(self) -> bool:
            return not self._of_step and bool(super().lightning_restore_optimizer)

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
            if not self.is_set_up:
                self.weights_only = weights_only
                return Nothing()
            steps, weights_only = self.bytecheckpoint, self.weights_only
            file = steps.file_of(checkpoint_path)
            self._of_step = file is None or steps.reads(file)
            if not self._of_step:
                return super().load_checkpoint(file, weights_only=weights_only)
            found = steps.restore(checkpoint_path) if file is None else steps.read_folder(file, weights_only)
            self.shown = dict(found.get("state_dict", {}))
            return found

        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            if self._of_step:
                shown, self.shown = self.shown, None
                refuse_edits("on_load_checkpoint", shown, checkpoint["state_dict"])
            else:
                super().load_model_state_dict(checkpoint, strict=strict)

        def lightning_module_state_dict(self) -> Any:
            if not self.bytecheckpoint.dumping:
                return super().lightning_module_state_dict()
            module = states_of_model(self)  # without copies: this is for `on_save_checkpoint`, and not saved
            self.shown = dict(module.state_dict()) if module is self.lightning_module else {}
            return dict(self.shown)

        def optimizer_state(self, optimizer: Any) -> Any:
            return {} if self.bytecheckpoint.dumping else super().optimizer_state(optimizer)

    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


def refuse_edits(hook: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuse hooks that change the weights of a checkpoint, because the live weights are saved and loaded."""
    changed = sorted(name for name in {**before, **after} if not _same(before.get(name), after.get(name)))
    if changed:
        raise UsageError(
            f"{hook} of the module or of a callback has changed {changed[0]!r} in checkpoint['state_dict'] "
            f"({len(changed)} entries in all), which is not supported: leave tensors out by "
            "save_options=SaveOptions(exclude=['model/...']) and load_options of ModelCheckpoint, and change "
            "weights in configure_model"
        )


def _same(before: Any, after: Any) -> bool:
    """Return whether two entries are one object, or tensors of the same memory."""
    if before is after or not type(before) is type(after) is torch.Tensor:
        return before is after
    return before.device == after.device and before.dtype == after.dtype and before.is_set_to(after)
