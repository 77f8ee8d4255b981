"""`TrainerCheckpoints`: a trainer and the `CheckpointManager` of its training."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.integrations.attaching import refuse_newer
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.transformers.rules import best_rule
from bytecheckpoint.integrations.transformers.state import TrainerState, logged_metrics
from bytecheckpoint.manager import CheckpointManager, StepInfo
from bytecheckpoint.manager.run_folder import step_folder, step_number
from bytecheckpoint.storage import resolve

__all__ = ["TrainerCheckpoints"]

_log = logging.getLogger("bytecheckpoint")


class TrainerCheckpoints:
    """The checkpoints of a trainer. `attach` makes it, and it is `trainer.bytecheckpoint`.

    Args:
        trainer: whose they are.
        root: folder or URL.
        final_weights: write Hugging Face weights at the end.
        options: of the manager.
        every: further times at which to save.

    Attributes:
        manager: of the training that runs, or of the last one; None before the first.
    """

    def __init__(
        self, trainer: Any, root: str | os.PathLike[str], final_weights: bool, options: Mapping[str, Any], every: Any
    ) -> None:
        self._trainer, self._root, self._options, self._every = trainer, root, dict(options), every
        self.final_weights = final_weights
        self.manager: CheckpointManager | None = None
        self._resume: Any = None
        self._states: dict[str, Any] = {}
        self._asked = False
        self._boundary = -1
        self._generators = DelayedGenerators()
        self._stack = contextlib.ExitStack()

    @property
    def preempted(self) -> bool:
        """Whether the last training ended early because the job is to stop."""
        return self.manager is not None and self.manager.preempted

    # --- called by the trainer ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, resume: Any) -> Iterator[Any]:
        """Take part in a training in a `with` block, and wait at its end for the save in flight.

        Args:
            resume: `resume_from_checkpoint` of `train`.

        Yields:
            What Trainer itself is to resume from, or None.
        """
        own = None if resume is None or resume is False else resume
        stock = (
            own if own not in (None, True, "auto") and os.path.isfile(os.path.join(own, "trainer_state.json")) else None
        )
        self._resume, self.manager = None if stock else own, None
        with contextlib.ExitStack() as self._stack:
            yield stock

    def begin(self, steps_per_epoch: int | None) -> str:
        """Make the manager of a training whose objects are ready, and restore them if that was asked for.

        Args:
            steps_per_epoch: optimizer steps in an epoch; None for data without a length.

        Returns:
            The state of the trainer to go on from, as JSON; "" in a new run.
        """
        trainer = self._trainer
        state, self._generators = TrainerState(trainer, steps_per_epoch), DelayedGenerators()
        self._states.clear()  # filled anew where Trainer begins again with smaller batches
        self._states |= {"model": trainer.model, "trainer": state}
        if not trainer.args.save_only_model:
            self._states |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "rng": self._generators}
            if getattr(trainer.accelerator, "scaler", None) is not None:
                self._states["scaler"] = trainer.accelerator.scaler
        if self.manager is None:
            self.manager = self._stack.enter_context(self._new_manager())
            if self._resume not in ("auto", True):
                self._refuse_newer(self.manager)
        self._boundary = -1
        if not self._restore(self.manager):
            return ""
        facts = json.loads(state.loaded)
        if (best := facts["best_model_checkpoint"]) is not None:
            facts["best_model_checkpoint"] = f"{self.manager.root}/{os.path.basename(best)}"  # the run may have moved
        return json.dumps(facts)

    def _new_manager(self) -> CheckpointManager:
        every = [lambda _: self._asked, *([] if self._every is None else [self._every])]
        options = dict(self._options)
        for name in ("save_options", "load_options"):
            options[name] = {**self._selection(), **options.get(name, {})}
        return CheckpointManager(self._root, self._states, every=every, **options)

    def _selection(self) -> dict[str, Any]:
        """Leave out what a model with adapters does not train: it comes from the base model."""
        model = self._trainer.model
        if not getattr(model, "peft_config", None):
            return {}
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return {"exclude": [f"model/{glob.escape(name)}" for name in frozen]} if frozen else {}

    def _refuse_newer(self, manager: CheckpointManager) -> None:
        step = None if self._resume is None else step_number(resolve(self._resume).url, manager.root)
        remedy = "pass resume_from_checkpoint='auto' to go on with it, attach the trainer with another root"
        refuse_newer(manager, step or 0, f"{remedy}, or remove the steps")

    def _restore(self, manager: CheckpointManager) -> bool:
        """Restore what `resume_from_checkpoint` names; return False in a new run."""
        if self._resume is None:
            return False
        if self._resume not in ("auto", True):
            manager.restore_from(self._resume)
        elif not manager.restore_latest():
            if self._resume is True:
                raise CheckpointNotFoundError(
                    f"{manager.root} holds no committed step: with resume_from_checkpoint='auto' a run begins there"
                )
            return False
        return True

    def restore_generators(self) -> None:
        """Let the random number generators go on from the checkpoint. Trainer asks for it when it has skipped batches."""
        self._generators.restore()

    def save(self) -> None:
        """Save, because the trainer wants it."""
        assert self.manager is not None
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = step_folder(self.manager.root, state.global_step)
        self._reach(asked=True)

    def reach_boundary(self) -> None:
        """Save if something else than the trainer wants it. Called after every step."""
        if self._trainer.state.global_step != self._boundary:  # it has not been saved, and this is no end of an epoch
            self._reach(asked=False)

    def _reach(self, *, asked: bool) -> None:
        assert self.manager is not None
        step = self._boundary = self._trainer.state.global_step
        self._asked = asked
        self.manager.maybe_save(step, logged_metrics(self._trainer.state))
        if self.manager.preempted:
            self._trainer.control.should_training_stop = True

    def load_best_model(self) -> None:
        """Load the weights of the step with the best metric."""
        assert self.manager is not None
        self.manager.wait()
        rule = best_rule(self._trainer.args)
        assert rule is not None
        manager = self.manager
        best = manager.ask_rank_0(lambda: manager.best(rule.metric, rule.mode), StepInfo | None)
        if best is None:
            _log.warning("no step of %s has a value of %s: the last weights stay", self.manager.root, rule.metric)
            return
        manager.restore_from(best.path, only=["model"])
        self._trainer.state.best_model_checkpoint = best.path
