"""What ZeRO says about its partitions: which run of which parameter this rank holds, and where.

Stages 1 and 2 string the parameters of a group together, cut the string into equal partitions, and keep the master
weights of one on each rank; every parameter knows its run (`_hp_mapping`). Stage 3 cuts each parameter by itself,
row-major, and strings the runs of a sub-group together. So nothing needs to be gathered to know what a rank has. This is
the only module that reads the attributes behind that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.installed import loaded

__all__ = [
    "Flat",
    "Run",
    "agrees",
    "forget_copies",
    "gathered",
    "is_replica",
    "is_sharded",
    "link_state",
    "master_run",
    "optimizer_behind",
    "shape_of",
    "shard_run",
    "unflattened",
    "zero_flats",
]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter, row-major.

    Attributes:
        data: 1-D memory that holds them; of the parameter's shape where it is whole by itself.
        start: number of the first element.
        first: its place in `data`.
        count: how many there are; 0 where this rank has none.
    """

    data: torch.Tensor
    start: int
    first: int
    count: int


@dataclass(slots=True)
class Flat:
    """One flat tensor that the optimizer inside steps.

    Attributes:
        data: the tensor itself: the optimizer's key.
        optimizer: what steps it; with partial offload some sub-groups have another one than the rest.
        group: number of its param group there.
        runs: the parameters behind it, and what it has of each.
    """

    data: torch.Tensor
    optimizer: Optimizer
    group: int
    runs: list[tuple[torch.Tensor, Run]]


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether stage 3 has divided `parameter`: it is empty but while it is gathered."""
    return "ds_id" in vars(parameter)


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter."""
    shape: Any = parameter.ds_shape if is_sharded(parameter) else parameter.shape  # type: ignore[attr-defined]
    return tuple(shape)


def is_replica(parameter: torch.Tensor) -> bool:
    """Whether a tied parameter of a pipeline has its owner in another stage, which divides it in its own way."""
    return bool(vars(parameter).get("ds_pipe_replicated", False))


def shard_run(where: str, parameter: Any) -> Run:
    """What this rank holds of a parameter of stage 3, whether or not it is gathered just now.

    Raises:
        UsageError: the shard is not in memory, or the parameter is being gathered.
    """
    shard = parameter.ds_tensor
    if parameter.ds_status.name == "INFLIGHT":
        raise UsageError(f"{where} is being gathered by ZeRO: save and load between steps")
    if shard is None or shard.status.name != "AVAILABLE" or shard.final_location == "nvme":
        raise UsageError(
            f"{where} is not in memory (ZeRO keeps it on NVMe), which is not supported: offload to the CPU, or not at all"
        )
    return Run(shard.detach().view(-1), *_stretch(parameter, int(shard.ds_numel)))


def _stretch(parameter: Any, size: int) -> tuple[int, int, int]:
    """(first element, place, count) of the partition of `size` elements of this rank; the last ones are padded."""
    start = dist.get_rank(parameter.ds_process_group) * size
    count = min(int(parameter.ds_numel) - start, size)
    return (start, 0, count) if count > 0 else (0, 0, 0)


def gathered(parameter: Any) -> torch.Tensor | None:
    """The whole of a parameter of stage 3, where it is kept gathered; a load has to fill it too."""
    if parameter.ds_status.name != "AVAILABLE":
        return None
    whole: torch.Tensor = parameter.data
    return whole if tuple(whole.shape) == shape_of(parameter) else None


def forget_copies(parameter: Any) -> None:
    """After the shard of a parameter has changed: drop the second partition (hierarchical ZeRO), made of old values."""
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None


def master_run(parameter: Any) -> Run | None:
    """The master weights of `parameter` that this rank steps, or None where ZeRO keeps none of it.

    As the parameter itself tells; see `agrees`.
    """
    known = vars(parameter)
    if is_sharded(parameter):
        wrapper = known.get("_z3_optimizer")
        place = None if wrapper is None else wrapper.grad_position.get(wrapper.get_param_id(parameter))
        if place is None:
            return None
        sub_group, first, size = place
        start, _, count = _stretch(parameter, size)
        return Run(wrapper.fp32_partitioned_groups_flat[sub_group].detach(), start, first, count)
    mapping = known.get("_hp_mapping")
    if mapping is None:
        return None
    return Run(mapping.hp_fragment.detach(), mapping.lp_fragment_address.start, 0, mapping.lp_fragment_address.numel)


