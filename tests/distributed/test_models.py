"""Wrappers, gathered modules, tied weights, low precision and optimizers in real layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import bytecheckpoint
from tests.distributed.models import compiled_blocks, load_coordinates, save_coordinates, wrong_names
from tests.support.comparisons import assert_same
from tests.support.tiny_model import Gpt, fill_by_coordinates, source_values, target_values
from tests.support.torch_layouts import WORLD_SIZE, Parallel, Trainer, adamw, build, in_layout, mesh
from tests.support.worlds import Worlds, on_ranks


def states(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model, "optimizer": trainer.optimizer}


@pytest.mark.parametrize("layout", ["ddp2", "fsdp3"])
@in_layout
def test_wrapped_modules_save_under_the_names_of_the_bare_ones(layout: str, path: str) -> None:
    """A wrapped model loads into a bare one, and into a wrapped one."""
    wrapped = build(layout, source_values, wrap=compiled_blocks)
    # State without a training step, which would trace the compiled blocks.
    wrapped.fill_optimizer()
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.model.named_modules())
    assert any("_orig_mod" in name for name, _ in wrapped.model.named_parameters())
    bytecheckpoint.save(path, states(wrapped))
    assert wrong_names(path) == []
    bare, again = build(layout, target_values), build(layout, target_values, wrap=compiled_blocks)
    bytecheckpoint.load(path, states(bare))
    expected = wrapped.snapshot()
    assert_same(
        {k.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): v for k, v in expected.items()},
        bare.snapshot(),
    )
    bytecheckpoint.load(path, states(again))
    assert_same(expected, again.snapshot())


@on_ranks(3)
def test_a_module_that_is_still_gathered_after_an_evaluation(path: str) -> None:
    """After a forward pass without a backward one FSDP2 leaves the root's parameters gathered."""
    expected, trainer = build("fsdp3", source_values), build("fsdp3", source_values)
    fresh = build("fsdp3", target_values)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(tokens)
    assert not isinstance(trainer.unwrapped.norm.weight, DTensor), "still gathered"
    bytecheckpoint.save(path, states(trainer))
    with torch.no_grad():
        fresh.model(tokens)
    bytecheckpoint.load(path, states(fresh))
    assert_same(expected.snapshot(), fresh.snapshot())
    assert fresh.train(2) == expected.train(2)


@on_ranks(2)
def test_unreduced_values_are_refused_by_name(path: str) -> None:
    tensor = DTensor.from_local(torch.ones(4), mesh(dp=2), [Partial()], run_check=False)
    with pytest.raises(bytecheckpoint.UsageError) as caught:
        bytecheckpoint.save(path, {"model": {"inner": {"w": tensor}}})
    assert "model/inner.w" in str(caught.value)
    assert "partial" in str(caught.value)
    dist.barrier()
    assert not list(Path(path).rglob("*.safetensors"))


# --- uneven shards ----------------------------------------------------------------------------------------------------


def test_uneven_strided_shards(worlds: Worlds, path: str) -> None:
    """TP 2 × FSDP 3 cuts 7 rows of a tensor-parallel piece into 3, 3 and 1."""
    worlds.run(4, save_coordinates, "fsdp4", path)
    worlds.run(6, load_coordinates, "tp2-fsdp3", path, f"{path}-6")
    worlds.run(3, load_coordinates, "fsdp3", f"{path}-6", f"{path}-3")


# --- virtual stages -----------------------------------------------------------------------------------------------


def virtual_stages(values: Callable[[nn.Module], None]) -> tuple[list[Trainer], dict[str, Any]]:
    """Start the stages of one rank, each with its own optimizer; return them, and the states: lists of both.

    Rank 0 has both ends, rank 1 the middle.
    """
    stages = [Gpt(stage, 4).double() for stage in ((0, 3) if dist.get_rank() == 0 else (1,))]
    for stage in stages:
        values(stage)
    trainers = [Trainer(Parallel(stage), adamw) for stage in stages]
    return trainers, {"model": [t.model for t in trainers], "optimizer": [t.optimizer for t in trainers]}


def save_virtual_stages(path: str) -> None:
    trainers, lists = virtual_stages(fill_by_coordinates)
    for trainer in trainers:
        trainer.fill_optimizer()
    bytecheckpoint.save(path, lists)


