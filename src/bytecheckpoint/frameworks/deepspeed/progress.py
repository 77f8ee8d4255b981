"""The progress of an engine: counts of steps and samples, the loss scale, the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bytecheckpoint.errors import UsageError

__all__ = ["EngineProgress", "engine_state_name"]

_GENERATOR = "generator_state"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# The state of a dynamic loss scale; its other attributes are configuration.
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_state_name(state_name: str) -> str:
    """Return the name of the state that holds the progress of the engine in state `state_name`."""
    return "engine" if state_name == "model" else f"{state_name}_engine"


class EngineProgress:
    """The progress of one engine: an object with a state_dict, saved and loaded as any other.

    Args:
        engine: the engine; None if the states hold only its optimizer.
        wrapper: its optimizer, if that is DeepSpeed's.
        scheduler: its learning-rate schedule, unless the states hold it by itself.
    """

    def __init__(self, engine: Any, wrapper: Any, scheduler: Any) -> None:
        self.engine = engine
        self.wrapper = wrapper
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        found: dict[str, Any] = {}
        if self.engine is not None:
            found.update((name, int(getattr(self.engine, name))) for name in _COUNTERS)
        for name, scaler in self._loss_scalers():
            found[name] = {key: vars(scaler)[key] for key in _LOSS_SCALE if key in vars(scaler)}
        found.update((name, component.state_dict()) for name, component in self._components())
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Install the saved progress; parts that this engine lacks are ignored."""
        if self.engine is not None:
            for name in _COUNTERS:
                if name in state:
                    setattr(self.engine, name, state[name])
        for name, scaler in self._loss_scalers():
            for key, value in state.get(name, {}).items():
                if key in vars(scaler):
                    setattr(scaler, key, value)
        for name, component in self._components():
            if state.get(name):
                component.load_state_dict(state[name])

    def _components(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, object) for the engine's objects with a state_dict of their own, the optimizer excepted."""
        engine = self.engine
        # With ZeRO the optimizer has torch's gradient scaler, without ZeRO the engine.
        for owner, name in ((self.wrapper, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler")):
            if (scaler := getattr(owner, name, None)) is not None:
                yield "grad_scaler", scaler
        if self.scheduler is not None:
            yield "lr_scheduler", self.scheduler
        if engine is not None and engine.random_ltd_enabled():
            yield "random_ltd", engine.random_ltd_scheduler
        if engine is not None and engine.training_dataloader is not None and engine.curriculum_learning_enabled():
            yield "data_sampler", _DataSampler(engine.training_dataloader.data_sampler)

    def _loss_scalers(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, dynamic loss scale), if there is one; a static one is configuration."""
        for attribute, flag in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
            scaler = getattr(self.wrapper, attribute, None)
            if getattr(scaler, flag, False):
                yield "loss_scale", scaler

    def check_between_steps(self, state_name: str, *, saves: bool) -> None:
        """Check that no gradients are being accumulated: a save would lose them, a load would leave old ones.

        Raises:
            UsageError: only some micro-batches of a step are done.
        """
        accumulated = "" if self.engine is None else _accumulated_micro_batches(self.engine)
        if accumulated:
            lost = "a checkpoint does not hold: save" if saves else "would be applied to what is loaded: load"
            raise UsageError(
                f"{state_name}: the engine has accumulated the gradients of {accumulated}, which {lost} between steps"
            )


class _DataSampler:
    """The sampler of a curriculum, with what its own state_dict lacks: the generator that it draws from.

    Its load_state_dict adds the loaded clusters of samples to those that it has.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, and that of its generator."""
        return {**self._sampler.state_dict(), _GENERATOR: self._sampler.np_rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        if self._sampler.global_rank == 0:
            self._sampler.data_clusters.clear()
            self._sampler.data_cluster_sizes.clear()
        self._sampler.load_state_dict({key: value for key, value in state.items() if key != _GENERATOR})
        if _GENERATOR in state:
            self._sampler.np_rng.bit_generator.state = state[_GENERATOR]


def _accumulated_micro_batches(engine: Any) -> str:
    """Return for example "1 of 2 micro-batches" within a step; "" between steps."""
    if getattr(engine, "pipeline_parallelism", False):
        return ""  # train_batch does whole steps
    steps = engine.gradient_accumulation_steps()
    if not engine.managed_gradient_accumulation():
        # The program calls step() when a step is complete.
        count = engine._unmanaged_backward_count
        return f"{count} micro-batches" if count else ""
    if engine._is_gradient_accumulation_boundary is not None:
        # After set_gradient_accumulation_boundary, step() may come once for all micro-batches and does not count them.
        return "" if engine._is_gradient_accumulation_boundary else f"some of {steps} micro-batches"
    count = engine.micro_steps % steps
    return f"{count} of {steps} micro-batches" if count else ""
