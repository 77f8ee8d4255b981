"""Save and restore a training of torchtitan, in the place of its own checkpoint manager."""

from __future__ import annotations

import functools
import glob
import logging
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import BaseCheckpointManager, ModelWrapper
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from bytecheckpoint.dataloader import TorchdataLoader
from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.integrations.attaching import OPTIMIZER, CheckpointOfTool, folders_of_tool, newest_of_tool
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.manager import Cadence, CheckpointManager, LoadOptions, Preemption, Retention, SaveOptions
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving import save
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.time_limits import with_time_limits

__all__ = ["TorchtitanCheckpointManager"]

_log = logging.getLogger("bytecheckpoint")
#: Folder of the seed checkpoint inside of the run's.
_SEED = "seed"
#: Names that torchtitan's own manager gives its steps.
_STOCK_STEP = re.compile(r"step-([0-9]+)")
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


class TorchtitanCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and restores a training of torchtitan; `Config.build` makes it, as torchtitan's Trainer asks for it.

    A step holds the model, the optimizers, the schedule, the position of the data loader, the trainer's counters, and
    the random number generators.

    Args:
        config: options of the manager.
        dataloader: data loader of this rank, or None.
        model_parts: pipeline stages of this rank.
        optimizers: optimizers of the stages.
        lr_schedulers: schedulers of the stages.
        states: further states by name; "train_state" is the trainer.
        sd_adapter: converter of names for Hugging Face.
        base_folder: `dump_folder` of the job.

    Attributes:
        manager: manager of the run.

    Raises:
        UsageError: the training is set up in a way that is not supported.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of the manager. Those of torchtitan's own checkpoint managers keep their meaning."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """End of the wait: the commit, the copy of the state, or none: the copy is made behind the next forward and
        backward."""

        overlap: Literal["wait", "skip", "fail"] = "wait"
        """Reaction to a save that is due during the save before."""

        on_error: Literal["raise", "warn"] = "raise"
        """Reaction to the failure of a save: end the training, or log it."""

        grace: float = 600.0
        """Seconds before the files of old steps are deleted, for jobs that read them, as in `Retention`."""

        preemption_grace: float = 0.0
        """Seconds between SIGTERM and the end of the job, in which all ranks save. 0: SIGTERM is not handled."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise UsageError(f"async_mode={self.async_mode!r}: use 'disabled', 'async' or 'async_with_pinned_mem'")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        if not self.enable:
            return
        self._config, self._loader = config, dataloader
        self._generators = _delayed_generators(states.get("train_state"))
        own = {
            "model": model_parts, "optimizer": _optimizers_of(optimizers), "lr_scheduler": lr_schedulers,
            "dataloader": _loader_state(dataloader), "rng": self._generators,
        }  # fmt: skip
        clash = own.keys() & states.keys()
        if clash:
            raise UsageError(f"a state is named {min(clash)!r}, which stands for another one here: rename it")
        self._states = {name: state for name, state in {**own, **states}.items() if state is not None}
        for name in config.exclude_from_loading:
            if name not in self._states:
                raise UsageError(
                    f"exclude_from_loading has {name!r}, and there is only {', '.join(sorted(self._states))}"
                )
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError("last_save_in_hf=True needs a model with a state_dict_adapter")
        self._stock_arguments = {
            "dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers,
            "lr_schedulers": lr_schedulers, "sd_adapter": sd_adapter,
        }  # fmt: skip
        self._stock_states = dict(states)
        self._due = False
        self._staging: SaveHandle | None = None
        self.manager = self._new_manager(filesystem.join(base_folder, config.folder))
        if config.preemption_grace:
            _end_when_preempted(states["train_state"], self.manager)

    def _new_manager(self, folder: str) -> CheckpointManager:
        config = self._config
        return CheckpointManager(
            folder,
            self._states,
            every=Cadence(lambda _: self._due, overlap=config.overlap),
            keep=Retention(config.keep_latest_k or None, grace=config.grace),
            preemption=Preemption(grace=config.preemption_grace) if config.preemption_grace else None,
            save_options=SaveOptions(
                async_checkpoint=config.async_mode != "disabled",
                staging="background" if config.async_mode == "async_with_pinned_mem" else "blocking",
                on_error=config.on_error,
            ),
            load_options=LoadOptions(exclude=[glob.escape(name) for name in config.exclude_from_loading]),
        )

    # --- save -----------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        if config.load_only:
            return False
        if last_step and curr_step == 0:  # torchtitan has made a model only to save it
            save(f"{self.manager.root}/{_SEED}", {"model": self._states["model"]})
            return True
        if last_step and config.last_save_model_only:
            self.manager.wait()
            self._save_last_model(curr_step)
            return True
        self._due = (
            last_step or curr_step % config.interval == 0 or (curr_step == 1 and config.enable_first_step_checkpoint)
        )
        handle = self.manager.save(curr_step) if last_step else self.manager.maybe_save(curr_step)
        self._staging = handle if config.async_mode == "async_with_pinned_mem" else None
        if handle is None:
            return False
        self.save_future = handle.committed
        if last_step:
            self._wait_for_saving()
        return True

    def _save_last_model(self, step: int) -> None:
        """Save the model for other programs, beside the steps, because a training cannot continue from it."""
        if self._config.last_save_in_hf:
            options = {"export_dtype": self._config.export_dtype, "last_save_in_hf": True}
            self._stock(self.manager.root, **options)._save_last_step(step)
            return
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        with torch.no_grad():
            entries = {
                name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for name, value in ModelWrapper(self._states["model"]).state_dict().items()
            }
            save(f"{self.manager.root}/step-{step}", {"model": entries}, step=step)

    def _maybe_wait_for_staging(self) -> None:
        if self._staging is not None:
            Future.exception(self._staging.staged)  # a failure is raised by the next save, on all ranks
            self._staging = None

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.manager.wait()

    def _close(self) -> None:
        self.manager.__exit__(*sys.exc_info())  # torchtitan closes while an exception ends the training, too

    @property
    def preempted(self) -> bool:
        """True if the training ends early because the job is to stop."""
        return self.enable and self.manager.preempted

    # --- load -----------------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        path = self._load_states(step)
        if path is None:
            return False
        _begin_iteration(self._loader)
        self._generators.restore()
        if torch.distributed.get_rank() == 0:
            for name in self._config.exclude_from_loading:
                _log.warning("%s: %s is not loaded (exclude_from_loading)", path, name)
        return True

    def _load_states(self, step: int) -> str | None:
        """Load a step, else the seed, else `initial_load_path`, as torchtitan does; return the path, or None."""
        manager = self.manager
        stock = self._find_stock(step)
        if stock is not None:
            try:
                self._stock(manager.root, load_only=True).load(stock.step)
            except AssertionError as error:  # another data-parallel degree
                advice = "exclude_from_loading=['dataloader'] begins the data anew"
                raise IncompatibleCheckpointError(f"torchtitan cannot load {stock.path}: {error} {advice}") from error
            return stock.path
        seed = manager.ask_rank_0(lambda: _has(f"{manager.root}/{_SEED}", CATALOG_NAME), bool)
        if step > 0:
            manager.restore(step)
        elif step < 0:
            manager.restore_latest()
        if manager.restored is not None:
            if "train_state" in self._config.exclude_from_loading:
                manager.go_back(0)  # the counters begin again
            return manager.restored.path
        if step == 0 or seed:
            return manager.restore_from(f"{manager.root}/{_SEED}", only=["model"], exclude=[]).path
        return self._load_initial()

    def _find_stock(self, step: int) -> CheckpointOfTool | None:
        """Return the checkpoint that torchtitan's own manager is to load, or None."""
        manager = self.manager
        if step < 0:
            find = functools.partial(folders_of_tool, manager.root, _STOCK_STEP, ".metadata")
            return newest_of_tool(manager, "torchtitan", find, self._lacks)
        found = CheckpointOfTool(step, f"{manager.root}/step-{step}")
        own = {info.step for info in manager.steps()}
        return found if manager.ask_rank_0(lambda: step not in own and _is_stock_checkpoint(found.path), bool) else None

    def _lacks(self, path: str) -> str:
        """Return what a folder of torchtitan's lacks, for `newest_of_tool`."""
        if not _is_stock_checkpoint(path):
            return ".metadata"
        if "optimizer" in self._config.exclude_from_loading:
            return ""
        try:
            with open_checkpoint(path) as checkpoint:
                return "" if "optimizer" in checkpoint.states else OPTIMIZER
        except CorruptCheckpointError:
            return "files, or their ends"

    def _load_initial(self) -> str | None:
        config, path = self._config, self._config.initial_load_path
        if path is None and not config.initial_load_in_hf:
            return None
        if config.initial_load_in_hf or self.manager.ask_rank_0(lambda: _is_stock_checkpoint(str(path))):
            self._load_with_stock()
        elif config.initial_load_model_only:  # perhaps saved with another export_dtype
            self.manager.restore_from(path, only=["model"], exclude=[], cast=True)
        else:
            self.manager.restore_from(path)
        return path or ""

    def _load_with_stock(self) -> None:
        """Load a checkpoint of torchtitan or Hugging Face by torchtitan's own code."""
        names = "initial_load_path", "initial_load_model_only", "initial_load_in_hf", "initial_load_in_hf_quantized"
        options = {name: getattr(self._config, name) for name in names}
        # It looks for steps in its folder first, and there shall be none.
        self._stock("/nonexistent", load_only=True, **options).load()

    def _stock(self, folder: str, **options: Any) -> Any:
        excluded = [name for name in self._config.exclude_from_loading if name != "rng"]
        config = StockManager.Config(
            enable=True, folder=folder, keep_latest_k=0, exclude_from_loading=excluded, **options
        )
        return StockManager(config, states=dict(self._stock_states), **self._stock_arguments)


