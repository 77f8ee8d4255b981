"""Save and load an accelerator through the `CheckpointManager` of its training."""

from __future__ import annotations

import glob
import logging
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.modules import scan_modules
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.integrations.accelerate.hooks import HookFiles, run_load_hooks, run_save_hooks
from bytecheckpoint.integrations.accelerate.loaders import track
from bytecheckpoint.integrations.accelerate.position import LoaderPosition
from bytecheckpoint.integrations.attaching import (
    OBJECTS,
    CheckpointOfTool,
    ManagerArguments,
    differences,
    folders_of_tool,
    newest_of_tool,
    refuse_newer,
    seen_by_all,
)
from bytecheckpoint.loading import load
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.saving import save
from bytecheckpoint.storage import resolve

__all__ = ["AcceleratorCheckpoints"]

_NUMBERED = re.compile(r".*?([0-9]+)")
_OF_RUN = re.compile(r"(?!step_[0-9]{8}).*?([0-9]*)")
#: A file in each checkpoint of accelerate itself.
_OF_ACCELERATE = "random_states_*.pkl"

_log = logging.getLogger("bytecheckpoint")


class AcceleratorCheckpoints:
    """The checkpoints of an accelerator. `attach` makes it, and it is `accelerator.bytecheckpoint`.

    Args:
        accelerator: accelerator of the run.
        arguments: arguments of the manager.

    Attributes:
        manager: manager of the run.
    """

    def __init__(self, accelerator: Any, arguments: ManagerArguments) -> None:
        self._accelerator = weakref.proxy(accelerator)
        self._states: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of parameters whose models hooks save and load
        loads, saves = arguments.load_options, arguments.save_options
        self._excluded, self._exclude = tuple(loads.exclude or ()), list(loads.exclude or ())
        self._save_options = replace(saves, names=saves.names or self._names)
        loads = replace(loads, names=loads.names or self._names, exclude=self._exclude)
        self.manager = replace(arguments, save_options=self._save_options, load_options=loads).manager(self._states)
        self.manager.before_loads(self._prepare_load)
        self._last: int | None = None  # the step that was saved or restored last
        self._apart: SaveHandle | None = None
        self._collect()

    def follow(self, loader: Any) -> LoaderPosition:
        """Track a prepared loader; return its position."""
        return track(loader, self._accelerator)

    def _collect(self, popped: Collection[int] | None = None) -> None:
        """Collect the prepared objects, without the models that hooks have `popped`; None if there are no hooks."""
        accelerator = self._accelerator
        models, optimizers = accelerator._models, [opt.optimizer for opt in accelerator._optimizers]
        self._states.clear()
        self._states |= {"accelerator": AcceleratorState(accelerator, popped), "rng": rng_state()}
        several = nn.ModuleDict({str(number): model for number, model in enumerate(models)})  # with names of their own
        if popped:  # the optimizer needs the names of their parameters
            scanned = scan_modules("model", models if len(models) == 1 else [several]).parameters
            own = [parameter for number in popped for parameter in several.pop(str(number)).parameters()]
            self._names |= {parameter: scanned[id(parameter)][0] for parameter in own}
        if len(several):
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

    # --- names ----------------------------------------------------------------------------------------------------

    def _folder(self, path: str | os.PathLike[str] | None) -> str | None:
        """Return the address of a folder, or None for the folder of the run."""
        url = self.manager.root if path is None else resolve(os.path.expanduser(path)).url
        return None if url == self.manager.root else url

    def _number_of(self, folder: str) -> int | None:
        """Return the step number of a folder of this run, or None for other folders."""
        parent, _, name = folder.rpartition("/")
        found = _NUMBERED.fullmatch(name)
        return int(found[1]) if found and parent == self.manager.root else None

    def begin_behind(self, folder: str | os.PathLike[str]) -> int | None:
        """Count on from a checkpoint that accelerate itself has loaded; return its number, or None if it has none."""
        accelerator, number = self._accelerator, self._number_of(self._folder(folder) or "")
        own = os.path.join(os.path.expanduser(folder), f"random_states_{accelerator.process_index}.pkl")
        try:
            with open_checkpoint(own):
                pass
        except CheckpointError:  # which accelerate takes without a word
            _log.warning("%s is not there or not whole: dropout and the like draw other numbers", own)
        if number is not None:
            accelerator.project_configuration.iteration = number + 1
        if accelerator.is_main_process and not all(one.use_stateful_dataloader for one in accelerator._dataloaders):
            _log.warning(
                "%s holds no position in the data: skip the done batches by accelerator.skip_first_batches", folder
            )
        return number

    def _begin_at(self, number: int) -> None:
        self._last = number
        self._accelerator.project_configuration.iteration = number + 1

    def folder_of_accelerate(self, folder: str | os.PathLike[str] | None) -> Any:
        """Return the folder from which accelerate itself loads for this argument of `load_state`, or None."""
        if folder is None or self._folder(folder) is None:
            found = newest_of_tool(self.manager, "accelerate", self._of_accelerate, self._lacks)
            return None if found is None else found.path
        seen = seen_by_all(self.manager, folder, lambda: _has(os.path.expanduser(folder), _OF_ACCELERATE))
        return folder if seen else None

    def _of_accelerate(self) -> list[CheckpointOfTool]:
        """Return the checkpoints of accelerate itself, the newest one first: by number, those without one by time."""
        found = folders_of_tool(self.manager.root, _OF_RUN, "random_states_0.pkl")
        # The model is written first.
        return [one for one in found if _has(one.path, _OF_ACCELERATE) or _has(one.path, "*model*")]

    def _lacks(self, folder: str) -> str:
        """Return what a folder of accelerate lacks, for `newest_of_tool`. Registered objects are written last."""
        if not _has(folder, _OF_ACCELERATE):
            return _OF_ACCELERATE
        last = len(self._accelerator._custom_objects) - 1
        return OBJECTS if last >= 0 and not _has(folder, f"custom_checkpoint_{last}.pkl") else ""

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
            output_dir: folder of the run with the step number at its end, or any other folder for one checkpoint that no
                rule deletes. None, or the folder of the run: the next number of the run.
            safe_serialization: argument without effect: nothing is pickled.
            step: number of the step, in place of a folder.
            metrics: numbers for `Best`, as for `CheckpointManager.save`.
            **unknown: arguments that are refused.

        Returns:
            The path of the checkpoint. An asynchronous save is not committed yet.

        Raises:
            UsageError: this moment or this name cannot be saved.
            CheckpointError: this save failed, or the one before.
        """
        project = self._accelerator.project_configuration
        if unknown:
            raise UsageError(f"save_state({min(unknown)}=...): only DeepSpeed takes that, which is not supported")
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
        else:
            found = self._number_of(folder)
            if found is None:
                self._save_apart(folder)
                return folder
            number = found
        if self._last is None:
            remedy = "call load_state() to continue it, attach the accelerator with another root, or remove the steps"
            refuse_newer(self.manager, number - 1, remedy)
        elif number < self._last:
            raise UsageError(
                f"step {number} is saved after step {self._last}: the numbers of a run ascend, because the highest counts "
                "as the newest; count in one way only"
            )
        self._save_with_hooks(partial(self.manager.save, number, metrics))
        self._begin_at(number)
        return step_folder(self.manager.root, number)

    def _save_apart(self, folder: str) -> None:
        """Save a checkpoint beside the steps of the run."""
        self._apart = self._save_with_hooks(partial(save, folder, self._states, **self._save_options.arguments()))
        self._accelerator.project_configuration.iteration += 1

    def _save_with_hooks(self, save_states: Callable[[], SaveHandle | None]) -> SaveHandle | None:
        """Save the objects, and the files of hooks."""
        files, handle = HookFiles(), None
        try:
            popped = run_save_hooks(self._accelerator, self.manager, files)
            self._collect(popped)
            if popped is not None:
                self._states["hooks"] = files
            handle = save_states()
        finally:
            self._states.pop("hooks", None)
            if handle is None:
                files.close()
            else:
                handle.restorable.add_done_callback(files.close)
        return handle

    # --- load -----------------------------------------------------------------------------------------------------

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **unknown: Any) -> int | None:
        """Load in place of `Accelerator.load_state`. All ranks call it, after `prepare`.

        Args:
            input_dir: a checkpoint, of this run or another one. None, or the folder of the run: its newest step that
                verifies.
            **unknown: `map_location`, which has no effect because tensors are loaded in place. Others are refused.

        Returns:
            The number of the step, or None if the run has no step yet or the checkpoint is not one of the run.

        Raises:
            CheckpointError: as `CheckpointManager.restore_latest` and `load`.
        """
        if others := unknown.keys() - {"map_location"}:
            raise UsageError(f"load_state({min(others)}=...) is not supported: pass load_options= to attach")
        folder = self._folder(input_dir)
        number = None if folder is None else self._number_of(folder)
        if folder is None:
            restored = self.manager.restore_latest()
            if restored is None:
                return None
            number = restored.step
        elif number is not None:
            self.manager.restore(number)
        else:
            self.manager.restore_from(folder)
        for loader in self._accelerator._dataloaders:
            self.follow(loader).note_generators()
        if number is not None:
            self._begin_at(number)
        return number

    def _prepare_load(self, path: str) -> None:
        """Run the hooks of a load, and collect the objects that they leave to this package."""
        accelerator, popped = self._accelerator, None
        state = AcceleratorState(accelerator, range(len(accelerator._models)))
        if any(self.manager.ask_ranks(lambda: len(accelerator._load_model_state_pre_hook))):
            files = HookFiles()
            try:
                load(path, {"accelerator": state, "hooks": files}, strict=False, prepare_save=False)
                popped = run_load_hooks(accelerator, self.manager, files, saved=state.saved is not None)
            finally:
                files.remove()
        self._collect(popped)
        twice = set(popped or ()) - set(state.saved or ()) if "model" in self._states else ()
        self._exclude[:] = [*self._excluded, *(f"model/{number}.*" for number in twice)]

    # --- the end --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the saves in flight are committed.

        Raises:
            CheckpointError: a save failed, and its failure was not raised before.
        """
        if self._apart is not None:
            self._apart.result()
        self.manager.wait()

    def close(self) -> None:
        """Wait for the saves in flight and for deletions; `accelerator.end_training` calls it.

        Raises:
            CheckpointError: a save failed, and its failure was not raised before.
        """
        try:
            self.wait()
        finally:
            self.manager.close()


