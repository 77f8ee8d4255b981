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
        if (autocast := getattr(self.wrapper, "torch_autocast_gradscaler", None)) is not None:
            found["grad_scaler"] = autocast.state_dict()
        if self.scheduler is not None:
            found["lr_scheduler"] = self.scheduler.state_dict()
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
        autocast = getattr(self.wrapper, "torch_autocast_gradscaler", None)
        if autocast is not None and state.get("grad_scaler"):
            autocast.load_state_dict(state["grad_scaler"])
        if self.scheduler is not None and state.get("lr_scheduler") is not None:
            self.scheduler.load_state_dict(state["lr_scheduler"])

    def _scalers(self) -> Iterator[tuple[str, Any]]:
        """The dynamic loss scale, if there is one; a static one is configuration."""
        for attribute, flag in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
            scaler = getattr(self.wrapper, attribute, None)
            if getattr(scaler, flag, False):
                yield "loss_scale", scaler

    def check_between_steps(self, kind: str) -> None:
        """See that no gradients are being accumulated, which a load would leave as they are.

        Raises:
            UsageError: some micro-batches of a step are done, and others are not.
        """
        engine = self.engine
        if engine is None or getattr(engine, "pipeline_parallelism", False):
            return
        done = engine.micro_steps % engine.gradient_accumulation_steps()
        if done:
            raise UsageError(
                f"{kind}: the engine has accumulated the gradients of {done} of {engine.gradient_accumulation_steps()} "
                "micro-batches, which would be applied to what is loaded: load between steps"
            )
