"""Training runs under DeepSpeed, and the full state of an engine, gathered by DeepSpeed's own means."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.real_frameworks import BEFORE, mean_over_ranks
from tests.support.tiny_model import SEQUENCES, Gpt, batch, initialise, loss_of
from tests.support.worlds import on_ranks

Values = Callable[[nn.Module], None]

trained: Values = partial(initialise, seed=1)
other: Values = partial(initialise, seed=2)


@dataclass(frozen=True)
class Zero:
    """The configuration of an engine.

    Attributes:
        size: ranks.
        stage: stage of ZeRO.
        low: "bf16" or "fp16"; "": float32.
        init: build the model partitioned (deepspeed.zero.Init).
        zero_options: further settings of ZeRO.
        root_options: further settings beside ZeRO's.
    """

    size: int
    stage: int
    low: str = ""
    init: bool = False
    zero_options: tuple[tuple[str, Any], ...] = ()
    root_options: tuple[tuple[str, Any], ...] = ()


_SUB_GROUPS = (("sub_group_size", 300), ("stage3_param_persistence_threshold", 0))
_PERSIST = (("stage3_param_persistence_threshold", 60),)
_ROUND_ROBIN = (("round_robin_gradients", True),)
_FP32_GRADS = (("data_types", {"grad_accum_dtype": "fp32"}),)

ENGINES = {
    "z0x2": Zero(2, 0),
    "z1x3": Zero(3, 1),
    "z2x2": Zero(2, 2),
    "z2x4": Zero(4, 2, zero_options=_ROUND_ROBIN),
    "z3x2": Zero(2, 3, zero_options=_PERSIST),
    "z3x3": Zero(3, 3, zero_options=_SUB_GROUPS),
    "z3x1": Zero(1, 3, zero_options=_PERSIST),
    "b0x2": Zero(2, 0, "bf16"),
    "b1x2": Zero(2, 1, "bf16"),
    "b1x3-own": Zero(3, 1, "bf16", root_options=_FP32_GRADS),  # BF16_Optimizer
    "b1x2-own": Zero(2, 1, "bf16", root_options=_FP32_GRADS),
    "b2x2": Zero(2, 2, "bf16"),
    "b2x3": Zero(3, 2, "bf16"),
    "b2x1": Zero(1, 2, "bf16"),
    "b2x4": Zero(4, 2, "bf16", zero_options=_ROUND_ROBIN),
    "b2x2-aligned": Zero(2, 2, "bf16", zero_options=(("parameter_alignment", True),)),
    "b3x2": Zero(2, 3, "bf16", init=True, zero_options=_PERSIST),
    "b3x3": Zero(3, 3, "bf16", zero_options=_SUB_GROUPS),
    "b3x4": Zero(4, 3, "bf16", zero_options=_PERSIST),
    "h2x2": Zero(2, 2, "fp16"),
    "h3x2": Zero(2, 3, "fp16", zero_options=_PERSIST),
    "h3x3": Zero(3, 3, "fp16", zero_options=_SUB_GROUPS),
    "h0x2": Zero(2, 0, "fp16"),
    "b2x2-cpu": Zero(2, 2, "bf16", zero_options=(("offload_optimizer", {"device": "cpu"}),)),
    "b3x2-cpu": Zero(
        2, 3, "bf16", zero_options=(("offload_optimizer", {"device": "cpu"}), ("offload_param", {"device": "cpu"}))
    ),
    "b3x2-part": Zero(
        2, 3, "bf16", zero_options=(("offload_optimizer", {"device": "cpu", "ratio": 0.5}), *_SUB_GROUPS)
    ),
    "b3x4-hpz": Zero(4, 3, "bf16", zero_options=(("zero_hpz_partition_size", 2), *_SUB_GROUPS)),
}


#: Makes a test run on the ranks of the engine of its parameter `name`.
in_engine_world = on_ranks(lambda name, **_: ENGINES[name].size, timeout=250)


def prepare() -> None:
    """Make DeepSpeed use this process's group, as if no engine had been made in this process."""
    _initialise()
    from deepspeed.utils import groups

    groups.mpu = None  # a pipeline leaves its grid there


