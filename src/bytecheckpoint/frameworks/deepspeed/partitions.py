"""Find the elements of parameters that this rank holds under ZeRO, and the tensors that hold them.

Stages 1 and 2 flatten the parameters of a group into one tensor, cut it into equal partitions, and keep the master
weights of one partition on each rank; each parameter knows its range (`_hp_mapping`). Stage 3 partitions each
parameter by itself, row-major, and joins the partitions of a sub-group. So no rank needs to gather anything to know what
it holds. Only this module reads the attributes that say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.detection import imported

__all__ = [
    "FlatPartition",
    "HeldRange",
    "check_masters",
    "check_tiling",
    "drop_secondary_partition",
    "flat_partitions",
    "full_shape",
    "gathered_weight",
    "has_master_link",
    "has_unfused_masters",
    "is_pipeline_replica",
    "is_zero3_param",
    "link_hp_state",
    "master_fragment",
    "masters_match_weights",
    "stepped_parameters",
    "weight_range",
    "zero3_optimizer_of",
]


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Consecutive elements of a parameter on this rank, in row-major order; a `FlatRange` once it has a key.

    Attributes:
        data: 1-D memory that holds them; or a whole tensor of the parameter's shape.
        start: number of the first element in the parameter.
        offset: place of the first element in `data`.
        count: number of elements; 0: this rank has none.
    """

    data: torch.Tensor
    start: int
    offset: int
    count: int


@dataclass(slots=True)
class FlatPartition:
    """One flat tensor that the inner optimizer steps.

    Attributes:
        data: the tensor; the optimizer's state is under it.
        optimizer: the optimizer that steps it; with partial offload some sub-groups have another one than the rest.
        group: index of its param group.
        ranges: each parameter behind it, with its elements in the tensor.
    """

    data: torch.Tensor
    optimizer: Optimizer
    group: int
    ranges: list[tuple[torch.Tensor, HeldRange]]


