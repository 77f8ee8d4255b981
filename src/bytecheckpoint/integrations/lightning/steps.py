"""Save and load the states of a trainer as steps of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed
from torch.utils._pytree import keystr, tree_flatten_with_path

from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UsageError,
)
from bytecheckpoint.frameworks.base import is_strict
from bytecheckpoint.frameworks.wrappers import without_wrappers
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.integrations.attaching import (
    OPTIMIZER,
    CheckpointOfTool,
    ManagerArguments,
    check_has,
    newest_of_tool,
    patch,
)
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.lightning.package import pl
from bytecheckpoint.integrations.lightning.position import TrainingPosition
from bytecheckpoint.integrations.lightning.strategy import Nothing, refuse_edits, states_of_model
from bytecheckpoint.loading import load
from bytecheckpoint.manager import Cadence, CheckpointManager
from bytecheckpoint.manager.run_folder import step_number
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.representation.values.registry import register
from bytecheckpoint.step_fence import fence
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = [
    "HYPERPARAMETERS",
    "POSITION",
    "WRAPPED_NAMES",
    "LightningState",
    "Newest",
    "TrainerSteps",
    "averaging_callback",
]

#: Entries of Lightning with hyperparameters, and beside each the one with its class if that is one of OmegaConf.
HYPERPARAMETERS = {
    one.CHECKPOINT_HYPER_PARAMS_KEY: one.CHECKPOINT_HYPER_PARAMS_TYPE
    for one in (pl.LightningModule, pl.LightningDataModule)
}
#: Name of the `TrainingPosition` in the state that Lightning dumps.
POSITION = "bytecheckpoint"
#: Names in the module of weights inside `torch.compile`, by those in the step.
WRAPPED_NAMES = "bytecheckpoint_names"
#: Step in the name of a file of Lightning's; "train_step=7" may be a metric, so such a file is read.
_STEP_IN_NAME = re.compile(r"(?<![A-Za-z0-9_])step=(\d+)")
#: File of a sharded folder with what is no tensor.
_REST_OF_FOLDER = "meta.pt"
#: State of the weights in training, where a callback averages them and "model" holds the averages.
_IN_TRAINING = "current_model"
#: Entry in which `WeightAveraging` saves the number of averaged steps.
_OF_AVERAGES = "averaging_state"

_log = logging.getLogger("bytecheckpoint")


class Newest(os.PathLike[str]):
    """Path that stands for "last": the newest step of a run that verifies.

    Lightning looks up the age of the path that a callback returns, by fsspec, on each rank. So this is a path that exists
    everywhere; messages show the run.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def __fspath__(self) -> str:
        return os.sep

    def __str__(self) -> str:
        return os.sep

    def __format__(self, _: str) -> str:
        return f"{self._root} (the newest step)"


class LightningState:
    """State that Lightning writes to its files beside tensors, as one of the states of a save.

    Args:
        dump: function that returns the state.

    Attributes:
        loaded: state in the loaded checkpoint.
    """

    def __init__(self, dump: Callable[[], Mapping[str, Any]] = dict) -> None:
        _register_configurations()
        self._dump = dump
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the trainer."""
        return self._dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state for Lightning, which restores it."""
        self.loaded = dict(state)


def _register_configurations() -> None:
    """Let configurations of OmegaConf, as Hydra makes them, be hyperparameters."""
    with contextlib.suppress(ImportError):
        from omegaconf import DictConfig, ListConfig, OmegaConf

        def plain(config: Any) -> Any:  # with interpolations, if they lead nowhere but into the same configuration
            return OmegaConf.to_container(config, resolve=config._get_parent() is not None)

        for kind in (DictConfig, ListConfig):
            register(kind, encode=plain, decode=OmegaConf.create)


