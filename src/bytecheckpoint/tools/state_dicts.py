"""Show the states of a checkpoint as the nested dicts in which programs of torch keep them, with stand-ins for tensors."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.representation.values.codec import leaves_with_paths

__all__ = ["mapped", "state_dict_of"]

_log = logging.getLogger("bytecheckpoint")


def state_dict_of(view: CheckpointView, state: str, *, param_names: bool = False) -> Any:
    """Return the values of a state in their containers, with an `Entry` for each tensor.

    An optimizer becomes {"state": {name: {slot: value}}, "param_groups": [...]} with parameters by name, as torch's
    `get_optimizer_state_dict` returns it, and further entries that its own state_dict has; modules become {name: tensor}.

    Args:
        view: the checkpoint.
        state: name of the state.
        param_names: give param groups the names of their parameters, as those of an optimizer of named parameters have
            them, and leave out further entries. DCP loads what the live optimizer has, so that others leave them, and
            makes texts of keys.

    Raises:
        IncompatibleCheckpointError: a value is an instance of a class that is not registered here.
    """
    tensors = {key: view[key] for key in view.keys_of(state) if view.stored_under(key) is not None}
    groups = f"{state}/param_groups"
    if groups in view:
        found = _optimizer(view, state, tensors, own=not param_names)
        if param_names:
            found["param_groups"] = [{**group, "param_names": [*group["params"]]} for group in found["param_groups"]]
        return found
    tree, inside, classes = view.structure(state)
    if classes:
        _log.warning("%s: instances of %s in %r become their plain values", view.path, listed(sorted(classes)), state)
    if not isinstance(tree, dict):
        return tree if tree is not None else {key.removeprefix(f"{state}/"): entry for key, entry in tensors.items()}
    return {key.removeprefix(f"{state}/"): entry for key, entry in tensors.items() if key not in inside} | tree


def _optimizer(view: CheckpointView, state: str, tensors: dict[str, Entry], *, own: bool) -> dict[str, Any]:
    """Return the state_dict of an optimizer; with `own`, its entries beside "state" and "param_groups" too."""
    found: dict[str, Any] = {"state": {}, "param_groups": view[f"{state}/param_groups"]}
    for part, place in (("globals", found["state"]), ("own", found if own else {})):
        values = view.get(f"{state}/{part}", [])
        if len(values) > 1:
            _log.warning(
                "%s: values of several optimizers in %r that belong to no parameter are left out", view.path, state
            )
        elif values:
            place.update(values[0])
    containers = view.containers_of(state)
    if containers and view.is_renamed:
        raise IncompatibleCheckpointError(
            f"{view.path}: the optimizer has lists or dicts as states of {listed([*containers])}, which no layout renames"
        )
    for key in view.keys_of(state):
        place, _, slot = key.removeprefix(f"{state}/").rpartition("/")
        if place.startswith("state/"):
            fqn = place.removeprefix("state/")
            slots = found["state"].setdefault(fqn, {})
            inside = containers.get(fqn, {})
            if (name := next((name for name in inside if f"{slot}.".startswith(f"{name}.")), None)) is not None:
                slots[name] = inside[name]
            else:
                slots[slot] = tensors[key] if key in tensors else view[key]
    return found


def mapped(tree: Any, replace: Callable[[Any], Any], kind: type | tuple[type, ...] = Entry) -> Any:
    """Return a tree with another object in the place of each tensor, which is an instance of `kind`.

    Raises:
        IncompatibleCheckpointError: a container is of a type that cannot be made again.
    """
    if isinstance(tree, kind):
        return replace(tree)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, mapped(value, replace, kind)) for key, value in tree.items())
    if type(tree) is Namespace:
        return Namespace(**mapped(vars(tree), replace, kind))
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, replace, kind) for value in tree)
    if any(isinstance(leaf, kind) for _, leaf in leaves_with_paths(tree)):
        raise IncompatibleCheckpointError(f"a {type(tree).__name__} holds tensors: export the other states alone")
    return tree
