"""Layers that DeepSpeed's AutoTP and AutoEP have split over the ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.detection import imported, split_layers

__all__ = ["check_split_layers"]


def check_split_layers(kind: str, modules: Iterable[nn.Module]) -> None:
    """Refuse the layers of which this rank holds an unknown part, found by their own type: no engine is needed.

    Raises:
        UsageError: a layer is split by AutoTP or AutoEP; names it.
    """
    mixture = imported("moe.layer", "MoE")
    for module in modules:
        for name, layer in split_layers(module):
            if mixture is None or not isinstance(layer, mixture):
                raise UsageError(
                    f"{kind}: module {name!r} ({type(layer).__name__}) is split by AutoTP or AutoEP, "
                    "and this rank's part is not known: not supported; use DTensor, Megatron-Core or deepspeed.moe"
                )