def _has(folder: str, pattern: str) -> bool:
    return bool(glob.glob(os.path.join(glob.escape(folder), pattern)))


class AcceleratorState:
    """Counters of an accelerator and the numbers of its objects; implements `SupportsStreams`.

    Args:
        accelerator: accelerator of the run.
        popped: numbers of the models that hooks have saved or loaded; None if there are no hooks.
    """

    stream_count = 1

    def __init__(self, accelerator: Any, popped: Collection[int] | None = None) -> None:
        self._accelerator, self.popped = accelerator, popped
        self.saved: Collection[int] | None = None  # the same, of the checkpoint

    def shared_state(self) -> dict[str, Any]:
        """Return the counters, equal on all ranks; see `SupportsStreams`."""
        accelerator = self._accelerator
        return {
            "optimizer_steps": accelerator.step // accelerator.gradient_accumulation_steps,
            "objects": {
                "models": len(accelerator._models),
                "optimizers": len(accelerator._optimizers),
                "schedulers": len(accelerator._schedulers),
                "data loaders": len(accelerator._dataloaders),
                "registered objects": len(accelerator._custom_objects),
                "gradient scalers": int(accelerator.scaler is not None),
            },
            # By how many steps each schedule advances in an optimizer step.
            "schedule_steps": [
                1 if schedule.split_batches or not schedule.step_with_optimizer else accelerator.num_processes
                for schedule in accelerator._schedulers
            ],
            **({} if self.popped is None else {"popped": list(self.popped)}),
        }

    def stream_states(self) -> dict[int, Any]:
        """Return an empty stream of rank 0, which carries the shared state; see `SupportsStreams`."""
        return {0: {}} if self._accelerator.is_main_process else {}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Refuse a checkpoint of other objects; see `SupportsStreams`."""
        own = self.shared_state()
        differing = differences(shared["objects"], own["objects"])
        if differing:
            raise IncompatibleCheckpointError(
                f"the checkpoint is of {differing}: prepare and register the same before load_state, or load a part with "
                "bytecheckpoint.load"
            )
        self.saved = shared.get("popped")
        if lacking := sorted(set(self.saved or ()) - set(self.popped or ())):
            raise IncompatibleCheckpointError(
                f"a hook of register_save_state_pre_hook popped the weights of models {lacking}, so the checkpoint holds "
                "files of the hook in their place: register the hook of register_load_state_pre_hook that loads them"
            )
        steps = own["schedule_steps"]
        if steps != shared["schedule_steps"]:
            raise IncompatibleCheckpointError(
                f"a schedule advanced by {max(shared['schedule_steps'])} in an optimizer step, and would by {max(steps)} "
                "now, since accelerate steps it once for each rank: the learning rates would be others. A run whose number "
                "of ranks may change needs split_batches=True or step_scheduler_with_optimizer=False from its beginning"
            )
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Set the counters; see `SupportsStreams`."""
        self._accelerator.step = shared["optimizer_steps"] * self._accelerator.gradient_accumulation_steps
