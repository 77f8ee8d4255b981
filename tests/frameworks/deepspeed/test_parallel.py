"""Pipelines and mixtures of experts: any number of stages, any number of ranks that share the experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from tests.support.deepspeed_engines import Zero, configuration, prepare, settings
from tests.support.real_frameworks import check_every_pair, mean_over_ranks
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

_VOCABULARY, _WIDTH, _ROWS = 13, 6, 8


# --- pipelines ------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """The embedding, which both ends of the pipeline have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_VOCABULARY, _WIDTH) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


def head(module: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.T


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.up(x)))


def pipeline(stages: int, stage: int, low: bool, seed: int) -> Any:
    """Return an engine with so many pipeline stages, the ranks of a stage in data parallelism."""
    prepare()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    size = dist.get_world_size()
    torch.manual_seed(seed)
    layers = [
        TiedLayerSpec("embed", Embedding),
        *(LayerSpec(Layer) for _ in range(4)),
        TiedLayerSpec("embed", Embedding, forward_fn=head),
    ]
    module = PipelineModule(
        layers, num_stages=stages, loss_fn=_loss, seed_layers=True, base_seed=seed, partition_method="uniform"
    )
    zero = Zero(size, stage, "bf16" if low else "")
    replicas = size // stages
    config = configuration(zero, train_micro_batch_size_per_gpu=_ROWS // replicas // 2, gradient_accumulation_steps=2)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "lr": 2e-2, "weight_decay": 0.0},
        ],
        foreach=False,
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _tokens(step: int, rank: int, replicas: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(_VOCABULARY, (_ROWS, 5), generator=generator).chunk(replicas)[rank]


def _batches(step: int, rank: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in _tokens(step, rank, replicas).chunk(2):
        yield part[:, :-1], part[:, 1:]


class PipelineRun:
    """A training run of a pipeline."""

    def __init__(self, stages: int, stage: int, low: bool, seed: int) -> None:
        self.engine, self.step = pipeline(stages, stage, low, seed), 0

    def states(self) -> dict[str, Any]:
        return {"model": self.engine}

    def train(self, steps: int) -> list[float]:
        rank, replicas = self.engine.grid.get_data_parallel_rank(), self.engine.dp_world_size
        self.step += steps
        numbers = range(self.step - steps, self.step)
        return [float(self.engine.train_batch(_batches(number, rank, replicas))) for number in numbers]


# --- mixtures of experts --------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """An embedding, two layers of four experts each, and a head."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(
            MoE(
                _WIDTH,
                nn.Sequential(nn.Linear(_WIDTH, 7), nn.Tanh(), nn.Linear(7, _WIDTH)),
                num_experts=4,
                ep_size=ep_size,
                k=1,
                drop_tokens=False,
                use_rts=False,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def mixture(ep_size: int, stage: int, low: bool, seed: int) -> Any:
    """Return an engine in which so many ranks share the experts."""
    prepare()
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    torch.manual_seed(seed)
    model = Mixture(ep_size)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # The ranks hold different experts.
            part = dist.get_rank() % ep_size if "deepspeed_experts" in name else 0
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + 7 * part + seed)) * 0.3)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 1e-2, "weight_decay": 0.1}
    )
    optimizer = torch.optim.AdamW(groups, foreach=False)
    size = dist.get_world_size()
    config = configuration(Zero(size, stage, "bf16" if low else ""), train_micro_batch_size_per_gpu=_ROWS // size)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


class MixtureRun:
    """A training run of a mixture of experts."""

    def __init__(self, ep_size: int, stage: int, low: bool, seed: int) -> None:
        self.engine, self.step = mixture(ep_size, stage, low, seed), 0

    def states(self) -> dict[str, Any]:
        last = settings(self.engine)[-1]
        assert not {"moe", "name"} <= last.keys() or last["name"].startswith("ep_size"), settings(self.engine)
        return {"model": self.engine}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens = _tokens(self.step, dist.get_rank(), dist.get_world_size())
            loss = _loss(self.engine(tokens[:, :-1]), tokens[:, 1:])
            self.engine.backward(loss)
            self.engine.step()
            losses.append(mean_over_ranks(loss))
            self.step += 1
        return losses


# --- tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "low"), [(1, True), (1, False), (0, False)])
def test_pipelines(worlds: Worlds, zero: int, low: bool, tmp_path: Path) -> None:
    # (ranks, stages). The last stage has its own copy of the tied embedding, and partitions it in its own way.
    pipelines = [(4, 2), (2, 2), (2, 1), (3, 3)]
    chosen = [(ranks, partial(PipelineRun, stages, zero, low)) for ranks, stages in pipelines]
    # Measured: 9e-4, 9e-8.
    check_every_pair(worlds, tmp_path, chosen if zero else chosen[1:3], 3e-3 if low else 5e-7, more_than=10)


@pytest.mark.parametrize(("zero", "low"), [(1, False), (2, True), (2, False), (0, False)])
def test_mixtures_of_experts(worlds: Worlds, zero: int, low: bool, tmp_path: Path) -> None:
    mixtures = [(2, 2), (2, 1), (4, 2), (1, 1)]  # (ranks, size of the expert-parallel groups)
    chosen = [(ranks, partial(MixtureRun, ep_size, zero, low)) for ranks, ep_size in mixtures]
    # Measured: 1.7e-4, 1.2e-7.
    for path in check_every_pair(worlds, tmp_path, chosen, 6e-4 if low else 5e-7, more_than=10):
        with bytecheckpoint.open(path) as checkpoint:
            names = [key for key in checkpoint if key.startswith("model/") and "deepspeed_experts" in key]
        assert len(names) == 32
        assert {name.split("deepspeed_experts.")[1].partition(".")[0] for name in names} == {"0", "1", "2", "3"}
