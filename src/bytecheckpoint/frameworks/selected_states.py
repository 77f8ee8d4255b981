"""Leave out of captured states what a save does not select."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.optimizers.tree import is_optimizer_tree
from bytecheckpoint.frameworks.selection import Selection
from bytecheckpoint.representation.shards import LiveState, TensorKey
from bytecheckpoint.representation.values.codec import TensorRef, decode, encode

__all__ = ["select_states"]

_LEFT_OUT = object()
_ANY_SLOT = "state"  # the state of a parameter is selected as a whole


def select_states(states: Sequence[LiveState], selection: Selection) -> Sequence[LiveState]:
    """Reduce captured states, in place, to what `selection` selects; return them.

    Raises:
        UsageError: a part of something is to be left out that has no parts.
    """
    if selection.active:
        for state in states:
            _select(state, selection)
    return states


def _select(state: LiveState, selection: Selection) -> None:
    takes_rest = selection.takes(state.name)
    if state.part_count and not takes_rest:
        state.parts, state.part_count, state.tree = [], 0, None
    if state.part_count:
        return
    if not state.merged:
        if not takes_rest:
            state.shards, state.tree = [], None
        return
    tree = None if state.tree is None else decode(state.tree, on_tensor=TensorRef)
    if is_optimizer_tree(tree):
        assert isinstance(tree, dict)
        _select_optimizer_tree(state, tree, selection, takes_rest=takes_rest)
    elif state.entries:
        assert isinstance(tree, dict | None)
        _select_entries(state, tree or {}, selection)
        return
    elif takes_rest and tree is not None:
        tree = _without_tensors(state.name, tree, selection)
        state.tree = None if tree is _LEFT_OUT else _encoded(tree)
        _refuse_parts(state, selection)
    else:
        state.tree = None
    state.shards = [shard for shard in state.shards if selection.takes_any(shard.key, shard.aliases)]


def _select_optimizer_tree(state: LiveState, tree: dict[str, Any], selection: Selection, *, takes_rest: bool) -> None:
    """Reduce a tree (`optimizers/tree.py`) to the selected parameters; other values go with any of them."""
    aliases: Mapping[str, Sequence[str]] = tree["aliases"]

    def taken(fqn: str) -> bool:
        return selection.takes_any(TensorKey(state.name, fqn, _ANY_SLOT), aliases.get(fqn, ()))

    groups = [{**group, "params": [fqn for fqn in group["params"] if taken(fqn)]} for group in tree["groups"]]
    if groups == tree["groups"] and (groups or takes_rest):
        return
    tree["groups"] = [group for group in groups if group["params"]]
    for part in ("state", "aliases"):
        tree[part] = {fqn: values for fqn, values in tree[part].items() if taken(fqn)}
    state.tree = _encoded(tree) if tree["groups"] else None


def _select_entries(state: LiveState, tree: dict[str, Any], selection: Selection) -> None:
    """Reduce the extra states of modules to the selected ones, with the tensors in them."""
    kept = {fqn: value for fqn, value in tree.items() if selection.takes(state.name, fqn)}
    inside, kept_inside = _references(_encoded(tree)), _references(_encoded(kept))
    state.tree = _encoded(kept) if kept else None
    state.shards = [
        shard
        for shard in state.shards
        if (shard.key.fqn in kept_inside if shard.key.fqn in inside else selection.takes_any(shard.key, shard.aliases))
    ]


def _without_tensors(state_name: str, value: Any, selection: Selection) -> Any:
    """Return `value` without the tensors in its dicts that are not selected."""
    if isinstance(value, TensorRef):
        return value if selection.takes(state_name, value.name) else _LEFT_OUT
    if type(value) in (dict, collections.OrderedDict):
        pairs = [(key, _without_tensors(state_name, item, selection)) for key, item in value.items()]
        return type(value)((key, item) for key, item in pairs if item is not _LEFT_OUT)
    if type(value) in (list, tuple):
        items = [_without_tensors(state_name, item, selection) for item in value]
        # A list of fewer items would be another one: the tensor stays in it, and is refused below.
        return type(value)(old if new is _LEFT_OUT else new for old, new in zip(value, items, strict=True))
    return value


def _refuse_parts(state: LiveState, selection: Selection) -> None:
    for name in _references(state.tree) if state.tree is not None else ():
        if not selection.takes(state.name, name):
            raise UsageError(
                f"{state.name}/{name} is not selected and lies in a list, or in an object, that is: "
                "leave out all of that, or nothing"
            )


def _references(tree: bytes) -> set[str]:
    """Return the names of the tensors to which a tree refers."""
    found: set[str] = set()
    decode(tree, on_tensor=found.add)
    return found


def _encoded(tree: Any) -> bytes:
    return encode(tree, on_tensor=_no_tensor)


def _no_tensor(path: tuple[object, ...], tensor: object) -> str:
    raise AssertionError("decoded trees refer to tensors by name")
