"""Save and restore fits of Lightning, in the place of its own `ModelCheckpoint`.

Lightning's own class decides when to save and which step is best; `CheckpointManager` saves and deletes.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.attaching import ManagerArguments, refuse_newer
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.lightning.steps import Newest, TrainerSteps, averaging_callback
from bytecheckpoint.integrations.lightning.strategy import checkpointed
from bytecheckpoint.manager import Cadence, LoadOptions, Preemption, Retention, SaveOptions, StepInfo
from bytecheckpoint.manager.rules import Best, KeepRule, Latest
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.storage import resolve

__all__ = ["ModelCheckpoint"]

#: Beginning of the names of metrics that say for which of several callbacks a step was saved.
_SAVED_FOR = "saved for "


class ModelCheckpoint(pl.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the steps of a run with this package, in the place of Lightning's own callback of this name.

    A step holds the model, the optimizers, the random number generators of every rank, and everything else that Lightning
    writes to its files: loops, schedules, callbacks, hyperparameters. Its path is `dirpath/step_00000100`, by
    `trainer.global_step`. `trainer.fit(ckpt_path=...)` takes "last" (the newest step that verifies; a new run if there is
    none), the path of a step, or a file of Lightning's; `validate`, `test` and `predict` take "best" as well.

    Several callbacks with one `dirpath` share the steps: each step is saved once, and stays while one of them wants it.
    Arguments of Lightning's own class keep their meaning, with these exceptions: `save_on_exception` is refused,
    `filename`, `auto_insert_metric_name` and `enable_version_counter` have no effect, and `save_last` saves at every save
    that is due, not only at the best; the newest step always stays. A save that is due in the middle of accumulated
    gradients follows after them, and one that is due at the last batch of an epoch at its end.

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
            pl.utilities.rank_zero.rank_zero_info(
                f"filename={given['filename']!r} names nothing: steps are named step_00000100 and hold their metrics"
            )
        if given.get("save_on_exception"):
            raise UsageError(
                "save_on_exception=True: an exception may reach one rank alone. The newest step stands; for signals, pass "
                "preemption=Preemption()"
            )
        self._best = ""
        super().__init__(**{**given, "dirpath": None})
        self.dirpath = resolve(os.path.expanduser(dirpath)).url
        rules = _keep_rules(self.monitor, self.save_top_k, self.mode, save_last=bool(self.save_last))
        default, cadence = rules and _OfEach({self._mark: rules}), Cadence(overlap=overlap)
        self._arguments = ManagerArguments.of(
            self.dirpath, keep, default, cadence, preemption, save_options, load_options
        )
        self._shared = {
            "preemption": preemption, "skip_batches": skip_batches, "overlap": overlap, "save_options": save_options,
            "load_options": load_options, "save_weights_only": self.save_weights_only,
        }  # fmt: skip
        self._trainer: Any = None
        self.steps: TrainerSteps | None = None
        self._wanted: dict[str, float] | None = None  # metrics of a save that is due
        self._reached: tuple[int, dict[str, float]] = -1, {}  # a step, and the metrics of its save
        self.preempted = False

    @property
    def _mark(self) -> str:
        return f"{_SAVED_FOR}{self.state_key}"

    @property
    def _peers(self) -> list[ModelCheckpoint]:
        """The callbacks of the same steps. The first one saves."""
        return self._trainer.checkpoint_callbacks  # type: ignore[no-any-return]

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
        steps = _saved_for(self._mark, steps)
        if self.monitor is None:
            return [info for info in reversed(steps) if not info.superseded]
        return _TopK(self.monitor, max(self.save_top_k, 1), self.mode).ranked(steps)

    def _learn_best(self, steps: list[StepInfo]) -> None:
        """Rank the committed steps: a step that was best may be lost, and another job may have saved some."""
        ranked = self._ranked(steps)
        self._best = ranked[0].path if ranked else ""
        saved = [info.path for info in _saved_for(self._mark, steps) if not info.superseded]
        self.last_model_path = saved[-1] if saved else ""
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
        for one in trainer.checkpoint_callbacks:
            if not isinstance(one, ModelCheckpoint) or one.dirpath != self.dirpath:
                raise UsageError(
                    f"the Trainer has a {type(one).__name__} too, which is Lightning's or has another dirpath: only "
                    "callbacks of this package with one dirpath go together, because a run is in one folder"
                )
        uploads = [type(one).__name__ for one in trainer.loggers if getattr(one, "_log_model", False)]
        if uploads:
            raise UsageError(
                f"{uploads[0]}(log_model=...) uploads files of Lightning's, which are not written: leave it away"
            )
        if stage == "fit":
            averaging_callback(trainer)
        self._trainer, first = trainer, trainer.checkpoint_callbacks[0]
        if first is not self:
            self._check_shared(first)
            self.steps = first.steps
            return
        trainer.strategy.__class__ = checkpointed(type(trainer.strategy))
        trainer.strategy.bytecheckpoint = self.steps = TrainerSteps(
            trainer, replace(self._arguments, retention=self._retention()), self._reach,
            weights_only=self.save_weights_only, skip_batches=self._shared["skip_batches"],
        )  # fmt: skip

    def _check_shared(self, first: ModelCheckpoint) -> None:
        for name, value in self._shared.items():
            default = inspect.signature(ModelCheckpoint).parameters.get(name)
            if value != first._shared[name] and (default is None or value != default.default):
                raise UsageError(
                    f"{name}={value!r} of one ModelCheckpoint, and {first._shared[name]!r} of the first one: they share "
                    "their steps, so give all of them the same"
                )

    def _retention(self) -> Retention:
        kept = {one._mark: one._arguments.retention for one in self._peers}
        if len(kept) == 1 or all(one.rules is None for one in kept.values()):
            return self._arguments.retention
        grace, most = max(one.grace for one in kept.values()), max(one.most_retired for one in kept.values())
        return Retention(_OfEach({mark: one.rules for mark, one in kept.items()}), grace=grace, most_retired=most)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the manager of the run."""
        assert self.steps is not None
        if self._peers[0] is self:
            self.steps.begin()
        self._wanted, self._reached, self.preempted = None, (-1, {}), False
        self._best, self.best_k_models, self._last_checkpoint_saved = "", {}, ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over from the step that was loaded."""
        assert self.steps is not None
        super().on_train_start(trainer, pl_module)
        manager = self.steps.manager
        if manager.restored is None and self._peers[0] is self:
            refuse_newer(manager, trainer.global_step, "pass ckpt_path='last' to continue it, or another dirpath")
            if trainer.ckpt_path is None:
                self.steps.begin_anew()
        steps = manager.ask_rank_0(manager.steps, list[StepInfo])
        # Without the steps behind the one that was restored.
        self._learn_best([info for info in steps if info.step <= trainer.global_step])
        self._last_global_step_saved, self._reached = trainer.global_step, (trainer.global_step, {})
        # Lightning's handlers would stop each rank by itself, and run a collective.
        preemption = self._peers[0]._arguments.preemption
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
        self.steps.manager.wait()

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
        first, self._last_global_step_saved = self._peers[0], trainer.global_step
        wanted = first._wanted = first._wanted or {}
        self._last_checkpoint_saved = self.last_model_path = filepath
        for name, value in self._monitor_candidates(trainer).items():
            if name == self.monitor:
                wanted[name] = _rankable(float(value), self.mode)
            elif name not in ("epoch", "step") and value.numel() == 1:
                wanted.setdefault(name, float(value))
        if len(self._peers) > 1:
            wanted[self._mark] = 1.0

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Do nothing: the manager deletes, after the next commit."""

    # --- saves ----------------------------------------------------------------------------------------------------

    def _reach(self, *, ends: bool = False) -> None:
        """Save if that is due, at a place where the state of the training is complete.

        Raises:
            SIGTERMException: the job is to stop.
        """
        assert self.steps is not None
        for one in self._peers if ends else ():
            super(ModelCheckpoint, one).on_train_end(self._trainer, self._trainer.lightning_module)
        trainer, wanted, self._wanted = self._trainer, self._wanted, None
        reached, metrics = self._reached
        if trainer.fast_dev_run or (wanted is None and reached == trainer.global_step):
            return
        if reached == trainer.global_step:  # another callback wants this step at the end of the epoch
            wanted = {**metrics, **(wanted or {})}
        self._reached = trainer.global_step, wanted or {}
        self.steps.maybe_save(wanted is not None, wanted or {})
        for one in self._peers:
            one.preempted = self.steps.manager.preempted
        if self.preempted:
            raise pl.utilities.exceptions.SIGTERMException


