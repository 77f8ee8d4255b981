"""Makes golden folders of DeepSpeed of four processes: `python make_deepspeed_parallel.py FOLDER KIND RANK PORT`.

KIND is one of KINDS. `ds_to_universal.py --no_strict --inject_missing_state` converts each folder, and `expected` of
make_deepspeed.py joins its files; that of "rigid", which is not kept, is whole.expected.pt, for "elastic" and "dealt".
KIND.loss is the loss of the next step.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KINDS = ("pipeline", "grid", "tensor1", "tensor3", "elastic", "dealt", "rigid")
VOCABULARY, PADDED, WIDTH, INNER = 13, 16, 6, 8


GRID = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "vocabulary_parameter_patterns": [r"0\.weight"],
    "tp_replicated_parameter_patterns": [r"\d\.norm\..*", r"4\..*"],
    "parameter_with_row_parallelism_patterns": [r"\d\.down"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d\.up"],
}


class Joined(torch.autograd.Function):
    """Adds outputs of tensor-parallel ranks, or the gradients of their inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, forward: bool) -> torch.Tensor:
        ctx.group, ctx.forward = group, forward
        return _sum(x, group) if forward else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient if ctx.forward else _sum(gradient, ctx.group), None, None


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return x
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Embedding(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, ranks = group, 1 if group is None else 2
        self.first = 0 if group is None else dist.get_rank(group) * PADDED // 2
        self.weight = nn.Parameter(torch.randn(PADDED // ranks, WIDTH) + self.first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = (tokens >= self.first) & (tokens < self.first + len(self.weight))
        return Joined.apply(
            self.weight[(tokens - self.first).clamp(0, len(self.weight) - 1)] * own[..., None], self.group, True
        )


def head(module: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.T


class Layer(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, ranks = group, 1 if group is None else 2
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(
            torch.randn(2 * INNER // ranks, WIDTH) * 0.3 + (0 if group is None else dist.get_rank(group))
        )
        self.down = nn.Parameter(
            torch.randn(WIDTH, INNER // ranks) * 0.3 + (0 if group is None else dist.get_rank(group))
        )
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("count", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (Joined.apply(self.norm(x), self.group, False) @ self.up.T).chunk(2, -1)
        return x + Joined.apply((torch.tanh(gate) * up) @ self.down.T, self.group, True)


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def _config(stage: int, micro: int, kind: str, **options: Any) -> dict[str, Any]:
    zero = {"stage": stage, "elastic_checkpoint": kind == "elastic", "round_robin_gradients": kind == "dealt"}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 40}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **options,
    }


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def pipeline(folder: str, kind: str) -> None:
    """Train two stages: tied embeddings at two data-parallel ranks, or two tensor-parallel ranks."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    grid = kind == "grid"
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2] if grid else None
    torch.manual_seed(1)
    if grid:
        layers = [
            LayerSpec(Embedding, group),
            *(LayerSpec(Layer, group) for _ in range(3)),
            LayerSpec(nn.Linear, WIDTH, VOCABULARY),
        ]
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    else:
        tied = TiedLayerSpec("embed", Embedding, None), TiedLayerSpec("embed", Embedding, None, forward_fn=head)
        layers = [tied[0], *(LayerSpec(Layer, None) for _ in range(3)), tied[1]]
        topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    module = PipelineModule(
        layers, topology=topology, loss_fn=_loss, seed_layers=True, base_seed=1, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(_groups(module), lr=0.01), config=_config(1, 4, kind)
    )
    losses = []
    for step in range(3):
        if step == 2:
            info = {"pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"]}
            engine.save_checkpoint(
                folder, tag=kind, client_state={"note": "hi", "universal_checkpoint_info": GRID if grid else info}
            )
        tokens = torch.randint(VOCABULARY, (8, 5), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(2)[0 if grid else engine.grid.get_data_parallel_rank()]
        losses.append(float(engine.train_batch(iter([(mine[:, :-1], mine[:, 1:])]))))
    _note(folder, kind, losses[-1])


def _note(folder: str, kind: str, loss: float) -> None:
    if dist.get_rank() == 0:
        Path(folder, f"{kind}.loss").write_text(f"{loss}\n")


class Split(nn.Module):
    """The ways in which AutoTP cuts a layer: fused of equal and unequal parts, an uneven one, rows of experts, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused, self.out = nn.Linear(WIDTH, 21), nn.Linear(7, WIDTH)
        self.grouped, self.join = nn.Linear(WIDTH, 8, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.experts, self.combine = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.frozen = nn.Parameter(torch.arange(3.0) + 1, requires_grad=False)
        self.register_buffer("count", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.fused(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(a) * b + c)
        grouped = self.grouped(x)
        heads = grouped.shape[-1] // 4
        queries, keys, values = grouped.split((2 * heads, heads, heads), -1)
        x = x + self.join(
            (torch.tanh(queries.unflatten(-1, (heads, 2))) * keys[..., None] + values[..., None]).flatten(-2)
        )
        x = x + self.combine(torch.tanh(self.experts(x)).unflatten(-1, (2, -1)).sum(-2))
        return self.head(x) * self.frozen


SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"^fused\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r"^grouped\.weight$"], "partition_type": "column", "shape": [[4, 2, 2], -1]},
        {"patterns": [r"^experts\.weight$"], "partition_type": "column", "shape": [2, -1, WIDTH], "partition_dim": 1},
        {"patterns": [r"^(out|join|combine)\.weight$"], "partition_type": "row"},
    ],
}


def flat(folder: str, kind: str) -> None:
    """Train with AutoTP on two ranks, or on four data-parallel ranks."""
    import deepspeed

    torch.manual_seed(1)
    module = Split()
    whole = kind in ("elastic", "dealt", "rigid")
    stage = 2 if whole else int(kind[-1])
    parallel = {} if whole else {"tensor_parallel": {"autotp_size": 2, "partition_config": SPLIT}}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(_groups(module), lr=0.01), config=_config(stage, 2, kind, **parallel)
    )
    for step in range(3):
        if step == 2:
            engine.save_checkpoint(folder, tag=kind, client_state={"note": "hi"})
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(4)[dist.get_rank()] if whole else rows.chunk(2)[dist.get_rank() // 2]
        loss = engine(mine.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
    dist.all_reduce(loss := loss.detach())
    _note(folder, kind, float(loss) / 4)


def main(folder: str, kind: str, rank: int, port: str) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DS_ACCELERATOR="cpu")
    import deepspeed

    logging.disable(logging.INFO)
    deepspeed.init_distributed("gloo")
    (pipeline if kind in ("pipeline", "grid") else flat)(folder, kind)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
