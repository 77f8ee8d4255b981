"""The plain values of a checkpoint under the keys that `bytecheckpoint.open` shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CorruptCheckpointError, IncompatibleCheckpointError
from ..representation.values import TensorRef, decode, dotted, encode, leaves

if TYPE_CHECKING:
    from .entry import Entry

__all__ = ["Unreadable", "free_name", "is_merged", "plain_values"]

_OPTIMIZER_TREE = {"groups", "state", "globals", "optimizers"}
# What ill-formed trees of a hostile checkpoint can provoke in code that expects the form.
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError)


class Unreadable:
    """Stands for an instance of a class that is not registered here: whoever wants a copy of it learns why there is none.

    Attributes:
        name: what stands for the class in the checkpoint.
        saved: what its `encode` made of the instance.
    """

    def __init__(self, name: str, saved: object) -> None:
        self.name = name
        self.saved = saved

    def __repr__(self) -> str:
        return f"<{self.name}: {self.saved!r}>"

    def __deepcopy__(self, memo: object) -> Unreadable:
        raise IncompatibleCheckpointError(
            f"the value is, or holds, an instance of {self.name!r}, which is not registered here; call "
            "bytecheckpoint.register() for its class first"
        )


def free_name(name: str, taken: set[str]) -> str:
    """`name`, or the first of `name#2`, `name#3`, ... that is not taken; it is taken afterwards."""
    if name in taken:
        number = 2
        while f"{name}#{number}" in taken:
            number += 1
        name = f"{name}#{number}"
    taken.add(name)
    return name


def is_merged(kind: str, blob: bytes) -> bool:
    """Whether the trees of different ranks are parts of one (modules, optimizers), judged by one of them."""
    if kind == "model":
        return True
    try:
        return _is_optimizer(decode(blob, on_tensor=TensorRef, on_unregistered=Unreadable))
    except IncompatibleCheckpointError:
        return False


def _is_optimizer(tree: object) -> bool:
    return isinstance(tree, dict) and tree.keys() >= _OPTIMIZER_TREE and isinstance(tree["groups"], list)


def plain_values(
    kind: str, blobs: Sequence[bytes], entry: Callable[[str, str], Entry | None], taken: Collection[str]
) -> dict[str, Any]:
    """Key -> value for all that is not a tensor.

    Args:
        kind: name of the state.
        blobs: encoded trees; of several, the first that has a key counts.
        entry: (FQN, slot) -> the tensor of that name; it stands in containers that are shown as one value.
        taken: keys of the kind's tensors.

    Raises:
        CorruptCheckpointError: the values are damaged.
        IncompatibleCheckpointError: an instance of a class that is not registered here.
    """
    if not blobs:
        return {}
    values = _Values(kind, entry, set(taken))
    try:
        if _is_optimizer(decode(blobs[0], on_tensor=TensorRef, on_unregistered=Unreadable)):
            values.add_optimizer(blobs)
        else:
            values.add_trees(blobs)
    except _MALFORMED as error:
        if isinstance(error, CorruptCheckpointError | IncompatibleCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"the plain values of {kind!r} are malformed ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    return values.found


class _Values:
    """The plain values of one kind, gathered under keys that are free."""

    def __init__(self, kind: str, entry: Callable[[str, str], Entry | None], used: set[str]) -> None:
        self.found: dict[str, Any] = {}
        self._kind = kind
        self._entry = entry
        self._used = used

    def _add(self, key: str, value: object) -> None:
        self.found[free_name(f"{self._kind}/{key}", self._used)] = value

    def _tensor(self, fqn: str, slot: str) -> Entry:
        found = self._entry(fqn, slot)
        if found is None:
            raise CorruptCheckpointError(
                f"the values of {self._kind!r} refer to tensor {fqn!r}, which the catalog lacks; use another checkpoint"
            )
        return found

    @staticmethod
    def _plain(tree: object) -> Iterator[tuple[str, object]]:
        """The leaves that are no tensors, with their dotted keys."""
        from .entry import Entry

        return ((dotted(path) or "value", leaf) for path, leaf in leaves(tree) if not isinstance(leaf, Entry))

    def add_trees(self, blobs: Sequence[bytes]) -> None:
        """Trees of any form. A key that an earlier tree has is passed over; one that a tree has twice is not."""
        seen: set[str] = set()
        for blob in blobs:
            tree = decode(blob, on_tensor=lambda name: self._tensor(name, ""), on_unregistered=Unreadable)
            own = [*self._plain(tree)]
            for key, value in own:
                if key not in seen:
                    self._add(key, value)
            seen.update(key for key, _ in own)

    def add_optimizer(self, blobs: Sequence[bytes]) -> None:
        """Optimizers' trees: parts of one."""
        from ..frameworks.optimizers import outline, referenced

        trees: list[dict[str, Any]] = []
        for blob in blobs:
            tree = decode(blob, on_tensor=lambda name: self._tensor(*referenced(name)))
            if not _is_optimizer(tree):
                raise CorruptCheckpointError(
                    f"the ranks' values of {self._kind!r} do not belong together; use another checkpoint"
                )
            assert isinstance(tree, dict)
            trees.append(tree)
        self._add("param_groups", [outline(group) for group in _merged_groups(trees)])
        seen: set[str] = set()
        for tree in trees:
            names = tree.get("aliases", {})
            for fqn, values in tree["state"].items():
                if fqn in seen:
                    continue
                seen.add(fqn)
                for key, value in self._plain(values):
                    for name in (fqn, *names.get(fqn, ())):
                        self._add(f"state/{name}/{key}", value)
        if any(trees[0]["globals"]):
            self._add("globals", outline(trees[0]["globals"]))


def _merged_groups(trees: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The param groups of all ranks. Ranks of a pipeline have parts of one group: equal settings, other parameters."""
    merged: list[dict[str, Any]] = []
    settings: list[bytes] = []
    seen: set[str] = set()
    for tree in trees:
        free = list(range(len(merged)))  # a rank's own groups stay apart, equal or not
        for group in tree["groups"]:
            params = [name for name in group["params"] if name not in seen]
            if not params and group["params"]:
                continue
            seen.update(params)
            rest = {key: value for key, value in group.items() if key != "params"}
            code = encode(rest, on_tensor=lambda path, tensor: "")
            match = next((i for i in free if settings[i] == code), None)
            if match is None:
                merged.append({"params": params, **rest})
                settings.append(code)
            else:
                free.remove(match)
                merged[match]["params"] += params
    return merged
