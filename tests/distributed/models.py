"""States of coordinates in the layouts of torch, and wrappers of the tiny model's blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bytecheckpoint
from tests.support.comparisons import assert_same
from tests.support.tiny_model import Gpt, fill_by_coordinates, target_values
from tests.support.torch_layouts import Trainer, build


def coordinates(layout: str) -> Trainer:
    """Start a run in a state of coordinates, with a step of its own for each parameter."""
    trainer = build(layout, fill_by_coordinates)
    trainer.fill_optimizer()
    return trainer


def save_coordinates(layout: str, path: str) -> None:
    bytecheckpoint.save(path, coordinates(layout).states())


def load_coordinates(layout: str, source: str, path: str) -> None:
    """Load a state of coordinates, check every element of this rank, and save it again."""
    expected, fresh = coordinates(layout), build(layout, target_values)
    bytecheckpoint.load(source, {"model": fresh.model, "optimizer": fresh.optimizer})
    assert_same(expected.snapshot(), fresh.snapshot())
    bytecheckpoint.save(path, fresh.states())


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
