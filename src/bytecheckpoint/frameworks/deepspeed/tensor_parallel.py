"""Find the parts of parameters that ranks hold under DeepSpeed's AutoTP.

AutoTP puts a layer of its own in the place of a linear layer or an embedding. The parameter keeps its name, and its memory
is this rank's part. For its own checkpoints DeepSpeed writes down beside each such parameter how it was cut: along which
dimension, and how much each rank has. A fused projection is cut part by part, so a rank has several intervals of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.detection import imported, split_layers
from bytecheckpoint.frameworks.deepspeed.partitions import full_shape
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.flat_ranges import FlattenedBox, JoinedBoxes
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["AutoTPShard", "find_autotp_shards"]

# Layers with a correct description. Others inherit a wrong one (Conv1D layers are cut along the other
# dimension), or repeat elements on several ranks.
_DESCRIBED = frozenset(
    {
        "GateUpPack_LinearLayer",
        "HiddenParallelEmbedding",
        "LinearAllreduce",
        "LinearAllreduceWithReplicatedInput",
        "LinearLayer",
        "LmHeadLinearAllreduce",
        "SubParamLinearAllreduce",
        "SubParamLinearLayer",
        "VocabParallelEmbedding",
        "VocabParallelLinear",
        "fused_LinearLayer",
    }
)
_DESCRIPTION = "ds_autotp_universal_checkpoint_meta"  # attribute of a parameter


@dataclass(frozen=True, slots=True)
class AutoTPShard:
    """This rank's part of a parameter: intervals along one dimension, joined.

    Attributes:
        shape: shape of the whole parameter.
        dim: the dimension that is cut.
        intervals: (first, length) of each interval in the whole parameter, in the order of the part.
    """

    shape: tuple[int, ...]
    dim: int
    intervals: tuple[tuple[int, int], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self._lengths(sum(length for _, length in self.intervals))

    @property
    def box(self) -> FlattenedBox | JoinedBoxes:
        """The boxes that the part joins, as flat ranges of the part need them. Several are along dimension 0."""
        boxes = tuple(FlattenedBox(self._offsets(first), self._lengths(n)) for first, n in self.intervals)
        return boxes[0] if len(boxes) == 1 else JoinedBoxes(boxes)

    def shards(self, key: TensorKey, data: torch.Tensor, aliases: tuple[str, ...]) -> Iterator[LiveShard]:
        """Yield the boxes of the part as views of `data`, a tensor of the part's shape."""
        at = 0
        for first, length in self.intervals:
            found: list[LiveShard] = []
            add_shards(found, key, data, aliases=aliases)
            (shard,) = found
            shard.data = shard.data.narrow(self.dim, at, length)
            shard.global_shape, shard.offsets, shard.lengths = self.shape, self._offsets(first), self._lengths(length)
            yield shard
            at += length

    def _offsets(self, first: int) -> tuple[int, ...]:
        return tuple(first if dim == self.dim else 0 for dim in range(len(self.shape)))

    def _lengths(self, length: int) -> tuple[int, ...]:
        return tuple(length if dim == self.dim else extent for dim, extent in enumerate(self.shape))


def find_autotp_shards(state_name: str, modules: Iterable[nn.Module]) -> dict[int, AutoTPShard]:
    """Find the parameters of which this rank holds a part, by the types of their layers: no engine is needed.

    Returns:
        id of a parameter -> the part.

    Raises:
        UsageError: a layer is split in a way that is not known; names it.
    """
    parts: dict[int, AutoTPShard] = {}
    grid = imported("utils.groups", "mpu")
    size_of = getattr(grid, "get_tensor_model_parallel_world_size", None)
    mixture = imported("moe.layer", "MoE")
    for module in modules:
        for name, layer in split_layers(module):
            if mixture is not None and isinstance(layer, mixture):
                continue  # its experts have names of their own
            where = f"{state_name}: module {name!r} ({type(layer).__name__})"
            if type(layer) is not imported("module_inject.layers", type(layer).__name__) or (
                type(layer).__name__ not in _DESCRIBED
            ):
                raise UsageError(
                    f"{where} is split by AutoTP or AutoEP in a way that is not supported: leave it whole (a layer_spec "
                    'with partition_type "skip"), or use DTensor, Megatron-Core or deepspeed.moe'
                )
            for own_name, parameter in layer.named_parameters(recurse=False):
                part = _part_of(f"{where}, {own_name}", parameter, layer)
                if part is not None:
                    parts[id(parameter)] = part
        if size_of is not None and (size := size_of()) > 1:
            _refuse_unknown_parts(state_name, module, parts, size)
    return parts


def _refuse_unknown_parts(state_name: str, module: nn.Module, parts: Mapping[int, AutoTPShard], size: int) -> None:
    """Refuse parameters that are marked as split, but not by AutoTP: the program's own grid (`mpu`) splits them."""
    for name, parameter in module.named_parameters():
        if vars(parameter).get("tensor_model_parallel") and id(parameter) not in parts:
            raise UsageError(
                f"{state_name}/{name} is tensor-parallel over {size} ranks of the program's mpu, which does not say "
                "how the "
                "tensors are split: not supported; use AutoTP, DTensor or Megatron-Core for tensor parallelism"
            )


def _part_of(where: str, parameter: torch.Tensor, layer: Any) -> AutoTPShard | None:
    """Return this rank's part of one parameter; None: it is whole on every rank.

    Raises:
        UsageError: DeepSpeed does not describe the part, or describes another one.
    """
    description: Mapping[str, Any] | None = vars(parameter).get(_DESCRIPTION)
    if description is not None and description["replicated"]:
        return None
    part = None if description is None else _described_part(description, int(layer.tp_index))
    if part is None:
        reason = "nothing describes it" if description is None else description["conversion"]["unsupported_reason"]
        raise UsageError(
            f"{where}: how AutoTP has split this parameter is not known ({reason or 'it is cut into many blocks'}): leave "
            "the layer whole"
        )
    if part.local_shape != full_shape(parameter):
        raise UsageError(
            f"{where} has shape {full_shape(parameter)} on this rank, and DeepSpeed describes a part of shape "
            f"{part.local_shape} of {part.shape}: not supported (the layer was changed after AutoTP split it)"
        )
    return part


def _described_part(description: Mapping[str, Any], rank: int) -> AutoTPShard | None:
    """Return the part that `rank` of the tensor-parallel group has; None: more than intervals describe it."""
    shape, logical, dim = (description[name] for name in ("original_shape", "logical_shape", "partition_dim"))
    # For each sub-parameter the widths of all ranks; an ordinary layer is one sub-parameter.
    widths = description["sub_param_shard_widths"] or [description["partition_sizes"]]
    if description["conversion"]["unsupported_reason"] or dim is None or None in widths:
        return None
    intervals: list[tuple[int, int]] = []
    first = 0
    for of_ranks in widths:
        intervals.append((first + sum(of_ranks[:rank]), of_ranks[rank]))
        first += sum(of_ranks)
    if first != logical[dim]:
        return None
    if len(shape) == 2 and dim == len(logical) - 1:
        return AutoTPShard(tuple(shape), 1, tuple(intervals)) if len(intervals) == 1 else None
    # The rows may be seen as a grid (experts by rows), of which one dimension is cut.
    rows = logical[:-1] if len(shape) == 2 else logical
    outer, inner = prod(rows[:dim]), prod(rows[dim + 1 :])
    return AutoTPShard(
        tuple(shape),
        0,
        tuple(
            ((number * first + start) * inner, length * inner)
            for number in range(outer)
            for start, length in intervals
            if length
        ),
    )