def load_virtual_stages(path: str) -> None:
    (expected, _), (fresh, lists) = virtual_stages(fill_by_coordinates), virtual_stages(target_values)
    bytecheckpoint.load(path, lists)
    for source, target in zip(expected, fresh, strict=True):
        source.fill_optimizer()
        assert_same(source.snapshot(), target.snapshot())


def test_lists_of_virtual_stages(worlds: Worlds, path: str) -> None:
    worlds.run(2, save_virtual_stages, path)
    worlds.run(2, load_virtual_stages, path)
    for layout in ("one", "fsdp3"):
        worlds.run(WORLD_SIZE[layout], load_coordinates, layout, path, path + layout)
        worlds.run(2, load_virtual_stages, path + layout)


#: Of losses about 1 in float64: the order of summation differs between layouts.
TOLERANCE = 1e-9

# --- optimizers ---------------------------------------------------------------------------------------------------

Named = Mapping[str, torch.Tensor]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW, stepped as one optimizer and saved as a list."""

    def __init__(self, parameters: Named) -> None:
        matrices = [p for p in parameters.values() if p.ndim == 2]
        rest = [p for p in parameters.values() if p.ndim != 2]
        self.both: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW(rest, lr=3e-3, foreach=False),
        ]
        super().__init__([*matrices, *rest], {"lr": 1.0})

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.both:
            optimizer.step()


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named.values(), lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adafactor": lambda named: torch.optim.Adafactor(named.values(), lr=0.05, foreach=False),
    "lbfgs": lambda named: torch.optim.LBFGS(named.values(), lr=0.5, max_iter=2, history_size=3),
    "muon-adamw": MuonAndAdamW,
}


def small_run(kind: str, layout: str, seed: int) -> tuple[dict[str, Any], Callable[[int], list[float]]]:
    """Build a small model, whose steps can run inside a closure of the optimizer; return (states, train)."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    if layout.startswith("fsdp"):
        fully_shard(model, mesh=mesh(dp=dist.get_world_size()))
    optimizer = OPTIMIZERS[kind](dict(model.named_parameters()))

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

    return {"model": model, "optimizer": getattr(optimizer, "both", optimizer)}, train


def save_optimizer(kind: str, layout: str, path: str) -> list[float]:
    """Train three steps, save, and return the losses of three more."""
    run, train = small_run(kind, layout, seed=1)
    train(3)
    bytecheckpoint.save(path, run)
    return train(3)


def load_optimizer(kind: str, layout: str, path: str) -> list[float]:
    """Load into a new optimizer; return the losses of three steps."""
    run, train = small_run(kind, layout, seed=2)
    bytecheckpoint.load(path, run)
    return train(3)


# (optimizer, layout that saves, layouts that continue, tolerance of the losses after the first step).
# torch's Adafactor and LBFGS cannot work on uneven shards; its Muon computes in bfloat16.
@pytest.mark.parametrize(
    ("kind", "source", "others", "tolerance"),
    [
        ("sgd", "fsdp3", ["fsdp2", "one"], TOLERANCE),
        ("adafactor", "ddp2", ["one"], TOLERANCE),
        ("lbfgs", "ddp2", ["one"], TOLERANCE),
        ("muon-adamw", "fsdp3", ["fsdp2", "one"], 0.02),
    ],
)
def test_optimizers_continue(
    worlds: Worlds, kind: str, source: str, others: list[str], tolerance: float, path: str
) -> None:
    expected = worlds.run(WORLD_SIZE[source], save_optimizer, kind, source, path)
    again = worlds.run(WORLD_SIZE[source], load_optimizer, kind, source, path)
    assert again == expected, "the same layout continues bit for bit"
    for layout in others:
        for losses in worlds.run(WORLD_SIZE[layout], load_optimizer, kind, layout, path):
            assert losses[0] == pytest.approx(expected[0][0], abs=TOLERANCE, rel=0), layout
            assert losses == pytest.approx(expected[0], abs=tolerance, rel=0), layout


@on_ranks(2)
def test_an_optimizer_inside_a_dict_can_step(path: str) -> None:
    """Its state goes through torch's load_state_dict, which distributes nothing."""

    def trained(seed: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = fully_shard(nn.Linear(3, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer, steps)
        return {"model": model, "optimizer": optimizer, "step": steps}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    source, target = trained(0, 2), trained(1, 0)
    bytecheckpoint.save(path, {"train": source})
    bytecheckpoint.load(path, {"train": target})
    assert target["step"] == 2
    for run in (source, target):
        step(run["model"], run["optimizer"], 2)
    for one, other in zip(source["model"].parameters(), target["model"].parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
