"""`AcceleratorCheckpoints`: an accelerator and the `CheckpointManager` of its training."""

from __future__ import annotations

import glob
import logging
import os
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.handles import LoadReport, SaveHandle
from bytecheckpoint.integrations.accelerate.loaders import track
from bytecheckpoint.integrations.accelerate.positions import LoaderPosition
from bytecheckpoint.integrations.accelerate.state import AcceleratorState
from bytecheckpoint.loading import load
from bytecheckpoint.manager import CheckpointManager
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.saving import save
from bytecheckpoint.storage import resolve

__all__ = ["AcceleratorCheckpoints"]

_log = logging.getLogger("bytecheckpoint")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
#: How accelerate names folders where it numbers saves itself, and how the manager does.
_AUTOMATIC, _STEP = "checkpoint_", "step_"
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
        self._naming = ""
        self._last: int | None = None  # the step that was saved or restored last
        self._apart: SaveHandle | None = None

    def positions(self) -> list[LoaderPosition]:
        """Return the positions of the prepared loaders."""
        return [self.follow(loader) for loader in self._accelerator._dataloaders]

    def follow(self, loader: Any) -> LoaderPosition:
        """Return the position of a prepared loader, which is followed from now on."""
        return track(loader, self._accelerator)

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
        if unknown:
            raise UsageError(f"save_state({min(unknown)}=...): only DeepSpeed takes that, which is not supported")
        self._refuse_hooks(self._accelerator._save_model_state_pre_hook, "save_state")
        if not self._accelerator.sync_gradients:
            raise UsageError(
                "save_state in the middle of an accumulation of gradients: those so far are not part of a checkpoint; "
                "call it where accelerator.sync_gradients is True"
            )
        folder = None if output_dir is None or self._is_automatic else self._folder(output_dir)
        naming, number = self._number_of(folder)
        if step is not None:
            if number not in (None, step):
                raise UsageError(f"save_state({str(output_dir)!r}, step={step}): these are two numbers")
            naming, number = naming if folder else _STEP, step
        elif folder is None:
            naming, number = _AUTOMATIC, self._accelerator.project_configuration.iteration
        if number is None:
            assert folder is not None
            self._collect("")
            options = {name: self._options[name] for name in ("async_checkpoint",) if name in self._options}
            self._apart = save(folder, self._states, **options, **self._options.get("save_options", {}))
            self._accelerator.project_configuration.iteration += 1
            return folder
        self._check_number(naming, number)
        self._collect(naming)
        self.manager.save(number, metrics)
        self._begin_at(naming, number)
        return step_folder(self.manager.root, number)

    def _folder(self, path: str | os.PathLike[str]) -> str | None:
        """Return the address of a folder; None for that of the run."""
        url = resolve(os.path.expanduser(path)).url
        return None if url == self.manager.root else url

    @property
    def _is_automatic(self) -> bool:
        return bool(self._accelerator.project_configuration.automatic_checkpoint_naming)

    def _number_of(self, folder: str | None) -> tuple[str, int | None]:
        """Return what stands before the number of a step of this run, and the number; None for other folders."""
        parent, _, name = (folder or "").rpartition("/")
        found = _NUMBERED.fullmatch(name)
        return (found[1], int(found[2])) if found and parent == self.manager.root else ("", None)

    def _check_number(self, naming: str, number: int) -> None:
        """Refuse a number that would make another step of the run count as the newest."""
        if self._naming and naming != self._naming:
            raise UsageError(
                f"the steps of {self.manager.root} are numbered as {self._naming!r}, and this one as {naming!r}: use one "
                "numbering in a run, because the highest number counts as the newest step"
            )
        if self._last is None:
            newest = self._ask_rank_0(self.manager.latest)
            if newest is not None and newest.step >= number:
                raise UsageError(
                    f"{self.manager.root} holds a run up to step {newest.step}, and this one begins with step {number}: "
                    "call load_state() to go on with it, attach the accelerator with another root, or remove the steps"
                )
        elif number < self._last:
            raise UsageError(f"step {number} is saved after step {self._last}: the numbers of a run ascend")

    def _begin_at(self, naming: str, number: int) -> None:
        self._naming, self._last = naming, number
        self._accelerator.project_configuration.iteration = number + 1

    def _collect(self, naming: str) -> AcceleratorState:
        """Look up what the accelerator has prepared until now."""
        accelerator = self._accelerator
        models, optimizers = accelerator._models, [opt.optimizer for opt in accelerator._optimizers]
        state = AcceleratorState(accelerator, self.positions(), naming)
        self._states.clear()
        self._states |= {"accelerator": state, "rng": rng_state()}
        if models:  # one dict gives the parameters of several models different names
            several = nn.ModuleDict({str(number): model for number, model in enumerate(models)})
            self._states["model"] = models[0] if len(models) == 1 else several
        if optimizers:
            self._states["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        if accelerator.scaler is not None:
            self._states["scaler"] = accelerator.scaler
        for name, objects in (("scheduler", accelerator._schedulers), ("registered", accelerator._custom_objects)):
            self._states |= {f"{name}_{number}": value for number, value in enumerate(objects)}
        return state

    def _refuse_hooks(self, hooks: Mapping[Any, Any], method: str) -> None:
        if hooks:
            raise UsageError(
                f"a hook was registered with register_{method}_pre_hook: it works on files that {method} of this package "
                "does not have; remove it, and save what it writes by itself or as a registered object"
            )

    # --- load -----------------------------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        **unknown: Any,
    ) -> int | None:
        """Load in place of `Accelerator.load_state`. All ranks call it, after `prepare`.

        Args:
            input_dir: a checkpoint, of this run or another one, or one that accelerate itself has saved. None, or the
                folder of the run: its newest step that verifies.
            load_kwargs: for checkpoints of accelerate itself.
            map_location: for checkpoints of accelerate itself. Others are loaded to where the tensors lie.
            **unknown: for checkpoints of accelerate itself.

        Returns:
            The number of the step; None if the run has none yet, or if the checkpoint is not one of the run.

        Raises:
            UsageError: the run has no step, but checkpoints of accelerate itself.
            CheckpointError: as `CheckpointManager.restore_latest` and `load`.
        """
        if unknown:
            raise UsageError(f"load_state({min(unknown)}=...) is not supported: pass load_options= to attach")
        self._refuse_hooks(self._accelerator._load_model_state_pre_hook, "load_state")
        state = self._collect("")
        folder = None if input_dir is None else self._folder(input_dir)
        if folder is None:
            self.manager.restore_latest()
        elif (number := self._number_of(folder)[1]) is not None:
            self.manager.restore(number)
        else:
            self._tell(state, load(folder, self._states, **self._options.get("load_options", {})))
            return None
        restored = self.manager.restored
        if restored is None or restored.step is None or restored.report is None:
            self._refuse_lost_beginning()
            return None
        self._tell(state, restored.report)
        self._begin_at(state.naming, restored.step)
        return restored.step

    @staticmethod
    def is_of_accelerate(folder: str | os.PathLike[str] | None) -> bool:
        """Return whether accelerate itself has saved a folder."""
        return folder is not None and bool(
            glob.glob(os.path.join(glob.escape(os.path.expanduser(folder)), _OF_ACCELERATE))
        )

    def _tell(self, state: AcceleratorState, report: LoadReport) -> None:
        """Let the accelerator go on, and log the remarks about a load."""
        notes = [*report.notes, *state.install()]
        for note in notes if self._accelerator.is_main_process else ():
            _log.warning("%s: %s", report.path, note)

    def _refuse_lost_beginning(self) -> None:
        """Refuse to begin a run where accelerate itself has saved one."""
        pattern = os.path.join(glob.escape(self.manager.root), "*", _OF_ACCELERATE)
        if found := self._ask_rank_0(lambda: sorted(glob.glob(pattern))):
            raise UsageError(
                f"{self.manager.root} holds checkpoints of accelerate itself: go on from one by load_state("
                f"{os.path.dirname(found[-1])!r}), or attach the accelerator with another root"
            )

    # --- the end --------------------------------------------------------------------------------------------------

    def _ask_rank_0(self, question: Callable[[], Any]) -> Any:
        """Return rank 0's answer, or raise its error, on all ranks."""
        from accelerate.utils import broadcast_object_list

        answer: tuple[Any, CheckpointError | None] = None, None
        if self._accelerator.is_main_process:
            try:
                answer = question(), None
            except CheckpointError as error:
                answer = None, error
        value, failure = broadcast_object_list([answer])[0]
        if failure is not None:
            raise failure
        return value

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
            if self._apart is not None:
                self._apart.result()
        finally:
            self.manager.close()
