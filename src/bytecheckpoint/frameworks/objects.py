"""Everything that is neither module nor optimizer: nested values, and objects with state_dict/load_state_dict.

Plain values go into one encoded tree per kind; each tensor in it becomes a shard and leaves its name in the tree.
In most kinds a tensor is identified by its content, since ranks may hold different values under one key (random
number generators, dataloaders). In the kinds "model" and "optimizer" it is identified by its name, as in a
state_dict, and a destination that holds tensors asks for those and no others.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from bytecheckpoint.errors import CorruptCheckpointError, UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.leaves import (
    add_shards,
    declares,
    dtype_name,
    dtype_named,
    empty_like_layout,
    is_leaf,
    is_writable,
    memory_of,
    writable,
)
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.value_registry import registered_class
from bytecheckpoint.representation.value_types import NATIVE
from bytecheckpoint.representation.values import MAX_DEPTH, TensorRef, decode, dotted, encode

__all__ = ["BY_NAME", "Reader", "capture_object", "encoded", "is_stateful", "load_object", "unique"]

#: Kinds whose tensors are identified by name and box, not by content.
BY_NAME = frozenset({"model", "optimizer"})

_ROOT = "value"  # name of a tensor that is a whole state by itself
_LACKS = "the values of {kind} refer to tensor {name!r}, which the catalog lacks"
_STORED = object()  # stands in a decoded tree for a tensor that is filled by name


def is_stateful(value: object) -> bool:
    """Whether `value` is an object that saves and restores itself through state_dict and load_state_dict."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def unique(name: str, taken: dict[str, Any]) -> str:
    """`name`, or `name#2`, `name#3`, ... when it is taken: {"a": {"b": t}, "a.b": u} has two leaves called "a.b"."""
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


def encoded(kind: str, value: object, shards: list[LiveShard], *, by_content: bool = True) -> bytes:
    """`value` as a tree; its tensors are appended to `shards`.

    Raises:
        UsageError: something in `value` cannot be stored; the message says where it stands.
    """
    taken: dict[str, Any] = {}

    def add(path: tuple[object, ...], leaf: Any) -> str:
        name = unique(dotted(path) or _ROOT, taken)
        taken[name] = leaf
        plain = isinstance(leaf, torch.Tensor) and not is_dtensor(leaf) and not declares(type(leaf))
        add_shards(shards, TensorKey(kind, name), leaf, by_content=by_content and plain)
        return name

    lowered = _Lowering(add).lower(value)
    try:
        return encode(lowered, on_tensor=add)
    except UsageError as error:
        # Messages about tensors name the kind already; those about plain values start with the path inside it.
        raise (error if str(error).startswith(kind) else UsageError(f"{kind}/{error}")) from None


def capture_object(kind: str, value: object) -> LiveState:
    """The shards and the tree of a nested value or of an object with a state_dict."""
    state = LiveState(kind, merged=kind in BY_NAME)
    state.tree = encoded(kind, value, state.shards, by_content=kind not in BY_NAME)
    return state


class _Lowering:
    """One walk over a value that replaces live objects by their state_dict and tensors by references to them.

    Args:
        add: called as (path, leaf) for every tensor; returns the name to refer to it by.

    Attributes:
        owners: id of a live object -> its state_dict.
        rest: whether the result has anything but dicts, lists, tuples, references and plain scalars; tensors may be
            inside it still.
    """

    def __init__(self, add: Callable[[tuple[object, ...], Any], str]) -> None:
        self._add = add
        self._open: set[int] = set()
        self.owners: dict[int, Any] = {}
        self.rest = False

    def lower(self, value: Any, path: tuple[object, ...] = ()) -> Any:
        kind = type(value)
        if kind in NATIVE:
            return value
        if kind in _CONTAINERS and id(value) not in self._open and len(self._open) < MAX_DEPTH:
            return self._container(kind, value, path)
        if is_leaf(value) and registered_class(kind) is None:
            return TensorRef(self._add(path, value))
        if kind not in _CONTAINERS and is_stateful(value) and len(self._open) < MAX_DEPTH:
            state = self.owners[id(value)] = value.state_dict()
            return self.lower(state, path)
        # Also a cycle and what is nested too deeply, which the encoding refuses by name.
        self.rest = True
        return value

    def _container(self, kind: type, value: Any, path: tuple[object, ...]) -> Any:
        self._open.add(id(value))
        mapping = kind in _DICTS
        steps = value if mapping else range(len(value))
        items = value.values() if mapping else value
        # Most are plain tensors, by the ten thousand.
        lowered = [
            TensorRef(self._add((*path, step), item)) if type(item) in _TENSORS else self.lower(item, (*path, step))
            for step, item in zip(steps, items, strict=True)
        ]
        self._open.discard(id(value))
        if all(map(operator.is_, lowered, items)):
            return value
        return kind(zip(steps, lowered, strict=True)) if mapping else kind(lowered)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DICTS = frozenset({dict, collections.OrderedDict})