def _end_when_preempted(trainer: Any, manager: CheckpointManager) -> None:
    """Let a trainer leave its loop when the job is to stop. Monkey-patches it: torchtitan has no hook for this."""
    continues = trainer.should_continue_training
    trainer.should_continue_training = lambda: continues() and not manager.preempted


# --- states ---


def _optimizers_of(container: Any) -> list[Any]:
    """Return the optimizers inside of torchtitan's container, which is an Optimizer without any state.

    Raises:
        UsageError: the container has a state of its own.
    """
    for method in ("state_dict", "load_state_dict"):
        if getattr(type(container), method) is not getattr(OptimizersContainer, method):
            raise UsageError(
                f"a {type(container).__name__} has a {method} of its own, whose state would be lost: train with an "
                "OptimizersContainer"
            )
    return list(container.optimizers)


def _loader_state(loader: Any) -> Any:
    """Return the state of a data loader, or None without one.

    A loader with streams continues at any data-parallel degree, torchtitan's own at the same one. Others are saved per
    rank.
    """
    if not isinstance(loader, ParallelAwareDataloader):
        return loader
    # torchtitan's data sets have that of Hugging Face inside.
    try:
        check_exact(
            getattr(loader.dataset, "_data", None), "feed it by TokenBufferLoader or HuggingFaceLoader(replay=True)"
        )
    except UsageError as error:
        _log.warning("a resumed run will not go on with exactly the next samples: %s", error)
    return _LoaderOfRank(loader, rank=loader.dp_rank, ranks=loader.dp_world_size)


