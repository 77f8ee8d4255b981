"""The place of this rank in the job's parallel layout: its coordinate by mesh dimension, for metrics."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from bytecheckpoint.frameworks.detection import loaded_class, nested_objects
from bytecheckpoint.frameworks.tensors.dtensors import dtensor_type, is_dtensor

__all__ = ["axis_of", "mesh_coordinates"]

#: Names of mesh dimensions by axis. Dimensions of one axis are joined, the outer one first.
_NAMES = {
    "dp": (
        "dp",
        "ddp",
        "fsdp",
        "hsdp",
        "data",
        "replicate",
        "shard",
        "dp_replicate",
        "dp_shard",
        "dp_shard_cp",
        "dim0",
    ),
    "tp": ("tp", "tensor", "model", "mp"),
    "pp": ("pp", "pipeline", "pipe", "stage"),
    "cp": ("cp", "sp", "context", "sequence", "ulysses"),
    "ep": ("ep", "expert"),
}
_MEGATRON = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "cp": "context_parallel",
             "dp": "data_parallel", "ep": "expert_model_parallel"}  # fmt: skip


def axis_of(name: str) -> str:
    """Return the axis of a mesh dimension, as "dp" of "dp_shard"; the name itself where that is not known."""
    return next((axis for axis, names in _NAMES.items() if name.lower() in names), name)


def mesh_coordinates(states: Mapping[str, object], mesh: str, rank: int, world_size: int) -> dict[str, int]:
    """Return this rank's coordinate by mesh dimension, and by axis where dimensions have other names; {} if not known.

    Args:
        states: live objects, as for `save`.
        mesh: extents by dimension, the outermost first, as the setting `mesh`; "" to find them.
        rank: this rank.
        world_size: number of ranks.
    """
    if mesh:
        extents = {name: int(extent) for name, _, extent in (part.partition("=") for part in mesh.split(","))}
        fits = math.prod(extents.values()) == world_size
        return _along_axes(extents, _unravel(rank, [*extents.values()])) if fits else {}
    with contextlib.suppress(Exception):  # an untested version of a framework must not fail a save for its metrics
        return _of_megatron() or _of_meshes(states) or _of_wrappers(states, rank)
    return {}


def _unravel(rank: int, extents: list[int]) -> list[int]:
    coordinate: list[int] = []
    for extent in reversed(extents):
        rank, place = divmod(rank, extent)
        coordinate.insert(0, place)
    return coordinate


def _along_axes(extents: Mapping[str, int], coordinate: list[int]) -> dict[str, int]:
    """Return coordinates by name, and joined ones by axis."""
    found = dict(zip(extents, coordinate, strict=True))
    joined: dict[str, int] = {}
    for name, place in found.items():
        axis = axis_of(name)
        joined[axis] = joined.get(axis, 0) * extents[name] + place
    return joined | found


def _of_megatron() -> dict[str, int]:
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return {}
    return {axis: int(getattr(groups, f"get_{name}_rank")()) for axis, name in _MEGATRON.items()}


def _of_meshes(states: Mapping[str, object]) -> dict[str, int]:
    """Return the coordinates in the job's root mesh of the first distributed tensor; {} if there is none."""
    for tensor in _distributed_tensors(states):
        mesh = tensor.device_mesh
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        coordinate = root.get_coordinate()
        names = root.mesh_dim_names or [f"dim{number}" for number in range(root.ndim)]
        if coordinate is not None:
            return _along_axes(dict(zip(names, root.shape, strict=True)), [*coordinate])
    return {}


def _distributed_tensors(states: Mapping[str, object]) -> Iterator[Any]:
    """Iterate over the DTensors in modules and in state dicts."""
    cls = dtensor_type()
    if cls is not None:
        for value in states.values():
            for item in nested_objects(value, (nn.Module, cls)):
                tensors = item.parameters() if isinstance(item, nn.Module) else (item,)
                yield from (tensor for tensor in tensors if is_dtensor(tensor))


def _of_wrappers(states: Mapping[str, object], rank: int) -> dict[str, int]:
    """Return the rank as data-parallel coordinate if a module is wrapped for data parallelism; else {}."""
    wrappers = (
        loaded_class("torch.nn.parallel.distributed", "DistributedDataParallel"),
        loaded_class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine"),
    )
    classes = tuple(cls for cls in wrappers if cls is not None)
    return {"dp": rank} if any(isinstance(module, classes) for module in _modules(states)) else {}


def _modules(states: Mapping[str, object]) -> Iterator[nn.Module]:
    return (module for value in states.values() for module in nested_objects(value, nn.Module))