@cache
def _initialise() -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(os.getppid()))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    # It refuses fp16 where the processor has no instructions for it; torch computes it on any.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def configuration(zero: Zero, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES // zero.size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": zero.stage,
            "reduce_bucket_size": 2000,
            "allgather_bucket_size": 2000,
            "stage3_prefetch_bucket_size": 500,
            # Otherwise the first engine of stage 3 replaces torch.nn.functional.linear in its process by one that rounds
            # differently.
            "memory_efficient_linear": False,
            **dict(zero.zero_options),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict(zero.root_options),
    }
    if zero.low:
        found[zero.low] = {"enabled": True}
    if zero.low == "fp16":
        found["fp16"].update(initial_scale_power=8, loss_scale_window=2)
    return found | options


Named = dict[str, torch.Tensor]


def adamw(parameters: Named) -> torch.optim.Optimizer:
    """Make two groups with settings of their own; the frozen parameter is in one of them."""
    matrices, vectors = _matrices_and_vectors(parameters)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "lr": 3e-3},
            {"params": vectors, "weight_decay": 0.0, "lr": 1e-2},
        ],
        foreach=False,
    )


def sgd(parameters: Named) -> torch.optim.Optimizer:
    matrices, vectors = _matrices_and_vectors(parameters)
    return torch.optim.SGD(
        [{"params": matrices, "momentum": 0.9, "lr": 0.05}, {"params": vectors, "momentum": 0.8, "lr": 0.1}]
    )


def _matrices_and_vectors(parameters: Named) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    # By name: under zero.Init all parameters have one dimension.
    vectors = {n for n in parameters if n.endswith("bias") or "norm" in n or n == "temperature"}
    return [p for n, p in parameters.items() if n not in vectors], [p for n, p in parameters.items() if n in vectors]


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}


@dataclass
class EngineTrainer:
    """A training run of an engine."""

    engine: Any
    client: dict[str, Any] = field(default_factory=lambda: {"step": 0})

    def states(self) -> dict[str, Any]:
        return {"model": self.engine, "client": self.client}

    def step(self) -> float:
        """One training step; the loss of the whole batch."""
        inputs, targets = self.local_batch()
        loss = loss_of(self.engine(inputs).float(), targets)
        self.engine.backward(loss)
        self.engine.step()
        self.client["step"] += 1
        return mean_over_ranks(loss)

    def local_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's inputs and targets of the next step."""
        inputs, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(self.client["step"]))
        return inputs, targets

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]


def build(
    name: str,
    values: Values,
    make: str | Callable[[Named], torch.optim.Optimizer] | None = "adamw",
    *,
    tied: bool = True,
    **options: Any,
) -> EngineTrainer:
    """Return a fresh run of the engine `name`.

    Args:
        name: a key of `ENGINES`.
        values: fills the weights.
        make: makes the optimizer, or its name; None: DeepSpeed makes it, as `options` say.
        tied: tie the head to the embedding.
        **options: go into the configuration.
    """
    prepare()
    import deepspeed

    zero = ENGINES[name]
    settings = configuration(zero, **options)
    if zero.init:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Gpt(tied=tied)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            values(model)
    else:
        model = Gpt(tied=tied)
        values(model)
    # DeepSpeed leaves buffers alone.
    low = {"bf16": torch.bfloat16, "fp16": torch.float16, "": torch.float32}[zero.low]
    model.positions = model.positions.to(low)
    made: Any = None
    schedule: Any = None
    if make is not None:
        make = OPTIMIZERS[make] if isinstance(make, str) else make
        made = make(dict(model.named_parameters()))
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, gamma=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, lr_scheduler=schedule, config=settings)
    return EngineTrainer(engine)


