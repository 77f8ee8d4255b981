"""The counters of an accelerator, as one of the states of a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.integrations.attaching import differences

__all__ = ["AcceleratorState"]


class AcceleratorState:
    """The counters of an accelerator, and how many objects it has prepared; implements `SupportsStreams`.

    Args:
        accelerator: whose state it is.
    """

    stream_count = 1

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def shared_state(self) -> dict[str, Any]:
        """Return the counters, which all ranks have alike; see `SupportsStreams`."""
        accelerator = self._accelerator
        return {
            "optimizer_steps": accelerator.step // accelerator.gradient_accumulation_steps,
            "objects": {
                "models": len(accelerator._models),
                "optimizers": len(accelerator._optimizers),
                "schedulers": len(accelerator._schedulers),
                "data loaders": len(accelerator._dataloaders),
                "registered objects": len(accelerator._custom_objects),
                "gradient scalers": int(accelerator.scaler is not None),
            },
            # By how many steps each schedule advances in an optimizer step.
            "schedule_steps": [
                1 if schedule.split_batches or not schedule.step_with_optimizer else accelerator.num_processes
                for schedule in accelerator._schedulers
            ],
        }

    def stream_states(self) -> dict[int, Any]:
        """Return nothing but a place for the shared state; see `SupportsStreams`."""
        return {0: {}} if self._accelerator.is_main_process else {}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Refuse a checkpoint of other objects; see `SupportsStreams`."""
        own = self.shared_state()
        if differing := differences(shared["objects"], own["objects"]):
            raise IncompatibleCheckpointError(
                f"the checkpoint is of {differing}: prepare and register the same before load_state, or load a part with "
                "bytecheckpoint.load"
            )
        if (steps := own["schedule_steps"]) != shared["schedule_steps"]:
            raise IncompatibleCheckpointError(
                f"a schedule advanced by {max(shared['schedule_steps'])} in an optimizer step, and would by {max(steps)} "
                "now, since accelerate steps it once for each rank: the learning rates would be others. A run whose number "
                "of ranks may change needs split_batches=True or step_scheduler_with_optimizer=False from its beginning"
            )
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Go on from these counters; see `SupportsStreams`."""
        self._accelerator.step = shared["optimizer_steps"] * self._accelerator.gradient_accumulation_steps
