"""Attach a trainer, by a monkey patch: the trainer gets a subclass of its own class.

A callback cannot save and load, because Trainer calls callbacks when its own files are written. So methods are overridden.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.attaching import ManagerArguments, Mixin, check_has, subclass_in_place
from bytecheckpoint.integrations.transformers.checkpoints import TrainerCheckpoints, keep_rule
from bytecheckpoint.manager import Cadence, LoadOptions, Preemption, SaveOptions

__all__ = ["attach"]

_log = logging.getLogger("bytecheckpoint")

#: Methods of Trainer that are overridden. Versions before 5.10 lack some of them.
_OVERRIDDEN = (
    "set_initial_training_values", "_init_training_state", "_prepare_for_training", "_run_epoch", "_load_rng_state",
    "_maybe_log_save_evaluate", "_save_checkpoint", "_load_best_model", "_finalize_training",
)  # fmt: skip

#: Methods by which Trainer writes and reads its own files.
_NOT_CALLED = (
    "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_scaler",
)  # fmt: skip


def attach(
    trainer: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    hf_weights: str | None = None,
    preemption: Preemption | None = None,
    every: Any = None,
    keep: Any = None,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> TrainerCheckpoints:
    """Let a trainer save and resume with this package; then call `trainer.train` as always.

    A checkpoint holds the model, the optimizer, the schedule, the gradient scaler if there is one, the random number
    generators, and the trainer's state with those of its callbacks. `train(resume_from_checkpoint=...)` takes "auto" (the
    newest step that verifies, or a higher one that Trainer itself has saved; a new run if there is none), True (the same,
    but there must be one), the path of a step, or a checkpoint folder that Trainer itself has written. All ranks call it.

    Args:
        trainer: a `transformers.Trainer`, or an instance of a subclass such as `trl.SFTTrainer`.
        root: folder or URL of the run; by default `args.output_dir`.
        hf_weights: "last" to call `trainer.save_model()` at the end of the training, or None.
        preemption: notice that the job is about to stop. All ranks then save at the same step, and `train` returns. With
            `args.enable_jit_checkpoint`, SIGTERM is this notice by default.
        every: further times of saves, as for `CheckpointManager`, beside those of `args.save_strategy`.
        keep: steps to keep, as for `CheckpointManager`; by default those of `args.save_total_limit`. With
            `Retention(..., grace=0)` the files of old steps go at once, as Trainer does it.
        save_options: options of all saves.
        load_options: options of all loads.

    Raises:
        UsageError: the trainer is set up in a way that is not supported.
    """
    _check(trainer, hf_weights)
    if trainer.args.enable_jit_checkpoint:
        _remove_jit_checkpoints(trainer)
        preemption = preemption or Preemption()
    root = trainer.args.output_dir if root is None else root
    cadence = every if isinstance(every, Cadence) else Cadence(every)
    limit = keep_rule(trainer.args)
    arguments = ManagerArguments.of(root, keep, limit, cadence, preemption, save_options, load_options)
    from transformers import Trainer

    checkpoints = TrainerCheckpoints(trainer, arguments, final_weights=hf_weights == "last")
    _warn_of_overrides(type(trainer), Trainer)
    subclass_in_place(trainer, _CheckpointedTrainer, Trainer)
    trainer.bytecheckpoint = checkpoints
    trainer.add_callback(_watching(checkpoints))
    return checkpoints


def _check(trainer: Any, hf_weights: object) -> None:
    check_has(trainer, _OVERRIDDEN, "transformers", "pass a transformers.Trainer, of version 5.10 or newer")
    if hasattr(trainer, "bytecheckpoint"):
        raise UsageError("the trainer is attached already: call attach once")
    if hf_weights not in (None, "last"):
        raise UsageError(f"hf_weights={hf_weights!r}: use None or 'last'")
    if trainer.is_deepspeed_enabled:
        raise UsageError("a Trainer that uses DeepSpeed is not supported: save its engine with bytecheckpoint.save")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
        raise UsageError(
            f"hub_strategy={trainer.args.hub_strategy!r} uploads Trainer's own files: use hub_strategy='end'"
        )


def _remove_jit_checkpoints(trainer: Any) -> None:
    """Take Trainer's own handler of SIGTERM away: it saves on each rank when that rank sees the signal."""
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    callback = trainer.pop_callback(JITCheckpointCallback)
    if callback is not None and callback.jit_manager is not None:
        signal.signal(signal.SIGTERM, callback.jit_manager._original_sigterm_handler or signal.SIG_DFL)


def _warn_of_overrides(own: type, of_tool: type) -> None:
    """Say which methods of a subclass of Trainer are not called any more, because no files of Trainer are written."""
    for kind in own.__mro__[: own.__mro__.index(of_tool)]:
        if names := [name for name in _NOT_CALLED if name in vars(kind)]:
            _log.warning(
                "%s.%s is not called for steps, which hold the model and the optimizer as they are: %s", kind.__name__,
                names[0], "change what is saved by save_options and load_options of attach",
            )  # fmt: skip


def _watching(checkpoints: TrainerCheckpoints) -> Any:
    """Return a callback that refuses other callbacks and subclasses which need folders of Trainer."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            checkpoints.refuse_uploads()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            checkpoints.check_save()

    return Watching()


class _CheckpointedTrainer(Mixin):  # type: ignore[misc]
    """Methods that `attach` overrides in a trainer. Trainer's own methods document when they are called."""

    bytecheckpoint: TrainerCheckpoints

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        trial = args[0] if args else kwargs.get("trial")
        if trial is not None:
            raise UsageError("hyperparameter_search is not supported: its trials would save into one run")
        with self.bytecheckpoint.training(resume_from_checkpoint) as stock:
            return super().train(stock, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        self._loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> Any:
        from transformers.trainer_utils import has_length

        counts = max_steps, num_update_steps_per_epoch, num_train_epochs
        position = super()._init_training_state(*counts, resume, trial)
        # Earlier than Trainer does, because one load fills all, the number of the step included.
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume)
        self._resumes = False
        found = self.bytecheckpoint.begin(num_update_steps_per_epoch if has_length(self._loader) else None)
        if found:
            self._resumes = True
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "trainer_state.json"), "w", encoding="utf-8") as file:
                    file.write(found)
                position = super()._init_training_state(*counts, folder, trial)
        if self.state.global_step >= max_steps:  # Trainer would look at this after one more step
            position = num_train_epochs, 0
        self.bytecheckpoint.warn_of_completions()
        return position

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        live = self.model if model is None else model
        self.bytecheckpoint.load_renamed(resume_from_checkpoint, live)
        self.bytecheckpoint.warn_of_lost(resume_from_checkpoint, live)

    def _run_epoch(self, **arguments: Any) -> Any:
        if self._resumes:
            arguments["resume_from_checkpoint"] = self.bytecheckpoint  # not None, and passed to _load_rng_state
        return super()._run_epoch(**arguments)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint is self.bytecheckpoint:
            self.bytecheckpoint.restore_generators()
        else:
            if checkpoint is not None:
                self.bytecheckpoint.check_generators(checkpoint)
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self.bytecheckpoint.preempted:  # no evaluation at the end of an epoch that is cut short
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self.bytecheckpoint.reach_boundary()

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self.bytecheckpoint.save()

    def _load_best_model(self) -> None:
        if not self.bytecheckpoint.preempted:
            self.bytecheckpoint.load_best_model(super()._load_best_model)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # Trainer deletes by this limit here, folders of its own.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if self.bytecheckpoint.final_weights and not self.bytecheckpoint.preempted:
            self.save_model(_internal_call=True)
        return output
