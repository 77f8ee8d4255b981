"""Scan Megatron modules: find the layouts of all parameters and buffers by `sharded_state_dict()`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.megatron.detection import (
    is_megatron_module,
    megatron_class,
    require,
    torch_sharding_of,
    unknown_structure,
    unwrap,
)
from bytecheckpoint.frameworks.megatron.layouts import (
    ParameterLayout,
    boxes_of_factory,
    checkpoint_names,
    join_parts,
    sharded_tensor_box,
)
from bytecheckpoint.frameworks.tensors.dtensors import local_tensor

__all__ = ["MegatronModuleScan", "StateDictEntry", "scan_megatron_modules"]

# One name for each layer on all pipeline stages, and one tensor for all of a fused gate.
_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


@dataclass(slots=True)
class StateDictEntry:
    """A state-dict entry that is not memory of the model: it is loaded through `load_state_dict`.

    Attributes:
        value: the entry.
        model: the model that it belongs to.
        state_key: its key in the model's state dict.
    """

    value: Any
    model: nn.Module
    state_key: str


@dataclass(slots=True)
class MegatronModuleScan:
    """The tensors and values of all model chunks of one state, in one namespace.

    Attributes:
        layouts: the parameters and buffers; tied tensors once.
        values: name -> extra state.
        computed: id of a layout -> its entry, for tensors that `sharded_state_dict()` computed.
        layout_by_id: id of a parameter or buffer -> its layout.
        stepped_ranges: id of a parameter under Megatron's DistributedDataParallel -> (first, count) of the elements that
            this rank's distributed optimizer steps.
        current_ranges: id of a parameter whose all-gather waits for the next forward pass (overlap_param_gather) ->
            (first, count) of the elements that are up to date on this rank.
        pending_gathers: handles of all-gathers of parameters that have started and are not complete.
    """

    layouts: list[ParameterLayout] = field(default_factory=list)
    values: dict[str, StateDictEntry] = field(default_factory=dict)
    computed: dict[int, StateDictEntry] = field(default_factory=dict)
    layout_by_id: dict[int, ParameterLayout] = field(default_factory=dict)
    stepped_ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    current_ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    pending_gathers: list[Any] = field(default_factory=list)

    @property
    def parameters(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Id of a parameter or buffer -> (FQN, aliases)."""
        return {number: (layout.names[0], layout.names[1:]) for number, layout in self.layout_by_id.items()}


def scan_megatron_modules(state_name: str, modules: Sequence[nn.Module]) -> MegatronModuleScan:
    """Scan a model, or the chunks of virtual pipeline stages.

    Raises:
        UsageError: a module has no `sharded_state_dict`, or one that cannot be represented; or two chunks use one name
            for different tensors.
    """
    scan = MegatronModuleScan()
    if sharding := torch_sharding_of({state_name: list(modules)}):
        raise UsageError(
            f"{state_name}: a model of Megatron is sharded by {sharding}: use Megatron's DistributedDataParallel and the "
            'distributed optimizer; or, where Megatron does not split the model, framework="fsdp"'
        )
    for module in modules:
        model, wrappers = unwrap(module)
        if not hasattr(model, "sharded_state_dict"):
            if is_megatron_module(model):
                raise UsageError(
                    f"{state_name}: {type(model).__name__} holds modules of Megatron, but has no sharded_state_dict "
                    "that tells how they are split: derive it from MegatronModule"
                )
            raise UsageError(
                f"{state_name}: {type(model).__name__} is not a module of Megatron, and the others in this state are: "
                "give it a name of its own"
            )
        _scan_chunk(state_name, scan, model, wrappers)
    _check_names(state_name, scan)
    return scan


