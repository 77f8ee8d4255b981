"""`TrainerSteps`: the states of a trainer, saved and loaded as the steps of a run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path

from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.lightning.position import TrainingPosition
from bytecheckpoint.integrations.lightning.strategy import states_of_model
from bytecheckpoint.loading import load
from bytecheckpoint.manager import CheckpointManager, StepInfo
from bytecheckpoint.representation.names import CATALOG_NAME, STEP_FOLDER
from bytecheckpoint.storage import resolve

__all__ = ["POSITION", "LightningState", "Newest", "TrainerSteps"]

_log = logging.getLogger("bytecheckpoint")
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

    def __init__(self, dump: Callable[[], Mapping[str, Any]]) -> None:
        self._dump = dump
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the trainer."""
        return self._dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state for Lightning, which restores it."""
        self.loaded = dict(state)


class TrainerSteps:
    """The steps of a trainer; a `Restorer`.

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
        trainer = self._trainer
        self._states |= self._model_states()
        if not self._weights_only:
            mock = pl.core.optimizer._MockOptimizer
            if optimizers := [one for one in trainer.optimizers if not isinstance(one, mock)]:
                self._states["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
            self._states["rng"] = rng_state()
        self.manager = self._stack.enter_context(
            CheckpointManager(
                self._root, self._states, every=lambda _: self._asked,
                **{**self._options, "load_options": self._load_options()},
            )
        )  # fmt: skip
        self.position = TrainingPosition(trainer, self._skip, self._reach, self._load_streams)
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

    def refuse_newer(self, steps: list[StepInfo]) -> None:
        """Refuse to begin before the end of a run that is in the folder: its steps would count as the newest ones.

        Raises:
            UsageError: there is such a run, and it was not loaded.
        """
        restored = self.manager.restored
        newest = max((info.step for info in steps if not info.superseded), default=0)
        if (restored is None or restored.step is None) and newest > self._trainer.global_step:
            raise UsageError(
                f"{self._root} holds a run up to step {newest}: pass ckpt_path='last' to go on with it, or another dirpath"
            )

    def _model_states(self) -> dict[str, Any]:
        return {"model": states_of_model(self._trainer.strategy), "lightning": self._state}

    def _load_options(self) -> dict[str, Any]:
        options = dict(self._options.get("load_options") or {})
        if not self._trainer.lightning_module.strict_loading:
            options.setdefault("strict", {"model": False})
        return options

    def _load_streams(self, streams: dict[str, Any]) -> None:
        load(self._loaded_path, streams, **self._load_options())

    def _dump(self) -> dict[str, Any]:
        strategy = self._trainer.strategy
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
        strategy.refuse_edits("on_save_checkpoint", found.pop("state_dict"))
        found.pop("optimizer_states", None)
        if self.position.cut is not None:
            found["loops"]["fit_loop"] = self.position.cut
        return _checked({**found, POSITION: self.position.state()})

    # --- restore --------------------------------------------------------------------------------------------------

    def restores(self, path: Any) -> bool:
        """See `Restorer`."""
        return isinstance(path, Newest) or is_step(path)

    def restore(self, path: Any) -> dict[str, Any]:
        """See `Restorer`.

        Raises:
            CheckpointNotFoundError: an evaluation wants a step, and there is none.
            CheckpointError: as `load`.
        """
        trainer = self._trainer
        report = self._restore_fit(path) if self.running else self._restore_model(path)
        if report is None:
            trainer._checkpoint_connector._ckpt_path = None  # or Lightning says that it has restored something
            return _Nothing({"pytorch-lightning_version": pl.__version__})
        self._loaded_path = report.path
        if trainer.is_global_zero:
            for note in report.notes:
                _log.warning("%s: %s", report.path, note)
        found = {name: value for name, value in self._state.loaded.items() if name != POSITION}
        model = states_of_model(trainer.strategy)
        return found | {"state_dict": model.state_dict() if model is trainer.lightning_module else {}}

    def _restore_fit(self, path: Any) -> LoadReport | None:
        generators = rng_state()
        before = generators.state_dict()
        report: LoadReport | None
        step = 0 if isinstance(path, Newest) else self._step_of(path)
        if step is None:
            report = load(path, self._states, **self._load_options())
        else:
            report = _load_step(self.manager, step)
        if report is not None:
            self.position.resume(self._state.loaded[POSITION], generators.state_dict())
            generators.load_state_dict(before)  # until the first batch; what comes before draws numbers
        return report

    def _restore_model(self, path: Any) -> LoadReport:
        states = self._model_states()
        if not isinstance(path, Newest):
            return load(path, states, **self._load_options())
        with CheckpointManager(self._root, states, load_options=self._load_options()) as manager:
            report = _load_step(manager, 0)
        if report is None:
            raise CheckpointNotFoundError(f"{self._root} holds no committed step")
        return report

    def _step_of(self, path: Any) -> int | None:
        """Return the number of a step of this run; None for another checkpoint."""
        folder, _, name = resolve(path).url.rpartition("/")
        found = STEP_FOLDER.fullmatch(name) if folder == self._root else None
        return int(found[1]) if found else None


def _load_step(manager: CheckpointManager, step: int) -> LoadReport | None:
    """Load a step, 0 for the newest one; return None if there is none."""
    if step:
        manager.restore(step)
    else:
        manager.restore_latest()
    assert manager.restored is not None
    return manager.restored.report


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Refuse objects that would be stored by their own states, as those states are what Lightning would get back."""
    for path, leaf in tree_flatten_with_path(state)[0]:
        if hasattr(leaf, "state_dict"):
            raise UsageError(
                f"a {type(leaf).__name__} cannot be stored among the plain values of a step, at {keystr(path)}: leave it "
                "out, for example by save_hyperparameters(ignore=[...]), or store its state_dict"
            )
    return state


def is_step(path: Any) -> bool:
    """Return whether a path is that of a step, and not of a file or folder that Lightning has written."""
    if STEP_FOLDER.fullmatch(os.path.basename(os.fspath(path).rstrip("/"))):
        return True
    return not os.path.isfile(path) and bool(resolve(path).version(CATALOG_NAME))
