"""A checkpoint as the adapters see it during a load: names, shapes, dtypes and trees of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from bytecheckpoint.frameworks.base import SavedTensor
from bytecheckpoint.frameworks.objects.capture import STATES_BY_NAME
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.lazy import lazy
from bytecheckpoint.loading.live_names import LiveNames
from bytecheckpoint.loading.trees import Trees
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import TensorRef, decode, leaves_with_paths

__all__ = ["SavedView"]


class SavedView:
    """Implements `frameworks.base.SavedStates` over a catalog, for one rank. Its tensors go by their number in the catalog.

    Args:
        catalog: of the checkpoint.
        trees: reads its trees of plain values.
        rank: whose view this is.
        live: names of the live objects; by default they are the checkpoint's.
        groups: the groups of a large catalog, of which this rank has read some.

    Attributes:
        rows: the stored shards that were read, ordered by tensor.
        from_rank_0: names of the states and keys for which this rank has no copy of its own and got rank 0's.
    """

    def __init__(
        self,
        catalog: Catalog,
        trees: Trees,
        rank: int,
        live: LiveNames | None = None,
        groups: CatalogGroups | None = None,
    ) -> None:
        self._catalog = catalog
        self._reader = trees
        self._rank = rank
        self._live = live or LiveNames(NameSelection())
        self.rows = trees.rows
        self.from_rank_0: list[str] = []
        self._trees: dict[str, list[bytes]] = {}
        # Files of each tensor: all of them, or the first of those in each group.
        self._places = (groups.hulls.tensor, groups.file) if groups else (self.rows.boxes.tensor, self.rows.file)

    def states(self) -> Collection[str]:  # noqa: D102 (protocol)
        # A state of tensors with names is in parts, which `names_of` selects.
        takes = self._live.selection.takes
        return [state for state in self._catalog.states() if state in STATES_BY_NAME or takes(state)]

    @lazy
    def tensors(self) -> list[SavedTensor]:
        """All tensors, by number."""
        # Whole columns at once: one at a time costs several microseconds each.
        catalog = self._catalog
        shapes = (tuple(s[:n]) for s, n in zip(catalog.shapes.tolist(), catalog.ndims.tolist(), strict=True))
        return list(map(SavedTensor, catalog.keys(), catalog.dtype.to_list(), shapes))

    @lazy
    def _shared(self) -> dict[tuple[str, str, str], int]:
        """Numbers of the tensors that all ranks share, by key."""
        # Looked up by (state, FQN, slot): a plain tuple is made in a third of the time of a TensorKey, and equals it.
        owners = self._catalog.owner.tolist()
        return {
            saved.key: number
            for number, (saved, owner) in enumerate(zip(self.tensors, owners, strict=True))
            if owner == SHARED
        }

    @lazy
    def _slots(self) -> dict[tuple[str, str], list[SavedTensor]]:
        """The optimizer state tensors that all ranks share, by (state, FQN)."""
        slots: dict[tuple[str, str], list[SavedTensor]] = {}
        for number in self._shared.values():
            key = self.tensors[number].key
            if key.slot and key.slot != VALUES_SLOT:
                slots.setdefault((key.state, key.fqn), []).append(self.tensors[number])
        return slots

    def find(self, state: str, names: Sequence[str], slot: str = "") -> SavedTensor | None:  # noqa: D102 (protocol)
        number = self._number(state, self.names_of(state, names, parameter=bool(slot)), slot)
        return self.tensors[number] if number >= 0 else None

    def stored(self, key: TensorKey) -> SavedTensor | None:  # noqa: D102 (protocol)
        number = self._number(key.state, (key.fqn,), key.slot)
        return self.tensors[number] if number >= 0 else None

    def names_of(self, state: str, names: Sequence[str], *, parameter: bool = False) -> Sequence[str]:  # noqa: D102
        return self._live.of(state, names, parameter=parameter)

    def _number(self, state: str, names: Sequence[str], slot: str) -> int:
        """Find a shared tensor by the first of `names` that is a name or alias of one; -1 if none is."""
        shared = self._shared
        for name in names:
            number = shared.get((state, name, slot), -1)
            if number < 0 and (aliases := self._catalog.aliases.get(state)) is not None and name in aliases:
                number = shared.get((state, aliases[name], slot), -1)
            if number >= 0:
                return number
        return -1

    def numbers(self, keys: Iterable[TensorKey]) -> list[int]:
        """Find the shared tensor of each key, also by an alias; -1 where there is none."""
        shared = self._shared
        found = [shared.get(key, -1) for key in keys]
        if -1 in found:
            found = [
                n if n >= 0 else self._number(key.state, (key.fqn,), key.slot)
                for n, key in zip(found, keys, strict=True)
            ]
        return found

    def slots(self, state: str, names: Sequence[str]) -> list[SavedTensor]:  # noqa: D102 (protocol)
        for name in self.names_of(state, names, parameter=True):
            found = self._slots.get((state, name))
            if found is None and (aliases := self._catalog.aliases.get(state)) is not None and name in aliases:
                found = self._slots.get((state, aliases[name]))
            if found is not None:
                return found
        return []

    def keys(self, state: str) -> list[TensorKey]:  # noqa: D102 (protocol)
        catalog = self._catalog
        keys = (catalog.key(i) for i in catalog.of_state(state).tolist())
        selection = self._live.selection
        return list(
            dict.fromkeys(k for k in keys if k.slot != VALUES_SLOT and (not selection.active or selection.takes_any(k)))
        )

    def streams(self, state: str) -> list[SavedTensor]:  # noqa: D102 (protocol)
        catalog = self._catalog
        of_state = catalog.of_state(state)
        trees = of_state[catalog.slot.codes[of_state] == catalog.slot.code_of(VALUES_SLOT)]
        found = trees[catalog.fqn.codes[trees] != catalog.fqn.code_of("")]
        return [self.tensors[i] for i in found.tolist()]

    def resolve(self, keys: Sequence[TensorKey], *, by_content: bool) -> list[int]:
        """Find the tensor that this rank loads for each key; -1 where there is none.

        Args:
            keys: what to find.
            by_content: these are values, which may differ between ranks: take this rank's own copy, else the shared one,
                else rank 0's. False: take the shared tensor, also by an alias.
        """
        if not keys:
            return []
        if not by_content:
            return self.numbers(keys)
        found = self._catalog.find(keys)
        own = self._catalog.find(keys, self._rank)
        first = self._catalog.find(keys, 0)
        result = np.where(own >= 0, own, np.where(found >= 0, found, first))
        lacking = np.flatnonzero((own < 0) & (found < 0) & (first >= 0))
        self.from_rank_0 += [str(keys[i]) for i in lacking.tolist()]
        return [int(i) for i in result]

    def tree(self, state: str) -> bytes | None:  # noqa: D102 (protocol)
        key = TensorKey(state, "", VALUES_SLOT)
        before = len(self.from_rank_0)
        (number,) = self.resolve([key], by_content=True) if self._live.selection.takes(state) else (-1,)
        self.from_rank_0[before:] = [state] if len(self.from_rank_0) > before else []
        return self._reader.read(number) if number >= 0 else None

    def trees(self, state: str) -> list[bytes]:  # noqa: D102 (protocol)
        if not self._live.selection.takes(state):
            return []
        known = self._trees.get(state)
        if known is None:
            known = self._trees[state] = list(dict.fromkeys(map(self._reader.read, self._tree_numbers(state).tolist())))
        return known

    def _tree_numbers(self, state: str) -> Int64s:
        """Find the tensors that are trees of `state`, in order of their owners."""
        of_state = self._catalog.of_state(state)
        root = self._catalog.fqn.codes[of_state] == self._catalog.fqn.code_of("")
        found = of_state[root & (self._catalog.slot.codes[of_state] == self._catalog.slot.code_of(VALUES_SLOT))]
        ordered: Int64s = found[np.argsort(self._catalog.owner[found], kind="stable")]
        return ordered

    def extra_states(self, state: str, world_size: int) -> Iterator[str]:
        """Iterate over the names of the extra states in this rank's share of the trees of `state`.

        The shares of all ranks are all trees. A name may come twice. An empty value is nothing to load, and a tensor
        that the ranks share has a name of its own in the catalog.
        """
        for number in self._tree_numbers(state).tolist():
            if max(int(self._catalog.owner[number]), 0) % world_size != self._rank:
                continue
            tree = decode(
                self._reader.read(number), on_tensor=TensorRef, on_unregistered=lambda _, saved: saved, restore=False
            )
            for name, value in tree.items() if isinstance(tree, dict) else ():
                if any(self._holds_more(state, leaf) for _, leaf in leaves_with_paths(value)):
                    yield str(name)

    def _holds_more(self, state: str, leaf: object) -> bool:
        """Return whether a leaf of an extra state holds something that no shared tensor of the catalog holds."""
        if isinstance(leaf, TensorRef):
            return (state, leaf.name, "") not in self._shared
        return not (leaf is None or (isinstance(leaf, bytes | dict | list | tuple) and not leaf))

    def trees_about(self, state: str, names: Collection[str]) -> Iterator[bytes]:  # noqa: D102 (protocol)
        numbers = self._tree_numbers(state)
        if not len(numbers):
            return
        # One copy stands for all that are equal, and the lowest of their ranks wrote it.
        owners = self._catalog.owner[numbers]
        own = self._rank if self._rank <= max(f.rank for f in self._catalog.files) else 0
        first = max(int(np.searchsorted(owners, own, "right")) - 1, 0)
        yield self._reader.read(int(numbers[first]))
        if len(numbers) == 1:
            return
        saved_names = {self._live.renamed(state, name, parameter=True) for name in names}
        near = np.maximum(np.searchsorted(owners, self._writers(state, saved_names), "right") - 1, 0)
        order = np.argsort(-np.bincount(near, minlength=len(numbers)), kind="stable")
        for place in order[order != first].tolist():
            yield self._reader.read(int(numbers[place]))

    def _writers(self, state: str, names: Collection[str]) -> Int64s:
        """Return the writers of the stored boxes of the tensors of `names`; of a catalog in groups, one of each group."""
        catalog = self._catalog
        aliases = catalog.aliases.get(state, {})
        codes = catalog.fqn.codes_of([n for name in names for n in (name, aliases.get(name, name))])
        of_state = catalog.of_state(state)
        wanted = np.zeros(catalog.count, np.bool_)
        wanted[of_state] = np.isin(catalog.fqn.codes[of_state], codes) & (catalog.owner[of_state] == SHARED)
        tensor, file = self._places
        return np.array([f.rank for f in catalog.files], np.int64)[file[wanted[tensor]]]

    def other_names(self, recognized: Collection[TensorKey]) -> Iterator[str]:
        """Iterate over the names of what this rank does not recognize, as `Destination.missing` spells them."""
        for key in self._shared:
            if key not in recognized and key[2] != VALUES_SLOT:
                yield str(TensorKey(*key))
        known = {(key.state, key.fqn) for key in recognized if key.slot}
        for state, fqn in self._slots.keys() - known:
            yield f"{state}/param_groups/{fqn}"

    def skipped(self) -> list[int]:
        """Find the tensors of the live names that the load does not select."""
        found: list[int] = []
        for state, name in self._live.skipped:
            number = self._number(state, (name,), "")
            found += [number] if number >= 0 else []
            fqn = self._catalog.aliases.get(state, {}).get(name, name)
            found += self.numbers(tensor.key for tensor in self._slots.get((state, fqn), ()))
        return found

    def find_by_content(self, state: str, fqn: str) -> SavedTensor | None:  # noqa: D102 (protocol)
        for owner in (self._rank, SHARED, 0):
            number = self._catalog.find_one(TensorKey(state, fqn), owner)
            if number >= 0:
                return self.tensors[number]
        return None