def trained_run(name: str, make: Any = "adamw", **options: Any) -> EngineTrainer:
    """Return a run that has trained `BEFORE` steps; arguments as for `build`."""
    run = build(name, trained, make, **options)
    run.train(BEFORE)
    return run


def full_state(engine: Any) -> dict[str, Any]:
    """Return weights, master weights and state of all parameters, and buffers, by the keys of `bytecheckpoint.open`.

    A collective: DeepSpeed gathers. Tied weights are under their first name only.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {f"model/{n}": b.clone() for n, b in engine.module.named_buffers()}
    wrapper = engine.optimizer
    base = getattr(wrapper, "optimizer", wrapper)
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links after the step of the first group, when the others have no state yet.
        wrapper._hp_optimizer_states_linked = False
        if engine.zero_round_robin_gradients():
            _link_round_robin(wrapper)
        wrapper._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found[f"model/{name}"] = p.detach().clone()
        if not p.requires_grad or base is None:
            continue
        if type(wrapper).__name__ in ("FP16_UnfusedOptimizer", "FP16_Optimizer") or base is wrapper:
            found |= _replicated_state(name, p, wrapper, base)
            continue
        master = safe_get_full_fp32_param(p).clone()
        if master.dtype != p.dtype:
            found[f"optimizer/state/{name}/master"] = master.reshape(found[f"model/{name}"].shape)
        for slot in _slots(base):
            value = safe_get_full_optimizer_state(p, slot)
            found[f"optimizer/state/{name}/{slot}"] = value.clone().reshape(found[f"model/{name}"].shape)
        found |= _steps(name, base)
    return found


def _link_round_robin(wrapper: Any) -> None:
    """Link as DeepSpeed does with parameter_alignment: without it, DeepSpeed assumes the parameters' own order."""
    from deepspeed.utils import link_hp_params

    for i, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        in_order = zip(wrapper.round_robin_bit16_groups[i], wrapper.round_robin_bit16_offsets[i], strict=True)
        offsets = {id(p): offset for p, offset in in_order}
        link_hp_params(
            lp_param_list=wrapper.bit16_groups[i],
            flat_hp_partition=flat,
            gradient_dict=wrapper.averaged_gradients,
            offload_gradient_dict=wrapper.offload_gradient_dict,
            use_offload=wrapper.cpu_offload,
            param_group_index=i,
            partition_start=dist.get_rank(wrapper.real_dp_process_group[i]) * flat.numel(),
            partition_size=flat.numel(),
            dp_group=wrapper.real_dp_process_group[i],
            param_offsets=[offsets[id(p)] for p in wrapper.bit16_groups[i]],
        )


def _replicated_state(name: str, p: torch.Tensor, wrapper: Any, base: Any) -> dict[str, Any]:
    """Return the state without ZeRO: every rank has all of it, and a master weight, if any, has the parameter's place."""
    key, found = p, {}
    if base is not wrapper:
        lows = [x for group in wrapper.fp16_groups for x in group]
        highs = [x for group in wrapper.fp32_groups for x in group]
        (key,) = (high for low, high in zip(lows, highs, strict=True) if low is p)
        found[f"optimizer/state/{name}/master"] = key.detach().clone()
    for slot, value in base.state[key].items():
        found[f"optimizer/state/{name}/{slot}"] = value.clone()
    return found


def _slots(base: Any) -> list[str]:
    """Return the names of the elementwise state."""
    return sorted(
        {slot for s in base.state.values() for slot, v in s.items() if isinstance(v, torch.Tensor) and v.ndim}
    )


def _steps(name: str, base: Any) -> dict[str, Any]:
    steps = {float(s["step"]) for s in base.state.values() if "step" in s}
    return {f"optimizer/state/{name}/step": torch.tensor(step) for step in steps}


def settings(engine: Any) -> list[dict[str, Any]]:
    """Return the settings of each param group, in the order of the optimizer that was passed."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [{k: v for k, v in group.items() if k != "params"} for group in base.param_groups]
