"""Save and restore a trainer through the `CheckpointManager` of its training."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UsageError,
    listed,
)
from bytecheckpoint.integrations.attaching import (
    OPTIMIZER,
    SCHEDULE,
    CheckpointOfTool,
    ManagerArguments,
    differences,
    folders_of_tool,
    newest_of_tool,
    refuse_newer,
    seen_by_all,
)
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.transformers.pretrained import adapter_names, describe_pretrained
from bytecheckpoint.loading import load
from bytecheckpoint.manager import Best, Cadence, CheckpointManager, StepInfo
from bytecheckpoint.manager.run_folder import step_folder, step_number
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.storage import resolve

__all__ = ["TrainerCheckpoints", "keep_rule"]

_log = logging.getLogger("bytecheckpoint")

#: Last file of each checkpoint of Trainer itself.
_STATE_OF_TRAINER = "trainer_state.json"
#: Files that Trainer reads when it resumes.
_FILES_OF_TRAINER = ("*.safetensors", "*_model*.bin", "*.pt", "*.pth")
_OF_TRAINER = re.compile(r"checkpoint-([0-9]+)")
#: Callbacks of transformers that upload Trainer's folders: the attribute that decides, its value that does, and a remedy.
_UPLOADS = {
    "WandbCallback": ("_log_model", "checkpoint", "set WANDB_LOG_MODEL to 'end' or 'false'"),
    "MLflowCallback": ("_log_artifacts", "true", "set HF_MLFLOW_LOG_ARTIFACTS to false"),
    "ClearMLCallback": ("_log_model", "true", "set CLEARML_LOG_MODEL to false"),
    "DVCLiveCallback": ("_log_model", "all", "set HF_DVCLIVE_LOG_MODEL to true, for the end of the training, or false"),
    "FlyteCallback": ("sync_checkpoints", "true", "pass sync_checkpoints=False"),
    "NeptuneCallback": ("_should_upload_checkpoint", "true", "pass log_checkpoints=None"),
}


class TrainerCheckpoints:
    """The checkpoints of a trainer. `attach` makes it, and it is `trainer.bytecheckpoint`.

    Args:
        trainer: trainer of the run.
        arguments: arguments of the manager.
        final_weights: True to write Hugging Face weights at the end.

    Attributes:
        manager: manager of the current or last training; None before the first.
    """

    def __init__(self, trainer: Any, arguments: ManagerArguments, *, final_weights: bool) -> None:
        self._trainer, self._arguments = trainer, arguments
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
        """True if the last training ended early because the job is to stop."""
        return self.manager is not None and self.manager.preempted

    # --- called by the trainer ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, resume: Any) -> Iterator[Any]:
        """Take part in a training in a `with` block, and wait at its end for the save in flight.

        Args:
            resume: `resume_from_checkpoint` of `train`.

        Yields:
            The folder from which Trainer itself resumes, or None.
        """
        self._resume, self.manager = None if resume is False else resume, None
        stock = None if self._resume is None else self._folder_of_trainer(self._resume)
        self._resume = self._resume if stock is None else None
        with contextlib.ExitStack() as self._stack:
            yield stock

    def _folder_of_trainer(self, resume: Any) -> Any:
        """Return the folder from which Trainer itself resumes; None if this package does, or a new run begins."""
        with replace(self._arguments, preemption=None).manager({}) as manager:
            if resume not in ("auto", True):
                if not seen_by_all(manager, resume, lambda: _is_of_trainer(resume)):
                    return None
                missing = manager.ask_rank_0(lambda: self._lacks(resume), str)
                if missing in (OPTIMIZER, SCHEDULE):
                    raise UsageError(
                        f"{resume} lacks {missing}, so Trainer would begin with a new optimizer: begin a new run, without "
                        "a resume, with a model that has these weights"
                    )
                if missing:
                    raise UsageError(f"{resume} lacks {missing}: a save was killed; give another folder")
                return resume
            find = functools.partial(self._of_trainer, manager)
            found = newest_of_tool(manager, "Trainer", find, self._lacks)
            return None if found is None else found.path

    def _lacks(self, path: str | os.PathLike[str]) -> str:
        """Return what a folder of Trainer lacks, for `newest_of_tool`."""
        if not _is_of_trainer(path):
            return f"a whole {_STATE_OF_TRAINER}"
        folder = glob.escape(os.fspath(path))
        for file in sorted(file for kind in _FILES_OF_TRAINER for file in glob.glob(os.path.join(folder, kind))):
            try:
                open_checkpoint(file).close()
            except CorruptCheckpointError:
                return f"a whole {os.path.basename(file)}"
            except CheckpointError:  # of a kind that Trainer may read
                pass
        if self._trainer.args.save_only_model:
            return ""
        if not glob.glob(os.path.join(folder, "optimizer*")):
            return OPTIMIZER
        return "" if os.path.isfile(os.path.join(path, "scheduler.pt")) else SCHEDULE

    def begin(self, steps_per_epoch: int | None) -> str:
        """Make the manager of a training whose objects are ready, and restore them if the user wants to resume.

        Args:
            steps_per_epoch: optimizer steps in an epoch; None for data without a length.

        Returns:
            The state of the trainer to continue from, as JSON; "" in a new run.
        """
        trainer = self._trainer
        state, self._generators = TrainerState(trainer, steps_per_epoch), DelayedGenerators()
        self._states.clear()  # filled anew where Trainer begins again with smaller batches
        self._states |= {"model": trainer.model, "trainer": state, "huggingface": describe_pretrained(trainer.model)}
        if not trainer.args.save_only_model:
            self._states |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "rng": self._generators}
            if (reference := _synced_reference(trainer)) is not None:
                self._states["ref_model"] = reference
                if trainer.state.global_step:
                    _log.warning(
                        "Trainer's own checkpoints do not hold the reference model of sync_ref_model: the run continues "
                        "with the one that it was given"
                    )
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
        best = facts["best_model_checkpoint"]
        if best is not None and step_number(best) is not None:
            facts["best_model_checkpoint"] = f"{self.manager.root}/{os.path.basename(best)}"  # the run may have moved
        return json.dumps(facts)

    def _new_manager(self) -> CheckpointManager:
        arguments, cadence = self._arguments, self._arguments.cadence
        save_options, load_options = arguments.save_options, arguments.load_options
        frozen = self._frozen()
        if save_options.exclude is None:
            save_options = replace(save_options, exclude=frozen or None)
        excluded = frozen if load_options.exclude is None else load_options.exclude
        load_options = replace(load_options, exclude=[*excluded, "huggingface"])  # which no run reads
        every = [lambda _: self._asked, *cadence.rules]
        cadence = Cadence(every, at_end=cadence.at_end, overlap=cadence.overlap)
        arguments = replace(arguments, cadence=cadence, save_options=save_options, load_options=load_options)
        return arguments.manager(self._states)

    def _frozen(self) -> list[str]:
        """Return patterns of the parameters that the base model of adapters has: those that are not trained."""
        model = self._trainer.model
        if not getattr(model, "peft_config", None):
            return []
        parameters = model.named_parameters(remove_duplicate=False)  # with both names of tied embeddings
        frozen = [name for name, one in parameters if not one.requires_grad]
        # A frozen part of an adapter is in no base model, and may have been drawn by chance. Its name holds the adapter's.
        written = set().union(*(adapter_names(model, name) or () for name in model.peft_config))
        own = {name for name in frozen if name in written or model.peft_config.keys() & name.split(".")}
        return [f"model/{glob.escape(name)}" for name in frozen if name not in own]

    def _refuse_newer(self, manager: CheckpointManager) -> None:
        trainer = self._trainer
        step = trainer.state.global_step  # 0, or where a checkpoint of Trainer itself ends
        if self._resume is not None:
            step = step_number(resolve(self._resume).url, manager.root) or 0
        elif not step and trainer.is_world_process_zero():
            for path in [one.path for one in self._of_trainer(manager) if _is_of_trainer(one.path)][:1]:
                _log.warning(
                    "a new run begins, although Trainer itself has saved %s, from which it could continue", path
                )
        remedy = "pass resume_from_checkpoint='auto' to continue it, attach the trainer with another root"
        refuse_newer(manager, step, f"{remedy}, or remove the steps")

    def _of_trainer(self, manager: CheckpointManager) -> list[CheckpointOfTool]:
        """Return the checkpoints that Trainer itself has saved, the newest one first."""
        roots = {resolve(self._trainer.args.output_dir).url, manager.root}
        found = [one for root in roots for one in folders_of_tool(root, _OF_TRAINER, _STATE_OF_TRAINER)]
        return sorted(found, key=lambda one: one.step, reverse=True)

    def _restore(self, manager: CheckpointManager) -> bool:
        """Restore the step that `resume_from_checkpoint` names; return False in a new run."""
        if self._resume is None:
            return False
        if self._resume not in ("auto", True):
            manager.restore_from(self._resume)
        elif manager.restore_latest() is None:
            if self._resume is True:
                raise CheckpointNotFoundError(
                    f"{manager.root} holds no committed step: with resume_from_checkpoint='auto' a run begins there"
                )
            return False
        return True

    def refuse_uploads(self) -> None:
        """Refuse callbacks that would upload folders of Trainer, which are not written.

        Raises:
            UsageError: there is one; raised on all ranks, although some of them learn on rank 0 alone what to do.
        """
        assert self.manager is not None
        callbacks = self._trainer.callback_handler.callbacks

        def look() -> str:
            for kind, callback in ((kind.__name__, one) for one in callbacks for kind in type(one).__mro__):
                attribute, asked, remedy = _UPLOADS.get(kind, ("", "", ""))
                value = getattr(callback, attribute, None)
                if attribute and str(getattr(value, "value", value)).lower() == asked:
                    return f"{kind} would upload folders checkpoint-N of Trainer, which are not written: {remedy}"
            return ""

        if message := self.manager.ask_rank_0(look, str):
            raise UsageError(message)

    def load_renamed(self, folder: str | os.PathLike[str], model: Any) -> None:
        """Load the weights of a folder of Trainer whose files have other names than the model in memory.

        Trainer itself leaves such weights as they are, with a warning.
        """
        if self._trainer.is_fsdp_enabled or getattr(model, "peft_config", None):
            return  # whose files Trainer does not load by these names
        with open_checkpoint(folder) as checkpoint:
            names = {key.removeprefix("model/") for key in checkpoint.tensors}
        if names - model.state_dict().keys():
            load(folder, {"model": model}, layout="auto")

    def warn_of_lost(self, folder: str | os.PathLike[str], model: Any) -> None:
        """Warn if adapters in a folder of Trainer lack parameters that are trained, which Trainer leaves as they are."""
        if not getattr(model, "peft_config", None) or (
            self._trainer.is_fsdp_enabled and not self._trainer.accelerator.is_fsdp2  # whose state_dict gathers
        ):
            return
        held = set()
        for adapter in model.peft_config:
            places = [os.path.join(glob.escape(os.fspath(folder)), *part) for part in ([], [adapter])]
            kinds = "adapter_model.*", "pytorch_model_fsdp*"  # the second ones with names of either kind
            if files := [path for place in places for kind in kinds for path in glob.glob(os.path.join(place, kind))]:
                with open_checkpoint(files[-1]) as checkpoint:
                    found = {key.removeprefix("model/") for key in checkpoint.tensors}
                held |= found | {key for key, name in (adapter_names(model, adapter) or {}).items() if name in found}
        parameters = list(model.named_parameters(remove_duplicate=False))
        whole = {id(one) for name, one in parameters if name in held}
        if lost := [name for name, one in parameters if one.requires_grad and id(one) not in whole]:
            _log.warning(
                "%s does not hold %s, which the run trains: it continues with the values that the model was given",
                folder, listed(lost),
            )  # fmt: skip

    def restore_generators(self) -> None:
        """Restore the random number generators. Trainer calls it when it has skipped batches."""
        self._generators.restore()

    def check_generators(self, folder: str | os.PathLike[str]) -> None:
        """Warn if a folder of Trainer has no random numbers for this rank, which Trainer takes without a word."""
        args = self._trainer.args
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        if not os.path.isfile(os.path.join(folder, name)):
            _log.warning("%s has no %s: dropout and the like draw other numbers than without the stop", folder, name)

    def warn_of_completions(self) -> None:
        """Warn if a trainer of TRL resumes in the middle of completions that it drew for several steps (GRPO, RLOO)."""
        trainer = self._trainer
        if not hasattr(trainer, "_buffered_inputs"):
            return
        every = trainer.args.steps_per_generation * getattr(trainer, "num_iterations", 1)
        if trainer.state.global_step * trainer.args.gradient_accumulation_steps % every:
            _log.warning(
                "the run continues at step %d, in the middle of completions for %d batches, which %s draws anew; its "
                "losses will be others than without the stop: choose save_steps so that saves fall between completions",
                trainer.state.global_step, every, type(trainer).__name__,
            )  # fmt: skip

    def save(self) -> None:
        """Save, because the trainer wants to."""
        assert self.manager is not None
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = step_folder(self.manager.root, state.global_step)
        self._reach(asked=True)

    def check_save(self) -> None:
        """Check that the save of this step, which the trainer believes to be made, was one of this package.

        Raises:
            UsageError: a subclass of Trainer saves in another way.
        """
        step, name = self._trainer.state.global_step, type(self._trainer).__name__
        if step != self._boundary:
            raise UsageError(
                f"nothing is saved at step {step}: {name}._save_checkpoint does not "
                "call super()._save_checkpoint(model, trial), which saves; let it do so, or remove it"
            )

    def reach_boundary(self) -> None:
        """Save if a rule or the end of the job wants it. Called after every step."""
        if self._trainer.state.global_step != self._boundary:  # it has not been saved, and this is no end of an epoch
            self._reach(asked=False)

    def _reach(self, *, asked: bool) -> None:
        assert self.manager is not None
        step = self._boundary = self._trainer.state.global_step
        self._asked = asked
        self.manager.maybe_save(step, logged_metrics(self._trainer.state))
        if self.manager.preempted:
            self._trainer.control.should_training_stop = True

    def load_best_model(self, of_trainer: Callable[[], object]) -> None:
        """Load the weights of the step with the best metric, by a function `of_trainer` if it is a folder of its own."""
        assert self.manager is not None
        self.manager.wait()
        folder = self._trainer.state.best_model_checkpoint
        if folder is not None and seen_by_all(self.manager, folder, lambda: _is_of_trainer(folder)):
            of_trainer()
            self.load_renamed(folder, self._trainer.model)
            return
        rule = best_rule(self._trainer.args)
        assert rule is not None
        manager = self.manager
        best = manager.ask_rank_0(lambda: manager.best(rule.metric, rule.mode), StepInfo | None)
        if best is None:
            _log.warning("no step of %s has a value of %s: the last weights stay", self.manager.root, rule.metric)
            return
        manager.restore_from(best.path, only=["model"])
        self._trainer.state.best_model_checkpoint = best.path


def _synced_reference(trainer: Any) -> Any:
    """Return the reference model that a trainer of TRL moves towards its model (`sync_ref_model`), or None."""
    for callback in trainer.callback_handler.callbacks:
        if any(kind.__name__ == "SyncRefModelCallback" for kind in type(callback).__mro__):
            return callback.ref_model
    return None


def _is_of_trainer(path: Any) -> bool:
    """Return True for a folder that Trainer itself has saved to the end."""
    try:
        with open(os.path.join(path, _STATE_OF_TRAINER), encoding="utf-8") as file:
            return "global_step" in json.load(file)
    except (OSError, ValueError):
        return False


def logged_metrics(state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, evaluation included."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        found = {name: value for name, value in entry.items() if isinstance(value, int | float)} | found
    found.pop("step", None)
    return found


# --- the steps to keep ---


@dataclass(frozen=True)
class _TotalLimit:
    """Keep the newest step, the best one, and others up to `save_total_limit`."""

    limit: int
    best: Best | None

    def keep(self, steps: Sequence[StepInfo]) -> set[int]:
        """See `KeepRule`."""
        kept = {info.step for info in steps[-1:]} | set(self.best.keep(steps) if self.best else ())
        for info in reversed(steps):
            if len(kept) >= self.limit:
                break
            kept.add(info.step)
        return kept


def keep_rule(args: Any) -> _TotalLimit | None:
    """Return the rule of `save_total_limit`, or None to keep everything."""
    limit = args.save_total_limit
    return _TotalLimit(limit, best_rule(args)) if limit is not None and limit > 0 else None


def best_rule(args: Any) -> Best | None:
    """Return the rule of `metric_for_best_model`, or None."""
    metric = args.metric_for_best_model
    if metric is None:
        return None
    return Best(f"eval_{metric.removeprefix('eval_')}", mode="max" if args.greater_is_better else "min")


# --- states ---


class TrainerState:
    """State of a trainer, as in trainer_state.json, with a description of its data; implements `SupportsStreams`.

    Args:
        trainer: trainer of the run.
        steps_per_epoch: optimizer steps in an epoch; None for data without a length.

    Attributes:
        loaded: the state of the checkpoint, as JSON.
    """

    stream_count = 1

    def __init__(self, trainer: Any, steps_per_epoch: int | None) -> None:
        self._trainer = trainer
        args = trainer.args
        self._data = {
            "samples per step": trainer.get_total_train_batch_size(args),
            "steps per epoch": steps_per_epoch,
            "data seed": args.seed if args.data_seed is None else args.data_seed,
        }
        self.loaded = ""

    def shared_state(self) -> dict[str, Any]:
        """Return the facts that decide the order of the data; see `SupportsStreams`."""
        return {"data": self._data}

    def stream_states(self) -> dict[int, Any]:
        """Return the state of rank 0, which counts for all ranks; see `SupportsStreams`."""
        from transformers.trainer_callback import ExportableState

        trainer = self._trainer
        if not trainer.is_world_process_zero():
            return {}
        parts = [*trainer.callback_handler.callbacks, trainer.control]
        parts = [part for part in parts if isinstance(part, ExportableState)]
        state = replace(trainer.state, stateful_callbacks=parts)
        return {0: {"trainer_state.json": json.dumps(asdict(state))}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Refuse a checkpoint of other data; see `SupportsStreams`."""
        differing = differences(shared["data"], self._data)
        if differing and not self._trainer.args.ignore_data_skip:
            raise IncompatibleCheckpointError(
                f"the run would continue with other data than it began with ({differing}). Samples per step are "
                "per_device_train_batch_size x gradient_accumulation_steps x ranks: keep their product. With "
                "ignore_data_skip=True the run continues with the first samples of the epoch"
            )
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Keep the state until Trainer asks for it; see `SupportsStreams`."""
        self.loaded = states[0]["trainer_state.json"]
