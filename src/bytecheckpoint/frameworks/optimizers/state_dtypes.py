"""Choose the dtype of loaded optimizer state: the one that the live optimizer makes itself.

An optimizer makes its state in the dtype of the tensor that it steps: a parameter, or its float32 master weight. Saved
state that has the dtype of the saved optimizer's stepped tensor is cast to the dtype of the live one. State of another
dtype (moments in eight bits) was a choice of the optimizer, and an optimizer of the same type gets it unchanged. Files of
other programs do not name the type: there, one that loads state itself gets it unchanged, where torch would cast it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.optim import Optimizer

from bytecheckpoint.frameworks.base import SavedStates, SavedTensor
from bytecheckpoint.frameworks.optimizers.master_weights import optimizer_state_name
from bytecheckpoint.frameworks.optimizers.own_values import loads_itself
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.representation.shards import MASTER, LiveShard, TensorKey

__all__ = ["SINGLE_VALUE_SLOTS", "StateDtypes", "converts_exactly", "mark_exact_conversions"]

#: States with one value for each parameter. For a parameter without dimensions, the shape does not show that. torch's
#: optimizers hold them on the CPU for parameters on any device, unless capturable or fused.
SINGLE_VALUE_SLOTS = frozenset({"step", "mu_product"})


class StateDtypes:
    """Choose the dtypes in which one optimizer state is loaded.

    Args:
        state_name: name of the state.
        saved: the checkpoint.
        optimizer_types: names of the types of the saved optimizers.
        names: names of each live parameter, in the order in which checkpoints number them.
    """

    def __init__(
        self, state_name: str, saved: SavedStates, optimizer_types: Collection[str], names: Sequence[Sequence[str]]
    ) -> None:
        self._state_name = state_name
        self._saved = saved
        self._optimizer_types = optimizer_types
        self._names = names
        state_names = list(saved.states())
        self._model_states = [
            model for model in state_names if optimizer_state_name(model) == state_name
        ] or state_names

    def choose(
        self,
        found: SavedTensor,
        optimizer: Optimizer,
        shape: tuple[int, ...],
        stepped: torch.dtype,
        live: object,
        *,
        on_device: bool,
    ) -> torch.dtype:
        """Return the dtype in which the live optimizer gets a saved state tensor.

        Args:
            found: the saved state tensor.
            optimizer: the live optimizer.
            shape: shape of the whole parameter.
            stepped: dtype of the tensor that the live optimizer steps.
            live: state tensor that the optimizer has in this slot now, if any.
            on_device: True if the optimizer holds scalars on the parameter's device.
        """
        dtype = dtype_named(found.dtype)
        name = found.key.slot.rpartition(".")[2]
        if name in SINGLE_VALUE_SLOTS or (not found.global_shape and shape):
            # As torch's Optimizer.load_state_dict does: kernels on a device count steps in float32.
            return torch.float32 if name == "step" and on_device and dtype.is_floating_point else dtype
        wanted = live.dtype if isinstance(live, torch.Tensor) else stepped
        if wanted == dtype or not _is_same_category(wanted, dtype):
            return dtype
        return dtype if live is None and self._has_own_dtype(found, optimizer) else wanted

    def _has_own_dtype(self, found: SavedTensor, optimizer: Optimizer) -> bool:
        """Return whether the state has a dtype that optimizers of the live type choose for themselves."""
        name = type(optimizer).__name__
        if self._optimizer_types or not self._saved.is_foreign:
            if not any(saved == name or saved.endswith(f"({name})") for saved in self._optimizer_types):
                return False
        elif not loads_itself(optimizer):
            return False
        fqn = found.key.fqn
        stepped = [self._saved.stored(TensorKey(self._state_name, fqn, MASTER))]
        if stepped[0] is None:
            # States of other names may hold several models, an average of the weights in another precision among them.
            names = self._names[int(fqn[1:])] if fqn.startswith("#") else (fqn,)
            stepped = [self._saved.stored(TensorKey(state, n)) for state in self._model_states for n in names]
        return all(weight is None or weight.dtype != found.dtype for weight in stepped)


def _is_same_category(first: torch.dtype, second: torch.dtype) -> bool:
    return (first.is_floating_point and second.is_floating_point) or (first.is_complex and second.is_complex)


def converts_exactly(saved: str, live: str) -> bool:
    """Return whether every value of dtype `saved` is one of dtype `live`; both are torch's names of dtypes."""
    one, other = dtype_named(saved), dtype_named(live)
    if one == other or not _is_same_category(one, other):
        return one == other
    low, high = torch.finfo(one), torch.finfo(other)
    return high.eps <= low.eps and high.max >= low.max and high.tiny * high.eps <= low.tiny * low.eps


def mark_exact_conversions(shards: list[LiveShard], saved_dtype: str) -> None:
    """Let a load convert `shards` from `saved_dtype` unasked where that loses nothing; rounding needs `cast=True`."""
    for shard in shards:
        if shard.dtype != saved_dtype:
            is_step = shard.key.slot.rpartition(".")[2] == "step"
            shard.converts = is_step or converts_exactly(saved_dtype, shard.dtype)
