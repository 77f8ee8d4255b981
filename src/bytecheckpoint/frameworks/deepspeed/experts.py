"""Name each expert of a mixture of experts by its number within the layer, whichever rank holds it.

Every rank of an expert-parallel group holds some of the experts and numbers them from 0. A checkpoint uses the number
within the layer, so another number of ranks can load it.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from bytecheckpoint.frameworks.deepspeed.detection import imported
from bytecheckpoint.frameworks.modules import ModuleScan
from bytecheckpoint.frameworks.wrappers import walk_modules

__all__ = ["number_experts"]

_LIST = "deepspeed_experts."
_EXPERT = re.compile(r"deepspeed_experts\.(\d+)")


def number_experts(scan: ModuleScan) -> None:
    """Rename the parameters of experts in `scan`: local expert numbers become numbers within the layer."""
    offsets = {prefix: offset for chunk in scan.modules for prefix, offset in _expert_offsets(chunk.module) if offset}
    if not offsets:
        return

    def renamed(name: str) -> str:
        return _EXPERT.sub(lambda m: f"{_LIST}{int(m[1]) + offsets.get(name[: m.start(1)], 0)}", name)

    for tensor in scan.tensors:
        tensor.fqn = renamed(tensor.fqn)
        tensor.aliases = tuple(map(renamed, tensor.aliases))
    scan.values = {renamed(name): value for name, value in scan.values.items()}
    scan.setters = {renamed(name): owner for name, owner in scan.setters.items()}
    scan.parameters = {
        key: (renamed(fqn), tuple(map(renamed, aliases))) for key, (fqn, aliases) in scan.parameters.items()
    }


def _expert_offsets(module: nn.Module) -> list[tuple[str, int]]:
    """Return (prefix of the list of experts, number of this rank's first expert) for each layer."""
    experts_class = imported("moe.experts", "Experts")
    if experts_class is None:
        return []
    return [
        (bare + _LIST, _expert_parallel_rank(owner) * int(owner.num_local_experts))
        for _, bare, owner in walk_modules(module)
        if isinstance(owner, experts_class)
    ]


def _expert_parallel_rank(experts: Any) -> int:
    group = next((p.group_name for p in experts.parameters()), None)
    groups = imported("utils.groups", "_get_expert_parallel_group_dict")()
    return int(imported("utils.groups", "_get_expert_parallel_rank")(group)) if group in groups else 0
