"""verl's manager of FSDP checkpoints, with states that are saved and loaded by this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from verl.utils.checkpoint import fsdp_checkpoint_manager

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.loading import load
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving import save

__all__ = ["VerlCheckpointManager"]

#: Contents of a checkpoint that this package saves; verl writes the others: configuration, tokenizer, a whole model.
_OWN = ("model", "optimizer", "extra")


class VerlCheckpointManager(fsdp_checkpoint_manager.FSDPCheckpointManager):  # type: ignore[misc]
    """Saves model, optimizer, schedule and random numbers as one ordinary checkpoint in verl's folder of a step.

    It is committed before verl deletes old steps. Folders that verl itself wrote are loaded by verl.

    Attributes:
        checkpoint_save_contents: contents of a checkpoint, by verl's names.
    """

    checkpoint_save_contents: list[str]

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save and commit, then let verl write its other files and delete old steps.

        Raises:
            UsageError: only LoRA's parameters are to be saved.
        """
        if local_path is None:
            return
        if self.should_save_lora_only and self._has_lora():
            raise UsageError("save_lora_only is not supported: leave it out, and the whole model is saved")
        contents = self.checkpoint_save_contents
        if states := self._states(contents):
            save(local_path, states, step=global_step)
        self.checkpoint_save_contents = [name for name in contents if name not in _OWN]
        try:
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        finally:
            self.checkpoint_save_contents = contents

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a step at any number of ranks; a folder of verl's own at the number that saved it."""
        if local_path is None or not os.path.exists(os.path.join(local_path, CATALOG_NAME)):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        elif states := self._states(self.checkpoint_load_contents):
            load(local_path, states)

    def _states(self, contents: Collection[str]) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("model", "optimizer") if name in contents}
        if "extra" in contents:
            found["rng"] = rng_state()
            if self.lr_scheduler is not None:
                found["lr_scheduler"] = self.lr_scheduler
        return found


# Before verl's engines import the class by its name, and in those that have.
fsdp_checkpoint_manager.FSDPCheckpointManager = VerlCheckpointManager
for _engine in ("fsdp", "veomni"):
    if (_module := sys.modules.get(f"verl.workers.engine.{_engine}.transformer_impl")) is not None:
        setattr(_module, "FSDPCheckpointManager", VerlCheckpointManager)  # noqa: B010  mypy knows no such attribute
