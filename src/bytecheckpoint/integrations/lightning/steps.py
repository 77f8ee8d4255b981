"""`TrainerSteps`: the states of a trainer, saved and loaded as the steps of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path

from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.lightning.position import TrainingPosition
from bytecheckpoint.integrations.lightning.strategy import states_of_model
from bytecheckpoint.manager import CheckpointManager
from bytecheckpoint.manager.run_folder import step_number
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve

__all__ = ["POSITION", "LightningState", "Newest", "TrainerSteps"]

#: Under this name a state of Lightning's holds the `TrainingPosition`.
POSITION = "bytecheckpoint"


class Newest(os.PathLike[str]):
    """What "last" stands for: the newest step of a run that verifies.

    Lightning looks up the age of what a callback names, by fsspec, on each rank. So this is a path that is there
    everywhere; in messages, it is the run.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def __fspath__(self) -> str:
        return os.sep

    def __str__(self) -> str:
        return os.sep

    def __format__(self, _: str) -> str:
        return f"{self._root} (the newest step)"


class _Nothing(dict[str, Any]):
    """What a load returns in a new run: Lightning restores nothing of what is false."""

    def __bool__(self) -> bool:
        return False


class LightningState:
    """What Lightning writes to its files beside tensors, as one of the states of a save.

    Args:
        dump: returns it.

    Attributes:
        loaded: that of the checkpoint.
    """

    def __init__(self, dump: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._dump = dump
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the trainer."""
        return self._dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state for Lightning, which restores it."""
        self.loaded = dict(state)


class TrainerSteps:
    """The steps of a trainer. The strategy that `checkpointed` makes loads by it.

    Args:
        trainer: whose they are.
        root: folder or URL of the run.
        options: of the manager.
        weights_only: save neither optimizers nor random numbers.
        skip_batches: see `TrainingPosition`.
        reach: see `TrainingPosition`.

    Attributes:
        manager: of a fit.
        position: of a fit.
        running: a fit runs.
        dumping: the trainer's state is being put together for a save.
    """

    manager: CheckpointManager
    position: TrainingPosition

    def __init__(
        self, trainer: Any, root: str, options: Mapping[str, Any], *, weights_only: bool, skip_batches: bool,
        reach: Callable[[], object],
    ) -> None:  # fmt: skip
        self._trainer, self._root, self._options = trainer, root, dict(options)
        self._weights_only, self._skip, self._reach = weights_only, skip_batches, reach
        self._states: dict[str, Any] = {}
        self._state = LightningState(self._dump)
        self._stack = contextlib.ExitStack()
        self._asked = False
        self._loaded_path = ""
        self.running = self.dumping = False

    # --- a fit ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the manager of a fit, whose model and optimizers are ready."""
        trainer, generators = self._trainer, DelayedGenerators()
        self._states |= self._model_states()
        if not self._weights_only:
            mock = pl.core.optimizer._MockOptimizer
            if optimizers := [one for one in trainer.optimizers if not isinstance(one, mock)]:
                self._states["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
            self._states["rng"] = generators
        self.manager = self._stack.enter_context(self._new_manager(self._states, every=lambda _: self._asked))
        self.position = TrainingPosition(trainer, generators, self._skip, self._reach, self._load_streams)
        self._stack.callback(self.position.close)
        self.running = True

    def end(self, error: type[BaseException] | None) -> None:
        """End a fit: wait for the save in flight."""
        self.running = False
        stack, self._stack = self._stack, contextlib.ExitStack()
        stack.__exit__(error, None, None)

    def maybe_save(self, asked: bool, metrics: Mapping[str, float]) -> None:
        """Save if that was asked for, or if the job is to stop."""
        self._asked = asked
        if not self._weights_only:
            self._states |= self.position.streams
        self.manager.maybe_save(self._trainer.global_step, metrics)

    def _new_manager(self, states: dict[str, Any], **more: Any) -> CheckpointManager:
        load_options = dict(self._options.get("load_options") or {})
        if not self._trainer.lightning_module.strict_loading:
            load_options.setdefault("strict", {"model": False})
        return CheckpointManager(self._root, states, **{**self._options, **more, "load_options": load_options})

    def _model_states(self) -> dict[str, Any]:
        return {"model": states_of_model(self._trainer.strategy), "lightning": self._state}

    def _load_streams(self) -> None:
        self._states |= self.position.streams
        self.manager.restore_from(self._loaded_path, only=self.position.streams)

    def _dump(self) -> dict[str, Any]:
        if not self.running or not (self._asked or self.manager.preempted):
            # A load, or a save that is being prepared: hooks of the user are called for real saves only. Instances of the
            # user's classes are here, so that they can be made again.
            objects = self._trainer.lightning_module, self._trainer.datamodule
            return _checked(
                {one.CHECKPOINT_HYPER_PARAMS_KEY: dict(one.hparams) for one in objects if one and one.hparams}
            )
        self.dumping = True
        try:
            found = self._trainer._checkpoint_connector.dump_checkpoint(self._weights_only)
        finally:
            self.dumping = False
        self._trainer.strategy.refuse_edits("on_save_checkpoint", found.pop("state_dict"))
        found.pop("optimizer_states", None)
        if self.position.cut is not None:
            found["loops"]["fit_loop"] = self.position.cut
        return _checked({**found, POSITION: self.position.state()})

    # --- restore --------------------------------------------------------------------------------------------------

    def restores(self, path: Any) -> bool:
        """Return whether a path is that of a step, and not of a file or folder that Lightning has written."""
        if isinstance(path, Newest) or step_number(os.fspath(path)) is not None:
            return True
        return not os.path.isfile(path) and bool(resolve(path).version(CATALOG_NAME))

    def restore(self, path: Any) -> dict[str, Any]:
        """Load a step; return what Lightning looks for in its own files.

        Raises:
            CheckpointNotFoundError: an evaluation wants a step, and there is none.
            CheckpointError: as `load`.
        """
        trainer = self._trainer
        if self.running:
            report = _load(self.manager, path)
        else:
            with self._new_manager(self._model_states(), preemption=None) as manager:
                report = _load(manager, path)
            if report is None:
                raise CheckpointNotFoundError(f"{self._root} holds no committed step")
        if report is None:
            trainer._checkpoint_connector._ckpt_path = None  # or Lightning says that it has restored something
            return _Nothing({"pytorch-lightning_version": pl.__version__})
        found = dict(self._state.loaded)
        position = found.pop(POSITION, None)
        if self.running:
            self._loaded_path = report.path
            self.position.resume(position)
        model = states_of_model(trainer.strategy)
        return found | {"state_dict": model.state_dict() if model is trainer.lightning_module else {}}


def _load(manager: CheckpointManager, path: Any) -> LoadReport | None:
    if not isinstance(path, Newest):
        return manager.restore_from(path)
    manager.restore_latest()
    return manager.restored.report if manager.restored else None


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Refuse objects that would be stored by their own states, as those states are what Lightning would get back."""
    for path, leaf in tree_flatten_with_path(state)[0]:
        if hasattr(leaf, "state_dict"):
            raise UsageError(
                f"a {type(leaf).__name__} cannot be stored among the plain values of a step, at {keystr(path)}: leave it "
                "out, for example by save_hyperparameters(ignore=[...]), or store its state_dict"
            )
    return state
