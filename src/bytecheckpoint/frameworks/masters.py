"""Master weights: the full-precision copies that mixed-precision engines keep of low-precision parameters.

An engine that trains in bfloat16 (ZeRO, Megatron's distributed optimizer) steps float32 copies of the weights, and rounds
them into the model. In a checkpoint the model's own weight is `model/<fqn>` as ever, and the copy is one more optimizer
state of the parameter: `optimizer/state/<fqn>/master`. So a model in full precision takes its weights from the copies, one
in low precision takes those that it had, and an engine takes both. An engine whose model is in full precision saves none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import SavedStates, SavedTensor

__all__ = ["MASTER", "is_foreign_master", "optimizer_kind", "precise"]

#: Name of the optimizer state that is a parameter's master weight.
MASTER = "master"


def optimizer_kind(kind: str) -> str:
    """Name of the state that holds the optimizer of the modules in `kind`, where nothing else says so."""
    return "optimizer" if kind == "model" else f"{kind}_optimizer"


def precise(
    saved: SavedStates, found: SavedTensor, names: Sequence[str], dtype: str, masters: str | None = None
) -> SavedTensor:
    """The saved tensor that a parameter of `dtype` is filled with.

    Args:
        saved: the checkpoint.
        found: the weight as the model had it.
        names: all names of the parameter.
        dtype: torch's name of the dtype that is wanted.
        masters: the kind that holds the master weights; None: that of `optimizer_kind`.

    Returns:
        `found`, or the master weight where that alone is of `dtype`.
    """
    if found.dtype == dtype:
        return found
    master = saved.find(masters or optimizer_kind(found.key.kind), (found.key.fqn, *names), MASTER)
    fits = master is not None and master.dtype == dtype and master.global_shape == found.global_shape
    return master if master is not None and fits else found


def is_foreign_master(
    slot: str, live: Mapping[Any, Any], optimizer: Optimizer, saved_types: frozenset[str] | set[str]
) -> bool:
    """Whether a saved optimizer state is a master weight that `optimizer` would carry along, never stepped.

    An optimizer that itself names a state so has it already, or is of a type that the checkpoint was saved from.

    Args:
        slot: name of the saved state.
        live: the parameter's state now.
        optimizer: the one that is loaded into.
        saved_types: names of the types of the optimizers that were saved.
    """
    return slot == MASTER and MASTER not in live and type(optimizer).__name__ not in saved_types
