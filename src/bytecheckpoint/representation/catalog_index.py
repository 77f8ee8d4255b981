"""Find the tensors of a catalog by key, by alias and by the rank that owns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.names import VALUES_NAME
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.tree import StoredTree

__all__ = ["CatalogIndex", "stored_tree"]


def stored_tree(catalog: Catalog, number: int, data: bytes) -> StoredTree:
    """Return the encoded value of a tensor of plain values, with the places that errors name."""
    row, key = int(np.searchsorted(catalog.boxes.tensor, number)), catalog.key(number)
    name = catalog.files[catalog.file[row]].name
    return StoredTree(data, f"values of {key.state!r}" if name.startswith(VALUES_NAME) else name, str(key))


class CatalogIndex:
    """Finds tensors of a catalog; their numbers there stand for them, and -1 for none.

    Args:
        catalog: catalog of the checkpoint; of a large one any rows.

    Attributes:
        catalog: catalog of the checkpoint.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    @lazy
    def keys(self) -> list[TensorKey]:
        """Keys of all tensors, by number."""
        return self.catalog.keys()

    @lazy
    def shared(self) -> dict[tuple[str, str, str], int]:
        """Numbers of the tensors that all ranks share, by (state, FQN, slot)."""
        # Looked up by plain tuples: one is made in a third of the time of a TensorKey, and equals it.
        owners = self.catalog.owner.tolist()
        return {
            key: number for number, (key, owner) in enumerate(zip(self.keys, owners, strict=True)) if owner == SHARED
        }

    @lazy
    def of_lowest(self) -> dict[tuple[str, str, str], int]:
        """Numbers of the tensors that belong to a rank, by (state, FQN, slot); of several ranks' the lowest one's."""
        owner = self.catalog.owner
        owned = np.flatnonzero(owner != SHARED)
        return {self.keys[n]: n for n in owned[np.argsort(-owner[owned], kind="stable")].tolist()}

    @lazy
    def slots(self) -> dict[tuple[str, str], list[int]]:
        """Numbers of the optimizer state tensors that all ranks share, by (state, FQN of the parameter)."""
        slots: dict[tuple[str, str], list[int]] = {}
        for (state, fqn, slot), number in self.shared.items():
            if slot and slot != VALUES_SLOT:
                slots.setdefault((state, fqn), []).append(number)
        return slots

    def stored_name(self, state: str, fqn: str) -> str:
        """Return the FQN under which the checkpoint stores a tensor, of which `fqn` may be an alias."""
        return self.catalog.aliases.get(state, {}).get(fqn, fqn)

    def find(self, state: str, names: Sequence[str], slot: str = "") -> int:
        """Find the shared tensor of the first of `names` that is an FQN or an alias of one."""
        shared = self.shared
        for name in names:
            number = shared.get((state, name, slot), -1)
            if number < 0 and (stored := self.stored_name(state, name)) != name:
                number = shared.get((state, stored, slot), -1)
            if number >= 0:
                return number
        return -1

    def find_all(self, keys: Iterable[TensorKey]) -> list[int]:
        """Find the shared tensor of each key, also by an alias."""
        shared = self.shared
        found = [shared.get(key, -1) for key in keys]
        if -1 in found:
            found = [n if n >= 0 else self.find(*_by_name(key)) for n, key in zip(found, keys, strict=True)]
        return found

    def find_slots(self, state: str, names: Sequence[str]) -> list[int]:
        """Find the optimizer state tensors of the first of `names` that has some."""
        for name in names:
            found = self.slots.get((state, name)) or self.slots.get((state, self.stored_name(state, name)))
            if found is not None:
                return found
        return []

    def of_rank(self, rank: int | None) -> dict[TensorKey, int]:
        """Choose the tensor of each key for one rank: its own, else the shared one, else that of the lowest rank."""
        owners = self.catalog.owner.tolist()

        def preference(number: int) -> tuple[bool, int]:
            return owners[number] != rank, owners[number]  # SHARED is less than any rank

        chosen: dict[TensorKey, int] = {}
        for number, key in enumerate(self.keys):
            known = chosen.get(key)
            if known is None or preference(number) < preference(known):
                chosen[key] = number
        return chosen

    def trees(self, state: str) -> Int64s:
        """Find the trees of plain values of a state, in order of their owners."""
        found = self._values(state, root=True)
        ordered: Int64s = found[np.argsort(self.catalog.owner[found], kind="stable")]
        return ordered

    def streams(self, state: str) -> Int64s:
        """Find the trees of the streams of a state; the FQN of each is the name of its stream."""
        return self._values(state, root=False)

    def _values(self, state: str, *, root: bool) -> Int64s:
        catalog = self.catalog
        of_state = catalog.of_state(state)
        is_root = catalog.fqn.codes[of_state] == catalog.fqn.code_of("")
        is_tree = catalog.slot.codes[of_state] == catalog.slot.code_of(VALUES_SLOT)
        found: Int64s = of_state[is_tree & (is_root == root)]
        return found


def _by_name(key: TensorKey) -> tuple[str, tuple[str], str]:
    return key.state, (key.fqn,), key.slot