def is_zero3_param(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 partitions `parameter`, which is then empty unless it is gathered."""
    return "ds_id" in vars(parameter)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the parameter before ZeRO cuts it; under AutoTP, of this rank's part of it."""
    shape: Any = parameter.ds_shape if is_zero3_param(parameter) else parameter.shape  # type: ignore[attr-defined]
    return tuple(shape)


def is_pipeline_replica(parameter: torch.Tensor) -> bool:
    """Return whether another pipeline stage owns this tied parameter; that stage partitions it in its own way."""
    return bool(vars(parameter).get("ds_pipe_replicated", False))


def weight_range(where: str, parameter: Any) -> HeldRange:
    """Return this rank's partition of a stage 3 parameter, gathered or not.

    Raises:
        UsageError: the partition is not in memory, or the parameter is being gathered.
    """
    partition = parameter.ds_tensor
    if parameter.ds_status.name == "INFLIGHT":
        raise UsageError(f"{where} is being gathered by ZeRO: save and load between steps")
    if partition is None or partition.status.name != "AVAILABLE" or partition.final_location == "nvme":
        raise UsageError(
            f"{where} is not in memory (ZeRO keeps it on NVMe), which is not supported: offload to the CPU, or not at all"
        )
    return HeldRange(partition.detach().view(-1), *_zero3_range(parameter, int(partition.ds_numel)))


def _zero3_range(parameter: Any, size: int) -> tuple[int, int, int]:
    """Return (start, offset, count) of this rank's partition of `size` elements; the last partitions have padding."""
    start = dist.get_rank(parameter.ds_process_group) * size
    count = min(int(parameter.ds_numel) - start, size)
    return (start, 0, count) if count > 0 else (0, 0, 0)


def gathered_weight(parameter: Any) -> torch.Tensor | None:
    """Return the whole of a stage 3 parameter that is kept gathered, which a load has to fill too; else None."""
    if parameter.ds_status.name != "AVAILABLE":
        return None
    weight: torch.Tensor = parameter.data
    return weight if tuple(weight.shape) == full_shape(parameter) else None


def drop_secondary_partition(parameter: Any) -> None:
    """Drop the secondary partition (hierarchical ZeRO), which holds old values once the primary one has changed."""
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None


def master_fragment(parameter: Any) -> HeldRange | None:
    """Return the master weights of `parameter` that this rank steps, by the parameter's own links; None: no such link.

    See `masters_match_weights` for how far the links can be trusted.
    """
    attributes = vars(parameter)
    if is_zero3_param(parameter):
        wrapper = attributes.get("_z3_optimizer")
        place = None if wrapper is None else wrapper.grad_position.get(wrapper.get_param_id(parameter))
        if place is None:
            return None
        sub_group, offset, size = place
        start, _, count = _zero3_range(parameter, size)
        return HeldRange(wrapper.fp32_partitioned_groups_flat[sub_group].detach(), start, offset, count)
    mapping = attributes.get("_hp_mapping")
    if mapping is None:
        return None
    lp_address = mapping.lp_fragment_address
    return HeldRange(mapping.hp_fragment.detach(), lp_address.start, 0, lp_address.numel)


def masters_match_weights(parameter: torch.Tensor, master: HeldRange) -> bool:
    """Return whether `master`, rounded, equals the weights of `parameter`, which this rank holds whole.

    DeepSpeed links wrong ranges in some settings (round-robin gradients); these have other values.
    """
    low = parameter.detach().reshape(-1)[master.start : master.start + master.count]
    high = master.data[master.offset : master.offset + master.count].to(low.dtype)
    return torch.allclose(high, low, rtol=0, atol=0, equal_nan=True)


def zero3_optimizer_of(parameter: torch.Tensor) -> Any:
    """Return the stage 3 optimizer that partitions `parameter`; None for other stages, which leave no link."""
    return vars(parameter).get("_z3_optimizer")


def has_master_link(parameter: torch.Tensor) -> bool:
    """Return whether an optimizer of stage 1 or 2 has linked `parameter` to its master weights, here or on another rank."""
    return "_hp_mapping" in vars(parameter)


def stepped_parameters(wrapper: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of the model that an engine's optimizer steps."""
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        for group in getattr(wrapper, name, ()):
            yield from group


def has_unfused_masters(wrapper: Any) -> bool:
    """Return whether each parameter has a whole master weight of its own on every rank (float16 without ZeRO)."""
    unfused = imported("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
    return unfused is not None and isinstance(wrapper, unfused)


def flat_partitions(state_name: str, wrapper: Any) -> list[FlatPartition]:
    """Find the flat tensors that the optimizer inside `wrapper` steps on this rank.

    Raises:
        UsageError: `wrapper` has not the tables of a known class.
    """
    base: Optimizer = wrapper.optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return list(_sub_groups(state_name, wrapper))
    groups: Sequence[Sequence[torch.Tensor]]
    flats: Sequence[torch.Tensor]
    process_groups: Sequence[Any] | None = None  # the ranks that share each group; None: it is whole on every rank
    offsets: Sequence[Mapping[int, int]] | None = None  # id of a parameter -> its offset, for each group
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        groups, flats = wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups
        process_groups = wrapper.real_dp_process_group
        # `_hp_mapping` is wrong in some settings: it assumes that the parameters are flattened in their own order.
        offsets = [
            {id(p): int(offset) for p, offset in zip(parameters, own, strict=True)}
            for parameters, own in zip(wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, strict=True)
        ]
    elif hasattr(wrapper, "fp32_groups_flat_partition"):
        groups, flats = wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
        process_groups = wrapper.real_dp_process_group
    elif hasattr(wrapper, "fp32_groups_flat"):
        groups, flats = wrapper.fp16_groups, wrapper.fp32_groups_flat
    else:
        raise UsageError(
            f"{state_name}: {type(wrapper).__name__} has no flat tensors that this package knows: not supported"
        )
    return [
        FlatPartition(
            flat,
            base,
            _param_group_index(state_name, base, flat),
            _fragments(
                flat,
                group,
                _offsets_in_order(group) if offsets is None else offsets[number],
                0 if process_groups is None else dist.get_rank(process_groups[number]) * flat.numel(),
            ),
        )
        for number, (flat, group) in enumerate(zip(flats, groups, strict=True))
    ]


def _offsets_in_order(group: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return id of each parameter -> its offset when all are flattened in their order."""
    ends = accumulate(p.numel() for p in group)
    return {id(p): end - p.numel() for p, end in zip(group, ends, strict=True)}


def _fragments(
    flat: torch.Tensor, group: Sequence[torch.Tensor], offsets: Mapping[int, int], partition_start: int
) -> list[tuple[torch.Tensor, HeldRange]]:
    """Return each parameter of the group with its elements in the partition `flat`.

    Args:
        flat: the partition.
        group: the parameters that were flattened together.
        offsets: id of a parameter -> its offset in the flattened group.
        partition_start: offset of the partition in the flattened group.
    """
    ranges = []
    for parameter in group:
        offset = offsets[id(parameter)]
        low = max(offset, partition_start)
        high = min(offset + parameter.numel(), partition_start + flat.numel())
        found = low < high
        start_offset_count = (low - offset, low - partition_start, high - low) if found else (0, 0, 0)
        ranges.append((parameter, HeldRange(flat, *start_offset_count)))
    return ranges


def link_hp_state(wrapper: Any, partitions: Sequence[FlatPartition]) -> None:
    """Link each parameter to its part of new optimizer state (stages 1 and 2).

    DeepSpeed links after the first step. It does so itself if there is no state yet.
    """
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
        wrapper._hp_optimizer_states_linked = False
        if all(partition.optimizer.state.get(partition.data) for partition in partitions):
            wrapper._lazy_init_hp_params_optimizer_state()


def _sub_groups(state_name: str, wrapper: Any) -> Iterator[FlatPartition]:
    """Yield the partitions of stage 3, one per sub-group."""
    devices = getattr(wrapper, "subgroup_to_device", {})
    for number, (flat, group) in enumerate(zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True)):
        offset, ranges = 0, []
        for parameter in group:
            size = int(parameter.ds_tensor.ds_numel)
            start, _, count = _zero3_range(parameter, size)
            ranges.append((parameter, HeldRange(flat, start, offset if count else 0, count)))
            offset += size
        if offset != flat.numel():
            raise UsageError(
                f"{state_name}: sub-group {number} of ZeRO-3 has {flat.numel()} elements, and the partitions of its "
                "parameters "
                f"have {offset}: not supported (DeepSpeed joins them in another way than the known versions)"
            )
        # With partial offload a share of the sub-groups stays on the accelerator, stepped by torch's AdamW.
        optimizer = wrapper.optimizer if devices.get(number, "cpu") == "cpu" else wrapper.backup_optimizer
        yield FlatPartition(flat, optimizer, int(wrapper.sub_group_to_group_id[number]), ranges)


def _param_group_index(state_name: str, base: Optimizer, flat: torch.Tensor) -> int:
    found = [i for i, group in enumerate(base.param_groups) if any(p is flat for p in group["params"])]
    if len(found) != 1:
        raise UsageError(
            f"{state_name}: a flat tensor of {flat.numel()} elements is in {len(found)} param groups of "
            f"{type(base).__name__}, "
            "instead of one: not supported (the optimizer's groups were changed, or DeepSpeed steps another tensor)"
        )
    return found[0]


_LARGEST_GAP = 15  # elements: `parameter_alignment` lets parameters begin at multiples of 16 bytes
_SAMPLED = 16  # parameters of each flat tensor

_sampled: WeakSet[Any] = WeakSet()  # optimizers whose master weights were compared


def check_tiling(state_name: str, wrapper: Any, partitions: Sequence[FlatPartition]) -> None:
    """Check that the parameters follow each other in each flat tensor, without overlaps and without gaps.

    Raises:
        UsageError: they do not; names the flat tensor and the parameter's number in it.
    """
    seen: set[int] = set()
    for number, partition in enumerate(partitions):
        size, end = partition.data.numel(), 0
        where = f"{state_name}: flat tensor {number} of {type(wrapper).__name__}"
        if partition.data.ndim != 1:
            raise _changed(f"{where} has shape {tuple(partition.data.shape)}, not one dimension")
        found = [(f.offset, f.count, f.start, p) for p, f in partition.ranges if f.count]
        for offset, count, start, parameter in sorted(found, key=lambda item: item[0]):
            zero3 = is_zero3_param(parameter)
            whole = int(parameter.ds_numel) if zero3 else parameter.numel()  # type: ignore[attr-defined]
            # A partition of stage 3 ends with the padding of its last rank.
            gap = max(int(parameter.ds_tensor.ds_numel), _LARGEST_GAP) if zero3 else _LARGEST_GAP  # type: ignore[attr-defined]
            if not end <= offset <= end + gap or offset + count > size or start + count > whole:
                raise _changed(
                    f"{where} has {size} elements, of which {count} from place {offset} would be the elements from number "
                    f"{start} of a parameter of {whole}, after the previous one's end at {end}"
                )
            if not zero3 and start + count < whole and offset + count < size:
                raise _changed(f"{where} leaves out the end of a parameter of {whole} elements after {start + count}")
            if id(parameter) in seen:
                raise _changed(f"{where} holds a parameter that another one holds too")
            seen.add(id(parameter))
            end = offset + count


def check_masters(state_name: str, wrapper: Any, partitions: Sequence[FlatPartition]) -> None:
    """Check once for each optimizer that some of its master weights round to the weights.

    Samples the first and the last element of some parameters in each flat tensor: a fraction of a millisecond on the CPU.

    Raises:
        UsageError: they do not.
    """
    if wrapper in _sampled:
        return
    for number, partition in enumerate(partitions):
        ranges = [pair for pair in partition.ranges if pair[1].count]
        lows: list[torch.Tensor] = []
        places: list[int] = []
        for parameter, held in ranges[:: -(-len(ranges) // _SAMPLED) or 1]:
            for place, low in _first_and_last(state_name, parameter, held):
                places.append(place)
                lows.append(low)
        if not lows:
            continue
        low = torch.stack(lows).cpu()
        high = partition.data.detach()[torch.tensor(places, device=partition.data.device)].cpu()
        if not torch.equal(high.to(low.dtype).nan_to_num(), low.nan_to_num()):
            raise _changed(
                f"{state_name}: the master weights in flat tensor {number} of {type(wrapper).__name__} do not round to the "
                "weights",
                "; or the weights were changed since the last step, and the next step would undo that: save before they "
                "are changed, or pass engine.module alone",
            )
    _sampled.add(wrapper)


def _first_and_last(state_name: str, parameter: torch.Tensor, held: HeldRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place in the flat tensor, weight) of the first and the last element of a range."""
    if is_zero3_param(parameter):
        partition = weight_range(state_name, parameter)
        weights, first = partition.data, partition.offset
    else:
        weights, first = parameter.detach().view(-1), held.start
    for k in {0, held.count - 1}:
        yield held.offset + k, weights[first + k]


def _changed(what: str, also: str = "") -> UsageError:
    return UsageError(
        f"{what}: this DeepSpeed does not lay its partitions out as the versions that are supported{also}"
    )