_CONTAINERS = _DICTS | {list, tuple}


class Reader:
    """Decodes trees of one kind into values whose tensors are memory that is still to be filled.

    First `read` the trees, then `fit` what was read to the live value, then `want` the tensors. After the bytes came,
    `build` gives the finished value and changes the live one.
    """

    def __init__(self, kind: str, saved: SavedStates, into: Destination) -> None:
        self._kind = kind
        self._saved = saved
        self._into = into
        # id of the empty tensor -> (what is saved, the empty tensor, where its elements shall go).
        self._tensors: dict[int, tuple[SavedTensor, torch.Tensor, Any]] = {}
        self._by_content: set[TensorKey] = set()
        # Live containers and storages that have found a use: one that stands at two places may take one value only.
        self._used: set[int] = set()

    def read(self, blob: bytes) -> Any:
        """The value in `blob`; its tensors are empty ones of the saved dtype and shape, on the CPU."""
        return decode(blob, on_tensor=self._named)

    def _named(self, name: str) -> torch.Tensor:
        found = self._saved.shape_of(self._kind, name)
        if found is not None:
            self._by_content.add(found.key)
        else:
            found = self._saved.find(self._kind, (name,))
        if found is None:
            raise CorruptCheckpointError(_LACKS.format(kind=self._kind, name=name))
        return self.fresh(found)

    def fresh(self, found: SavedTensor) -> torch.Tensor:
        """An empty tensor for `found`."""
        # Untouched memory costs nothing, so a live tensor may still take its place.
        empty = torch.empty(found.global_shape, dtype=dtype_named(found.dtype), device="cpu")
        self._tensors[id(empty)] = (found, empty, empty)
        return empty

    def keys(self) -> set[TensorKey]:
        """The keys of all tensors that were read so far."""
        return {found.key for found, _, _ in self._tensors.values()}

    def fit(self, value: Any, live: Any, *, in_place: bool = True) -> None:
        """Let the tensors of `value` be filled where `live` has a tensor that takes them.

        With `in_place` False the live tensors only lend their distribution (DTensors).
        """
        if id(value) in self._tensors and is_leaf(live):
            found, empty, _ = self._tensors[id(value)]
            if not isinstance(live, torch.Tensor) or declares(type(live)):
                self._tensors[id(value)] = (found, empty, live)
            elif _fits(live, found):
                if in_place:
                    if self._first_use(memory_of(live).untyped_storage().data_ptr()):
                        self._tensors[id(value)] = (found, empty, live)
                elif is_dtensor(live):
                    self._tensors[id(value)] = (found, empty, empty_like_layout(live, live.dtype))
        elif is_stateful(live) and not is_leaf(live):
            self.fit(value, live.state_dict(), in_place=False)
        elif isinstance(value, dict) and isinstance(live, dict):
            for key, item in value.items():
                if key in live:
                    self.fit(item, live[key], in_place=in_place)
        elif isinstance(value, list | tuple) and isinstance(live, list | tuple):
            for item, other in zip(value, live, strict=False):
                self.fit(item, other, in_place=in_place)

    def want(self) -> None:
        """Ask for the elements of all tensors that were read."""
        for found, _, target in self._tensors.values():
            self._into.claimed.add(found.key)
            add_shards(self._into.wanted, found.key, target, by_content=found.key in self._by_content)

    def build(self, value: Any, live: Any, *, root: bool = False) -> Any:
        """The finished value: `live` itself, changed, where it can hold `value`, else a new object.

        At the root any dict and any list stay what they are; further down only those of the saved type.
        """
        if id(value) in self._tensors:
            return self._tensors[id(value)][2]
        if is_stateful(live) and not is_leaf(live):
            live.load_state_dict(self.build(value, None))
            return live
        if isinstance(value, dict):
            old = live if isinstance(live, dict) else {}
            pairs = {key: self.build(item, old.get(key)) for key, item in value.items()}
            keeper = live if isinstance(live, dict) and self._keeps(value, live, root) else value
            if isinstance(keeper, collections.defaultdict) and isinstance(value, collections.defaultdict):
                keeper.default_factory = value.default_factory
            keeper.clear()
            keeper.update(pairs)
            return keeper
        if type(value) is list or type(value) is tuple:
            past = live if isinstance(live, list | tuple) else ()
            items = [self.build(item, past[i] if i < len(past) else None) for i, item in enumerate(value)]
            if isinstance(value, tuple):
                return tuple(items)
            kept: list[Any] = live if isinstance(live, list) and self._keeps(value, live, root) else value
            kept[:] = items
            return kept
        return value

    def _keeps(self, value: Any, live: Any, root: bool) -> bool:
        return (root or type(live) is type(value)) and self._first_use(id(live))

    def _first_use(self, identity: int) -> bool:
        first = identity not in self._used
        self._used.add(identity)
        return first


