"""The full weights and optimizer state of a Megatron run, gathered from live memory by Megatron's own tables.

Independent of the adapter: every rank says which elements of which tensor of the full model it holds, by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.models import main_params
from tests.support.megatron.training import Trainer

#: (key, shape of the full tensor, numbers of the elements, values)
HeldElements = tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]


def full_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights, master weights and state by the keys of `bytecheckpoint.open`, on every rank. A collective."""
    if trainer.layout.overlap:
        # Until the next forward pass a rank has old values of the elements that other ranks step.
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
    gathered: list[list[HeldElements]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(_held_elements(trainer)))
    found: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for key, shape, numbers, values in (item for of_rank in gathered for item in of_rank):
        tensor = found.setdefault(key, torch.zeros(shape, dtype=values.dtype)).view(-1)
        seen = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool)).view(-1)
        again = seen[numbers]
        assert torch.equal(tensor[numbers][again], values[again]), f"copies of {key} differ"
        tensor[numbers] = values
        seen[numbers] = True
    assert all(seen.all() for seen in filled.values())
    return found


def param_groups_by_name(trainer: Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a parameter, its param group) for the parameters that this rank steps."""
    names = {id(p): _name(trainer, chunk, local) for chunk in trainer.bare for local, p in chunk.named_parameters()}
    for optimizer in trainer.optimizer.chained_optimizers:
        found = {id(t): group for group in optimizer.optimizer.param_groups for t in group["params"]}
        for parameter, tensor, _ in main_params(optimizer):
            yield names[id(parameter)], found[id(tensor)]


def _held_elements(trainer: Trainer) -> Iterator[HeldElements]:
    places: dict[int, tuple[str, tuple[int, ...], torch.Tensor]] = {}
    for chunk in trainer.bare:
        for local, parameter in chunk.named_parameters():
            name = _name(trainer, chunk, local)
            shape, numbers = _numbers(trainer, name, parameter)
            places[id(parameter)] = name, shape, numbers
            yield f"model/{name}", shape, numbers.flatten(), parameter.detach().flatten().clone()
    for optimizer in trainer.optimizer.chained_optimizers:
        for parameter, tensor, start in main_params(optimizer):
            name, shape, numbers = places[id(parameter)]
            held = numbers.flatten()[start : start + tensor.numel()]
            state = dict(optimizer.optimizer.state.get(tensor, {}))
            if trainer.layout.bf16 or trainer.layout.fp16:
                state["master"] = tensor.detach()
            for slot, value in state.items():
                key = f"optimizer/state/{name}/{slot}"
                if value.numel() == tensor.numel() and slot != "step":
                    yield key, shape, held, value.flatten().clone()
                else:
                    yield key, (), torch.zeros(1, dtype=torch.int64), value.reshape(1).clone()


def _name(trainer: Trainer, chunk: Any, local: str) -> str:
    """Return the name in a model without parallelism, with its numbers of layers and experts."""
    from megatron.core import parallel_state

    if local == "output_layer.weight" and trainer.layout.tied:
        return "embedding.word_embeddings.weight"
    if found := re.match(r"decoder\.layers\.(\d+)\.", local):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        local = f"decoder.layers.{number}.{local[found.end() :]}"
    if found := re.search(r"\.local_experts\.(\d+)\.", local):
        experts_per_rank = 4 // trainer.layout.ep
        number = parallel_state.get_expert_model_parallel_rank() * experts_per_rank + int(found[1])
        local = f"{local[: found.start()]}.local_experts.{number}.{local[found.end() :]}"
    return local


def _numbers(trainer: Trainer, name: str, parameter: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the shape of the full tensor, and which of its elements this parameter holds."""
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
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    # A fused gate is two tensors in one: a rank has a part of each.
    halves = 2 if "linear_fc1" in name and trainer.layout.gated else 1
    held = torch.cat([half.chunk(size, dim)[rank] for half in numbers.chunk(halves, dim)], dim)
    return tuple(shape), held
