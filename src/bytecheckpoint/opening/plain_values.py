"""Decode the plain values of a checkpoint, under the keys of `bytecheckpoint.open`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.optimizer_tree import unpack_tensors
from bytecheckpoint.frameworks.optimizers.renaming import renamed_trees
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.representation.names import unique_name
from bytecheckpoint.representation.values.codec import (
    TensorRef,
    decode,
    equal,
    key_of_path,
    leaves_with_paths,
    naming_file,
)
from bytecheckpoint.representation.values.tree import parse_state_reference

__all__ = ["UnregisteredInstance", "has_complementary_trees", "plain_values"]

_OPTIMIZER_KEYS = {"groups", "state", "globals", "optimizers"}
# Errors that malformed trees of a hostile checkpoint cause in code that expects the form.
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError)


class UnregisteredInstance:
    """A stand-in for an instance whose class is not registered here; a deep copy of it raises an error.

    Attributes:
        name: name of the class in the checkpoint.
        saved: the plain value of the instance in the checkpoint.
    """

    def __init__(self, name: str, saved: object) -> None:
        self.name = name
        self.saved = saved

    def __repr__(self) -> str:
        return f"<{self.name}: {self.saved!r}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnregisteredInstance):
            return NotImplemented
        return self.name == other.name and equal(self.saved, other.saved)

    def __hash__(self) -> int:
        return hash(self.name)

    def __deepcopy__(self, memo: object) -> UnregisteredInstance:
        raise IncompatibleCheckpointError(
            f"the value is, or holds, an instance of {self.name!r}, which is not registered here; call "
            "bytecheckpoint.register() for its class first"
        )


def has_complementary_trees(state: str, blob: bytes) -> bool:
    """Return whether the trees of the ranks complement each other (modules, optimizers), judging by the tree `blob`."""
    if state == "model":
        return True
    try:
        return _is_optimizer(decode(blob, on_tensor=TensorRef, on_unregistered=UnregisteredInstance))
    except IncompatibleCheckpointError:
        return False


def _is_optimizer(tree: object) -> bool:
    return isinstance(tree, dict) and tree.keys() >= _OPTIMIZER_KEYS and isinstance(tree["groups"], list)


def plain_values(
    state: str,
    blobs: Sequence[bytes],
    parts: Mapping[str, bytes],
    entry: Callable[[str, str], Entry | None],
    taken: Collection[str],
    names: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return key -> value for all values of a state that are not tensors.

    Args:
        state: name of the state.
        blobs: encoded trees; the first tree with a key determines its value.
        parts: the trees of the state's parts, by name; a part's values have its name and a dot before their keys.
        entry: (FQN, slot) -> the tensor of that name, to put into containers that are one value.
        taken: keys of the state's tensors.
        names: names under which a layout shows the parameters of each of the checkpoint's names.

    Raises:
        CorruptCheckpointError: the values are damaged.
        IncompatibleCheckpointError: the values hold an instance of a class that is not registered here.
    """
    if not blobs:
        return {}
    with naming_file(blobs[0]):
        return _collected(state, blobs, parts, _ValueCollector(state, entry, set(taken), names))


def _collected(
    state: str, blobs: Sequence[bytes], parts: Mapping[str, bytes], collector: _ValueCollector
) -> dict[str, Any]:
    try:
        if _is_optimizer(decode(blobs[0], on_tensor=TensorRef, on_unregistered=UnregisteredInstance)):
            collector.add_optimizer(blobs)
        else:
            collector.add_trees(blobs)
        for name, blob in parts.items():
            collector.add_trees([blob], f"{name}.")
    except _MALFORMED as error:
        if isinstance(error, CorruptCheckpointError | IncompatibleCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"the plain values of {state!r} are malformed ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    return collector.found


class _ValueCollector:
    """A collector of the plain values of one state under unique keys."""

    def __init__(
        self,
        state: str,
        entry: Callable[[str, str], Entry | None],
        taken: set[str],
        names: Mapping[str, Sequence[str]],
    ) -> None:
        self.found: dict[str, Any] = {}
        self._names = names
        self._state = state
        self._entry = entry
        self._taken = taken

    def _add(self, key: str, value: object) -> None:
        name = unique_name(f"{self._state}/{key}", self._taken)
        self._taken.add(name)
        self.found[name] = value

    def _tensor(self, fqn: str, slot: str) -> Entry:
        found = self._entry(fqn, slot)
        if found is None:
            raise CorruptCheckpointError(
                f"the values of {self._state!r} refer to tensor {fqn!r}, which the catalog lacks; use another checkpoint"
            )
        return found

    @staticmethod
    def _plain_leaves(tree: object) -> Iterator[tuple[str, object]]:
        """Return (key, leaf) for the leaves that are not tensors."""
        return (
            (key_of_path(path) or "value", leaf)
            for path, leaf in leaves_with_paths(tree)
            if not isinstance(leaf, Entry)
        )

    def add_trees(self, blobs: Sequence[bytes], prefix: str = "") -> None:
        """Add the values of trees of any form, without the keys of earlier trees; a key may occur twice in one tree."""
        seen: set[str] = set()
        for blob in blobs:
            tree = decode(blob, on_tensor=lambda name: self._tensor(name, ""), on_unregistered=UnregisteredInstance)
            values = [*self._plain_leaves(tree)]
            for key, value in values:
                if key not in seen:
                    self._add(prefix + key, value)
            seen.update(key for key, _ in values)

    def add_optimizer(self, blobs: Sequence[bytes]) -> None:
        """Add the values of optimizer trees, which complement each other."""
        trees: list[dict[str, Any]] = []
        for blob in blobs:
            tree = decode(
                blob,
                on_tensor=lambda name: self._tensor(*parse_state_reference(name)),
                on_unregistered=UnregisteredInstance,
            )
            if not _is_optimizer(tree):
                raise CorruptCheckpointError(
                    f"the ranks' values of {self._state!r} do not belong together; use another checkpoint"
                )
            assert isinstance(tree, dict)
            trees.append(tree)
        if self._names:
            trees = renamed_trees(self._state, trees, self._names)
        self._add("param_groups", [unpack_tensors(group) for group in _merged_groups(trees)])
        seen: set[str] = set()
        for tree in trees:
            names = tree.get("aliases", {})
            for fqn, values in tree["state"].items():
                if fqn in seen:
                    continue
                seen.add(fqn)
                for key, value in self._plain_leaves(values):
                    for name in (fqn, *names.get(fqn, ())):
                        self._add(f"state/{name}/{key}", value)
        for part in ("globals", "own"):
            if any(values := trees[0].get(part, ())):
                self._add(part, unpack_tensors(values))


def _merged_groups(trees: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the param groups of all ranks: pipeline ranks have parts of one group, with equal settings."""
    merged: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []  # of each merged group
    seen: set[str] = set()
    for tree in trees:
        unmatched = list(range(len(merged)))  # two groups of one rank stay separate, even with equal settings
        for group in tree["groups"]:
            params = [name for name in group["params"] if name not in seen]
            if not params and group["params"]:
                continue
            seen.update(params)
            group_settings = {key: value for key, value in group.items() if key != "params"}
            match = next((i for i in unmatched if equal(settings[i], group_settings)), None)
            if match is None:
                merged.append({"params": params, **group_settings})
                settings.append(group_settings)
            else:
                unmatched.remove(match)
                merged[match]["params"] += params
    return merged
