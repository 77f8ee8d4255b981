"""Wrappers of the tiny model's blocks; values, saves and loads of a model with a tied pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bytecheckpoint
from tests.support.tiny_model import Gpt, fill_by_coordinates, initialise
from tests.support.torch_layouts import Trainer

tied_source_values = partial(initialise, seed=1, tied=True)
tied_target_values = partial(initialise, seed=2, tied=True)
tied_coordinates = partial(fill_by_coordinates, tied=True)


def save_tied(layout: str, folder: str, build: Callable[..., Trainer]) -> list[float]:
    """Train a tied model and save it under the layout's name; return the next losses."""
    trainer = build(layout, tied_source_values, tied=True)
    trainer.train(2)
    bytecheckpoint.save(f"{folder}/{layout}", trainer.states())
    return trainer.train(3)


def load_tied(
    layout: str, folder: str, sources: Sequence[str], build: Callable[..., Trainer]
) -> dict[str, list[float]]:
    """Load what each layout saved; return the next losses by source."""
    resumed = build(layout, tied_target_values, tied=True)
    found = {}
    for source in sources:
        bytecheckpoint.load(f"{folder}/{source}", resumed.states())
        found[source] = resumed.train(3)
    return found


def wrong_names(path: str) -> list[str]:
    """Return the names that only the checkpoint or only the bare model has."""
    bare = {f"model/{name}" for name in Gpt().state_dict()}
    with bytecheckpoint.open(path) as checkpoint:
        return sorted(bare ^ {key for key in checkpoint if key.startswith("model/")})


def checkpointed_blocks(model: nn.Module) -> nn.Module:
    """Wrap each block in activation checkpointing, as torchtitan does."""
    for name, block in list(model.blocks.items()):  # type: ignore[operator, union-attr]
        model.blocks[name] = checkpoint_wrapper(block)
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    """Wrap each block in activation checkpointing and torch.compile; eager, so that no compiler runs."""
    for name, block in list(checkpointed_blocks(model).blocks.items()):
        model.blocks[name] = torch.compile(block, backend="eager")
    return model
