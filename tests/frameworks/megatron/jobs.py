"""Jobs of the ranks in several tests of this folder. A job raises if a load is not complete."""

from __future__ import annotations

import random

import torch

import bytecheckpoint
from tests.support.comparisons import assert_complete
from tests.support.megatron.models import Layout, initialize_parallel
from tests.support.megatron.training import Trainer
from tests.support.real_frameworks import AFTER, BEFORE


def save_start(layout: Layout, path: str) -> None:
    """Save the checkpoint that runs start from, in one process."""
    bytecheckpoint.save(path, Trainer(layout).states())


def train_and_save(layout: Layout, source: str, path: str) -> list[float]:
    """Train from `source` and save; return the losses of the steps after the save, which runs beside them."""
    trainer = Trainer(layout, seed=4, lr=0.5)
    assert_complete(bytecheckpoint.load(source, trainer.states(), framework="megatron"))
    trainer.loaded()
    trainer.train(BEFORE)
    handle = bytecheckpoint.save(path, trainer.states(), framework="megatron", async_checkpoint=True)
    losses = trainer.train(AFTER)
    handle.result(120)
    return losses


def save_coordinates(layout: Layout, path: str, *, own_steps: bool = False) -> None:
    """Save a state whose every element says which it is, in one process, where all parameters are whole.

    Args:
        layout: layout of one process.
        path: path of the checkpoint.
        own_steps: give each parameter a step of its own.
    """
    assert layout.world == 1
    trainer = Trainer(layout)
    trainer.train(1)
    trainer.fill_with_coordinates(5, step_of if own_steps else None)
    bytecheckpoint.save(path, trainer.states())


def step_of(name: str) -> float:
    """Return a parameter's own step."""
    return float(10 + sum(name.encode()) % 50)


def load_and_save(layout: Layout, sources: dict[str, str], folder: str) -> None:
    """Load several checkpoints, each over other state, and save each again, under its name in `sources`."""
    for name, source in sources.items():
        trainer = Trainer(layout, seed=3)
        trainer.train(1)
        assert_complete(bytecheckpoint.load(source, trainer.states()))
        steps = [id(state["step"]) for state in trainer.inner_states()]
        assert len(set(steps)) == len(steps), "parameters share a step"
        bytecheckpoint.save(f"{folder}/{name}", trainer.states())


def draw_random_numbers(layout: Layout, path: str, *, save: bool) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seed as Megatron does, save or load, and draw: from the default generator, and from each state of the tracker."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    initialize_parallel(layout)
    seed = 5 + 100 * parallel_state.get_pipeline_model_parallel_rank()  # as Megatron's training does
    random.seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    tracker = get_cuda_rng_tracker()

    def draw() -> dict[str, float]:
        found = {}
        for name in tracker.get_states():
            with tracker.fork(name):
                found[name] = torch.rand(()).item()
        return found

    states, notes = {"rng": bytecheckpoint.rng_state()}, ()
    draw()
    if save:
        bytecheckpoint.save(path, states)
    else:
        notes = bytecheckpoint.load(path, states).notes
    return {"torch": torch.rand(()).item(), "python": random.random(), **draw()}, notes
