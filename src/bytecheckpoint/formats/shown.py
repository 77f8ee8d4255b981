"""Show a foreign checkpoint as this package saves one: optimizers by parameters and slots, plain values in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.foreign import ForeignCheckpoint
from bytecheckpoint.representation.boxes import BoxTable, Int64s, widened
from bytecheckpoint.representation.catalog import FOREIGN, SHARED, VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_rows import rows_of
from bytecheckpoint.representation.string_column import StringColumn
from bytecheckpoint.representation.values.tree import TensorRef

__all__ = ["VALUES_NAME", "with_values"]

VALUES_NAME: Final = ".bytecheckpoint-values"
"""Beginning of the names of files that hold plain values, in memory."""

#: Names of the masters of parameters in other programs, and here.
_SLOTS: Final = {"fp32": "master"}


def with_values(checkpoint: ForeignCheckpoint) -> tuple[Catalog, dict[str, bytes | Decoded]]:
    """Return the catalog with a tensor for the plain values of each state, and the files that hold these, by name."""
    catalog, strides, trees = _with_slots(checkpoint.catalog, checkpoint.strides, checkpoint.values)
    contents = {f"{VALUES_NAME}-{number}": item for number, item in enumerate(trees.items())}
    values = {name: blob for name, (_, blob) in contents.items()}
    states = [state for state, _ in contents.values()]
    sizes = np.array([len(blob) for blob in values.values()], np.int64)
    count, width = len(states), catalog.boxes.ndim
    columns: dict[str, Any] = {
        "states": states, "fqns": [""] * count, "slots": [VALUES_SLOT] * count, "dtypes": ["uint8"] * count,
    }  # fmt: skip
    names = {"state": "states", "fqn": "fqns", "slot": "slots", "dtype": "dtypes"}
    strings = {given: [*getattr(catalog, name).to_list(), *columns[given]] for name, given in names.items()}
    more = widened(sizes[:, None], width, 1)
    tensors = TensorTable.of(
        **strings,
        shapes=np.concatenate([catalog.shapes, more]),
        ndims=np.concatenate([catalog.ndims, np.ones(count, np.int64)]),
        owner=np.concatenate([catalog.owner, np.full(count, SHARED, np.int32)]),
        requires_grad=np.concatenate([catalog.requires_grad, np.zeros(count, bool)]),
    )
    files = [StorageFile(name, state, 0, len(blob), 0, 0, 0, "", FOREIGN) for name, (state, blob) in contents.items()]
    boxes = BoxTable(catalog.count + np.arange(count), np.zeros_like(more), more)
    built = Catalog.build(
        tensors,
        boxes=BoxTable.concat([catalog.boxes, boxes]),
        file=np.concatenate([catalog.file, len(catalog.files) + np.arange(count, dtype=np.int32)]),
        byte_offset=np.concatenate([catalog.byte_offset, np.zeros(count, np.int64)]),
        byte_length=np.concatenate([catalog.byte_length, sizes]),
        files=[*catalog.files, *files],
        sums=[np.zeros(0, np.uint64)] * (len(catalog.files) + count),
        aliases=catalog.aliases,
        info=catalog.info,
    )
    if strides is not None:  # the rows keep their order, and those of the values follow
        strides = np.concatenate([widened(strides, width, 1), np.ones((count, width), np.int64)])
    return replace(built, strides=strides), {**values, **checkpoint.made}


def _with_slots(
    catalog: Catalog, strides: Int64s | None, values: Mapping[str, bytes]
) -> tuple[Catalog, Int64s | None, dict[str, bytes]]:
    """Give the tensors of optimizers names of parameters and slots, and their plain values the form of an optimizer's tree.

    This concerns states with the form of an optimizer's state_dict: {"state": {name: {slot: value}}, "param_groups":
    [...]}. Where parameters have numbers and the groups do not name them, their names are "#0", "#1" and so on, and the
    catalog's info lists the state under "numbered": only the live optimizer knows which parameter has which number.

    Args:
        catalog: catalog of a foreign checkpoint, whose tensors of such a state are named by their paths in it.
        strides: strides of its rows, as in `Catalog`.
        values: encoded trees of plain values by state.
    """
    from bytecheckpoint.representation.values.codec import decode, encode  # imports torch, which a list does without

    found = dict(values)
    numbered: list[str] = []
    names: dict[tuple[str, str], tuple[str, str]] = {}
    for state, blob in values.items():
        tree: Any = decode(blob, on_tensor=TensorRef, on_unregistered=lambda name, value: value, restore=False)
        if (name_of := _names_of_parameters(tree)) is None:
            continue
        if any(name.startswith("#") for name in name_of.values()):
            numbered.append(state)
        plain: dict[str, dict[str, Any]] = {}
        for parameter, slots in tree["state"].items():
            fqn = name_of[parameter]
            for slot, value in slots.items():
                if isinstance(value, TensorRef):
                    names[state, value.name] = fqn, _SLOTS.get(slot, slot)
                else:
                    plain.setdefault(fqn, {})[slot] = value
        groups = [{**group, "params": [name_of[p] for p in group["params"]]} for group in tree["param_groups"]]
        found[state] = encode(
            {
                "groups": groups, "state": plain, "aliases": {}, "globals": [{}], "optimizers": [],
                "complete": True,
            },
            on_tensor=_refuse,
        )  # fmt: skip
    if numbered:
        catalog = replace(catalog, info={**catalog.info, "numbered": numbered})
    if not names:
        return catalog, strides, found
    aliases = {state: dict(tied) for state, tied in catalog.aliases.items()}
    copies: list[tuple[int, tuple[str, str]]] = []  # the steps of several parameters may be one tensor
    number_of = {
        key: number for number, key in enumerate(zip(catalog.state.to_list(), catalog.fqn.to_list(), strict=True))
    }
    for (state, name), slot in names.items():
        first = aliases.get(state, {}).pop(name, None)
        if first is not None:
            copies.append((number_of[state, first], slot))
    catalog, strides = _with_copies(replace(catalog, aliases=aliases), strides, [number for number, _ in copies])
    fqns, slots_of = catalog.fqn.to_list(), catalog.slot.to_list()
    for number, key in enumerate(zip(catalog.state.to_list(), list(fqns), strict=True)):
        fqns[number], slots_of[number] = names.get(key, (key[1], slots_of[number]))
    for number, name_and_slot in zip(range(catalog.count - len(copies), catalog.count), copies, strict=True):
        fqns[number], slots_of[number] = name_and_slot[1]
    return replace(catalog, fqn=StringColumn.of(fqns), slot=StringColumn.of(slots_of)), strides, found


def _with_copies(catalog: Catalog, strides: Int64s | None, numbers: Sequence[int]) -> tuple[Catalog, Int64s | None]:
    """Add tensors that have the rows of others."""
    if not numbers:
        return catalog, strides
    chosen = np.array(numbers, np.int64)
    tensors = np.concatenate([np.arange(catalog.count), chosen])
    place, copied = rows_of(catalog.boxes.tensor, chosen)
    rows = np.concatenate([np.arange(len(catalog.boxes)), copied])
    boxes = catalog.boxes.take(rows)
    boxes = BoxTable(np.concatenate([catalog.boxes.tensor, catalog.count + place]), boxes.offsets, boxes.lengths)
    table: dict[str, Any] = {}
    for name in (column.name for column in fields(TensorTable)):
        value = getattr(catalog, name)
        if isinstance(value, StringColumn):
            table[name] = StringColumn(value.codes[tensors], value.values)
        else:
            table[name] = value[tensors]
    found = replace(
        catalog, **table, boxes=boxes, file=catalog.file[rows], byte_offset=catalog.byte_offset[rows],
        byte_length=catalog.byte_length[rows],
    )  # fmt: skip
    return found, None if strides is None else strides[rows]


def _names_of_parameters(tree: Any) -> dict[Any, str] | None:
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
