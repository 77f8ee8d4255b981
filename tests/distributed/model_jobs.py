"""The jobs that ranks run in test_models.py: wrappers, tied weights, dtypes and optimizers, in real layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import bytecheckpoint
from tests.distributed.layouts import Parallel, Trainer, adamw, build, mesh
from tests.distributed.matrix_jobs import differences, source_values, target_values
from tests.support.tiny_model import Gpt, fill_by_coordinates, initialise

tied_source_values = partial(initialise, seed=1, tied=True)
tied_coordinates = partial(fill_by_coordinates, tied=True)
tied_target_values = partial(initialise, seed=2, tied=True)


def wrong_names(path: str) -> list[str]:
    """Return the names that only the checkpoint or only the bare model has."""
    bare = {f"model/{name}" for name in Gpt().state_dict()}
    with bytecheckpoint.open(path) as checkpoint:
        return sorted(bare ^ {key for key in checkpoint if key.startswith("model/")})


def checkpointed_blocks(model: nn.Module) -> nn.Module:
    """Wrap each block in activation checkpointing, as torchtitan does."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleDict)
    for name, block in list(blocks.items()):
        blocks[name] = checkpoint_wrapper(block)
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    """Wrap each block in activation checkpointing and torch.compile; eager, so that no compiler runs."""
    blocks = checkpointed_blocks(model).blocks
    assert isinstance(blocks, nn.ModuleDict)
    for name, block in list(blocks.items()):
        blocks[name] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return model


def wrapped_names(layout: str, path: str) -> list[str]:
    """Save a wrapped model, load it into a bare one, and back."""
    wrapped = build(layout, source_values, wrap=compiled_blocks)
    # State without a training step, which would trace the compiled blocks.
    wrapped.fill_optimizer()
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.model.named_modules())
    assert any("_orig_mod" in name for name, _ in wrapped.model.named_parameters())
    bytecheckpoint.save(path, {"model": wrapped.model, "optimizer": wrapped.optimizer})
    wrong = wrong_names(path)
    bare = build(layout, target_values)
    bytecheckpoint.load(path, {"model": bare.model, "optimizer": bare.optimizer})
    unwrapped = {_without_wrappers(key): value for key, value in wrapped.snapshot().items()}
    wrong += differences(unwrapped, bare.snapshot())
    again = build(layout, target_values, wrap=compiled_blocks)
    bytecheckpoint.load(path, {"model": again.model, "optimizer": again.optimizer})
    return wrong + differences(wrapped.snapshot(), again.snapshot())


def _without_wrappers(key: str) -> str:
    return key.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def gathered_after_evaluation(path: str) -> list[str]:
    """Save and load while the root's parameters are gathered, as FSDP2 leaves them after a forward without backward."""
    expected = build("fsdp3", source_values)
    trainer = build("fsdp3", source_values)
    trainer.model.eval()
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    with torch.no_grad():
        trainer.model(tokens)
    assert not isinstance(trainer.unwrapped.norm.weight, DTensor), "still gathered"
    bytecheckpoint.save(path, {"model": trainer.model, "optimizer": trainer.optimizer})
    fresh = build("fsdp3", target_values)
    with torch.no_grad():
        fresh.model(tokens)
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    wrong = differences(expected.snapshot(), fresh.snapshot())
    assert fresh.train(2) == expected.train(2)
    return wrong


def partial_is_refused(path: str) -> str:
    """Return the error about a parameter with unreduced values."""
    tensor = DTensor.from_local(torch.ones(4), mesh(dp=2), [Partial()], run_check=False)
    with pytest.raises(bytecheckpoint.UsageError) as caught:
        bytecheckpoint.save(path, {"model": {"inner": {"w": tensor}}})
    return str(caught.value)


def save_tied(layout: str, folder: str) -> list[float]:
    """Save a tied model's state of coordinates and its trained state; return the next losses."""
    filled = build(layout, tied_coordinates, tied=True)
    filled.fill_optimizer()
    bytecheckpoint.save(f"{folder}/coordinates/{layout}", filled.states())
    trainer = build(layout, tied_source_values, tied=True)
    trainer.train(2)
    bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states())
    return trainer.train(3)


def load_tied(layout: str, sources: list[str], folder: str) -> dict[str, tuple[list[str], list[float]]]:
    """Load what every source saved; return the problems by coordinates and the next losses, by source."""
    filled = build(layout, tied_coordinates, tied=True)
    filled.fill_optimizer()
    found = {}
    for source in sources:
        fresh = build(layout, tied_target_values, tied=True)
        bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
        wrong = differences(filled.snapshot(), fresh.snapshot())
        resumed = build(layout, tied_target_values, tied=True)
        bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
        if hasattr(resumed.unwrapped, "embed") and hasattr(resumed.unwrapped, "head"):
            assert resumed.unwrapped.embed.weight is resumed.unwrapped.head.weight, "still tied"
        found[source] = (wrong, resumed.train(3))
    return found


def open_tied(sources: list[str], folder: str) -> list[str]:
    """Open what every source saved: both names of the tied pair show the parameter and its state; return problems."""
    model = Gpt(tied=True).double()
    tied_coordinates(model)
    whole = model.embed.weight.detach()
    wrong = []
    for source in sources:
        with bytecheckpoint.open(f"{folder}/coordinates/{source}") as checkpoint:
            for name in ("embed.weight", "head.weight"):
                pairs = [(f"model/{name}", whole), (f"optimizer/state/{name}/exp_avg", whole * 2 + 1)]
                wrong += [f"{source}: {key}" for key, value in pairs if not torch.equal(checkpoint[key][...], value)]
    return wrong


