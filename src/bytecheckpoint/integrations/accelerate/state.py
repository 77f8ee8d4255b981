"""The state of an accelerator, as one of the states of a save: its counters, and the positions of its data loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.integrations.accelerate.positions import LoaderPosition
from bytecheckpoint.integrations.accelerate.prepared import process_generators

__all__ = ["AcceleratorState"]


class AcceleratorState:
    """The counters of an accelerator and the positions of its loaders; implements `SupportsStreams`, a stream for a rank.

    Args:
        accelerator: whose state it is.
        positions: of its loaders.
        naming: what stands before the number in the names that the program gives to checkpoints.

    Attributes:
        naming: that of the checkpoint, after a load.
    """

    takes_all_streams = False

    def __init__(self, accelerator: Any, positions: Sequence[LoaderPosition], naming: str) -> None:
        self._accelerator, self._positions, self.naming = accelerator, positions, naming
        self._loaded: tuple[Any, Mapping[str, Any], list[int]] | None = None

    @property
    def stream_count(self) -> int:
        """Number of ranks."""
        return int(self._accelerator.num_processes)

    def shared_state(self) -> dict[str, Any]:
        """Return the counters and positions, which all ranks have alike; see `SupportsStreams`."""
        accelerator = self._accelerator
        accumulation = accelerator.gradient_accumulation_steps
        return {
            "ranks": self.stream_count,
            "objects": self._objects(),
            "naming": self.naming,
            "accumulation": accumulation,
            "optimizer_steps": accelerator.step // accumulation,
            "schedule_steps": self._schedule_steps(),
            "loaders": [position.describe() for position in self._positions],
        }

    def _objects(self) -> dict[str, int]:
        """Return how many objects of each kind a checkpoint is of."""
        accelerator = self._accelerator
        return {
            "models": len(accelerator._models),
            "optimizers": len(accelerator._optimizers),
            "schedulers": len(accelerator._schedulers),
            "data loaders": len(self._positions),
            "registered objects": len(accelerator._custom_objects),
            "gradient scalers": int(accelerator.scaler is not None),
        }

    def _schedule_steps(self) -> list[int]:
        """Return by how many steps each schedule advances in an optimizer step."""
        return [
            1 if schedule.split_batches or not schedule.step_with_optimizer else self.stream_count
            for schedule in self._accelerator._schedulers
        ]

    def stream_states(self) -> dict[int, Any]:
        """Return the states of this rank's loaders; see `SupportsStreams`."""
        return {int(self._accelerator.process_index): {"loaders": [position.state() for position in self._positions]}}

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        """Choose this rank's states, or those of rank 0 at another number of ranks; see `SupportsStreams`."""
        loaders, steps, objects = shared["loaders"], self._schedule_steps(), self._objects()
        if differing := [
            f"{shared['objects'][kind]} {kind}, now {objects[kind]}"
            for kind in objects
            if shared["objects"][kind] != objects[kind]
        ]:
            raise IncompatibleCheckpointError(
                f"the checkpoint is of {'; '.join(differing)}: prepare and register the same before load_state, or load a "
                "part with bytecheckpoint.load"
            )
        if steps != shared["schedule_steps"]:
            raise IncompatibleCheckpointError(
                f"a schedule advanced by {max(shared['schedule_steps'])} in an optimizer step, and would by {max(steps)} "
                "now, since accelerate steps it once for each rank: the learning rates would be others. A run whose number "
                "of ranks may change needs split_batches=True or step_scheduler_with_optimizer=False from its beginning"
            )
        same = shared["ranks"] == self.stream_count
        batches = [p.batches_from(found, same) for p, found in zip(self._positions, loaders, strict=True)]
        self._loaded = shared, {}, batches
        return [int(self._accelerator.process_index) if same else saved[0]]

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> list[str]:
        """Keep the state for `install`; see `SupportsStreams`."""
        assert self._loaded is not None
        (state,) = states.values()
        self._loaded = shared, state, self._loaded[2]
        accumulation = self._accelerator.gradient_accumulation_steps
        return [
            f"an optimizer step took {before} samples of data loader {number}, and takes {now} now"
            for number, (position, found) in enumerate(zip(self._positions, shared["loaders"], strict=True))
            if (before := (found["samples"] or 0) * shared["accumulation"])
            != (now := (position.describe()["samples"] or 0) * accumulation)
        ]

    def install(self) -> list[str]:
        """Let the accelerator and its loaders go on; return remarks for the user. Called after the whole load."""
        assert self._loaded is not None
        shared, state, batches = self._loaded
        self.naming = shared["naming"]
        self._accelerator.step = shared["optimizer_steps"] * self._accelerator.gradient_accumulation_steps
        notes, generators = [], {name: source.get() for name, source in process_generators().items()}
        found = zip(self._positions, shared["loaders"], batches, state["loaders"], strict=True)
        for number, (position, saved, done, own) in enumerate(found):
            if position.running:
                notes.append(f"data loader {number} is being iterated over: that iteration goes on where it is")
            else:
                position.go_to(saved, done, own, generators)
        return notes
