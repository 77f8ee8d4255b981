"""The layouts of the matrix: one model, built whole and then distributed as a user of torch would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.tiny_model import Gpt, MixtureOfExperts, batch, code, loss_of
from tests.support.worlds import on_ranks

__all__ = ["LAYOUTS", "WORLD_SIZE", "Trainer", "build", "in_layout"]

Values = Callable[[nn.Module], None]
MakeOptimizer = Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Parallel:
    """A model in its layout.

    Attributes:
        model: the model that the user saves.
        dp_rank: number of the part of the batch that this rank computes.
        dp_size: number of parts of the batch.
        dp_group: ranks over which losses are averaged; None: only this rank.
        pipeline: runs forward and backward of one batch through all stages, and returns the last stage's loss.
        pp_group: the ranks of the pipeline; None: there is none.
    """

    model: nn.Module
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: Any = None
    pipeline: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None
    pp_group: Any = None


_MESHES: dict[Any, DeviceMesh] = {}


def mesh(**extents: int) -> DeviceMesh:
    """Return a mesh over the world, made once: many tests share a world, and each mesh makes groups."""
    key = tuple(extents.items())
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh("cpu", tuple(extents.values()), mesh_dim_names=tuple(extents))
    return _MESHES[key]


def shard_blocks(model: nn.Module, over: DeviceMesh) -> None:
    """Apply fully_shard to each block, then to the rest."""
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)


def one_process(model: nn.Module) -> Parallel:
    return Parallel(model)


def ddp(model: nn.Module) -> Parallel:
    return Parallel(DistributedDataParallel(model), dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def fsdp2(model: nn.Module) -> Parallel:
    shard_blocks(model, mesh(dp=dist.get_world_size()))
    return Parallel(model, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def hsdp(model: nn.Module) -> Parallel:
    shard_blocks(model, mesh(replicate=2, shard=2))
    return Parallel(model, dist.get_rank(), 4, dist.group.WORLD)


def tensor_parallel(model: nn.Module, tp: DeviceMesh) -> None:
    """Parallelise attention, MLP, embedding and head; norms, router, experts and buffers stay plain on every rank."""
    tied = model.head.weight is model.embed.weight
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        plan: dict[str, Any] = {f"attention.{n}": ColwiseParallel() for n in "qkv"} | {"attention.o": RowwiseParallel()}
        if not isinstance(block.mlp, MixtureOfExperts):
            plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, tp, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, ends)
    if tied:
        model.head.weight = model.embed.weight


def tp(model: nn.Module) -> Parallel:
    tensor_parallel(model, mesh(tp=dist.get_world_size()))
    return Parallel(model)


def tp_fsdp(model: nn.Module) -> Parallel:
    both = mesh(dp=dist.get_world_size() // 2, tp=2)
    tensor_parallel(model, both["tp"])
    shard_blocks(model, both["dp"])
    return Parallel(model, both.get_local_rank("dp"), both.size(0), both.get_group("dp"))


def pp(model: nn.Module) -> Parallel:
    return _pipeline(model, mesh(pp=2), None)


def pp_fsdp(model: nn.Module) -> Parallel:
    both = mesh(pp=2, dp=2)
    shard_blocks(model, both["dp"])
    return _pipeline(model, both["pp"], both["dp"])


def _pipeline(model: nn.Module, over: DeviceMesh, dp: DeviceMesh | None) -> Parallel:
    group = over.get_group("pp")
    index = over.get_local_rank("pp")

    def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        # A stage caches the shapes of its first batch; a new stage for each step costs little here.
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # takes seconds; ranks have it already

        stage = PipelineStage(model, index, 2, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
        if index == 0:
            schedule.step(inputs)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().detach()

    if dp is None:
        return Parallel(model, pipeline=run, pp_group=group)
    return Parallel(model, dp.get_local_rank(), dp.size(), dp.get_group(), run, group)


def _gathered(rows: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


def _own_of_sum(rows: torch.Tensor, group: Any) -> torch.Tensor:
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class _Gather(torch.autograd.Function):
    """Joins the rows of all ranks. The functional collectives of torch 2.13 crash over gloo on a busy machine."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _own_of_sum(gradients[0], ctx.group), None


