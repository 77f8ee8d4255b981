"""Show a foreign checkpoint as this package saves one: optimizers by parameters and slots, plain values in files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign import ForeignCheckpoint, ForeignColumns
from bytecheckpoint.formats.optimizer_dicts import names_of_parameters, nested_optimizer
from bytecheckpoint.formats.trees import BYTES_PER_VALUE, Tree, decode_containers, with_references
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.representation.values.tree import PACKED_TENSOR, TensorRef, key_of_path, state_reference
from bytecheckpoint.storage.base import Storage

__all__ = ["with_values"]

#: Longest tensor among hyperparameters.
_MOST_HYPERPARAMETER_BYTES: Final = 1 << 20
#: Names of the masters of parameters in other programs, and here.
_SLOTS: Final = {"fp32": "master"}


def with_values(checkpoint: ForeignCheckpoint, storage: Storage) -> tuple[Catalog, dict[str, bytes | Decoded]]:
    """Return the catalog with a tensor for the plain values of each state, and the files that no folder holds, by name.

    Tensors of optimizers get the names of parameters and slots. Where parameters have numbers and the groups do not name
    them, their names are "#0", "#1" and so on, and the catalog's info lists the state under "numbered": only the live
    optimizer knows which parameter has which number. Tensors among the hyperparameters, such as a rate of a compiled
    optimizer, and beside the state of parameters become plain values, as in saves of this package. Where these are large,
    the state remains a dict.

    Args:
        checkpoint: the checkpoint.
        storage: storage of its files.
    """
    columns, rows, made = checkpoint.columns, checkpoint.rows, dict(checkpoint.made)
    facts = {"format": checkpoint.format, **checkpoint.facts}
    for number, (state, blob) in enumerate(checkpoint.values.items()):
        content = blob
        tree = nested_optimizer(decode_containers(blob))
        names = names_of_parameters(tree)
        own, shared = ({}, {}) if names is None else _beside_parameters(tree, names)
        small = columns.small_tensors(state, _MOST_HYPERPARAMETER_BYTES) if own or shared else set()
        if names is not None and small.issuperset(_tensors_in([own, shared])):
            tensors = [*_tensors_in(tree["param_groups"]), *_tensors_in([own, shared])]
            taken, rows = columns.take(state, tensors, rows) if tensors else ({}, rows)
            packed = {name: _packed(storage, made, *one) for name, one in taken.items()}
            values = _by_parameters(columns, state, tree, names, packed)
            if own:
                values["own"] = [_with_packed(own, packed)]
            values["globals"] = [_with_packed(shared, packed)]
            most = len(blob)  # as many values as bytes: the reader has counted them
            content = Tree(storage.url, BYTES_PER_VALUE * most).encode(values)
            if any(name.startswith("#") for name in names.values()):
                facts["numbered"] = [*facts.get("numbered", ()), state]
        made[f"{VALUES_NAME}-{number}"] = content
        columns.add_values(state, f"{VALUES_NAME}-{number}", len(content))
    return columns.build(facts, rows), made


def _tensors_in(value: Any) -> Iterator[str]:
    """Iterate over the names of the tensors in plain values."""
    if isinstance(value, TensorRef):
        yield value.name
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _packed(
    storage: Storage, made: Mapping[str, bytes | Decoded], dtype: str, shape: tuple[int, ...], file: str, begin: int
) -> dict[str, Any]:
    """Read a tensor, and return it as plain data."""
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes > _MOST_HYPERPARAMETER_BYTES:
        raise IncompatibleCheckpointError(f"{storage.url}/{file}: a hyperparameter of an optimizer has {nbytes} bytes")
    if (content := made.get(file)) is not None:
        data = (content.decode() if isinstance(content, Decoded) else content)[begin : begin + nbytes]
    else:
        with open_file(storage, file) as opened:
            data = opened.read(begin, nbytes)
    return {PACKED_TENSOR: [dtype, list(shape), data]}


def _with_packed(value: Any, packed: Mapping[str, Any]) -> Any:
    if isinstance(value, TensorRef):
        return packed[value.name]
    if isinstance(value, dict):
        return {key: _with_packed(item, packed) for key, item in value.items()}
    return type(value)(_with_packed(item, packed) for item in value) if type(value) in (list, tuple) else value


def _beside_parameters(tree: dict[str, Any], names: Mapping[Any, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries beside an optimizer's state and groups, and those of its state that belong to no parameter."""
    own = {key: value for key, value in tree.items() if key not in ("state", "param_groups")}
    return own, {key: value for key, value in tree["state"].items() if key not in names}


def _by_parameters(
    columns: ForeignColumns, state: str, tree: Any, names: Mapping[Any, str], packed: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the tensors of an optimizer by parameters and slots; return its plain values.

    Args:
        columns: columns, whose tensors are named by their paths in the tree.
        state: name of the state.
        tree: state_dict of an optimizer: {"state": {parameter: {slot: value}}, "param_groups": [...]}.
        names: name of each parameter.
        packed: tensors among the hyperparameters, by name.
    """
    places: dict[str, tuple[str, str]] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, slots in tree["state"].items():
        for slot, value in slots.items() if parameter in names else ():
            if isinstance(value, TensorRef):
                places[value.name] = names[parameter], _SLOTS.get(slot, slot)
            else:
                plain.setdefault(names[parameter], {})[slot] = _placed(value, names[parameter], (slot,), places)
    columns.rename(state, places)
    groups = [
        {**_with_packed(group, packed), "params": [names[p] for p in group["params"]]} for group in tree["param_groups"]
    ]
    return {
        "groups": groups, "state": plain, "aliases": {}, "globals": [{}], "optimizers": [], "complete": True,
    }  # fmt: skip


def _placed(value: Any, fqn: str, path: tuple[object, ...], places: dict[str, tuple[str, str]]) -> Any:
    """Give the tensors inside of a parameter's value slots of their own, as saves do; return the value with references."""
    if isinstance(value, TensorRef):
        places[value.name] = fqn, key_of_path(path)
        return msgspec.structs.replace(value, name=state_reference(*places[value.name]))
    if isinstance(value, dict):
        return {key: _placed(item, fqn, (*path, key), places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(item, fqn, (*path, number), places) for number, item in enumerate(value))

    def renamed(name: str) -> str:
        places[name] = fqn, key_of_path((*path, len(places)))  # a place of its own
        return state_reference(*places[name])

    return with_references(value, renamed)