def _begin_iteration(loader: Any) -> None:
    """Let the next `iter(loader)` draw no random number. Called after a load, before generators are restored."""
    if isinstance(loader, StatefulDataLoader):
        loader.state_dict()  # makes the iterator, which draws a seed and is taken by the next `iter`


class _LoaderOfRank(TorchdataLoader):
    """State of the loader of one data-parallel rank, without the pickle in which torchtitan wraps it."""

    def _divisible_sampler(self) -> None:
        super()._divisible_sampler()  # which refuses loaders without an exact state

    @property
    def _wraps(self) -> bool:
        return type(self.loader).state_dict is ParallelAwareDataloader.state_dict

    def stream_states(self) -> Mapping[int, Any]:
        """Return the state of this rank; see `SupportsStreams`."""
        state = StatefulDataLoader.state_dict(self.loader) if self._wraps else self.loader.state_dict()
        return {self._rank: state}

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Continue from the state of this rank; see `SupportsStreams`."""
        load = StatefulDataLoader.load_state_dict if self._wraps else type(self.loader).load_state_dict
        load(self.loader, states[self._rank])


def _delayed_generators(trainer: Any) -> DelayedGenerators:
    """Return the random number generators.

    torchtitan seeds ranks alike but for the stages of a pipeline, and its DTensors need that.

    Args:
        trainer: trainer, whose `parallel_dims` decide the seeds of the ranks.
    """
    sizes = getattr(trainer, "parallel_dims", None)
    return DelayedGenerators({name: getattr(sizes, name) for name in _DIMENSIONS if hasattr(sizes, name)})


# --- the folder of the run ---


def _is_stock_checkpoint(folder: str) -> bool:
    """Return True for a folder of torchtitan's own manager (DCP)."""
    return _has(folder, ".metadata")


def _has(folder: str, name: str) -> bool:
    return bool(with_time_limits(resolve(folder)).version(name))
