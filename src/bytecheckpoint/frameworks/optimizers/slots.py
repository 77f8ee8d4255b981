"""Check that saved state belongs to the algorithm of the live optimizer, by the names of its state tensors.

A new optimizer has no state before its first step, so the slots of torch's optimizers are listed here. Other optimizers
are checked only against state that they have already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from bytecheckpoint.representation.shards import MASTER

__all__ = ["SlotCheck", "fixed_settings", "slots_of"]

_ADAM = ({"exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"})
#: Name of a class -> the slots that every parameter has, and those that some settings add.
_SLOTS: dict[str, tuple[set[str], set[str]]] = {
    "ASGD": ({"eta", "mu", "ax"}, set()),
    "Adadelta": ({"square_avg", "acc_delta"}, set()),
    "Adafactor": (set(), {"row_var", "col_var", "variance"}),
    "Adagrad": ({"sum"}, set()),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": ({"exp_avg", "exp_inf"}, set()),
    "Muon": (
        set(),
        {"momentum_buffer", "momentum_average"},
    ),  # SGD's buffer is a sum: the second name distinguishes them
    "NAdam": ({"exp_avg", "exp_avg_sq", "mu_product"}, set()),
    "RAdam": ({"exp_avg", "exp_avg_sq"}, set()),
    "RMSprop": ({"square_avg"}, {"momentum_buffer", "grad_avg"}),
    "Rprop": ({"prev", "step_size"}, set()),
    "SGD": (set(), {"momentum_buffer"}),
    "SparseAdam": ({"exp_avg", "exp_avg_sq"}, set()),
}
_LISTED = frozenset(slot for needed, optional in _SLOTS.values() for slot in needed | optional)
#: Slots that many algorithms share, or that belong to an engine and not to the algorithm.
_COMMON = frozenset({"step", MASTER})


class SlotCheck:
    """Distinguish state of a live optimizer's own algorithm from that of other algorithms.

    Args:
        optimizer: the live optimizer.
        saved_types: names of the types of all saved optimizers.
    """

    def __init__(self, optimizer: Optimizer, saved_types: Collection[str]) -> None:
        self._own = slots_of(type(optimizer))
        self._saved_types = saved_types
        name = type(optimizer).__name__
        self._is_same = name in saved_types and (self._own is None or len(saved_types) == 1)

    def is_foreign(self, live: Mapping[Any, Any], saved: Collection[Any]) -> bool:
        """Return whether the saved state of a parameter belongs to another algorithm.

        Args:
            live: the parameter's state now.
            saved: the slots that the checkpoint has of the parameter.
        """
        slots = {slot.partition(".")[0] for slot in saved if isinstance(slot, str)} - _COMMON
        if not slots:
            return False
        if self._is_same:
            # A class of that name in another package may be something else.
            return self._own is not None and not self._own[0] <= slots
        if self._own is not None:
            needed, optional = self._own
            # A slot that is not listed may be one that a subclass or a newer torch has added.
            return slots <= _LISTED and not needed <= slots <= needed | optional
        known = {slot for slot in live if isinstance(slot, str)} - _COMMON
        return bool(known) and not known & slots

    def is_other_algorithm(self) -> bool:
        """Return whether no saved optimizer can have had state like the live one's."""
        own, saved = self._own, self._saved_types
        return own is not None and bool(saved) and all(_usual(_SLOTS.get(name, own)) != _usual(own) for name in saved)


def fixed_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings that the optimizer's class fixes: Adam's differ, and must not turn an AdamW into an Adam."""
    return {"decoupled_weight_decay": True} if any(c.__name__ == "AdamW" for c in type(optimizer).__mro__) else {}


def _usual(slots: tuple[set[str], set[str]]) -> set[str]:
    needed, optional = slots
    return needed or optional


def slots_of(cls: type) -> tuple[set[str], set[str]] | None:
    """Return the slots of a class of torch, of one that inherits its step from that, or of a view of such an optimizer."""
    inherits = getattr(getattr(cls, "step", None), "__module__", "").startswith("torch.optim.")
    places = "torch.optim." if inherits else __name__.partition(".")[0]
    names = [c.__name__ for c in cls.__mro__ if c.__module__.startswith(places)]
    return next((_SLOTS[name] for name in names if name in _SLOTS), None)
