"""What an engine counts: steps, samples, the loss scale, the learning rate's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bytecheckpoint.errors import UsageError

__all__ = ["Progress", "engine_kind"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# What a dynamic loss scale is made of; its other attributes are configuration.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_kind(kind: str) -> str:
    """Name of the state that holds the progress of the engine in `kind`."""
    return "engine" if kind == "model" else f"{kind}_engine"


class Progress:
    """The progress of one engine as a state of its own, saved and loaded as other objects with a state_dict are.

    Args:
        engine: the engine; None when the states hold its optimizer only.
        wrapper: its optimizer, if DeepSpeed's.
        scheduler: its schedule, unless the states hold that by itself.
    """

    def __init__(self, engine: Any, wrapper: Any, scheduler: Any) -> None:
        self.engine = engine
        self.wrapper = wrapper
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {}
        if self.engine is not None:
            found.update((name, int(getattr(self.engine, name))) for name in _COUNTERS)
        for name, scaler in self._scalers():
            found[name] = {key: vars(scaler)[key] for key in _SCALE if key in vars(scaler)}
        found.update((name, part.state_dict()) for name, part in self._parts())
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved, as far as this engine has it."""
        if self.engine is not None:
            for name in _COUNTERS:
                if name in state:
                    setattr(self.engine, name, state[name])
        for name, scaler in self._scalers():
            for key, value in state.get(name, {}).items():
                if key in vars(scaler):
                    setattr(scaler, key, value)
        for name, part in self._parts():
            if state.get(name):
                part.load_state_dict(state[name])

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """What keeps a state_dict of its own beside the optimizer: (name, object)."""
        engine = self.engine
        # Without ZeRO the engine itself has torch's scaler, with it the optimizer.
        for owner, name in ((self.wrapper, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler")):
            if (autocast := getattr(owner, name, None)) is not None:
                yield "grad_scaler", autocast
        if self.scheduler is not None:
            yield "lr_scheduler", self.scheduler
        if engine is not None and engine.random_ltd_enabled():
            yield "random_ltd", engine.random_ltd_scheduler
        if engine is not None and engine.training_dataloader is not None and engine.curriculum_learning_enabled():
            yield "data_sampler", engine.training_dataloader.data_sampler

    def _scalers(self) -> Iterator[tuple[str, Any]]:
        """The dynamic loss scale, if there is one; a static one is configuration."""
        for attribute, flag in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
            scaler = getattr(self.wrapper, attribute, None)
            if getattr(scaler, flag, False):
                yield "loss_scale", scaler

    def check_between_steps(self, kind: str, *, saves: bool) -> None:
        """See that no gradients are being accumulated: a save would lack them, a load would leave them as they are.

        Raises:
            UsageError: some micro-batches of a step are done, and others are not.
        """
        done = "" if self.engine is None else _accumulated(self.engine)
        if done:
            lost = "a checkpoint does not hold: save" if saves else "would be applied to what is loaded: load"
            raise UsageError(f"{kind}: the engine has accumulated the gradients of {done}, which {lost} between steps")


def _accumulated(engine: Any) -> str:
    """The micro-batches of a step that is not complete, in words; "" between steps."""
    if getattr(engine, "pipeline_parallelism", False):
        return ""  # train_batch does whole steps
    steps = engine.gradient_accumulation_steps()
    if not engine.managed_gradient_accumulation():
        # Whoever calls step() says that a step is complete.
        count = engine._unmanaged_backward_count
        return f"{count} micro-batches" if count else ""
    if engine._is_gradient_accumulation_boundary is not None:
        # set_gradient_accumulation_boundary: step() may come once for all micro-batches, and does not count them.
        return "" if engine._is_gradient_accumulation_boundary else f"some of {steps} micro-batches"
    count = engine.micro_steps % steps
    return f"{count} of {steps} micro-batches" if count else ""