class TrainerSteps:
    """Steps of a trainer. The strategy that `checkpointed` makes loads them.

    Args:
        trainer: trainer of the run.
        arguments: arguments of the manager.
        reach: function to call at each place where the state is complete, as for `TrainingPosition`.
        weights_only: True to save neither optimizers nor random number generators.
        skip_batches: True to continue behind the done batches of an epoch.

    Attributes:
        manager: manager of a fit.
        position: position of a fit.
        running: True during a fit.
        dumping: True while the trainer's state is collected for a save.
    """

    manager: CheckpointManager
    position: TrainingPosition

    def __init__(
        self,
        trainer: Any,
        arguments: ManagerArguments,
        reach: Callable[..., object],
        *,
        weights_only: bool,
        skip_batches: bool,
    ) -> None:
        self._trainer, self._arguments, self._reach = trainer, arguments, reach
        self._weights_only, self._skip_batches = weights_only, skip_batches
        self._states: dict[str, Any] = {}
        self._state = LightningState(self._dump)
        self._stack = contextlib.ExitStack()
        self._asked = False
        self._loaded_path = ""
        self._averaged: AveragedWeights | None = None
        self.running = self.dumping = False

    # --- a fit ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the manager of a fit, whose model and optimizers are ready."""
        trainer, generators = self._trainer, DelayedGenerators()
        if (callback := averaging_callback(trainer)) is not None:
            self._averaged = AveragedWeights(callback, trainer.strategy.root_device, self._stack)
        self._states |= self._model_states()
        if not self._weights_only:
            mock = pl.core.optimizer._MockOptimizer
            optimizers = [one for one in trainer.optimizers if not isinstance(one, mock)]
            if optimizers:
                self._states["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
            self._states["rng"] = generators
        cadence = Cadence(lambda _: self._asked, overlap=self._arguments.cadence.overlap)
        self.manager = self._stack.enter_context(self._new_manager(self._states, cadence=cadence))
        self.position = TrainingPosition(
            trainer, generators, self._reach, self._load_streams, self._stack, skip_batches=self._skip_batches
        )
        self.running = True

    def end(self, error: type[BaseException] | None) -> None:
        """End a fit: wait for the save in flight."""
        self.running = False
        stack, self._stack = self._stack, contextlib.ExitStack()
        stack.__exit__(error, None, None)

    def maybe_save(self, asked: bool, metrics: Mapping[str, float]) -> None:
        """Save if Lightning asks for it, or if the job is to stop."""
        self._asked = asked
        if not self._weights_only:
            self._states |= self.position.streams
        self.manager.maybe_save(self._trainer.global_step, metrics)

    def begin_anew(self) -> None:
        """Warn if the folder of a new run holds files of Lightning's."""
        file = self.manager.ask_rank_0(lambda: next(_files(self.manager), None), CheckpointOfTool | None)
        if file is not None and self._trainer.is_global_zero:
            _log.warning(
                "a new run begins, although Lightning itself has saved %s, from which it could continue", file.path
            )

    def _new_manager(self, states: dict[str, Any], **changes: Any) -> CheckpointManager:
        load_options = self._arguments.load_options
        if load_options.strict is True and not self._trainer.lightning_module.strict_loading:
            load_options = replace(load_options, strict={"model": False})
        if _IN_TRAINING in states and load_options.strict is not False:  # a step may be of a job that averaged nothing
            others = {} if load_options.strict is True else load_options.strict
            load_options = replace(load_options, strict={**others, _IN_TRAINING: False})
        return replace(self._arguments, load_options=load_options, **changes).manager(states)

    def _model_states(self) -> dict[str, Any]:
        own = states_of_model(self._trainer.strategy)
        if self._averaged is None:
            return {"model": own, "lightning": self._state}
        in_training = {} if self._weights_only else {_IN_TRAINING: own}
        return {"model": self._averaged.module, "lightning": self._state, **in_training}

    def _load_streams(self) -> None:
        self._states |= self.position.streams
        self.manager.restore_from(self._loaded_path, only=self.position.streams)

    def _dump(self) -> dict[str, Any]:
        if not self.running or not (self._asked or self.manager.preempted):
            # A load, or a save that is being prepared: hooks of the user are called for real saves only. Instances of the
            # user's classes are here, so that they can be made again.
            objects = self._trainer.lightning_module, self._trainer.datamodule
            hparams = {one.CHECKPOINT_HYPER_PARAMS_KEY: one.hparams for one in objects if one and one.hparams}
            return _checked({key: dict(one) if isinstance(one, dict) else one for key, one in hparams.items()})
        self.dumping = True
        try:
            found = self._trainer._checkpoint_connector.dump_checkpoint(self._weights_only)
        finally:
            self.dumping = False
        strategy, weights = self._trainer.strategy, found.pop("state_dict")
        shown, strategy.shown = strategy.shown, None
        if self._averaged is not None and _OF_AVERAGES in found:
            refuse_edits("on_save_checkpoint", self._averaged.entries(weights), weights)
            weights = found.pop("current_model_state")
        refuse_edits("on_save_checkpoint", shown, weights)
        for key in ("optimizer_states", *HYPERPARAMETERS.values()):
            found.pop(key, None)
        if names := {bare: name for name in weights if (bare := without_wrappers(name)) != name}:
            found[WRAPPED_NAMES] = names
        if self.position.cut is not None:
            found["loops"]["fit_loop"] = self.position.cut
        return _checked({**found, POSITION: self.position.state()})

    # --- restore --------------------------------------------------------------------------------------------------

    def file_of(self, path: Any) -> Any:
        """Return the file or folder of Lightning's from which to load; None if a step is loaded."""
        if isinstance(path, Newest):
            with contextlib.ExitStack() as stack:
                manager = self.manager if self.running else stack.enter_context(self._new_manager({}, preemption=None))
                found = newest_of_tool(manager, "Lightning", lambda: _files(manager), self._lacks)
            if found is None:
                return None
            self._trainer._checkpoint_connector._ckpt_path = found.path
            return found.path
        is_step = step_number(os.fspath(path)) is not None
        return None if is_step or (not os.path.isfile(path) and resolve(path).version(CATALOG_NAME)) else path

    def _lacks(self, path: str) -> str:
        """Return what a file of Lightning's lacks, for `newest_of_tool`."""
        try:
            _step_in(path)
            with open_checkpoint(path) as checkpoint:
                whole = any(name == "optimizer" or name.startswith("optimizer_") for name in checkpoint.states)
        except (CheckpointNotFoundError, CorruptCheckpointError):
            return "its end"
        wanted = self.running and not self._weights_only and self._trainer.optimizers
        return OPTIMIZER if wanted and not whole else ""

    def reads(self, path: Any) -> bool:
        """Return True for a folder of a sharding strategy, where that of the trainer does not shard and cannot read it."""
        sharding = pl.strategies.FSDPStrategy, pl.strategies.ModelParallelStrategy
        return os.path.isdir(path) and not isinstance(self._trainer.strategy, sharding)

    def read_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Load such a folder; return the content that Lightning expects in its own files."""
        module, own_io = self._trainer.lightning_module, self._trainer.strategy.checkpoint_io
        found = self._trainer.optimizers
        names = ["optimizer"] if len(found) == 1 else [f"optimizer_{number}" for number in range(len(found))]
        optimizers = dict(zip(names, found, strict=True))
        load(path, {"model": module, **optimizers}, strict={"model": module.strict_loading})
        rest: dict[str, Any] = own_io.load_checkpoint(os.path.join(path, _REST_OF_FOLDER), weights_only=weights_only)
        return rest | {"state_dict": module.state_dict()}

    def restore(self, path: Any) -> dict[str, Any]:
        """Load a step; return the content that Lightning expects in its own files.

        Raises:
            CheckpointNotFoundError: an evaluation wants a step, and there is none.
            CheckpointError: the load failed, as for `load`.
        """
        trainer = self._trainer
        if self.running:
            report = _load(self.manager, path)
        else:
            with self._new_manager(self._model_states(), preemption=None) as manager:
                report = _load(manager, path)
            if report is None:
                raise CheckpointNotFoundError(f"{self._arguments.root} holds no committed step")
        if report is None:
            trainer._checkpoint_connector._ckpt_path = None  # or Lightning says that it has restored something
            return Nothing()
        found = dict(self._state.loaded)
        position = found.pop(POSITION, None)
        found.pop(WRAPPED_NAMES, None)
        if self.running:
            self._loaded_path = report.path
            self.position.resume(position)
        model, module = states_of_model(trainer.strategy), trainer.lightning_module
        if model is not module:
            return found | {"state_dict": {}}
        if _OF_AVERAGES in found:
            missing = [name for name in report.missing if name.startswith(f"{_IN_TRAINING}/")]
            if missing and module.strict_loading and is_strict(self._arguments.load_options.strict, _IN_TRAINING):
                raise IncompatibleCheckpointError(f"{report.path} lacks {missing[0]} ({len(missing)} names in all)")
            found["current_model_state"] = module.state_dict()
        elif self._averaged is not None:
            module.load_state_dict(self._averaged.module.state_dict())
        return found | {"state_dict": (module if self._averaged is None else self._averaged.module).state_dict()}


def _load(manager: CheckpointManager, path: Any) -> LoadReport | None:
    if not isinstance(path, Newest):
        return manager.restore_from(path)
    restored = manager.restore_latest()
    return None if restored is None else restored.report


def _files(manager: CheckpointManager) -> Iterator[CheckpointOfTool]:
    """Yield the files of Lightning's in the folder of a run, the newest one first: by time, or by step without times."""
    folder, latest = with_time_limits(resolve(manager.root)), manager.latest()
    # Sharded ones are folders, in which Lightning writes the last file at last.
    names = {name.partition("/")[0]: name for name, _ in sorted(folder.list())}
    found = []
    for file, name in names.items():
        if file.endswith(".ckpt"):
            steps, modified = _STEP_IN_NAME.findall(file), 0.0
            with contextlib.suppress(FileNotFoundError, UsageError):  # removed meanwhile; a refused name
                modified = folder.stat(name).modified
            found.append((modified, int(steps[-1]) if steps else -1, f"{manager.root}/{file}"))
    nested = [name for file, name in names.items() if file != name and name.endswith(".ckpt")]
    if nested and not found and latest is None:
        _log.warning(
            "%s/%s is not taken: it is in a folder below; pass its path if it is of this run", manager.root, nested[0]
        )
    for modified, step, path in sorted(found, reverse=True):
        if step < 0 and not (latest is not None and 0 < modified < latest.committed):
            with contextlib.suppress(CorruptCheckpointError, CheckpointNotFoundError):
                step = _step_in(path)
        yield CheckpointOfTool(step, path, modified)


def _step_in(path: str) -> int:
    """Return the step in a file of Lightning's; 0 if there is none."""
    rest = f"{path}/{_REST_OF_FOLDER}"
    with open_checkpoint(rest if resolve(path).version(_REST_OF_FOLDER) else path) as checkpoint:
        return next((int(checkpoint[name]) for name in checkpoint if name.endswith("/global_step")), 0)


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Refuse objects with a state_dict, because Lightning would get their states back in their place."""
    for path, leaf in tree_flatten_with_path(state)[0]:
        if hasattr(leaf, "state_dict"):
            raise UsageError(
                f"a {type(leaf).__name__} cannot be stored among the plain values of a step, at {keystr(path)}: leave it "
                "out, for example by save_hyperparameters(ignore=[...]), or store its state_dict"
            )
    return state


# --- weights that a callback averages ---


def averaging_callback(trainer: Any) -> Any:
    """Return the callback of a trainer that averages weights, or None.

    Raises:
        UsageError: there are two, or the strategy shards the weights.
    """
    found = [one for one in trainer.callbacks if isinstance(one, pl.callbacks.WeightAveraging)]
    if len(found) > 1:
        raise UsageError(f"{type(found[0]).__name__} and {type(found[1]).__name__} both average the weights: pass one")
    if found and isinstance(trainer.strategy, pl.strategies.FSDPStrategy | pl.strategies.ModelParallelStrategy):
        raise UsageError(
            f"{type(found[0]).__name__} averages whole weights, and {type(trainer.strategy).__name__} shards them: use "
            "DDPStrategy, or leave the callback away"
        )
    return found[0] if found else None


class AveragedWeights:
    """The averaged weights of a fit.

    Args:
        callback: callback of Lightning that averages.
        device: device of this rank.
        stack: stack that leaves the callback as it was.

    Attributes:
        module: copy of the user's module with the averaged weights.
    """

    def __init__(self, callback: Any, device: Any, stack: contextlib.ExitStack) -> None:
        check_has(callback, ("_average_model", "_swap_models"), pl.__name__, "use 2.6")
        average = callback._average_model
        self.module: Any = average.module
        # A copy in the background may still read these weights, which no optimizer steps.
        for owner, name in (average, "update_parameters"), (callback, "_swap_models"):
            patch(stack, owner, name, _behind_fence(getattr(owner, name)))
        if torch.distributed.is_initialized():  # they were copied before DDP made the ranks equal
            with torch.no_grad():
                for tensor in (*self.module.parameters(), *self.module.buffers()):
                    shared = tensor.to(device)
                    torch.distributed.broadcast(shared, 0)
                    tensor.copy_(shared)

    def entries(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Return the averaged weights by their names, with the other entries of the `shown` weights."""
        averaged = self.module.state_dict()
        return {name: one if isinstance(one, torch.Tensor) else shown.get(name) for name, one in averaged.items()}


def _behind_fence(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        fence()
        return function(*arguments)

    return call
