"""Mixtures of experts: one name for each expert, whichever rank has it.

A rank of an expert-parallel group has some of the experts, numbered from 0, as every other rank of it does. In a
checkpoint an expert has its number in the layer, so that any number of ranks may share them.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from bytecheckpoint.frameworks.deepspeed.installed import loaded
from bytecheckpoint.frameworks.modules import ModuleScan, walk

__all__ = ["number_experts"]

_LIST = "deepspeed_experts."
_EXPERT = re.compile(r"deepspeed_experts\.(\d+)")


def number_experts(scan: ModuleScan) -> None:
    """Give the parameters of experts, in a scan of modules, the numbers that these have in their layers."""
    first = {prefix: number for chunk in scan.chunks for prefix, number in _layers(chunk.module) if number}
    if not first:
        return

    def renamed(name: str) -> str:
        return _EXPERT.sub(lambda m: f"{_LIST}{int(m[1]) + first.get(name[: m.start(1)], 0)}", name)

    for tensor in scan.tensors:
        tensor.fqn = renamed(tensor.fqn)
        tensor.aliases = tuple(map(renamed, tensor.aliases))
    scan.values = {renamed(name): value for name, value in scan.values.items()}
    scan.value_owners = {renamed(name): owner for name, owner in scan.value_owners.items()}
    scan.parameters = {
        key: (renamed(fqn), tuple(map(renamed, aliases))) for key, (fqn, aliases) in scan.parameters.items()
    }


def _layers(module: nn.Module) -> list[tuple[str, int]]:
    """(prefix of the list of experts, number of the first one here) for each layer."""
    kind = loaded("moe.experts", "Experts")
    if kind is None:
        return []
    return [
        (bare + _LIST, _rank(owner) * int(owner.num_local_experts))
        for _, bare, owner in walk(module)
        if isinstance(owner, kind)
    ]


def _rank(experts: Any) -> int:
    """Rank among those that share the experts of a layer."""
    group = next((p.group_name for p in experts.parameters()), None)
    known = loaded("utils.groups", "_get_expert_parallel_group_dict")()
    return int(loaded("utils.groups", "_get_expert_parallel_rank")(group)) if group in known else 0
