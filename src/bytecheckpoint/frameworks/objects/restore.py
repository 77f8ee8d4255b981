"""Load nested values and objects with load_state_dict.

In the states "model" and "optimizer" a destination that holds anything asks for its own tensors by name, and for no
others. Any other destination takes everything that the checkpoint holds of its state.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.formats.optimizer_dicts import flat_optimizer
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.objects.capture import (
    STATES_BY_NAME,
    TensorExtractor,
    is_stateful,
    saved_provider,
    tensor_name,
)
from bytecheckpoint.frameworks.objects.reader import (
    ValueReader,
    holds_objects,
    missing_tensor_error,
    objects_without_value,
)
from bytecheckpoint.frameworks.optimizer_tree import is_optimizer_tree, optimizer_state_dict
from bytecheckpoint.frameworks.tensors.allocation import FilledMemory, make_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import PLAIN_TYPES
from bytecheckpoint.frameworks.tensors.plain import is_tensor_like
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import encode, key_of_path
from bytecheckpoint.representation.values.registry import default_registration, registration_of
from bytecheckpoint.representation.values.types import NATIVE_TYPES

__all__ = ["load_object"]

_FILLED_BY_NAME = object()  # replaces, in a decoded tree, a tensor that the destination lacks


def load_object(
    state_name: str, states: MutableMapping[str, object], saved: SavedStates, destination: Destination
) -> None:
    """Plan the load of a nested value, or of an object with load_state_dict, into `states[state_name]`."""
    live = states[state_name]
    if state_name not in saved.states():
        destination.missing.append(state_name)
        return
    by_name = state_name in STATES_BY_NAME
    if by_name and isinstance(live, dict | list | tuple) and live:
        _load_named(state_name, live, saved, destination)
        return
    # Scripts keep their configuration beside the counts; a load of the counts must not need its class.
    lenient = saved.is_foreign and isinstance(live, dict)
    reader = ValueReader(state_name, saved, destination, live, lenient=lenient)
    value = _read_everything(state_name, saved, reader, merge=by_name)
    if lenient:
        reader.leave_out_unknown(value, live)
    if saved.is_foreign:
        value = reader.with_numbers(value, live)
    pairs = live.items() if isinstance(live, dict) and isinstance(value, dict) else ()
    if lost := [str(key) for key, item in pairs if key not in value and not holds_objects(item)]:
        own = [key for key in lost if key in saved.states()]
        elsewhere = f" ({listed(own)}: a state of its own there)" if own else ""
        destination.notes.append(
            f"{state_name}: the dict here loses what the checkpoint lacks: {listed(lost)}{elsewhere}"
        )
    if provider := saved_provider(value):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {state_name} as pieces of a {provider}, which a {type(live).__name__} cannot take: load "
            "them into a provider like the one that saved them (StateProvider)"
        )
    reader.match_live(value, live)
    for path in objects_without_value(value, live):
        destination.missing.append(str(TensorKey(state_name, key_of_path(path))))
    reader.request_tensors()
    # Copies of other ranks are no surprise to this rank: those ranks load them, or exist no longer.
    destination.recognized.update(saved.keys(state_name))

    def install() -> None:
        built = reader.build(value, live, root=True)
        if built is not live:
            states[state_name] = built

    destination.finish.append(install)


def _read_everything(state_name: str, saved: SavedStates, reader: ValueReader, *, merge: bool) -> Any:
    """Read all that the checkpoint holds of the state: this rank's tree, or with `merge` all trees and all tensors."""
    own = saved.tree(state_name)
    value: Any = {} if own is None else reader.read(own)
    merge = merge or is_optimizer_tree(value)
    if own is not None and not merge:
        return value
    # In the states by name, the ranks' trees are parts of one (pipeline stages), and the tensors of a live module or
    # optimizer are in no tree.
    for blob in saved.trees(state_name):
        if blob != own:
            value = _merge_dicts(value, reader.read(blob))
    value = reader.without(value, lambda key: not saved.names_of(state_name, (key.fqn,)))
    if isinstance(value, dict):
        in_trees = reader.keys()
        for key in saved.keys(state_name):
            if key in in_trees:
                continue
            found = saved.stored(key)
            assert found is not None
            if key.slot:
                if not merge and not saved.trees(state_name):
                    raise CorruptCheckpointError(
                        f"catalog '{CATALOG_NAME}' has {key}, and no values of {state_name}; use another checkpoint",
                        file=CATALOG_NAME,
                        tensors=(str(key),),
                    )
                value.setdefault("state", {}).setdefault(key.fqn, {})[key.slot] = reader.empty(found)
            else:
                value[key.fqn] = reader.empty(found)
    return _optimizer_state_dict(value) if is_optimizer_tree(value) else value