class _SumAndSplit(torch.autograd.Function):
    """Adds up the rows of all ranks and keeps this rank's part: the inverse of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own_of_sum(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _gathered(gradients[0], ctx.group), None


class _TokenExchange:
    """Sends all tokens of the expert group to each of its ranks, and the sum over experts back to the tokens' ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def dispatch(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        x, gates = (_Gather.apply(tensor, self.group) for tensor in tensors)
        local = gates.shape[-1] // dist.get_world_size(self.group)
        return [x, gates.narrow(-1, local * dist.get_rank(self.group), local)]

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        return _SumAndSplit.apply(out, self.group)  # type: ignore[no-any-return]


def ep_fsdp(model: nn.Module) -> Parallel:
    """Shard experts over ep and, along another dimension, by FSDP; shard everything else by FSDP over all four ranks."""
    both = mesh(edp=2, ep=2)
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        if not isinstance(block.mlp, MixtureOfExperts):
            continue
        experts = block.mlp.experts
        for name, weight in list(experts.named_parameters()):
            placed = distribute_tensor(weight.detach(), both["ep"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(placed))
        block.mlp.exchange = _TokenExchange(both.get_group("ep"))
        # There are two experts per rank, so FSDP shards another dimension.
        fully_shard(experts, mesh=both["edp"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(4.0)
    shard_blocks(model, mesh(dp=4))
    return Parallel(model, dist.get_rank(), 4, dist.group.WORLD)


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], Parallel]]] = {
    "one": (1, one_process),
    "ddp2": (2, ddp),
    "fsdp2": (2, fsdp2),
    "fsdp3": (3, fsdp2),
    "fsdp4": (4, fsdp2),
    "hsdp2x2": (4, hsdp),
    "tp2": (2, tp),
    "tp2-fsdp2": (4, tp_fsdp),
    "tp2-fsdp3": (6, tp_fsdp),
    "pp2": (2, pp),
    "pp2-fsdp2": (4, pp_fsdp),
    "ep2-fsdp2": (4, ep_fsdp),
}
WORLD_SIZE: Mapping[str, int] = {name: size for name, (size, _) in LAYOUTS.items()}


#: Makes a test run on the ranks of its parameter `layout`.
in_layout = on_ranks(lambda layout, **_: WORLD_SIZE[layout])