def load_object(kind: str, states: MutableMapping[str, object], saved: SavedStates, into: Destination) -> None:
    """Plan the load of a nested value or of an object with load_state_dict into `states[kind]`."""
    live = states[kind]
    if kind not in saved.kinds():
        into.missing.append(kind)
        return
    by_name = kind in BY_NAME
    if by_name and isinstance(live, dict | list | tuple) and live:
        _load_named(kind, live, saved, into)
        return
    reader = Reader(kind, saved, into)
    value = _everything(kind, saved, reader, merge=by_name)
    reader.fit(value, live)
    reader.want()
    # A copy of another rank is accounted for by the rank that it belongs to, also where that rank is gone.
    into.claimed.update(saved.keys(kind))

    def install() -> None:
        built = reader.build(value, live, root=True)
        if built is not live:
            states[kind] = built

    into.finish.append(install)


def _everything(kind: str, saved: SavedStates, reader: Reader, *, merge: bool) -> Any:
    """All that the checkpoint holds of `kind`, for a destination that takes what comes."""
    own = saved.tree(kind)
    if own is not None and not merge:
        return reader.read(own)
    # By name, the ranks' trees are parts of one (pipeline stages), and a live module or optimizer has left tensors
    # that stand in no tree.
    value: Any = {} if own is None else reader.read(own)
    for blob in saved.trees(kind):
        if blob != own:
            value = _merged(value, reader.read(blob))
    if isinstance(value, dict):
        held = reader.keys()
        for key in saved.keys(kind):
            if key in held:
                continue
            found = saved.find(kind, (key.fqn,), key.slot)
            assert found is not None
            if key.slot:
                value.setdefault("state", {}).setdefault(key.fqn, {})[key.slot] = reader.fresh(found)
            else:
                value[key.fqn] = reader.fresh(found)
    return value


def _merged(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        for key, item in second.items():
            first[key] = _merged(first[key], item) if key in first else item
    return first


def _load_named(kind: str, live: Any, saved: SavedStates, into: Destination) -> None:
    """A state_dict-like destination: its tensors say what is wanted, and stay the same objects."""
    taken: dict[str, Any] = {}

    wanted = into.wanted

    def want(path: tuple[object, ...], leaf: Any) -> str:
        name = unique(dotted(path) or _ROOT, taken)
        taken[name] = leaf
        found = saved.find(kind, (name,))
        if found is None:
            into.missing.append(str(TensorKey(kind, name)))
            return name
        into.claimed.add(found.key)
        first = len(wanted)
        add_shards(wanted, found.key, leaf)
        for shard in wanted[first:]:
            if (step := writable(shard)) is not None:
                into.finish.append(step)
        return name

    def stored(name: str) -> object:
        # What the destination has under this name was found; other names must at least exist.
        if name not in taken and saved.shape_of(kind, name) is None:
            raise CorruptCheckpointError(_LACKS.format(kind=kind, name=name))
        return _STORED

    lowering = _Lowering(want)
    lowered = lowering.lower(live)
    if lowering.rest:
        encode(lowered, on_tensor=want)
    own = saved.tree(kind)
    value = None if own is None else decode(own, on_tensor=stored)
    into.finish.append(lambda: _install_plain(value, live, lowering.owners))


def _install_plain(value: Any, live: Any, owners: dict[int, Any]) -> Any:
    """Put the plain values of `value` into `live`, whose tensors are filled already; returns what stands in its place."""
    if is_leaf(live):
        return live
    if is_stateful(live):
        live.load_state_dict(_install_plain(value, owners[id(live)], owners))
    elif isinstance(live, dict):
        new = value if isinstance(value, dict) else {}
        for key, old in live.items():
            if type(old) not in _TENSORS:
                live[key] = _install_plain(new.get(key, old), old, owners)
        for key, item in new.items():
            if key not in live and not _holds_tensor(item):
                live[key] = item
    elif type(live) in (list, tuple) and isinstance(value, list | tuple) and len(live) == len(value):
        items = [_install_plain(v, old, owners) for v, old in zip(value, live, strict=True)]
        if type(live) is tuple:
            return tuple(items)
        live[:] = items
    elif not _holds_tensor(value):
        return value
    return live


def _holds_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere in the dicts, lists and tuples of `value`."""
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return value is _STORED


def _fits(live: torch.Tensor, found: SavedTensor) -> bool:
    return tuple(live.shape) == found.global_shape and dtype_name(live.dtype) == found.dtype and is_writable(live)
