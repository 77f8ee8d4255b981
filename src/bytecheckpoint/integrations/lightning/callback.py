"""Save and restore fits of Lightning, in the place of its own `ModelCheckpoint`.

Lightning's own class decides when to save and which step is best; `CheckpointManager` saves and deletes.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.attaching import ManagerArguments, refuse_newer, retention_of_tool
from bytecheckpoint.integrations.lightning.averaging import averaging_callback
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.lightning.steps import Newest, TrainerSteps
from bytecheckpoint.integrations.lightning.strategy import checkpointed
from bytecheckpoint.manager import Best, Cadence, KeepRule, Latest, LoadOptions, Preemption, SaveOptions, StepInfo
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.storage import resolve

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(pl.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the steps of a run with this package, in the place of Lightning's own callback of this name.

    A step holds the model, the optimizers, the random number generators of every rank, and everything else that Lightning
    writes to its files: loops, schedules, callbacks, hyperparameters. Its path is `dirpath/step_00000100`, by
    `trainer.global_step`. `trainer.fit(ckpt_path=...)` takes "last" (the newest step that verifies; a new run if there is
    none), the path of a step, or a file of Lightning's; `validate`, `test` and `predict` take "best" as well.

    Arguments of Lightning's own class keep their meaning, with these exceptions: `filename` and `save_on_exception` are
    refused, `auto_insert_metric_name` and `enable_version_counter` have no effect, and `save_last` saves at every save that
    is due, not only at the best; the newest step always stays. A save that is due in the middle of accumulated gradients
    follows after them, and one that is due at the last batch of an epoch at its end. Steps are deleted after commits.

    Args:
        dirpath: folder or URL of the run, on any storage.
        *arguments: further arguments of Lightning's own class, in its order.
        preemption: notice that the job is about to stop. All ranks then save at the same step, and `fit` ends with
            Lightning's SIGTERMException. Lightning's own handling of these signals is switched off.
        keep: steps to keep, as for `CheckpointManager`; by default those of `save_top_k`. With `Retention(..., grace=0)`
            the files of old steps go at once.
        skip_batches: True to continue behind the done batches in the middle of an epoch, and to refuse other data; False to
            begin with the first samples of the epoch, as Lightning does.
        overlap: reaction to a save that is due during the save before: "wait" for that one, "skip" the new one, or "fail".
        save_options: options of all saves.
        load_options: options of all loads.
        **options: arguments of Lightning's own class (`monitor`, `mode`, `save_top_k`, `every_n_train_steps`, ...).

    Attributes:
        preempted: True if the last fit ended early because the job is to stop.
        steps: states of the trainer; `steps.manager` is the manager of the last fit.

    Raises:
        UsageError: an argument is not supported; the message names it.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *arguments: Any,
        preemption: Preemption | None = None,
        keep: Any = None,
        skip_batches: bool = True,
        overlap: str = "wait",
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **options: Any,
    ) -> None:
        stock = inspect.signature(pl.callbacks.ModelCheckpoint)
        unknown = sorted(options.keys() - stock.parameters.keys())
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]!r} of ModelCheckpoint")
        given = stock.bind(dirpath, *arguments, **options).arguments
        if dirpath is None:
            raise UsageError(
                "dirpath=None: Lightning would take another folder at each start; give the folder or URL of the run"
            )
        if given.get("filename") is not None:
            raise UsageError(
                f"filename={given['filename']!r}: steps are named step_00000100 and hold their metrics; leave it away"
            )
        if given.get("save_on_exception"):
            raise UsageError(
                "save_on_exception=True: an exception may reach one rank alone. The newest step stands; for signals, pass "
                "preemption=Preemption()"
            )
        self._best = ""
        super().__init__(**{**given, "dirpath": None})
        self.dirpath = resolve(os.path.expanduser(dirpath)).url
        self._arguments = ManagerArguments(
            self.dirpath,
            retention_of_tool(keep, _keep_rule(self.monitor, self.save_top_k, self.mode)),
            Cadence(overlap=overlap),
            preemption,
            save_options or SaveOptions(),
            load_options or LoadOptions(),
        )
        self._skip_batches = skip_batches
        self._trainer: Any = None
        self.steps: TrainerSteps | None = None
        self._wanted: dict[str, float] | None = None  # metrics of a save that is due
        self.preempted = False
        self._reached = -1

    # --- the best step --------------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """Path of the best step, or "": during a fit among the saved steps, otherwise among the committed ones."""
        if self._best or (self.steps is not None and self.steps.running):
            return self._best
        found = self._ranked(RunFolder(self.dirpath).steps())
        return found[0].path if found else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best = path

    def _ranked(self, steps: list[StepInfo]) -> list[StepInfo]:
        if self.monitor is None:
            return [info for info in reversed(steps) if not info.superseded]
        return _TopK(self.monitor, max(self.save_top_k, 1), self.mode).ranked(steps)

    def _learn_best(self, steps: list[StepInfo]) -> None:
        """Rank the committed steps: a step that was best may be lost, and another job may have saved some."""
        ranked = self._ranked(steps)
        self._best = ranked[0].path if ranked else ""
        if self.monitor is None:
            return
        kept = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        self.best_k_models = {info.path: torch.tensor(info.metrics[self.monitor]) for info in kept}
        self.best_model_score = self.best_k_models.get(self._best)
        self.kth_best_model_path = kept[-1].path if kept else ""
        if kept:
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the committed steps have their metrics."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing; see `state_dict`."""

    # --- called by Lightning --------------------------------------------------------------------------------------

    def _find_last_checkpoints(self, trainer: Any) -> set[Any]:
        return {Newest(self.dirpath)}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the strategy load steps."""
        if not isinstance(trainer, pl.Trainer):
            raise UsageError(f"the Trainer is of another package than {pl.__name__}: import only one of the two")
        others = [type(one).__name__ for one in trainer.checkpoint_callbacks if one is not self]
        if others:
            raise UsageError(
                f"the Trainer has a {others[0]} too: pass one ModelCheckpoint, and set keep= if it needs more"
            )
        uploads = [type(one).__name__ for one in trainer.loggers if getattr(one, "_log_model", False)]
        if uploads:
            raise UsageError(
                f"{uploads[0]}(log_model=...) uploads files of Lightning's, which are not written: leave it away"
            )
        if stage == "fit":
            averaging_callback(trainer)
        self._trainer = trainer
        trainer.strategy.__class__ = checkpointed(type(trainer.strategy))
        trainer.strategy.bytecheckpoint = self.steps = TrainerSteps(
            trainer, self._arguments, self._reach, self._save_at_end,
            weights_only=self.save_weights_only, skip_batches=self._skip_batches,
        )  # fmt: skip

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the manager of the run."""
        assert self.steps is not None
        self.steps.begin()
        self._wanted, self._reached, self.preempted = None, -1, False
        self._best, self.best_k_models, self._last_checkpoint_saved = "", {}, ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over from the step that was loaded."""
        assert self.steps is not None
        super().on_train_start(trainer, pl_module)
        manager = self.steps.manager
        if manager.restored is None:
            refuse_newer(manager, trainer.global_step, "pass ckpt_path='last' to continue it, or another dirpath")
            if trainer.ckpt_path is None:
                self.steps.begin_anew()
        steps = manager.ask_rank_0(manager.steps, list[StepInfo])
        # Without the steps behind the one that was restored.
        self._learn_best([info for info in steps if info.step <= trainer.global_step])
        self._last_global_step_saved = self._reached = trainer.global_step
        # Lightning's handlers would stop each rank by itself, and run a collective.
        preemption = self._arguments.preemption
        for number in () if preemption is None else preemption.signals:
            own = trainer._signal_connector._original_handlers.pop(number, None)
            if own is not None:  # the manager's, which the manager takes away at the end
                signal.signal(number, own)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget where the epoch before was cut."""
        assert self.steps is not None
        self.steps.position.cut = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Find out whether a save is due, unless gradients are being accumulated."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        if pl_module.automatic_optimization:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        # Lightning's own way with manual optimization exchanges weights while it saves.
        due = self._every_n_train_steps >= 1 and trainer.global_step % self._every_n_train_steps == 0
        if due and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            if self.monitor is not None and self.monitor not in candidates:
                self._defer_save_until_validation = True
                return
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save in flight."""
        assert self.steps is not None
        self._save_at_end()
        self.steps.manager.wait()

    def _save_at_end(self) -> None:
        super().on_train_end(self._trainer, self._trainer.lightning_module)
        self._reach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the save in flight; the newest committed step stands."""
        if self.steps is not None:
            self.steps.end(type(exception))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the manager of the run."""
        if self.steps is not None:
            self.steps.end(None)
        self._best = ""  # committed steps say it from now on

    # --- called by Lightning's own ModelCheckpoint ------------------------------------------------------------------

    def _get_metric_interpolated_filepath_name(self, *_: Any) -> str:
        return step_folder(self.dirpath, self._trainer.global_step)

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        self._save_last_checkpoint(trainer, monitor_candidates)  # Lightning's own would leave an older one there

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_checkpoint(trainer, step_folder(self.dirpath, trainer.global_step))

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Save at the next place where the state of the training is complete."""
        self._wanted, self._last_global_step_saved = {}, trainer.global_step
        self._last_checkpoint_saved = self.last_model_path = filepath
        for name, value in self._monitor_candidates(trainer).items():
            if name not in ("epoch", "step") and value.numel() == 1:
                self._wanted[name] = _rankable(float(value), self.mode) if name == self.monitor else float(value)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Do nothing: the manager deletes, after the next commit."""

    # --- saves ----------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        """Save if that is due, at a place where the state of the training is complete.

        Raises:
            SIGTERMException: the job is to stop.
        """
        assert self.steps is not None
        trainer, wanted, self._wanted = self._trainer, self._wanted, None
        if trainer.fast_dev_run or (wanted is None and self._reached == trainer.global_step):
            return
        self._reached = trainer.global_step
        self.steps.maybe_save(wanted is not None, wanted or {})
        self.preempted = self.steps.manager.preempted
        if self.preempted:
            raise pl.utilities.exceptions.SIGTERMException


class _TopK(Best):
    """Keep the best steps as Lightning ranks them: of equal values the older one, and no superseded steps."""

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Return the candidates, the best one first."""
        sign = 1 if self.mode == "min" else -1
        found = super().ranked([info for info in steps if not info.superseded])
        return sorted(found, key=lambda info: (sign * info.metrics[self.metric], info.step))


def _keep_rule(monitor: str | None, save_top_k: int, mode: str) -> KeepRule | None:
    """Return the rule of `save_top_k`, or None to keep everything. The newest step always stays, as with `save_last`."""
    if save_top_k == -1:
        return None
    return Latest(1) if monitor is None or save_top_k == 0 else _TopK(monitor, save_top_k, mode)


def _rankable(value: float, mode: str) -> float:
    """Return the value of a monitored metric as a finite number. Lightning ranks NaN last, and infinities as they are."""
    if math.isnan(value):
        value = math.inf if mode == "min" else -math.inf
    return max(-sys.float_info.max, min(value, sys.float_info.max))