def _scan_chunk(state_name: str, scan: MegatronModuleScan, model: Any, wrappers: Sequence[Any]) -> None:
    """Add the entries of one chunk's sharded state dict to `scan`."""
    metadata: dict[str, Any] = dict(_METADATA)
    for wrapper in wrappers:
        if getattr(wrapper, "dp_cp_group", None) is not None:
            metadata["dp_cp_group"] = wrapper.dp_cp_group
    live = {id(t): t for t in (*model.parameters(), *model.buffers())}
    live_by_address = {(t.data_ptr(), t.numel()): t for t in live.values() if t.numel()}
    storages = {t.untyped_storage().data_ptr() for t in map(local_tensor, live.values())} - {0}
    entries: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    for state_key, entry in entries.items():
        if _is_instance(entry, "ShardedObject"):
            _add_value(state_name, scan, model, state_key, entry)
            continue
        if _is_instance(entry, "LocalNonpersistentObject"):
            continue
        is_sharded = _is_instance(entry, "ShardedTensor") or _is_instance(entry, "ShardedTensorFactory")
        if not is_sharded or entry.data is None:
            found = "nothing" if entry is None else f"a {type(entry).__name__}"
            raise UsageError(
                f"{state_name}/{state_key}: sharded_state_dict has {found} here, where a tensor or an object that says "
                "how it is sharded is expected"
            )
        layout = _layout_of(state_name, state_key, entry)
        data: torch.Tensor = layout.tensor
        owner = live.get(id(data))
        if owner is None and data.numel():
            owner = live_by_address.get((data.data_ptr(), data.numel()))
        known = scan.layout_by_id.get(id(owner))
        if known is not None:
            _add_aliases(state_name, known, layout)
            continue
        if owner is not None:
            if owner.shape == data.shape:
                layout.tensor = owner
            scan.layout_by_id[id(owner)] = layout
        elif data.untyped_storage().data_ptr() not in storages:
            scan.computed[id(layout)] = StateDictEntry(data, model, state_key)
        scan.layouts.append(layout)
    _join_parts(scan, live)
    _add_empty_values(scan, model, entries)
    for wrapper in filter(_is_data_parallel, wrappers):
        _add_ranges(state_name, scan, wrapper)


def _join_parts(scan: MegatronModuleScan, live: Mapping[int, torch.Tensor]) -> None:
    """Add layouts of parameters that the model describes in parts, such as a fused projection by its unfused names."""
    views: dict[int, list[ParameterLayout]] = {}  # by the memory that they are in
    for layout in scan.layouts:
        if id(layout.tensor) not in live and id(layout) not in scan.computed and layout.tensor.numel():
            views.setdefault(layout.tensor.untyped_storage().data_ptr(), []).append(layout)
    for parameter in live.values() if views else ():
        if id(parameter) in scan.layout_by_id or not parameter.numel():
            continue
        first = parameter.data_ptr()
        last = first + parameter.numel() * parameter.element_size()
        parts = [
            view
            for view in views.get(parameter.untyped_storage().data_ptr(), ())
            if first <= view.tensor.data_ptr() < last and view.tensor.dtype == parameter.dtype
        ]
        joined = join_parts(parameter, parts) if parts else None
        if joined is not None:
            others = {id(part) for part in parts[1:]}
            kept = (layout for layout in scan.layouts if id(layout) not in others)
            scan.layouts = [joined if layout is parts[0] else layout for layout in kept]
            scan.layout_by_id[id(parameter)] = joined


def _is_data_parallel(wrapper: object) -> bool:
    found = megatron_class("distributed.distributed_data_parallel", "DistributedDataParallel")
    return found is not None and isinstance(wrapper, found)


def _add_ranges(state_name: str, scan: MegatronModuleScan, wrapper: Any) -> None:
    """Add the ranges of elements that this rank steps, or that are up to date, from Megatron's DistributedDataParallel."""
    require(state_name, wrapper, "ddp_config", "remove_forward_pre_hook_handles")
    require(state_name, wrapper.ddp_config, "use_distributed_optimizer")
    ranges = _stepped_ranges(state_name, wrapper) if wrapper.ddp_config.use_distributed_optimizer else {}
    scan.stepped_ranges.update(ranges)
    if wrapper.remove_forward_pre_hook_handles:
        if not wrapper.ddp_config.use_distributed_optimizer:
            raise UsageError(
                f"{state_name}: overlap_param_gather without the distributed optimizer is not supported: which parameters "
                "are up to date on a rank is not known"
            )
        require(state_name, wrapper, "bucket_groups", "expert_parallel_bucket_groups")
        scan.current_ranges.update(ranges)
        groups = (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups)
        scan.pending_gathers += [g.param_gather_handle for g in groups if g.param_gather_handle is not None]


def _stepped_ranges(state_name: str, wrapper: Any) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges that this rank's distributed optimizer steps: an equal share of each bucket."""
    found: dict[int, list[tuple[int, int]]] = {}
    require(state_name, wrapper, "buffers", "expert_parallel_buffers")
    for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers):
        require(state_name, buffer, "data_parallel_group", "param_index_map", "buckets")
        rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            require(state_name, bucket, "grad_data", "offset")
            if bucket.grad_data.numel() % size:
                raise unknown_structure(
                    state_name, f"a bucket of {bucket.grad_data.numel()} elements is divided among {size}"
                )
        for parameter, (start, end, bucket_number) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_number]
            if end - start != parameter.numel():
                raise unknown_structure(
                    state_name, f"a buffer has {end - start} elements of one of {parameter.numel()}"
                )
            share = bucket.grad_data.numel() // size
            low = max(start, bucket.offset + rank * share)
            count = min(end, bucket.offset + (rank + 1) * share) - low
            ranges = found.setdefault(id(parameter), [])
            if count > 0:
                ranges.append((low - start, count))
    return found


