"""The strategy of a trainer, made to load the steps of a run; Lightning's own files load as before.

Lightning's `CheckpointIO` serves rank 0 only, and strategies that shard do not ask it. So the class of the strategy is
replaced by a subclass of it.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from bytecheckpoint.errors import UsageError

__all__ = ["Restorer", "checkpointed", "states_of_model"]

#: Strategies whose states another library holds.
_UNSUPPORTED = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")


class Restorer(Protocol):
    """What loads steps for a strategy."""

    dumping: bool

    def restores(self, path: Any) -> bool:
        """Return whether this path is that of a step, and not of a file of Lightning's."""

    def restore(self, path: Any) -> dict[str, Any]:
        """Load a step; return what Lightning looks for in its own files."""


def states_of_model(strategy: Any) -> Any:
    """Return the module to save: the user's, or the wrapper of FSDP1, which holds the parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return strategy.model if isinstance(strategy.model, FullyShardedDataParallel) else strategy.lightning_module


def checkpointed(kind: Any) -> Any:
    """Return the subclass of a strategy that loads steps by `strategy.bytecheckpoint`, a `Restorer`.

    Raises:
        UsageError: the strategy is not supported.
    """
    if unsupported := {one.__name__ for one in kind.__mro__} & {*_UNSUPPORTED}:
        raise UsageError(
            f"strategy {min(unsupported)} is not supported: use DDPStrategy, ModelParallelStrategy or FSDPStrategy"
        )
    return kind if hasattr(kind, "loads_bytecheckpoints") else _subclass(kind)


@functools.cache
def _subclass(kind: Any) -> Any:
    class Checkpointed(kind):  # type: ignore[misc]
        loads_bytecheckpoints = True
        bytecheckpoint: Restorer
        _of_step: Any = None  # the weights, after a load of a step

        @property
        def restore_checkpoint_after_setup(self) -> bool:
            return True  # the weights are loaded where they are sharded to, together with the optimizer

        @property
        def lightning_restore_optimizer(self) -> bool:
            return self._of_step is None and bool(super().lightning_restore_optimizer)

        def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
            self._of_step = None
            if not self.bytecheckpoint.restores(checkpoint_path):
                return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            found = self.bytecheckpoint.restore(checkpoint_path)
            self._of_step = dict(found["state_dict"]) if found else None
            return found

        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
            if self._of_step is None:
                super().load_model_state_dict(checkpoint, strict=strict)
            else:
                refuse_edits("on_load_checkpoint", self._of_step, checkpoint["state_dict"])

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
    """Refuse a hook that has changed the state_dict of a checkpoint, which is not what is saved and loaded.

    Raises:
        UsageError: it has.
    """
    if changed := sorted(name for name in {**before, **after} if before.get(name) is not after.get(name)):
        raise UsageError(
            f"{hook} of the module or of a callback has changed {changed[0]!r} in checkpoint['state_dict'] "
            f"({len(changed)} entries in all), which is not supported: leave tensors out by save_options={{'exclude': "
            "['model/...']} and load_options of ModelCheckpoint, and change weights in configure_model"
        )