def _optimizer_state_dict(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an optimizer as its state_dict has them, with numbers where only these are known."""

    def number(name: str) -> str | int:
        return int(name[1:]) if name.startswith("#") else name

    found = optimizer_state_dict(tree)
    state = {number(name): slots for name, slots in found["state"].items()}
    groups = [{**group, "params": [*map(number, group["params"])]} for group in found["param_groups"]]
    return {**found, "state": state, "param_groups": groups}


def _merge_dicts(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        for key, item in second.items():
            first[key] = _merge_dicts(first[key], item) if key in first else item
    return first


def _load_named(state_name: str, live: Any, saved: SavedStates, destination: Destination) -> None:
    """Plan the load of a state_dict-like value: request its own tensors, which stay the same objects."""
    taken: dict[str, Any] = {}
    filled_slots: dict[TensorKey, Any] = {}
    filled = FilledMemory()
    wanted = destination.wanted

    def request(path: tuple[object, ...], tensor: Any) -> str:
        name = tensor_name(path, taken)
        taken[name] = tensor
        found = saved.find(state_name, (name,)) or _stored_slot(state_name, saved, *_slot_of(path, name))
        if found is None:
            destination.missing.append(str(TensorKey(state_name, name)))
            return name
        destination.recognized.add(found.key)
        filled_slots[found.key] = tensor
        earlier = filled.first_in_memory_of(tensor, found)
        if earlier.key != found.key:
            destination.tied.append((earlier, found))
            return name
        first = len(wanted)
        add_shards(wanted, found.key, tensor)
        for shard in wanted[first:]:
            if (step := make_writable(shard)) is not None:
                destination.finish.append(step)
        return name

    def skip_tensor(name: str) -> object:
        # `request` has found the destination's own tensors; the checkpoint must at least hold the others.
        found = None if name in taken else reader.find(name)
        if name not in taken and found is None:
            raise missing_tensor_error(state_name, name)
        return taken[name] if found is None else filled_slots.get(found.key, _FILLED_BY_NAME)

    extractor = TensorExtractor(request)
    extracted = extractor.extract(live)
    if extractor.needs_encoder:
        encode(extracted, on_tensor=request, on_array=lambda path, array: "")
    own = saved.tree(state_name)
    reader = ValueReader(state_name, saved, destination, live)
    value = None if own is None else _as_state_dict(reader.read(own, on_tensor=skip_tensor), live)
    reader.request_tensors()
    destination.finish.append(lambda: _install_plain(value, live, extractor.state_dicts))


def _slot_of(path: tuple[object, ...], name: str) -> tuple[str, str]:
    """Return the parameter and the slot of a tensor in an optimizer's state_dict, nested or flat."""
    if len(path) > 2 and path[0] == "state":
        return str(path[1]), key_of_path(path[2:])
    fqn, _, slot = name.removeprefix("state.").rpartition(".")
    return fqn, slot


def _stored_slot(state_name: str, saved: SavedStates, fqn: str, slot: str) -> SavedTensor | None:
    """Find a tensor of an optimizer's state, also by the number of its parameter."""
    return saved.stored(TensorKey(state_name, fqn, slot)) or saved.stored(TensorKey(state_name, f"#{fqn}", slot))


def _as_state_dict(value: Any, live: Any) -> Any:
    """Return the saved values of an optimizer as a state_dict has them, nested or flat as `live`; others unchanged."""
    if not is_optimizer_tree(value):
        return value
    found = _optimizer_state_dict(value)
    return found if "param_groups" in live else {k: item for k, item in flat_optimizer(found).items() if k in live}


def _install_plain(value: Any, live: Any, state_dicts: dict[int, Any]) -> Any:
    """Copy the plain values of `value` into `live`, whose tensors are filled already; return `live` or its replacement."""
    if is_tensor_like(live):
        return live
    if is_stateful(live):
        live.load_state_dict(_install_plain(value, state_dicts[id(live)], state_dicts))
    elif isinstance(live, dict):
        new = value if isinstance(value, dict) else {}
        for key, old in live.items():
            if type(old) not in PLAIN_TYPES:
                live[key] = _install_plain(new.get(key, old), old, state_dicts)
        for key, item in new.items():
            if key not in live and not _contains_tensor(item):
                live[key] = item
    elif type(live) in (list, tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        items = [_install_plain(v, old, state_dicts) for v, old in zip(value, live, strict=True)]
        if type(live) is tuple:
            return tuple(items)
        live[:] = items
    elif not _contains_tensor(value):
        return value
    return live


def _contains_tensor(value: Any, *, lacking: bool = False) -> bool:
    """Return whether there is a tensor anywhere in the dicts, lists and tuples of `value`.

    Inside of an instance of a class, or anywhere with `lacking`, only tensors count that the destination lacks.
    """
    if type(value) in NATIVE_TYPES:
        return False
    if isinstance(value, dict):
        return any(_contains_tensor(item, lacking=lacking) for item in value.values())
    if type(value) in (list, tuple):
        return any(_contains_tensor(item, lacking=lacking) for item in value)
    if value is _FILLED_BY_NAME or is_tensor_like(value):
        return not lacking or value is _FILLED_BY_NAME
    try:
        registration = registration_of(type(value)) or default_registration(value)
    except UsageError:
        return False
    return _contains_tensor(registration.encode(value), lacking=True)
