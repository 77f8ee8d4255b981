"""What ranks run in test_parallel.py: pipelines, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from tests.frameworks.deepspeed.engines import Zero, configuration, prepare, settings
from tests.frameworks.real_frameworks import mean_over_ranks, report_problems, unequal_checkpoints

BEFORE, AFTER = 3, 4
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
        layers, num_stages=stages, loss_fn=_pipeline_loss, seed_layers=True, base_seed=seed, partition_method="uniform"
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


def _pipeline_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _batches(step: int, rank: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(_VOCABULARY, (_ROWS, 5), generator=generator).chunk(replicas)[rank]
    for part in tokens.chunk(2):
        yield part[:, :-1], part[:, 1:]


def train_pipeline(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        data = _batches(engine.global_steps, engine.grid.get_data_parallel_rank(), engine.dp_world_size)
        losses.append(float(engine.train_batch(data)))
    return losses


def save_pipeline(stages: int, stage: int, low: bool, path: str) -> dict[str, Any]:
    engine = pipeline(stages, stage, low, seed=1)
    train_pipeline(engine, BEFORE)
    bytecheckpoint.save(path, {"model": engine}, async_checkpoint=True).result(60)
    return {"losses": train_pipeline(engine, AFTER)}


def load_pipeline(stages: int, stage: int, low: bool, path: str) -> dict[str, Any]:
    """Return the losses after a load, and the problems when this engine saves what it has loaded."""
    engine = pipeline(stages, stage, low, seed=2)
    train_pipeline(engine, 1)
    report = bytecheckpoint.load(path, {"model": engine})
    problems = report_problems(report)
    bytecheckpoint.save(f"{path}-again", {"model": engine})
    problems += unequal_checkpoints(path, f"{path}-again", more_than=10)
    return {"problems": problems, "losses": train_pipeline(engine, AFTER)}


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


def train_mixture(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        tokens = torch.randint(_VOCABULARY, (_ROWS, 5), generator=generator).chunk(dist.get_world_size())[
            dist.get_rank()
        ]
        loss = _pipeline_loss(engine(tokens[:, :-1]), tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    return losses


def save_mixture(ep_size: int, stage: int, low: bool, path: str) -> dict[str, Any]:
    engine = mixture(ep_size, stage, low, seed=1)
    train_mixture(engine, BEFORE)
    bytecheckpoint.save(path, {"model": engine})
    with bytecheckpoint.open(path) as checkpoint:
        names = [key for key in checkpoint if key.startswith("model/") and "deepspeed_experts" in key]
    return {"losses": train_mixture(engine, AFTER), "names": names}


def load_mixture(ep_size: int, stage: int, low: bool, path: str) -> dict[str, Any]:
    engine = mixture(ep_size, stage, low, seed=2)
    report = bytecheckpoint.load(path, {"model": engine})
    problems = report_problems(report)
    bytecheckpoint.save(f"{path}-again", {"model": engine})
    problems += unequal_checkpoints(path, f"{path}-again", more_than=10)
    if {"moe", "name"} <= settings(engine)[-1].keys() and not settings(engine)[-1]["name"].startswith("ep_size"):
        problems.append(f"settings {settings(engine)}")
    return {"problems": problems, "losses": train_mixture(engine, AFTER)}
