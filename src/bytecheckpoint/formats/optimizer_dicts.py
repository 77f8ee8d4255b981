"""Know the forms of an optimizer's `state_dict`: nested or flat, with names or numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["flat_optimizer", "names_of_parameters", "nested_optimizer"]

#: Beginnings of the keys of a flat state_dict.
_STATE, _GROUPS = "state.", "param_groups."


def nested_optimizer(tree: Any, identity: Callable[[dict[str, Any]], object] = repr) -> Any:
    """Return a flat state_dict of an optimizer, as `flatten_optimizer_state_dict` makes it, nested; other values unchanged.

    Args:
        tree: "state.FQN.slot" and "param_groups.FQN.lr" with their values.
        identity: function whose results are equal for the settings of parameters of one group.
    """
    if not isinstance(tree, dict) or not all(str(key).startswith((_STATE, _GROUPS)) for key in tree):
        return tree
    slots: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, item in tree.items():
        found, rest = (slots, key[len(_STATE) :]) if key.startswith(_STATE) else (settings, key[len(_GROUPS) :])
        fqn, _, name = rest.rpartition(".")
        if name != "param_names":  # those of the whole group, in its order
            found.setdefault(fqn, {})[name] = item
    groups: dict[object, dict[str, Any]] = {}
    for fqn, group in settings.items():
        groups.setdefault(identity(group), {"params": [], **group})["params"].append(fqn)
    return {"state": slots, "param_groups": list(groups.values())} if settings else tree


def flat_optimizer(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict, with names of parameters, in the flat form; see `nested_optimizer`."""
    slots = {f"{_STATE}{fqn}.{slot}": item for fqn, found in tree["state"].items() for slot, item in found.items()}
    settings = {
        f"{_GROUPS}{fqn}.{name}": item
        for group in tree["param_groups"]
        for fqn in group["params"]
        for name, item in group.items()
        if name not in {"params", "param_names"}
    }
    return slots | settings


def names_of_parameters(tree: Any) -> dict[Any, str] | None:
    """Return the name of each parameter in an optimizer's state_dict; None if the tree is none.

    Its "state" may have further entries, with texts as keys, that belong to no parameter.
    """
    if not (isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys() and isinstance(tree["state"], dict)):
        return None
    groups = tree["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    names: dict[Any, str] = {}
    for group in groups:
        params, given = group.get("params"), group.get("param_names")
        if not isinstance(params, list) or {*map(type, params)} not in (set(), {int}, {str}):
            return None
        if not isinstance(given, list) or [*map(type, given)] != [str] * len(params):
            given = [p if isinstance(p, str) else f"#{p}" for p in params]
        names.update(zip(params, given, strict=True))
    slots = {key: found for key, found in tree["state"].items() if key in names}
    others = {key: found for key, found in tree["state"].items() if key not in names}
    if all(isinstance(name, str) for name in names):  # a tied parameter may have its state under each of its names
        forms = [found.keys() for found in slots.values() if isinstance(found, dict)]
        tied = {key for key, found in others.items() if isinstance(found, dict) and found.keys() in forms}
        names = {**{key: key for key in tied if isinstance(key, str)}, **names}
    sound = all(isinstance(found, dict) for found in slots.values())
    return names if sound and all(type(key) is str for key in others if key not in names) else None
