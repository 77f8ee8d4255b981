"""Show the trees of optimizers under the names that a layout gives their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.optimizer_tree import comparable_bytes
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS
from bytecheckpoint.frameworks.optimizers.wrapped import wrapped_slots

__all__ = ["renamed_trees"]


def renamed_trees(
    state_name: str, trees: Sequence[Mapping[str, Any]], names: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the trees of all ranks with other names of parameters.

    Several parameters may become one, which has one set of hyperparameters and one value of each kind.

    Args:
        state_name: name of the state.
        trees: decoded trees (`tree.py` documents their form).
        names: names that each of the checkpoint's names becomes; the others stay.

    Raises:
        IncompatibleCheckpointError: parameters that become one have different hyperparameters or values, or a value follows
            no elements.
    """
    settings = _JoinedParameters(state_name, "hyperparameters")
    values = _JoinedParameters(state_name, "values")
    return [
        {
            **tree,
            "groups": [_renamed_group(group, names, settings) for group in tree["groups"]],
            "state": _renamed_values(tree["state"], names, values),
            "aliases": _renamed_aliases(tree.get("aliases", {}), names),
        }
        for tree in trees
    ]


class _JoinedParameters:
    """A comparison of the parameters that a layout joins.

    Args:
        state_name: name of the state.
        what: kind of the values that are compared, for the message.
    """

    def __init__(self, state_name: str, what: str) -> None:
        self._state_name = state_name
        self._what = what
        self._known: dict[str, tuple[str, Mapping[Any, Any], bytes]] = {}

    def add(self, name: str, stored: str, found: Mapping[Any, Any], encoded: bytes) -> None:
        """Note what the stored parameter brings to the one that it becomes.

        Raises:
            IncompatibleCheckpointError: another one brought something else.
        """
        first, known, own = self._known.setdefault(name, (stored, found, encoded))
        if own == encoded:
            return
        every = {**known, **found}
        differ = [key for key in every if comparable_bytes([known.get(key)]) != comparable_bytes([found.get(key)])]
        raise IncompatibleCheckpointError(
            f"{self._state_name}: the layout joins {first} and {stored} in {name}, and their {self._what} differ in "
            f"{', '.join(map(repr, differ))}: leave the optimizer out, or load it under its own names"
        )


def _renamed_group(
    group: Mapping[str, Any], names: Mapping[str, Sequence[str]], settings: _JoinedParameters
) -> dict[str, Any]:
    own = {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}
    encoded = comparable_bytes(own)
    params = {name: stored for stored in group["params"] for name in names.get(stored, (stored,))}
    for stored in group["params"]:
        for name in names.get(stored, (stored,)):
            settings.add(name, stored, own, encoded)
    return {"params": list(params), **own}


def _renamed_values(
    state: Mapping[str, Mapping[Any, Any]], names: Mapping[str, Sequence[str]], values: _JoinedParameters
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stored, own in state.items():
        if stored in names and wrapped_slots(own):
            raise IncompatibleCheckpointError(
                f"the state of {stored} has {', '.join(map(repr, wrapped_slots(own)))} in a form of its optimizer's own, "
                "which does not follow the parameter's elements: load the optimizer without a layout, or leave it out"
            )
        encoded = comparable_bytes(own)
        for name in names.get(stored, (stored,)):
            values.add(name, stored, own, encoded)
            found[name] = own
    return found


def _renamed_aliases(aliases: Mapping[str, Sequence[str]], names: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stored, others in aliases.items():
        name, *more = names.get(stored, (stored,))
        more += [alias for other in others for alias in names.get(other, (other,))]
        found[name] = [alias for alias in dict.fromkeys(more) if alias != name]
    return found
