"""Show a foreign checkpoint as this package saves one: optimizers by parameters and slots, plain values in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.values.tree import TensorRef

__all__ = ["VALUES_NAME", "names_of_parameters", "with_values"]

VALUES_NAME: Final = ".bytecheckpoint-values"
"""Beginning of the names of files that hold plain values, in memory."""

#: Names of the masters of parameters in other programs, and here.
_SLOTS: Final = {"fp32": "master"}


def with_values(checkpoint: ForeignCheckpoint) -> tuple[Catalog, dict[str, bytes | Decoded]]:
    """Return the catalog with a tensor for the plain values of each state, and the files that no folder holds, by name.

    Tensors of optimizers get the names of parameters and slots. Where parameters have numbers and the groups do not name
    them, their names are "#0", "#1" and so on, and the catalog's info lists the state under "numbered": only the live
    optimizer knows which parameter has which number.
    """
    from bytecheckpoint.representation.values.codec import decode  # imports torch, which a list does without

    columns, made = checkpoint.columns, dict(checkpoint.made)
    facts = {"format": checkpoint.format, **checkpoint.facts}
    for number, (state, blob) in enumerate(checkpoint.values.items()):
        content = blob
        tree: Any = decode(blob, on_tensor=TensorRef, on_unregistered=lambda name, value: value, restore=False)
        if (names := names_of_parameters(tree)) is not None:
            content = _by_parameters(columns, state, tree, names)
            if any(name.startswith("#") for name in names.values()):
                facts["numbered"] = [*facts.get("numbered", ()), state]
        made[f"{VALUES_NAME}-{number}"] = content
        columns.add_values(state, f"{VALUES_NAME}-{number}", len(content))
    return columns.build(facts, checkpoint.rows), made


def _by_parameters(columns: ForeignColumns, state: str, tree: Any, names: Mapping[Any, str]) -> bytes:
    """Name the tensors of an optimizer by parameters and slots; return the encoded tree of its plain values.

    Args:
        columns: columns, whose tensors are named by their paths in the tree.
        state: name of the state.
        tree: state_dict of an optimizer: {"state": {parameter: {slot: value}}, "param_groups": [...]}.
        names: name of each parameter.
    """
    from bytecheckpoint.representation.values.codec import encode

    places: dict[str, tuple[str, str]] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, slots in tree["state"].items():
        for slot, value in slots.items():
            if isinstance(value, TensorRef):
                places[value.name] = names[parameter], _SLOTS.get(slot, slot)
            else:
                plain.setdefault(names[parameter], {})[slot] = value
    columns.rename(state, places)
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in tree["param_groups"]]
    found = {
        "groups": groups, "state": plain, "aliases": {}, "globals": [{}], "optimizers": [], "complete": True,
    }  # fmt: skip
    return encode(found, on_tensor=_refuse)


def names_of_parameters(tree: Any) -> dict[Any, str] | None:
    """Return the name of each parameter in an optimizer's state_dict; None if the tree is none."""
    if not (isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys() and isinstance(tree["state"], dict)):
        return None
    groups = tree["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    names: dict[Any, str] = {}
    for group in groups:
        params, given = group.get("params"), group.get("param_names")
        if not isinstance(params, list) or len({*map(type, params)}) > 1:
            return None
        if not isinstance(given, list) or [*map(type, given)] != [str] * len(params):
            given = [p if isinstance(p, str) else f"#{p}" for p in params]
        names.update(zip(params, given, strict=True))
    sound = {type(p) for p in names} <= {str, int} and all(isinstance(slots, dict) for slots in tree["state"].values())
    return names if sound and tree["state"].keys() <= names.keys() else None


def _refuse(path: tuple[object, ...], tensor: object) -> str:
    raise AssertionError(f"a tensor at {path} of a tree without tensors")