class _TopK(Best):
    """Keep the best steps as Lightning ranks them: of equal values the older one, and no superseded steps."""

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Return the candidates, the best one first."""
        sign = 1 if self.mode == "min" else -1
        found = super().ranked([info for info in steps if not info.superseded])
        return sorted(found, key=lambda info: (sign * info.metrics[self.metric], info.step))


@dataclass(frozen=True)
class _OfEach:
    """Keep what the rules of each callback keep of the steps that were saved for it, and all steps of other callbacks.

    Attributes:
        rules: rules by the mark of the callback; None to keep all.
    """

    rules: Mapping[str, Sequence[KeepRule] | None]

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        kept = {info.step for info in steps if _marks(info) and not _marks(info) & self.rules.keys()}
        for mark, rules in self.rules.items():
            own = _saved_for(mark, steps)
            kept.update([info.step for info in own] if rules is None else (n for rule in rules for n in rule.keep(own)))
        return kept


def _saved_for(mark: str, steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps that were saved for a callback. Steps without marks are of all."""
    return [info for info in steps if mark in info.metrics or not _marks(info)]


def _marks(info: StepInfo) -> set[str]:
    return {name for name in info.metrics if name.startswith(_SAVED_FOR)}


def _keep_rules(monitor: str | None, save_top_k: int, mode: str, *, save_last: bool) -> list[KeepRule] | None:
    """Return the rules of `save_top_k` and `save_last`, or None to keep everything."""
    if save_top_k == -1:
        return None
    if monitor is None or save_top_k == 0:
        return [Latest(1)]
    return [_TopK(monitor, save_top_k, mode), *([Latest(1)] if save_last else [])]


def _rankable(value: float, mode: str) -> float:
    """Return the value of a monitored metric as a finite number. Lightning ranks NaN last, and infinities as they are."""
    if math.isnan(value):
        value = math.inf if mode == "min" else -math.inf
    return max(-sys.float_info.max, min(value, sys.float_info.max))