def _layout_of(state_name: str, state_key: str, entry: Any) -> ParameterLayout:
    """Return the layout that a ShardedTensor or ShardedTensorFactory describes."""
    where = f"{state_name}/{state_key}"
    data: torch.Tensor = entry.data
    is_copy = isinstance(entry.replica_id, tuple) and bool(entry.replica_id) and entry.replica_id[0] != 0
    if _is_instance(entry, "ShardedTensor"):
        if entry.flattened_range is not None:
            raise UsageError(f"{where}: sharded_state_dict flattens the tensor, which is not supported for modules")
        box = sharded_tensor_box(where, state_key, entry)
        return ParameterLayout(box.names, data, [box], is_copy)
    # The factory runs on a meta tensor: the offsets of its parts say where they lie in the parameter.
    meta = torch.empty(data.shape, dtype=data.dtype, device="meta")
    made = entry.build_fn(entry.key, meta, entry.replica_id, entry.flattened_range)
    parts = [part for part in _flatten(made) if _is_instance(part, "ShardedTensor")]
    boxes = boxes_of_factory(where, state_key, entry, parts, meta)
    prepended = parts[0].global_offset[: parts[0].prepend_axis_num]
    names, _ = checkpoint_names(state_key, entry.key, tuple(prepended))
    return ParameterLayout(names, data, boxes, is_copy)


def _flatten(made: Any) -> Iterator[Any]:
    if isinstance(made, dict):
        made = list(made.values())
    if not isinstance(made, list | tuple):
        yield made
        return
    for item in made:
        yield from _flatten(item)


def _add_aliases(state_name: str, known: ParameterLayout, again: ParameterLayout) -> None:
    """Add the names of a tied tensor's second entry to its layout."""
    if len(known.boxes) != len(again.boxes):
        raise UsageError(
            f"{state_name}/{known.names[0]} and {state_name}/{again.names[0]} are one tensor that is split in two ways"
        )
    known.names = tuple(dict.fromkeys((*known.names, *again.names)))
    for box, other in zip(known.boxes, again.boxes, strict=True):
        box.names = tuple(dict.fromkeys((*box.names, *other.names)))


def _add_value(state_name: str, scan: MegatronModuleScan, model: nn.Module, state_key: str, entry: Any) -> None:
    """Add an extra state, which Megatron stores as a ShardedObject."""
    offset = tuple(entry.global_offset) if entry.global_shape != (1,) else ()
    names, dims_in_name = checkpoint_names(state_key, entry.key, offset)
    name = names[0]
    if not dims_in_name and entry.global_shape != (1,):
        name += f"[{', '.join(map(str, entry.global_offset))}]"
    if name in scan.values:
        raise UsageError(f"{state_name}/{name} is in two modules of the list: chunks must not share names")
    scan.values[name] = StateDictEntry(entry.data, model, state_key)


def _add_empty_values(scan: MegatronModuleScan, model: nn.Module, state_keys: Collection[str]) -> None:
    """Add extra states that are None, which Megatron leaves out and a module's own state_dict has."""
    for name, module in model.named_modules():
        key = f"{name}._extra_state" if name else "_extra_state"
        known = key in state_keys or key in scan.values or any(map(str.isdecimal, name.split(".")))
        if not known and type(module).get_extra_state is not nn.Module.get_extra_state:
            value = module.get_extra_state()
            if value is None:
                scan.values[key] = StateDictEntry(None, model, key)


def _check_names(state_name: str, scan: MegatronModuleScan) -> None:
    """Refuse tensors of two chunks with one name, unless they are replicas: of one shape and dtype, at one place.

    A save compares replicas, a load fills all.
    """
    seen: dict[tuple[str, tuple[int, ...]], tuple[object, ...]] = {}
    for layout in scan.layouts:
        for box in layout.boxes:
            form = (box.global_shape, box.lengths, box.start, layout.tensor.dtype)
            known = seen.setdefault((box.names[0], box.offsets), form)
            if known != form and not layout.saved_by_other_stage:
                raise UsageError(
                    f"{state_name}/{box.names[0]} names two different tensors: chunks must not share names"
                )


def _is_instance(entry: object, name: str) -> bool:
    """Return whether `entry` is an instance of a class of `megatron.core.dist_checkpointing.mapping`."""
    found = megatron_class("dist_checkpointing.mapping", name)
    return found is not None and isinstance(entry, found)
