"""`AcceleratorCheckpoints`: an accelerator and the `CheckpointManager` of its training."""

from __future__ import annotations

import glob
import os
import re
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.integrations.accelerate.loaders import track
from bytecheckpoint.integrations.accelerate.position import LoaderPosition
from bytecheckpoint.integrations.accelerate.state import AcceleratorState
from bytecheckpoint.integrations.attaching import refuse_newer
from bytecheckpoint.manager import CheckpointManager
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.saving import save
from bytecheckpoint.storage import resolve

__all__ = ["AcceleratorCheckpoints"]

_NUMBERED = re.compile(r".*?([0-9]+)")
#: A file in each checkpoint of accelerate itself.
_OF_ACCELERATE = "random_states_*.pkl"


class AcceleratorCheckpoints:
    """The checkpoints of an accelerator. `attach` makes it, and it is `accelerator.bytecheckpoint`.

    Args:
        accelerator: whose they are.
        root: folder or URL of the run.
        options: of the manager.

    Attributes:
        manager: of the run.
    """

    def __init__(self, accelerator: Any, root: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self._accelerator, self._options = weakref.proxy(accelerator), dict(options)
        self._states: dict[str, Any] = {}
        self.manager = CheckpointManager(root, self._states, **options)
        self._last: int | None = None  # the step that was saved or restored last
        self._apart: SaveHandle | None = None
        self._collect()

    def follow(self, loader: Any) -> LoaderPosition:
        """Return the position of a prepared loader, which is followed from now on."""
        return track(loader, self._accelerator)

    def _collect(self) -> None:
        """Look up what the accelerator has prepared until now."""
        accelerator = self._accelerator
        models, optimizers = accelerator._models, [opt.optimizer for opt in accelerator._optimizers]
        self._states.clear()
        self._states |= {"accelerator": AcceleratorState(accelerator), "rng": rng_state()}
        if models:  # one dict gives the parameters of several models different names
            several = nn.ModuleDict({str(number): model for number, model in enumerate(models)})
            self._states["model"] = models[0] if len(models) == 1 else several
        if optimizers:
            self._states["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        if accelerator.scaler is not None:
            self._states["scaler"] = accelerator.scaler
        for name, objects in (
            ("scheduler", accelerator._schedulers),
            ("registered", accelerator._custom_objects),
            ("loader", [self.follow(loader) for loader in accelerator._dataloaders]),
        ):
            self._states |= {f"{name}_{number}": value for number, value in enumerate(objects)}

    def _refuse_hooks(self, hooks: Mapping[Any, Any], method: str) -> None:
        if hooks:
            raise UsageError(
                f"a hook was registered with register_{method}_pre_hook: it works on files that {method} of this package "
                "does not have; remove it, and save what it writes by itself or as a registered object"
            )

    # --- names ----------------------------------------------------------------------------------------------------

    def _folder(self, path: str | os.PathLike[str] | None) -> str | None:
        """Return the address of a folder; None for that of the run."""
        url = self.manager.root if path is None else resolve(os.path.expanduser(path)).url
        return None if url == self.manager.root else url

    def _number_of(self, folder: str) -> int | None:
        """Return the number of a step of this run by the name of its folder; None for other folders."""
        parent, _, name = folder.rpartition("/")
        found = _NUMBERED.fullmatch(name)
        return int(found[1]) if found and parent == self.manager.root else None

    def _begin_at(self, number: int) -> None:
        self._last = number
        self._accelerator.project_configuration.iteration = number + 1

    @staticmethod
    def is_of_accelerate(folder: str | os.PathLike[str] | None) -> bool:
        """Return whether accelerate itself has saved a folder."""
        if folder is None:
            return False
        return bool(glob.glob(os.path.join(glob.escape(os.path.expanduser(folder)), _OF_ACCELERATE)))

    # --- save -----------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> str:
        """Save in place of `Accelerator.save_state`. All ranks call it.

        Args:
            output_dir: a folder of the run with a number at its end, which is the step; or any other folder, which gets one
                checkpoint that no rule deletes. None, or the folder of the run: the next number of the run.
            safe_serialization: means nothing here: nothing is pickled.
            step: number of the step, in place of a folder.
            metrics: for `Best`; as for `CheckpointManager.save`.
            **unknown: refused.

        Returns:
            The path of the checkpoint. An asynchronous save is not committed yet.

        Raises:
            UsageError: this moment or this name cannot be saved.
            CheckpointError: this save failed, or the one before.
        """
        project = self._accelerator.project_configuration
        if unknown:
            raise UsageError(f"save_state({min(unknown)}=...): only DeepSpeed takes that, which is not supported")
        self._refuse_hooks(self._accelerator._save_model_state_pre_hook, "save_state")
        if not self._accelerator.sync_gradients:
            raise UsageError(
                "save_state in the middle of an accumulation of gradients: those so far are not part of a checkpoint; "
                "call it where accelerator.sync_gradients is True"
            )
        folder = None if project.automatic_checkpoint_naming else self._folder(output_dir)
        if folder is not None and step is not None:
            raise UsageError(f"save_state({str(output_dir)!r}, step={step}): pass a folder or a number, not both")
        if folder is None:
            number = project.iteration if step is None else step
        elif (found := self._number_of(folder)) is not None:
            number = found
        else:
            self._save_apart(folder)
            return folder
        if self._last is None:
            remedy = "call load_state() to go on with it, attach the accelerator with another root, or remove the steps"
            refuse_newer(self.manager, number - 1, remedy)
        elif number < self._last:
            raise UsageError(
                f"step {number} is saved after step {self._last}: the numbers of a run ascend, because the highest counts "
                "as the newest; count in one way only"
            )
        self._collect()
        self.manager.save(number, metrics)
        self._begin_at(number)
        return step_folder(self.manager.root, number)

    def _save_apart(self, folder: str) -> None:
        """Save a checkpoint that is no step of the run."""
        self._collect()
        options = {name: self._options[name] for name in ("async_checkpoint",) if name in self._options}
        self._apart = save(folder, self._states, **options, **self._options.get("save_options", {}))
        self._accelerator.project_configuration.iteration += 1

    # --- load -----------------------------------------------------------------------------------------------------

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **unknown: Any) -> int | None:
        """Load in place of `Accelerator.load_state`. All ranks call it, after `prepare`.

        Args:
            input_dir: a checkpoint, of this run or another one, or one that accelerate itself has saved. None, or the
                folder of the run: its newest step that verifies.
            **unknown: `map_location` has no effect: tensors are loaded to where they lie. Others are refused.

        Returns:
            The number of the step; None if the run has none yet, or if the checkpoint is not one of the run.

        Raises:
            UsageError: the run has no step, but checkpoints of accelerate itself.
            CheckpointError: as `CheckpointManager.restore_latest` and `load`.
        """
        if others := unknown.keys() - {"map_location"}:
            raise UsageError(f"load_state({min(others)}=...) is not supported: pass load_options= to attach")
        self._refuse_hooks(self._accelerator._load_model_state_pre_hook, "load_state")
        self._collect()
        folder = self._folder(input_dir)
        number = None if folder is None else self._number_of(folder)
        if folder is None:
            self.manager.restore_latest()
            number = self.manager.restored.step if self.manager.restored else None
            if number is None:
                self._refuse_lost_beginning()
                return None
        elif number is not None:
            self.manager.restore(number)
        else:
            self.manager.restore_from(folder)
        for loader in self._accelerator._dataloaders:
            self.follow(loader).note_generators()
        if number is not None:
            self._begin_at(number)
        return number

    def _refuse_lost_beginning(self) -> None:
        """Refuse to begin a run where accelerate itself has saved one."""
        pattern = os.path.join(glob.escape(self.manager.root), "*", _OF_ACCELERATE)
        if found := self.manager.ask_rank_0(lambda: sorted(glob.glob(pattern))):
            raise UsageError(
                f"{self.manager.root} holds checkpoints of accelerate itself: go on from one by load_state("
                f"{os.path.dirname(found[-1])!r}), or attach the accelerator with another root"
            )

    # --- the end --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the saves in flight are committed.

        Raises:
            CheckpointError: one failed, and nobody has been told.
        """
        if self._apart is not None:
            self._apart.result()
        self.manager.wait()

    def close(self) -> None:
        """Wait for the saves in flight and for deletions; `accelerator.end_training` calls it.

        Raises:
            CheckpointError: a save failed, and nobody has been told.
        """
        try:
            self.wait()
        finally:
            self.manager.close()
