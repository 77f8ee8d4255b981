"""Master weights: the full-precision copies that mixed-precision engines step.

An engine that trains in bfloat16 (ZeRO, Megatron's distributed optimizer) steps float32 copies of the weights and rounds
them into the model. A checkpoint holds the model's own weight as `model/<fqn>`, and the copy as one more optimizer state
of the parameter: `optimizer/state/<fqn>/master`. A model in full precision loads its weights from the copies, a model in
low precision loads its own, and an engine loads both. An engine whose model is in full precision saves no copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import SavedStates, SavedTensor
from bytecheckpoint.representation.shards import MASTER, TensorKey

__all__ = ["choose_saved_weight", "is_unused_master", "optimizer_state_name"]


def optimizer_state_name(state_name: str) -> str:
    """Return the name of the state that holds the optimizer of the modules in state `state_name`, by default."""
    return "optimizer" if state_name == "model" else f"{state_name}_optimizer"


def choose_saved_weight(
    saved: SavedStates, found: SavedTensor, names: Sequence[str], dtype: str, master_state: str | None = None
) -> SavedTensor:
    """Choose the saved tensor from which a parameter is loaded: the model's weight or the master weight.

    Args:
        saved: the checkpoint.
        found: the model's weight.
        names: all names of the parameter.
        dtype: torch's name of the live parameter's dtype.
        master_state: name of the state that holds the master weights; None: `optimizer_state_name` of the weight's.

    Returns:
        The master weight where only that has `dtype`, else `found`.
    """
    if found.dtype == dtype or found.key.slot:  # a hook computes it
        return found
    # By the checkpoint's names: master weights follow the weights, whether or not the load selects the optimizer.
    saved_names = dict.fromkeys((found.key.fqn, *saved.names_of(found.key.state, names)))
    state_of_masters = master_state or optimizer_state_name(found.key.state)
    masters = (saved.stored(TensorKey(state_of_masters, name, MASTER)) for name in saved_names)
    master = next(filter(None, masters), None)
    fits = master is not None and master.dtype == dtype and master.global_shape == found.global_shape
    return master if master is not None and fits else found


def is_unused_master(
    slot: str, live: Mapping[Any, Any], optimizer: Optimizer, saved_types: frozenset[str] | set[str]
) -> bool:
    """Return whether a saved optimizer state is a master weight that `optimizer` would hold without ever stepping it.

    An optimizer that itself has a state of that name either has it already, or has a type that the checkpoint was saved
    from.

    Args:
        slot: name of the saved state.
        live: the parameter's state now.
        optimizer: the live optimizer.
        saved_types: names of the saved optimizers' types.
    """
    return slot == MASTER and MASTER not in live and type(optimizer).__name__ not in saved_types