def low_precision(source: str, path: str) -> int:
    """Save bf16 parameters with fp32 optimizer state; return the size of the local parameters in bytes."""
    filled = build(source, source_values, dtype=torch.bfloat16)
    filled.fill_optimizer(torch.float32)
    bytecheckpoint.save(path, {"model": filled.model, "optimizer": filled.optimizer})
    return sum(p.numel() * p.element_size() for p in filled.parameters().values())


def load_low_precision(layout: str, path: str) -> list[str]:
    """Load bf16 parameters with fp32 optimizer state, which must never have been bf16; return problems."""
    expected = build(layout, source_values, dtype=torch.bfloat16)
    expected.fill_optimizer(torch.float32)
    fresh = build(layout, target_values, dtype=torch.bfloat16)
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    state = [v for s in fresh.optimizer.state.values() for n, v in s.items() if n != "step"]
    assert state
    assert {v.dtype for v in state} == {torch.float32}
    return differences(expected.snapshot(), fresh.snapshot())


def virtual_stages(values: Callable[[nn.Module], None]) -> list[Trainer]:
    """Start the stages of one rank: rank 0 has both ends, rank 1 the middle; each stage has its own optimizer."""
    stages = [Gpt(stage, 4).double() for stage in ((0, 3) if dist.get_rank() == 0 else (1,))]
    for stage in stages:
        values(stage)
    return [Trainer.start(Parallel(stage), adamw) for stage in stages]


def as_lists(trainers: list[Trainer]) -> dict[str, Any]:
    return {"model": [t.model for t in trainers], "optimizer": [t.optimizer for t in trainers]}


def save_virtual_stages(path: str) -> list[str]:
    """Save lists of modules and of optimizers, load them again, and return problems."""
    trainers = virtual_stages(fill_by_coordinates)
    for trainer in trainers:
        trainer.fill_optimizer()
    bytecheckpoint.save(path, as_lists(trainers))
    return load_virtual_stages(path)


def load_virtual_stages(path: str) -> list[str]:
    expected, fresh = virtual_stages(fill_by_coordinates), virtual_stages(target_values)
    bytecheckpoint.load(path, as_lists(fresh))
    wrong = []
    for source, target in zip(expected, fresh, strict=True):
        source.fill_optimizer()
        wrong += differences(source.snapshot(), target.snapshot())
    return wrong


def save_coordinates(layout: str, path: str) -> None:
    filled = build(layout, fill_by_coordinates)
    filled.fill_optimizer()
    bytecheckpoint.save(path, {"model": filled.model, "optimizer": filled.optimizer})


def load_coordinates(layout: str, path: str) -> list[str]:
    expected, fresh = build(layout, fill_by_coordinates), build(layout, target_values)
    expected.fill_optimizer()
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    return differences(expected.snapshot(), fresh.snapshot())


# --- optimizers ---------------------------------------------------------------------------------------------------

Named = Mapping[str, torch.Tensor]


def _trained(parameters: Named) -> list[torch.Tensor]:
    return [p for p in parameters.values() if p.requires_grad]


def sgd(parameters: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(parameters), lr=0.05, momentum=0.9, nesterov=True, foreach=False)


def adafactor(parameters: Named) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(_trained(parameters), lr=0.05, foreach=False)


def lbfgs(parameters: Named) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(_trained(parameters), lr=0.5, max_iter=2, history_size=3)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW, stepped as one optimizer and saved as a list."""

    def __init__(self, parameters: Named) -> None:
        learning = {n: p for n, p in parameters.items() if p.requires_grad}
        matrices = [p for n, p in learning.items() if p.ndim == 2 and n.startswith("blocks.")]
        chosen = {id(p) for p in matrices}
        rest = [p for p in learning.values() if id(p) not in chosen]
        self.both: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW(rest, lr=3e-3, foreach=False),
        ]
        super().__init__(list(learning.values()), {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.both:
            optimizer.step()


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adafactor": adafactor,
    "lbfgs": lbfgs,
    "muon-adamw": MuonAndAdamW,
}


class SmallModel(nn.Module):
    """A model whose steps can run inside a closure of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def small_run(kind: str, layout: str, seed: int) -> tuple[nn.Module, Any, Callable[[int], list[float]]]:
    """Build a small model under the named optimizer; return (model, optimizer to save, train)."""
    model = SmallModel().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    if layout.startswith("fsdp"):
        fully_shard(model, mesh=mesh(dp=dist.get_world_size()))
    optimizer = OPTIMIZERS[kind](dict(model.named_parameters()))
    saved = optimizer.both if isinstance(optimizer, MuonAndAdamW) else optimizer

    def train(steps: int) -> list[float]:
        losses = []
        for i in range(steps):
            x = torch.linspace(-1, 1 + i, 24, dtype=torch.float64).reshape(4, 6)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                model.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            losses.append(float(optimizer.step(closure) if kind == "lbfgs" else closure()))
            if kind != "lbfgs":
                optimizer.step()
        return losses

    return model, saved, train


def save_optimizer(kind: str, layout: str, path: str) -> list[float]:
    """Train three steps, save, and return the losses of three more."""
    model, optimizer, train = small_run(kind, layout, 1)
    train(3)
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    return train(3)


def load_optimizer(kind: str, layout: str, path: str) -> list[float]:
    """Load into a new optimizer; return the losses of three steps."""
    model, optimizer, train = small_run(kind, layout, 2)
    bytecheckpoint.load(path, {"model": model, "optimizer": optimizer})
    return train(3)
