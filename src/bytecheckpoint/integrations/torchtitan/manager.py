"""`BytecheckpointManager`: a checkpoint manager of torchtitan, which a `CheckpointManager` serves."""

from __future__ import annotations

import glob
import logging
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
from torchtitan.components.checkpointer import BaseCheckpointManager, ModelWrapper
from torchtitan.components.checkpointer import CheckpointManager as StockManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from bytecheckpoint.errors import UsageError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.integrations.torchtitan.folder import SEED, find_steps, is_stock_checkpoint
from bytecheckpoint.integrations.torchtitan.states import begin_iteration, generators_of, loader_state, optimizers_of
from bytecheckpoint.manager import CheckpointManager, Latest, Preemption
from bytecheckpoint.saving import save

__all__ = ["BytecheckpointManager"]

_log = logging.getLogger("bytecheckpoint")


class BytecheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and restores a training of torchtitan; `Config.build` makes it, as torchtitan's Trainer asks for it.

    A step holds the model, the optimizers, the schedule, the position of the data loader, the trainer's counters, and
    the random number generators.

    Args:
        config: the options.
        dataloader: of this rank, or None.
        model_parts: the stages of this rank.
        optimizers: of these.
        lr_schedulers: of these.
        states: further states by name; "train_state" is the trainer.
        sd_adapter: converts names for Hugging Face.
        base_folder: `dump_folder` of the job.

    Attributes:
        manager: decides when to save and what to keep.

    Raises:
        UsageError: the training is set up in a way that is not supported.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Options of torchtitan, of which those of all its checkpoint managers have their meaning there."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Wait for the commit; for the copy of the state; or let it be copied behind the next forward and backward."""

        overlap: Literal["wait", "skip", "fail"] = "wait"
        """What to do when a save is due while the one before is being written."""

        on_error: Literal["raise", "warn"] = "raise"
        """Whether the failure of a save ends the training."""

        grace: float = 0.0
        """Seconds before the files of old steps are deleted, for jobs that read them."""

        preemption_grace: float = 0.0
        """Seconds between SIGTERM and the end of the job; all ranks save in them, and training ends. 0: not handled."""

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
        self._generators = generators_of(states.get("train_state"))
        own = {
            "model": model_parts, "optimizer": optimizers_of(optimizers), "lr_scheduler": lr_schedulers,
            "dataloader": loader_state(dataloader), "rng": self._generators,
        }  # fmt: skip
        if clash := own.keys() & states.keys():
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
        background = {"staging": "background"} if config.async_mode == "async_with_pinned_mem" else {}
        return CheckpointManager(
            folder, self._states, every=lambda _: self._due,
            keep=Latest(config.keep_latest_k) if config.keep_latest_k else None,
            preemption=Preemption(grace=config.preemption_grace) if config.preemption_grace else None,
            overlap=config.overlap, on_error=config.on_error, grace=config.grace,
            async_checkpoint=config.async_mode != "disabled",
            save_options=background,
            load_options={"exclude": [glob.escape(name) for name in config.exclude_from_loading]},
        )  # fmt: skip

    # --- save -----------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        if config.load_only:
            return False
        if last_step and curr_step == 0:  # torchtitan has made a model only to save it
            save(f"{self.manager.root}/{SEED}", {"model": self._states["model"]})
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
        """Save the model for others, beside the steps: it is none, since a training cannot go on from it."""
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
        """Whether the training ends early because the job is to stop."""
        return self.enable and self.manager.preempted

    # --- load -----------------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        path = self._load_states(step)
        if path is None:
            return False
        begin_iteration(self._loader)
        self._generators.restore()
        for name in self._config.exclude_from_loading if torch.distributed.get_rank() == 0 else ():
            _log.warning("%s: %s is not loaded (exclude_from_loading)", path, name)
        return True

    def _load_states(self, step: int) -> str | None:
        """Load what torchtitan would load: a step, else the seed, else what `initial_load_path` names; return its path."""
        manager = self.manager
        own, stock, seed = manager.ask_rank_0(lambda: find_steps(manager, step))
        if stock > own:
            self._stock(manager.root, load_only=True, **self._stock_exclusions()).load(stock)
            return f"{manager.root}/step-{stock}"
        if step > 0:
            manager.restore(step)
        elif step < 0:
            manager.restore_latest()
        if manager.restored is not None and manager.restored.report is not None:
            return manager.restored.report.path
        if step == 0 or seed:
            return manager.restore_from(f"{manager.root}/{SEED}", only=["model"], exclude=[]).path
        return self._load_initial()

    def _load_initial(self) -> str | None:
        config, path = self._config, self._config.initial_load_path
        if path is None and not config.initial_load_in_hf:
            return None
        if config.initial_load_in_hf or self.manager.ask_rank_0(lambda: is_stock_checkpoint(str(path))):
            self._load_with_stock()
        elif config.initial_load_model_only:  # perhaps saved with another export_dtype
            self.manager.restore_from(path, only=["model"], exclude=[], cast=True)
        else:
            self.manager.restore_from(path)
        return path or ""

    def _load_with_stock(self) -> None:
        """Load what torchtitan or Hugging Face have saved, by torchtitan's own code."""
        names = "initial_load_path", "initial_load_model_only", "initial_load_in_hf", "initial_load_in_hf_quantized"
        options = {name: getattr(self._config, name) for name in names}
        # It looks for steps in its folder first, and there shall be none.
        self._stock("/nonexistent", load_only=True, **options, **self._stock_exclusions()).load()

    def _stock_exclusions(self) -> dict[str, list[str]]:
        return {"exclude_from_loading": [name for name in self._config.exclude_from_loading if name != "rng"]}

    def _stock(self, folder: str, **options: Any) -> Any:
        config = StockManager.Config(enable=True, folder=folder, keep_latest_k=0, **options)
        return StockManager(config, states=dict(self._stock_states), **self._stock_arguments)


def _end_when_preempted(trainer: Any, manager: CheckpointManager) -> None:
    """Have a trainer leave its loop when the job is to stop. torchtitan asks only itself."""
    go_on = trainer.should_continue_training
    trainer.should_continue_training = lambda: go_on() and not manager.preempted