def agrees(parameter: torch.Tensor, run: Run) -> bool:
    """Whether `run` are the master weights of `parameter`, of which this rank has all elements.

    They are linked wrongly in some settings (round-robin gradients), and then have other values.
    """
    low = parameter.detach().reshape(-1)[run.start : run.start + run.count]
    high = run.data[run.first : run.first + run.count].to(low.dtype)
    return torch.allclose(high, low, rtol=0, atol=0, equal_nan=True)


def optimizer_behind(parameter: torch.Tensor) -> Any:
    """The optimizer of stage 3 that divides `parameter`; None for other stages, which leave no link."""
    return vars(parameter).get("_z3_optimizer")


def unflattened(wrapper: Any) -> bool:
    """Whether each parameter has a master weight of its own, whole on every rank (float16 without ZeRO)."""
    kind = loaded("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
    return kind is not None and isinstance(wrapper, kind)


def zero_flats(wrapper: Any) -> list[Flat]:
    """The flat tensors that `wrapper` has the optimizer inside step."""
    base: Optimizer = wrapper.optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return list(_sub_groups(wrapper))
    groups: Sequence[Sequence[torch.Tensor]]
    flats: Sequence[torch.Tensor]
    divided: Sequence[Any] | None = None  # by groups of ranks; None: whole on every rank
    places: Sequence[Mapping[int, int]] | None = None
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        groups, flats = wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups
        divided = wrapper.real_dp_process_group
        # `_hp_mapping` is wrong in some settings: it takes the parameters to be strung together in their own order.
        places = [
            {id(p): int(place) for p, place in zip(strung, offsets, strict=True)}
            for strung, offsets in zip(wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, strict=True)
        ]
    elif hasattr(wrapper, "fp32_groups_flat_partition"):
        groups, flats, divided = wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, wrapper.real_dp_process_group
    else:
        groups, flats = wrapper.fp16_groups, wrapper.fp32_groups_flat
    return [
        Flat(
            flat,
            base,
            _group_of(base, flat),
            _strung(
                flat,
                group,
                _in_order(group) if places is None else places[number],
                0 if divided is None else dist.get_rank(divided[number]) * flat.numel(),
            ),
        )
        for number, (flat, group) in enumerate(zip(flats, groups, strict=True))
    ]


def _in_order(group: Sequence[torch.Tensor]) -> dict[int, int]:
    """id of each parameter -> its place when all are strung together."""
    ends = accumulate(p.numel() for p in group)
    return {id(p): end - p.numel() for p, end in zip(group, ends, strict=True)}


def _strung(
    flat: torch.Tensor, group: Sequence[torch.Tensor], places: Mapping[int, int], begin: int
) -> list[tuple[torch.Tensor, Run]]:
    """What `flat`, which begins at `begin` of all parameters strung together, has of each."""
    runs = []
    for parameter in group:
        place = places[id(parameter)]
        low, high = max(place, begin), min(place + parameter.numel(), begin + flat.numel())
        runs.append((parameter, Run(flat, low - place, low - begin, high - low) if low < high else Run(flat, 0, 0, 0)))
    return runs


def link_state(wrapper: Any, flats: Sequence[Flat]) -> None:
    """After optimizer state was replaced: let each parameter know its part of the new tensors (stages 1 and 2).

    What DeepSpeed does after the first step, and will do then where there is no state yet.
    """
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        wrapper._hp_optimizer_states_linked = False
        if all(flat.optimizer.state.get(flat.data) for flat in flats):
            wrapper._lazy_init_hp_params_optimizer_state()


def _sub_groups(wrapper: Any) -> Iterator[Flat]:
    devices = getattr(wrapper, "subgroup_to_device", {})
    for number, (flat, group) in enumerate(zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)):
        first, runs = 0, []
        for parameter in group:
            size = int(parameter.ds_tensor.ds_numel)
            start, _, count = _stretch(parameter, size)
            runs.append((parameter, Run(flat, start, first if count else 0, count)))
            first += size
        # Offloaded but for a share of the sub-groups, which torch's AdamW steps on the accelerator.
        optimizer = wrapper.optimizer if devices.get(number, "cpu") == "cpu" else wrapper.backup_optimizer
        yield Flat(flat, optimizer, int(wrapper.sub_group_to_group_id[number]), runs)


def _group_of(base: Optimizer, flat: torch.Tensor) -> int:
    return next(i for i, group in enumerate(base.param_groups) if any(p is flat for p in group["params"]))