def stage_of(name: str) -> tuple[int, int]:
    """Return (stage, number of stages) of this rank."""
    size = WORLD_SIZE[name]
    return (dist.get_rank() * 2 // size, 2) if name.startswith("pp") else (0, 1)


class Trainer:
    """A training run in one layout: model, optimizer, schedule, number of steps.

    Args:
        parallel: the model.
        optimizer: makes the optimizer from FQN -> parameter.
        tied: True if embedding and head are one parameter.
    """

    def __init__(self, parallel: Parallel, optimizer: MakeOptimizer, *, tied: bool = False) -> None:
        self.parallel, self.tied = parallel, tied
        self.extra: dict[str, Any] = {"step": 0}
        self.optimizer = optimizer(self.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)

    @property
    def model(self) -> nn.Module:
        return self.parallel.model

    @property
    def unwrapped(self) -> nn.Module:
        """The model without the DDP wrapper."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def states(self) -> dict[str, Any]:
        """Return the states of a checkpoint."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "extra_states": self.extra,
        }

    def step(self) -> float:
        """Run one training step; return the loss of the whole batch."""
        parallel = self.parallel
        inputs, targets = self.local_batch()
        self.optimizer.zero_grad()
        if parallel.pipeline is not None:
            loss = parallel.pipeline(inputs, targets)
            self._add_up_tied_gradients()
        else:
            loss = loss_of(self.model(inputs), targets)
            loss.backward()
            loss = loss.detach()
        self.optimizer.step()
        self.schedule.step()
        for block in self.unwrapped.blocks.values():  # type: ignore[operator, union-attr]
            block.steps_seen += 1
        self.extra["step"] += 1
        return self._mean(loss)

    def local_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's inputs and targets of the next step."""
        parallel = self.parallel
        inputs, targets = (t.chunk(parallel.dp_size)[parallel.dp_rank] for t in batch(self.extra["step"]))
        return inputs, targets

    def _mean(self, loss: torch.Tensor | None) -> float:
        parallel = self.parallel
        value = torch.zeros((), dtype=torch.float64) if loss is None else loss.double().clone()
        for group in (parallel.dp_group, parallel.pp_group):
            if group is not None:
                dist.all_reduce(value, group=group)
        return float(value) / parallel.dp_size

    def _add_up_tied_gradients(self) -> None:
        """Add the gradients of the tied weight's copies at both ends of a pipeline."""
        if not self.tied:
            return
        weight = (self.unwrapped.embed if hasattr(self.unwrapped, "embed") else self.unwrapped.head).weight
        grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        dist.all_reduce(grad, group=self.parallel.pp_group)

    def train(self, steps: int) -> list[float]:
        """Run that many steps; return their losses."""
        return [self.step() for _ in range(steps)]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return FQN -> parameter, by the bare model's names."""
        return dict(self.unwrapped.named_parameters())

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the param group of each parameter, by name."""
        names = {id(p): n for n, p in self.parameters().items()}
        return {
            names[id(p)]: {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
            for p in group["params"]
        }

    @torch.no_grad()
    def fill_optimizer(self, dtype: torch.dtype | None = None, step: float | None = None) -> None:
        """Give all optimizer state values that are computed from the parameters, and each group a rate of its own.

        Args:
            dtype: dtype of the state; None: that of the parameter.
            step: step of all parameters; None: each has its own.
        """
        names = {id(p): "embed.weight" if self.tied and n == "head.weight" else n for n, p in self.parameters().items()}
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 0.5 + number
            for p in group["params"]:
                if not p.numel():
                    continue  # FSDP1 gives it no gradient on this rank, and AdamW no state
                like = p.detach().to(dtype or p.dtype)
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(code(names[id(p)])) if step is None else step),
                    "exp_avg": like * 2 + 1,
                    "exp_avg_sq": like * 4 + 3,
                }

    def snapshot(self) -> dict[str, Any]:
        """Copy all that this rank holds, as plain tensors and values."""
        found: dict[str, Any] = {f"settings/{name}": settings for name, settings in self.settings().items()}
        for name, tensor in (*self.unwrapped.named_parameters(), *self.unwrapped.named_buffers()):
            found[f"model/{name}"] = _local(tensor)
        for name, p in self.parameters().items():
            for slot, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{name}/{slot}"] = _local(value) if isinstance(value, torch.Tensor) else value
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def adamw(parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Make an AdamW: matrices with weight decay, the rest without and at another rate; foreach cannot mix meshes."""
    learning = {n: p for n, p in parameters.items() if p.requires_grad}
    vectors = {n for n in learning if n.endswith("bias") or "norm" in n}  # by name: FSDP1's shards are all flat
    groups = [
        {"params": [p for n, p in learning.items() if n not in vectors], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [p for n, p in learning.items() if n in vectors], "weight_decay": 0.0, "lr": 1e-2},
    ]
    return torch.optim.AdamW(groups, foreach=False)


def build(
    name: str,
    values: Values,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    optimizer: MakeOptimizer = adamw,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Trainer:
    """Start a training run.

    Args:
        name: name of the layout.
        values: sets the whole model's parameters before they are distributed.
        tied: True if embedding and head are one parameter.
        dtype: dtype of the parameters.
        optimizer: makes the optimizer from FQN -> parameter.
        wrap: wraps the bare model first (compile, activation checkpointing).
    """
    model: nn.Module = Gpt(*stage_of(name), tied=tied).to(dtype)
    values(model)
    if wrap is not None:
        model = wrap(model)
    parallel = LAYOUTS[name][1](model)
    return Trainer(parallel, optimizer, tied=tied)
