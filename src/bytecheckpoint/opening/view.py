"""An open checkpoint with the facts that tools need: owners and stored names of tensors, and reads of many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bytecheckpoint.errors import MissingKeyError
from bytecheckpoint.opening.box_reader import TensorPiece, read_in_pieces
from bytecheckpoint.opening.checkpoint import Checkpoint
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.representation.values.tree import parse_state_reference
from bytecheckpoint.storage import Storage

__all__ = ["CheckpointView"]


class CheckpointView(Checkpoint):
    """A `Checkpoint` for tools; it shares the open files of the checkpoint that it was made of."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointView:
        """Return the view of a checkpoint, whose open files it shares."""
        return checkpoint if isinstance(checkpoint, cls) else cls(checkpoint._reader, checkpoint.rank)

    @property
    def catalog(self) -> Catalog:
        """The catalog of the checkpoint; of a large one the tensors, the files and some of the rows."""
        return self._catalog

    @property
    def storage(self) -> Storage:
        """The storage of the checkpoint."""
        return self._reader.storage

    @property
    def is_renamed(self) -> bool:
        """True if a layout shows the tensors under other names."""
        return bool(self._reader.shown_names)

    def for_rank(self, rank: int | None) -> CheckpointView:
        """Return the checkpoint as another rank sees it."""
        return CheckpointView(self._reader, rank)

    def own_keys(self) -> set[str]:
        """Return the keys whose values belong to this rank alone."""
        if self.rank is None:
            return set()
        owner = self._catalog.owner
        own = {key for key, number in self._keys.number.items() if owner[number] == self.rank}
        for state in self.states:
            tree = self._keys.chosen.get(TensorKey(state, "", VALUES_SLOT))
            if tree is not None and owner[tree] == self.rank:
                own.update(self._plain_of(state))
        return own

    def keys_of(self, state: str) -> list[str]:
        """Return the keys of one state, tensors first."""
        return [*self._keys.of_state.get(state, ()), *(self._plain_of(state) if state in self.states else ())]

    def stored_under(self, key: str) -> TensorKey | None:
        """Return the tensor behind a key under the name that stores its bytes, or None for a plain value."""
        number = self._number(key)
        return None if number is None else self._catalog.key(number)

    def as_stored(self, key: str) -> Any:
        """Return the value under a key, with an `UnregisteredInstance` for each instance of an unregistered class.

        The result is not a copy: do not modify it.
        """
        value = self._value(key) if self._number(key) is None else None
        return self[key] if value is None else value()

    def has_streams(self, state: str) -> bool:
        """Return whether a state is in streams: positions of data loaders, which any number of ranks divides."""
        return bool(len(self._index.streams(state)))

    def structure(self, state: str) -> tuple[Any, set[str], set[str]]:
        """Return the plain values of a state in their containers, with an `Entry` for each tensor; None without values.

        Where the ranks' values complement each other they are one. Instances of classes become their plain values.

        Returns:
            The values, the keys of the tensors in them, of which a tied one has several, and the names of the classes.
        """
        inside: set[str] = set()
        classes: set[str] = set()

        def found(name: str) -> Entry | None:
            entry = self._entry(state, name, "")
            inside.update([f"{state}/{name}"] if entry is None else [f"{state}/{name}", entry.key])
            return entry

        trees = self._values(state, found, classes.add)
        if len(trees) > 1 and all(isinstance(tree, dict) for tree in trees):
            return {key: value for tree in reversed(trees) for key, value in tree.items()}, inside, classes
        return trees[0] if trees else None, inside, classes

    def containers_of(self, state: str) -> dict[str, dict[str, Any]]:
        """Return the lists, tuples and dicts in the state of an optimizer's parameters, with an `Entry` for each tensor.

        Names are those in the checkpoint, also where a layout shows others.
        """
        found: dict[str, dict[str, Any]] = {}
        for tree in self._values(state, lambda name: self._entry(state, *parse_state_reference(name))):
            for fqn, values in tree["state"].items():
                own = {slot: value for slot, value in values.items() if isinstance(value, dict | list | tuple)}
                for name in (fqn, *tree["aliases"].get(fqn, ())) if own else ():
                    found.setdefault(name, own)
        return found

    def _values(
        self, state: str, on_tensor: Callable[[str], Entry | None], on_class: Callable[[str], None] = lambda _: None
    ) -> list[Any]:
        """Return the values of a state that each rank has saved, with the result of `on_tensor` for each tensor."""

        def plain(name: str, saved: object) -> object:
            on_class(name)
            return saved

        return [
            decode(blob, on_tensor=on_tensor, on_unregistered=plain, restore=False) for blob in self._trees(state)[0]
        ]

    def stream(self, keys: Iterable[str], max_bytes: int = 32 << 20) -> Iterator[TensorPiece]:
        """Read several tensors in pieces, in bounded memory; small tensors are read together.

        Args:
            keys: keys of tensors, in the order in which to yield them.
            max_bytes: bytes of tensors in memory at a time.

        Yields:
            (key, slices, data) where `data` is `self[key][slices]`. The pieces of a tensor come in row-major order,
            each one run of its elements. A tensor without elements is one empty piece.
        """
        numbers = ((key, self._required_number(key)) for key in keys)
        return read_in_pieces(self._reader, numbers, max_bytes)

    def _required_number(self, key: str) -> int:
        number = self._number(key)
        if number is None:
            raise MissingKeyError(f"{self.path} has no tensor {key!r}{self._similar(key)}")
        return number
