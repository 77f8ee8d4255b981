"""A model with frozen parameters, trained and saved step by step, and what its checkpoints hold and share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.representation.names import generation_of, is_uri
from bytecheckpoint.tools import verify
from tests.support.catalogs import catalog_at

__all__ = ["Adapted", "Training", "check_alone", "frozen_file", "load_into", "save_steps"]


class Adapted(nn.Module):
    """A frozen base of about 1 MB, with a trained adapter and a buffer that each step changes."""

    def __init__(self, width: int = 500) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)).requires_grad_(False)
        self.adapter = nn.Linear(width, 3)
        self.register_buffer("steps", torch.zeros(1))


class Training:
    """A model in training.

    Args:
        seed: seed of the parameters.
        width: width of the model.
    """

    def __init__(self, seed: int = 0, width: int = 500) -> None:
        self.model = Adapted(width)
        source = torch.Generator().manual_seed(seed)  # of its own, since ranks are threads
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, generator=source)
        self.optimizer = torch.optim.AdamW(self.model.adapter.parameters())

    def step(self) -> None:
        self.model.steps += 1
        for parameter in self.model.adapter.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        self.optimizer.step()

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self, path: Path | str, **options: Any) -> Any:
        """Train one step and save it; return the report."""
        self.step()
        return bytecheckpoint.save(path, self.states(), incremental=True, **options).result(60)


def save_steps(
    run: Path | str, *steps: int, world: ThreadWorld | None = None, **options: Any
) -> tuple[Training, list[Any]]:
    """Save steps of a new training; return it with the reports. A world of its own knows no earlier files."""

    def train(_: Any) -> tuple[Training, list[Any]]:
        training = Training()
        return training, [training.save(f"{run}/step_{step}", **options) for step in steps]

    return (world or ThreadWorld(1)).run(train, timeout=120)[0]


def frozen_file(step: Path) -> Path:
    """Return the file of the frozen parameters of a checkpoint saved by one rank."""
    (found,) = (step / "model").glob("rank-00000-p001.*")
    return found


def load_into(path: Path | str, width: int = 500) -> Training:
    """Load a checkpoint into a new training, whose parameters were others."""
    training = Training(seed=1, width=width)
    ThreadWorld(1).run(lambda _: bytecheckpoint.load(path, training.states(), prepare_save=False))
    return training


def check_alone(path: Path, step: int, width: int = 500) -> None:
    """Fail unless a checkpoint verifies, holds this step, and has no storage files but those of its catalog."""
    assert verify(path).ok
    found, wanted = load_into(path, width).model, Training(width=width).model
    assert found.steps.item() == step
    for name, tensor in wanted.base.state_dict().items():
        assert torch.equal(found.base.state_dict()[name], tensor), name
    named = {file.name for file in catalog_at(path).files if not is_uri(file.name)}
    assert {str(p.relative_to(path)) for p in path.glob("*/*") if generation_of(str(p.relative_to(path)))} == named
