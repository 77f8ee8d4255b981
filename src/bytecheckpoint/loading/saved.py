"""A checkpoint as the adapters see it during a load: names, shapes, dtypes and trees of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import SavedPiece, SavedTensor
from bytecheckpoint.frameworks.objects.capture import STATES_BY_NAME
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.lazy import lazy
from bytecheckpoint.loading.catalog_exchange import Trees
from bytecheckpoint.loading.live_names import LiveNames
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.catalog_index import CatalogIndex
from bytecheckpoint.representation.names import CATALOG_NAME, escape
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import TensorRef, decode, leaves_with_paths

__all__ = ["SavedView"]


class SavedView:
    """Implements `frameworks.base.SavedStates` over a catalog, for one rank. Numbers of tensors are those of the catalog.

    Args:
        catalog: catalog of the checkpoint.
        trees: reader of its trees of plain values.
        rank: rank whose view this is.
        live: names of the live objects; by default they are the checkpoint's.
        groups: groups of a large catalog, of which this rank has read some.
        shown_names: names under which a layout shows those of the checkpoint.

    Attributes:
        index: index of the catalog.
        from_rank_0: names of the states and keys for which this rank has no copy of its own and got rank 0's.
    """

    def __init__(
        self,
        catalog: Catalog,
        trees: Trees,
        rank: int,
        live: LiveNames | None = None,
        groups: CatalogGroups | None = None,
        shown_names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.index = CatalogIndex(catalog)
        self.shown_names = shown_names
        self._catalog = catalog
        self._trees = trees
        self._rank = rank
        self._live = live or LiveNames(NameSelection())
        self.from_rank_0: list[str] = []
        self._tree_cache: dict[str, list[bytes]] = {}
        # Boxes of the tensors with their files: all of them, or the hull and first file of each tensor in each group.
        rows = trees.rows
        self._places = (groups.hulls, groups.file) if groups else (rows.boxes, rows.file)

    @property
    def is_foreign(self) -> bool:  # noqa: D102 (protocol)
        return self._catalog.is_foreign

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
        return list(map(SavedTensor, self.index.keys, catalog.dtype.to_list(), shapes))

    def find(self, state: str, names: Sequence[str], slot: str = "") -> SavedTensor | None:  # noqa: D102 (protocol)
        saved_names = self.names_of(state, names, parameter=bool(slot))
        if not slot and saved_names and (computed := self._live.computed(state, names)) is not None:
            return computed
        number = self.index.find(state, saved_names, slot)
        return self._proven(number) if slot else self.tensors[number] if number >= 0 else None

    def stored(self, key: TensorKey) -> SavedTensor | None:  # noqa: D102 (protocol)
        return self._proven(self.index.find(key.state, (key.fqn,), key.slot))

    @lazy
    def _incomplete(self) -> NDArray[np.bool_]:
        """Mask of the tensors of which the rows hold fewer elements than the shape has."""
        boxes = self._places[0]
        stored = np.bincount(boxes.tensor, boxes.volumes().astype(np.float64), self._catalog.count)
        # Products of floats lose the last digits of numbers above 2**53.
        return np.asarray(stored < 0.999999 * np.prod(self._catalog.shapes, axis=1, dtype=np.float64), np.bool_)

    def _proven(self, number: int) -> SavedTensor | None:
        """Return a tensor for which a load may allocate memory; None for number -1.

        Raises:
            CorruptCheckpointError: the checkpoint cannot fill it.
        """
        if number < 0:
            return None
        found = self.tensors[number]
        if self._incomplete[number]:
            raise CorruptCheckpointError(
                f"catalog '{CATALOG_NAME}' gives {found.key} the shape {list(found.global_shape)}, and rows for a part of "
                "it only; use another checkpoint",
                file=CATALOG_NAME,
                tensors=(str(found.key),),
            )
        return found

    def names_of(self, state: str, names: Sequence[str], *, parameter: bool = False) -> Sequence[str]:  # noqa: D102
        return self._live.of(state, names, parameter=parameter)

    def tensors_of(self, state: str, live: Collection[str]) -> dict[str, SavedTensor]:  # noqa: D102 (protocol)
        numbers = (n for n in self._catalog.of_state(state).tolist() if self._catalog.owner[n] == SHARED)
        found = {t.key.fqn: t for t in map(self.tensors.__getitem__, numbers) if not t.key.slot}
        aliases = self._catalog.aliases.get(state, {}).items()
        found |= {alias: found[fqn] for alias, fqn in aliases if fqn in found and alias not in found}
        here = {name: tensor for name in live if (tensor := found.get(self._live.renamed(state, name))) is not None}
        renamed = {tensor.key for name, tensor in here.items() if found.get(name) != tensor}
        return {n: t for n, t in found.items() if n not in live and t.key not in renamed} | here

    def substitute(self, state: str, found: Mapping[str, SavedTensor | None]) -> None:  # noqa: D102 (protocol)
        self._live.note_hooks(state, found)

    def number(self, state: str, names: Sequence[Sequence[str]]) -> bool:  # noqa: D102 (protocol)
        if state not in self._catalog.info.get("numbered", ()):
            return False
        if self.shown_names:
            raise IncompatibleCheckpointError(
                f"the checkpoint knows the parameters of {state} by number only, which a layout cannot rename: leave "
                "the optimizer out, or load without a layout"
            )
        self._live.note_numbers(state, names)
        return True

    def slots(self, state: str, names: Sequence[str]) -> list[SavedTensor]:  # noqa: D102 (protocol)
        found = self.index.find_slots(state, self.names_of(state, names, parameter=True))
        return [tensor for number in found if (tensor := self._proven(number)) is not None]

    def keys(self, state: str) -> list[TensorKey]:  # noqa: D102 (protocol)
        keys = (self.index.keys[i] for i in self._catalog.of_state(state).tolist())
        selection = self._live.selection
        return list(
            dict.fromkeys(k for k in keys if k.slot != VALUES_SLOT and (not selection.active or selection.takes_any(k)))
        )

    def streams(self, state: str) -> list[SavedTensor]:  # noqa: D102 (protocol)
        numbers = self.index.streams(state).tolist()
        return [tensor for number in numbers if (tensor := self._proven(number)) is not None]

    def numbers(self, keys: Iterable[TensorKey]) -> list[int]:
        """Find the shared tensor of each key, also by an alias; -1 for none."""
        return self.index.find_all(keys)

    def resolve(self, keys: Sequence[TensorKey], *, by_content: bool) -> list[int]:
        """Find the tensor that this rank loads for each key; -1 where there is none.

        Args:
            keys: keys of the tensors.
            by_content: True for values, which may differ between ranks. Then this rank's own copy is taken, else
                the shared one, else the lowest rank's; otherwise the shared tensor, also by an alias.
        """
        if not keys:
            return []
        if not by_content:
            return self.numbers(keys)
        found = self._catalog.find(keys)
        own = self._catalog.find(keys, self._rank)
        result = np.where(own >= 0, own, found)
        for i in np.flatnonzero(result < 0).tolist():
            result[i] = self.index.of_lowest.get(keys[i], -1)
            if result[i] >= 0 and self._catalog.owner[result[i]] == 0:
                self.from_rank_0.append(str(keys[i]))
        return [int(i) for i in result]

    def tree(self, state: str) -> bytes | None:  # noqa: D102 (protocol)
        if not self._live.selection.takes(state):
            return None
        for owner in (self._rank, SHARED, 0):
            number = self._catalog.find_one(TensorKey(state, "", VALUES_SLOT), owner)
            if number >= 0:
                if owner == 0 and self._rank != 0:
                    self.from_rank_0.append(state)
                return self._trees.read(number)
        return None

    def trees(self, state: str) -> list[bytes]:  # noqa: D102 (protocol)
        if not self._live.selection.takes(state):
            return []
        known = self._tree_cache.get(state)
        if known is None:
            read = map(self._trees.read, self.index.trees(state).tolist())
            known = self._tree_cache[state] = list(dict.fromkeys(read))
        return known

    def extra_state_names(self, loaded: Mapping[str, Collection[str]], world_size: int) -> tuple[list[str], list[str]]:
        """Return the names of the extra states that this rank loads or leaves alone, and of others in the checkpoint.

        Args:
            loaded: state of modules -> names of the extra states that this rank loads.
            world_size: number of ranks, among which the trees of plain values are divided.
        """
        known = {(state, name) for state, names in loaded.items() for name in names}
        known |= {name for name in self._live.skipped if name[0] in loaded}
        found = {(state, name) for state in loaded for name in self._extra_states(state, world_size)}
        others = {name for name in found - known if self._live.selection.takes(*name)}
        return _escaped(known), _escaped(others)

    def _extra_states(self, state: str, world_size: int) -> Iterator[str]:
        """Iterate over the names of the extra states in this rank's share of the trees of a state.

        The shares of all ranks are all trees. A name may come twice. An empty value is nothing to load, and a tensor
        that the ranks share has a name of its own in the catalog.
        """
        for number in self.index.trees(state).tolist():
            if max(int(self._catalog.owner[number]), 0) % world_size != self._rank:
                continue
            tree = decode(
                self._trees.read(number), on_tensor=TensorRef, on_unregistered=lambda _, saved: saved, restore=False
            )
            for name, value in tree.items() if isinstance(tree, dict) else ():
                if any(self._holds_more(state, leaf) for _, leaf in leaves_with_paths(value)):
                    yield str(name)

    def _holds_more(self, state: str, leaf: object) -> bool:
        """Return whether a leaf of an extra state holds something that no shared tensor of the catalog holds."""
        if isinstance(leaf, TensorRef):
            return (state, self.index.stored_name(state, leaf.name), "") not in self.index.shared
        return not (leaf is None or (isinstance(leaf, bytes | dict | list | tuple) and not leaf))

    def trees_about(self, state: str, names: Collection[str]) -> Iterator[bytes]:  # noqa: D102 (protocol)
        numbers = self.index.trees(state)
        if not len(numbers):
            return
        # One copy stands for all that are equal, and the lowest of their ranks wrote it.
        owners = self._catalog.owner[numbers]
        own = self._rank if self._rank <= max(f.rank for f in self._catalog.files) else 0
        first = max(int(np.searchsorted(owners, own, "right")) - 1, 0)
        yield self._trees.read(int(numbers[first]))
        if len(numbers) == 1:
            return
        saved_names = {self._live.renamed(state, name, parameter=True) for name in names}
        near = np.maximum(np.searchsorted(owners, self._writers(state, saved_names), "right") - 1, 0)
        order = np.argsort(-np.bincount(near, minlength=len(numbers)), kind="stable")
        for place in order[order != first].tolist():
            yield self._trees.read(int(numbers[place]))

    def _writers(self, state: str, names: Collection[str]) -> Int64s:
        """Return the writers of the stored boxes of some tensors; of a large catalog, one of each group."""
        catalog = self._catalog
        codes = catalog.fqn.codes_of([n for name in names for n in (name, self.index.stored_name(state, name))])
        of_state = catalog.of_state(state)
        wanted = np.zeros(catalog.count, np.bool_)
        wanted[of_state] = np.isin(catalog.fqn.codes[of_state], codes) & (catalog.owner[of_state] == SHARED)
        boxes, file = self._places
        return np.array([f.rank for f in catalog.files], np.int64)[file[wanted[boxes.tensor]]]

    def other_names(self, recognized: Collection[TensorKey]) -> Iterator[str]:
        """Iterate over the names that this rank does not recognize, spelled as in `Destination.missing`."""
        for key in self.index.shared:
            if key not in recognized and key[2] != VALUES_SLOT:
                yield str(TensorKey(*key))
        known = {(key.state, key.fqn) for key in recognized if key.slot}
        for state, fqn in self.index.slots.keys() - known:
            yield f"{state}/param_groups/{fqn}"

    def skipped(self) -> list[int]:
        """Find the tensors of the live names that the load does not select."""
        found: list[int] = []
        for state, name in self._live.skipped:
            number = self.index.find(state, (name,))
            found += [number] if number >= 0 else []
            found += self.index.slots.get((state, self.index.stored_name(state, name)), ())
        return found

    def pieces(self, state: str, others: Collection[TensorKey], *, all_ranks: bool = False) -> list[SavedPiece]:  # noqa: D102
        saver = self._rank if self._rank <= max(f.rank for f in self._catalog.files) else 0
        found = []
        for number in self._catalog.of_state(state).tolist():
            key, owner = self.index.keys[number], self._catalog.owner[number]
            if (all_ranks or owner in (SHARED, saver)) and key.slot != VALUES_SLOT and key not in others:
                tensor = self._proven(number)
                assert tensor is not None
                found.append(SavedPiece(tensor, number, partial(self._trees.read_range, number)))
                if not all_ranks and owner != SHARED and saver != self._rank:
                    self.from_rank_0.append(state)
        return found

    @staticmethod
    def boxes_of(pieces: Sequence[SavedPiece]) -> BoxTable:
        """Return the boxes of pieces, each the whole tensor."""
        shapes = [piece.tensor.global_shape for piece in pieces]
        return BoxTable.build([piece.number for piece in pieces], [(0,) * len(shape) for shape in shapes], shapes)

    def find_by_content(self, state: str, fqn: str) -> SavedTensor | None:  # noqa: D102 (protocol)
        key = TensorKey(state, fqn)
        for owner in (self._rank, SHARED):
            number = self._catalog.find_one(key, owner)
            if number >= 0:
                return self._proven(number)
        # A tree of another rank (a pipeline stage) refers to tensors of that rank.
        return self._proven(self.index.of_lowest.get(key, -1))


def _escaped(names: Iterable[tuple[str, str]]) -> list[str]:
    return [escape(str(TensorKey(*name))) for name in sorted(names)]
