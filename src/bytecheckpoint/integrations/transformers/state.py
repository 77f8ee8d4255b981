"""The state of a trainer, as one of the states of a save: what Trainer writes to trainer_state.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.integrations.attaching import differences

__all__ = ["TrainerState", "logged_metrics"]


def logged_metrics(state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, those of its evaluation among them."""
    found: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        found = {name: value for name, value in entry.items() if isinstance(value, int | float)} | found
    found.pop("step", None)
    return found


class TrainerState:
    """What Trainer writes to trainer_state.json, and which data the run feeds; implements `SupportsStreams`.

    Args:
        trainer: whose state it is.
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
        """Return what the order of the data depends on; see `SupportsStreams`."""
        return {"data": self._data}

    def stream_states(self) -> dict[int, Any]:
        """Return rank 0's state, which counts for all; see `SupportsStreams`."""
        from transformers.trainer_callback import ExportableState

        trainer = self._trainer
        if not trainer.is_world_process_zero():
            return {}
        parts = [
            part for part in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(part, ExportableState)
        ]
        state = dataclasses.replace(trainer.state, stateful_callbacks=parts)
        return {0: {"trainer_state.json": json.dumps(dataclasses.asdict(state))}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Refuse a checkpoint of other data; see `SupportsStreams`."""
        differing = differences(shared["data"], self._data)
        if differing and not self._trainer.args.ignore_data_skip:
            raise IncompatibleCheckpointError(
                f"the run would go on with other data than it began with ({differing}). Samples per step are "
                "per_device_train_batch_size x gradient_accumulation_steps x ranks: keep their product. With "
                "ignore_data_skip=True the run goes on with the first samples of the epoch"
            )
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Keep the state until Trainer asks for it; see `SupportsStreams`."""
        self.loaded = states[0]["trainer_state.json"]
