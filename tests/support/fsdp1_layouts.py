"""Training runs under FSDP1, and the full state of any run, gathered by collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.tiny_model import Attention, Block, Experts, Gpt, MixtureOfExperts, Mlp
from tests.support.torch_layouts import WORLD_SIZE as NATIVE
from tests.support.torch_layouts import Parallel, Trainer, mesh, tensor_parallel
from tests.support.torch_layouts import build as build_native
from tests.support.worlds import on_ranks

Named = Mapping[str, torch.Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Fsdp1:
    """One way to wrap the model.

    Attributes:
        size: number of ranks.
        strategy: sharding strategy.
        use_orig_params: argument of FullyShardedDataParallel.
        units: classes that become units of their own, inside the root unit.
        tp: tensor parallelism under FSDP1.
        mixed_precision: compute in bfloat16 (float32 shards).
    """

    size: int
    strategy: str
    use_orig_params: bool
    units: tuple[type[nn.Module], ...] = ()
    tp: bool = False
    mixed_precision: bool = False


FSDP1 = {
    "full4-orig": Fsdp1(4, "FULL_SHARD", True, (Block,)),
    "full3-flat": Fsdp1(3, "FULL_SHARD", False, (Block,)),
    "full2-deep": Fsdp1(2, "FULL_SHARD", True, (Block, Attention, Mlp, Experts)),
    "full1-flat": Fsdp1(1, "FULL_SHARD", False, (Block,)),
    "grad2-flat": Fsdp1(2, "SHARD_GRAD_OP", False),
    "grad3-orig": Fsdp1(3, "SHARD_GRAD_OP", True, (Attention,)),
    "hybrid4-orig": Fsdp1(4, "HYBRID_SHARD", True, (Block,)),
    "hybrid4-flat": Fsdp1(4, "_HYBRID_SHARD_ZERO2", False, (Block, Attention)),
    "none2-orig": Fsdp1(2, "NO_SHARD", True, (Block,)),
    "none2-flat": Fsdp1(2, "NO_SHARD", False, (Block,)),
    "tp2-full2-orig": Fsdp1(4, "FULL_SHARD", True, (Block,), tp=True),
    "tp2-grad2-flat": Fsdp1(4, "SHARD_GRAD_OP", False, (Block,), tp=True),
    # Each unit has parameters of one group only, where groups are made by module (tests/frameworks/interchange).
    "full3-units": Fsdp1(3, "FULL_SHARD", False, (Attention, Mlp, MixtureOfExperts)),
    "hybrid4-units": Fsdp1(4, "HYBRID_SHARD", False, (Attention, Mlp, MixtureOfExperts)),
    "low2-orig": Fsdp1(2, "FULL_SHARD", True, (Block,), mixed_precision=True),
    "low3-flat": Fsdp1(3, "SHARD_GRAD_OP", False, (Block,), mixed_precision=True),
}
WORLD_SIZE: Mapping[str, int] = {**NATIVE, **{name: layout.size for name, layout in FSDP1.items()}}
#: Makes a test run on the ranks of its parameter `layout`.
in_layout = on_ranks(lambda layout, **_: WORLD_SIZE[layout])


def bare_name(name: str) -> str:
    """Remove the prefixes of wrappers from a name."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(wrapper, "")
    return name


def parallel(model: nn.Module, layout: Fsdp1) -> Parallel:
    """Wrap the model in FSDP1; a flat parameter cannot join frozen and trained parameters, so the frozen one is ignored."""
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[layout.strategy],
        "use_orig_params": layout.use_orig_params,
        "device_id": CPU,
        "auto_wrap_policy": ModuleWrapPolicy(layout.units) if layout.units else None,
    }
    data_parallel = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    if not layout.use_orig_params and isinstance(getattr(model, "temperature", None), nn.Parameter):
        options["ignored_states"] = [model.temperature]
    if "HYBRID" in layout.strategy:
        options["device_mesh"] = mesh(replicate=2, shard=2)
    if layout.tp:
        both = mesh(dp=dist.get_world_size() // 2, tp=2)
        tensor_parallel(model, both["tp"])
        options["device_mesh"] = both["dp"]
        data_parallel = both.get_local_rank("dp"), both.size(0), both.get_group("dp")
    if layout.mixed_precision:
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        )
    if dist.get_world_size() == 1:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    return Parallel(FullyShardedDataParallel(model, **options), *data_parallel)


def _trained(parameters: Named) -> list[torch.Tensor]:
    return [p for p in parameters.values() if p.requires_grad]


def adamw(parameters: Named) -> torch.optim.Optimizer:
    """Make an AdamW with one group, which any flat parameter can join."""
    return torch.optim.AdamW(_trained(parameters), lr=3e-3, weight_decay=0.1, foreach=False)


