"""Names of tensors in checkpoints of Megatron-Core, which stack the layers of a model and the experts of a layer."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["EXPERT", "LAYER", "PARAM", "SLOTS", "block_of", "model_or_slot", "place_in_stack", "unstacked"]

_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
"""Place in a name with the number of a layer."""
_EXPERTS = re.compile(r"(?:^|\.)experts\.experts\.")
EXPERT: Final = re.compile(r"\.local_experts\.(\d{1,9})\.")
"""Place in a name with the number of an expert."""
PARAM: Final = "param"
"""Slot of the masters of parameters in Megatron's optimizers."""
#: The same and another name of it, and the name elsewhere.
SLOTS: Final = {PARAM: "fp32", "fp32_param": "fp32"}


def model_or_slot(name: str) -> tuple[str, str]:
    """Return the slot of the optimizer that a tensor is, "" for one of the model, and the parameter's name."""
    found = _SLOT.fullmatch(name)
    return (SLOTS.get(found[1], found[1]), found[2]) if found else ("", name)


def unstacked(key: str) -> tuple[str, int]:
    """Return the pattern of the names of a stacked tensor's parts, and the number of its stacked dimensions.

    >>> unstacked("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    template, depth = key.replace("{", "{{").replace("}", "}}"), 0
    if found := _LAYERS.search(template):
        template, depth = f"{template[: found.end()]}{{}}.{template[found.end() :]}", 1
    if found := _EXPERTS.search(template):
        begin = found.end() - len("experts.")
        template, depth = f"{template[:begin]}local_experts.{{}}.{template[found.end() :]}", depth + 1
    return template, depth


def place_in_stack(fqn: str, by_layer: bool) -> tuple[str, tuple[int, ...]]:
    """Return the name of the stacked tensor of which a tensor is a part, and the place there: layer, expert.

    Args:
        fqn: name of a tensor.
        by_layer: true if layers are stacked; experts always are.

    >>> place_in_stack("decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight", by_layer=True)
    ('decoder.layers.mlp.experts.experts.linear_fc1.weight', (3, 12))
    """
    at: list[int] = []
    if by_layer and (found := LAYER.search(fqn)):
        fqn = f"{fqn[: found.start(1)]}{fqn[found.end() :]}"
        at.append(int(found[1]))
    if found := EXPERT.search(fqn):
        fqn = f"{fqn[: found.start()]}.experts.{fqn[found.end() :]}"
        at.append(int(found[1]))
    return fqn, tuple(at)


def block_of(fqn: str) -> str | None:
    """Return the beginning of a tensor's name that is the same for all layers of a model, None for a tensor of no layer.

    >>> block_of("decoder.layers.3.mlp.linear_fc1.weight")
    'decoder.layers.'
    """
    found = LAYER.search(fqn)
    return None if found is None else fqn[: found.start(1)]
