"""The whole of a Megatron run's weights and optimizer state, put together from live memory by Megatron's own tables.

Independent of the adapter: every rank says which elements of which tensor of the whole model it holds, by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks.megatron.worlds import Trainer

#: (key, shape of the whole, numbers of the elements, values)
Part = tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, master weights and state by the keys of `bytecheckpoint.open`, on every rank. A collective."""
    if trainer.layout.overlap:
        # Until the next forward pass a rank has old values of what others step.
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
    parts: list[list[Part]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, list(_parts(trainer)))
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for key, shape, numbers, values in (part for of_rank in parts for part in of_rank):
        tensor = found.setdefault(key, torch.zeros(shape, dtype=values.dtype)).view(-1)
        seen = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool)).view(-1)
        again = seen[numbers]
        assert torch.equal(tensor[numbers][again], values[again]), f"copies of {key} differ"
        tensor[numbers] = values
        seen[numbers] = True
    assert all(seen.all() for seen in filled.values())
    return found


def groups(trainer: Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of a parameter, the param group that it is in), of what this rank steps."""
    names = {id(p): _name(trainer, chunk, local) for chunk in trainer.bare for local, p in chunk.named_parameters()}
    for optimizer in trainer.optimizer.chained_optimizers:
        found = {id(t): group for group in optimizer.optimizer.param_groups for t in group["params"]}
        for parameter, tensor, _ in _stepped(optimizer):
            yield names[id(parameter)], found[id(tensor)]


def _parts(trainer: Trainer) -> Iterator[Part]:
    places: dict[int, tuple[str, tuple[int, ...], torch.Tensor]] = {}
    for chunk in trainer.bare:
        for local, parameter in chunk.named_parameters():
            name = _name(trainer, chunk, local)
            shape, numbers = _numbers(trainer, name, parameter)
            places[id(parameter)] = name, shape, numbers
            yield f"model/{name}", shape, numbers.flatten(), parameter.detach().flatten().clone()
    for optimizer in trainer.optimizer.chained_optimizers:
        for parameter, tensor, start in _stepped(optimizer):
            name, shape, numbers = places[id(parameter)]
            mine = numbers.flatten()[start : start + tensor.numel()]
            state = dict(optimizer.optimizer.state.get(tensor, {}))
            if trainer.layout.bf16 or trainer.layout.fp16:
                state["master"] = tensor.detach()
            for slot, value in state.items():
                key = f"optimizer/state/{name}/{slot}"
                if value.numel() == tensor.numel() and slot != "step":
                    yield key, shape, mine, value.flatten().clone()
                else:
                    yield key, (), torch.zeros(1, dtype=torch.int64), value.reshape(1).clone()


def _name(trainer: Trainer, chunk: Any, local: str) -> str:
    """The name in a model without parallelism: layers and experts have the numbers that they have there."""
    from megatron.core import parallel_state

    if local == "output_layer.weight" and trainer.layout.tied:
        return "embedding.word_embeddings.weight"
    if found := re.match(r"decoder\.layers\.(\d+)\.", local):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        local = f"decoder.layers.{number}.{local[found.end() :]}"
    if found := re.search(r"\.local_experts\.(\d+)\.", local):
        here = 4 // trainer.layout.ep
        number = parallel_state.get_expert_model_parallel_rank() * here + int(found[1])
        local = f"{local[: found.start()]}.local_experts.{number}.{local[found.end() :]}"
    return local


def _numbers(trainer: Trainer, name: str, parameter: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    """The shape of the whole tensor, and which of its elements this parameter has."""
    from megatron.core import parallel_state

    expert = ".local_experts." in name
    size, rank = (
        (parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank())
        if expert
        else (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank())
    )
    if not getattr(parameter, "tensor_model_parallel", False):
        size, rank = 1, 0
    dim = max(getattr(parameter, "partition_dim", 0), 0)
    shape = list(parameter.shape)
    shape[dim] *= size
    every = torch.arange(torch.Size(shape).numel()).reshape(shape)
    # The gate and the rest are one tensor, of which a rank has a part of each.
    halves = 2 if "linear_fc1" in name and trainer.layout.gated else 1
    mine = torch.cat([half.chunk(size, dim)[rank] for half in every.chunk(halves, dim)], dim)
    return tuple(shape), mine


def _stepped(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """(parameter, what is stepped in its place, number of its first element in the parameter)."""
    inner = optimizer.optimizer
    if hasattr(optimizer, "model_param_group_index_map"):
        for parameter, (group, place) in optimizer.model_param_group_index_map.items():
            run = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, inner.param_groups[group]["params"][place], run.start
        return
    lows = getattr(optimizer, "float16_groups", ())
    highs = getattr(optimizer, "fp32_from_float16_groups", ())
    pairs = {
        id(main): parameter
        for low, high in zip(lows, highs, strict=True)
        for parameter, main in zip(low, high, strict=True)
    }
    for group in inner.param_groups:
        for tensor in group["params"]:
            yield pairs.get(id(tensor), tensor), tensor, 0