def adagrad(parameters: Named) -> torch.optim.Optimizer:
    """Make an Adagrad, which has state from the start, also for parameters without elements on this rank."""
    return torch.optim.Adagrad(_trained(parameters), lr=0.02)


class FlatTrainer(Trainer):
    """A training run under FSDP1."""

    @property
    def unwrapped(self) -> nn.Module:
        return self.model.module  # type: ignore[no-any-return]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {bare_name(name): p for name, p in self.model.named_parameters()}


def build(
    name: str,
    values: Callable[[nn.Module], None],
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    optimizer: Callable[[Named], torch.optim.Optimizer] = adamw,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Trainer:
    """Start a training run in any layout, FSDP1's or native; arguments as for `layouts.build`."""
    if name not in FSDP1:
        return build_native(name, values, tied=tied, dtype=dtype, optimizer=optimizer, wrap=wrap)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model: nn.Module = Gpt(tied=tied).to(dtype)
    values(model)
    if wrap is not None:
        model = wrap(model)
    return FlatTrainer(parallel(model, FSDP1[name]), optimizer, tied=tied)


def full_state(trainer: Trainer) -> dict[str, Any]:
    """Gather the full state of the run on every rank, by the keys of `bytecheckpoint.open`.

    (FSDP1's own optim_state_dict is no reference: on CPU it returns exp_avg_sq for exp_avg too.)
    """
    found: dict[str, Any] = {}
    model = trainer.model
    root = model.module if isinstance(model, DistributedDataParallel) else model
    flattened = set()
    for prefix, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            flattened |= _add_flat(found, f"{prefix}." if prefix else "", unit._handle, trainer.optimizer)
    for name, tensor in (*root.named_parameters(remove_duplicate=False), *root.named_buffers()):
        if id(tensor) not in flattened:
            found[f"model/{bare_name(name)}"] = _full(tensor)
            for slot, value in trainer.optimizer.state.get(tensor, {}).items():
                found[f"optimizer/state/{bare_name(name)}/{slot}"] = _full(value)
    return found


def _add_flat(found: dict[str, Any], prefix: str, handle: Any, optimizer: torch.optim.Optimizer) -> set[int]:
    """Gather the original parameters of one flat parameter and their state; return ids of the live parameters."""
    flat = handle.flat_param
    names = [f"{bare_name(prefix)}{bare_name(name)}" for name in flat._fqns]
    shard = flat.detach()
    assert shard.shape == flat._sharded_size
    found |= {f"model/{n}": t for n, t in zip(names, _gathered(handle, shard), strict=True)}
    members = [flat] if flat._params is None else list(flat._params)
    slots = sorted({slot for p in members for slot in optimizer.state.get(p, {})} - {"step"})
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size(handle.process_group))]
    dist.all_gather_object(everywhere, slots, group=handle.process_group)
    steps, stepped = torch.zeros(len(names)), torch.zeros(len(names))
    for i, p in enumerate(members * len(names) if flat._params is None else members):
        if i < len(names) and p.numel() and (state := optimizer.state.get(p)):
            steps[i], stepped[i] = state.get("step", 0.0), 1.0
    dist.all_reduce(steps, dist.ReduceOp.MAX, group=handle.process_group)
    dist.all_reduce(stepped, dist.ReduceOp.MAX, group=handle.process_group)
    found |= {f"optimizer/state/{n}/step": steps[i].clone() for i, n in enumerate(names) if steps[i]}
    for slot in sorted({slot for of_rank in everywhere for slot in of_rank}):
        local = torch.zeros_like(shard)
        for p in members:
            value = optimizer.state.get(p, {}).get(slot)
            if value is not None and p.numel():
                first = (p.data_ptr() - flat.data_ptr()) // p.element_size()
                local[first : first + p.numel()] = value.flatten()
        values = zip(names, stepped, _gathered(handle, local), strict=True)
        found |= {f"optimizer/state/{n}/{slot}": t for n, has, t in values if has}
    for name, _, module_name, *_ in flat._shared_param_infos:
        alias = bare_name(f"{prefix}{module_name}.{name}" if module_name else f"{prefix}{name}")
        found[f"model/{alias}"] = None
    return {id(flat), *map(id, members)}


def _gathered(handle: Any, local: torch.Tensor) -> list[torch.Tensor]:
    flat = handle.flat_param
    everything = local
    if handle.uses_sharded_strategy:
        everything = local.new_empty(local.numel() * handle.world_size)
        dist.all_gather_into_tensor(everything, local.contiguous(), group=handle.process_group)
    out = []
    at = 0
    layouts = iter(zip(flat._shapes, flat._strides, flat._param_extensions, strict=True))
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            shape, stride, spec = next(layouts)
            part = everything[at : at + numel].as_strided(shape, stride)
            out.append(part.clone() if spec is None else DTensor(part.clone(), spec, requires_grad=False).full_tensor())
        at += numel
    return out


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
