"""The mapping that `bytecheckpoint.open` returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.errors import IncompatibleCheckpointError, MissingKeyError
from bytecheckpoint.opening.box_reader import BoxReader, BoxRequest, TensorPiece, read_in_pieces
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.plain_values import has_complementary_trees, plain_values
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.names import unique_name
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.similar_names import SimilarNames
from bytecheckpoint.storage import Storage

__all__ = ["Checkpoint"]


class Checkpoint(Mapping[str, Any]):
    """A checkpoint as a read-only mapping; see `bytecheckpoint.open`.

    Keys are `model/<fqn>`, `optimizer/state/<param fqn>/<state name>`, `optimizer/param_groups`, and for other states
    `<state>/<path joined by dots>`. Every name of a tied tensor is a key. If two values have the same key, the second
    key gets `#2`. The value of a key is an `Entry` for a tensor, else the plain value that was saved.

    Several threads may use one checkpoint. After a fork the child may continue to use it.

    Attributes:
        path: path or URL of the checkpoint.
        rank: the rank whose values are shown where ranks differ; see `bytecheckpoint.open`.
        info: facts about the save: world size, framework, layout, time, versions.
    """

    def __init__(
        self, storage: Storage, catalog: Catalog, rank: int | None = None, rest: CatalogReader | None = None
    ) -> None:
        self.path = storage.url
        self.rank = rank
        self.info: Mapping[str, Any] = MappingProxyType(dict(catalog.info))
        self._catalog = catalog
        self._reader = BoxReader(storage, catalog, rest)
        self._forget_index()

    def _forget_index(self) -> None:
        """Start without an index of the keys. Tensors are indexed at the first need, plain values state by state."""
        self._tensor_keys: dict[str, dict[str, int]] | None = None  # state -> key -> number of the tensor
        self._number_of_key: dict[str, int] = {}  # the same for all states together
        self._numbers: dict[TensorKey, int] = {}  # without the further names of tied tensors
        self._plain: dict[str, dict[str, Callable[[], Any]]] = {}  # state -> key -> function that returns the value

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid; further reads raise."""
        self._reader.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r}: {', '.join(self.states) or 'empty'}; {self._catalog.count} tensors>"

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the checkpoint holds, such as "model" and "optimizer"."""
        return tuple(self._catalog.states())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with values of their own; `open(path, rank=...)` shows these values."""
        return tuple(int(r) for r in np.unique(self._catalog.owner) if r != SHARED)

    @property
    def catalog(self) -> Catalog:
        """The catalog of the checkpoint, for tools; of a large one the tensors, the files and some of the rows."""
        return self._catalog

    def for_rank(self, rank: int | None) -> Checkpoint:
        """Return the checkpoint as another rank sees it; both share the open files."""
        other = Checkpoint.__new__(Checkpoint)
        other.__dict__.update(self.__dict__, rank=rank)
        other._forget_index()
        return other

    def own_keys(self) -> set[str]:
        """Return the keys whose values belong to this rank alone."""
        if self.rank is None:
            return set()
        owner, index = self._catalog.owner, self._index()
        own = {key for names in index.values() for key, number in names.items() if owner[number] == self.rank}
        for state in self.states:
            tree = self._numbers.get(TensorKey(state, "", VALUES_SLOT))
            if tree is not None and owner[tree] == self.rank:
                own.update(self._plain_of(state))
        return own

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

    def keys_of(self, state: str) -> list[str]:
        """Return the keys of one state, tensors first."""
        return [*self._index().get(state, ()), *(self._plain_of(state) if state in self.states else ())]

    def stored_under(self, key: str) -> TensorKey | None:
        """Return the tensor behind a key under the name that stores its bytes, or None for a plain value."""
        number = self._number(key)
        return None if number is None else self._catalog.key(number)

    def __iter__(self) -> Iterator[str]:
        index = self._index()
        for state in self.states:
            yield from index[state]
            yield from self._plain_of(state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (self._number(key) is not None or self._value(key) is not None)

    def __getitem__(self, key: str) -> Any:
        """Return the `Entry` or plain value under `key`.

        Raises:
            MissingKeyError: there is no such key; this is also a KeyError.
            IncompatibleCheckpointError: the value is an instance of a class that is not registered here.
        """
        if isinstance(key, str):
            number = self._number(key)
            if number is not None:
                return Entry(self._reader, number, key)
            value = self._value(key)
            if value is not None:
                return copy.deepcopy(value())
        raise MissingKeyError(f"{self.path} has no {key!r}{self._similar(key)}")

    def as_stored(self, key: str) -> Any:
        """Return the value under `key`, with an `UnregisteredInstance` for each instance of an unregistered class.

        The result is not a copy: do not modify it.
        """
        value = self._value(key) if self._number(key) is None else None
        return self[key] if value is None else value()

    def _similar(self, key: object) -> str:
        """Return the end of an error message for a missing key: a similar key, or what the checkpoint holds."""
        keys = SimilarNames([*self._number_of_key, *(k for values in self._plain.values() for k in values)])
        if isinstance(key, str):
            for similar in keys.of(key, cutoff=0.7):
                return f"; did you mean {similar!r}?"
        return f"; it holds {', '.join(self.states) or 'nothing'}"

    def _number(self, key: str) -> int | None:
        self._index()
        return self._number_of_key.get(key)

    def _value(self, key: str) -> Callable[[], Any] | None:
        for state in self.states:
            if key.startswith(f"{state}/"):
                found = self._plain_of(state).get(key)
                if found is not None:
                    return found
        return None

    # --- tensors ----------------------------------------------------------------------------------------------

    def _index(self) -> dict[str, dict[str, int]]:
        """Return state -> key -> number of the tensor."""
        if self._tensor_keys is None:
            numbers = self._chosen()
            index: dict[str, dict[str, int]] = {state: {} for state in self.states}
            number_of_key: dict[str, int] = {}

            def add(key: TensorKey, number: int) -> None:
                name = unique_name(str(key), number_of_key)
                index[key.state][name] = number_of_key[name] = number

            by_fqn: dict[tuple[str, str], list[tuple[TensorKey, int]]] = {}
            tied = {(state, fqn) for state, names in self._catalog.aliases.items() for fqn in names.values()}
            for key, number in numbers.items():
                if key.slot == VALUES_SLOT:
                    continue
                add(key, number)
                if (key.state, key.fqn) in tied:
                    by_fqn.setdefault((key.state, key.fqn), []).append((key, number))
            for state, names in self._catalog.aliases.items():
                for alias, fqn in names.items():
                    for key, number in by_fqn.get((state, fqn), []):
                        add(TensorKey(state, alias, key.slot), number)
            self._numbers = numbers
            self._number_of_key = number_of_key
            self._tensor_keys = index
        return self._tensor_keys

    def _chosen(self) -> dict[TensorKey, int]:
        """Return the number of the tensor to show under each key: this rank's own, else the shared or lowest rank's."""
        owners = self._catalog.owner.tolist()

        def preference(number: int) -> tuple[bool, int]:
            return owners[number] != self.rank, owners[number]  # SHARED is less than any rank

        chosen: dict[TensorKey, int] = {}
        for number, key in enumerate(self._catalog.keys()):
            known = chosen.get(key)
            if known is None or preference(number) < preference(known):
                chosen[key] = number
        return chosen

    def _entry(self, state: str, fqn: str, slot: str) -> Entry | None:
        """Return the tensor that a plain value refers to."""
        self._index()
        name = self._catalog.aliases.get(state, {}).get(fqn, fqn)
        for key in (TensorKey(state, fqn, slot), TensorKey(state, name, slot)):
            if key in self._numbers:
                return Entry(self._reader, self._numbers[key], str(key))
        return None

    # --- plain values -----------------------------------------------------------------------------------------

    def _plain_of(self, state: str) -> dict[str, Callable[[], Any]]:
        """Return key -> function that returns the plain value, or raises why it cannot be shown."""
        found = self._plain.get(state)
        if found is None:
            taken = set(self._index()[state])
            try:
                trees, parts = self._trees(state)
                values = plain_values(state, trees, parts, lambda fqn, slot: self._entry(state, fqn, slot), taken)
                found = {key: _returning(value) for key, value in values.items()}
            except IncompatibleCheckpointError as error:
                # The tensors stay readable: one key stands for the state's values, and reading it raises.
                found = {unique_name(f"{state}/value", taken): _raising(IncompatibleCheckpointError, str(error))}
            self._plain[state] = found
        return found

    def _trees(self, state: str) -> tuple[list[bytes], dict[str, bytes]]:
        """Return the encoded trees to show: one tree, or those of all ranks where they complement each other; and parts."""
        of_state = self._catalog.of_state(state).tolist()
        trees = [i for i in of_state if self._catalog.slot[i] == VALUES_SLOT]
        every = [i for i in trees if not self._catalog.fqn[i]]
        if not every:
            return [], {}
        first = self._numbers[TensorKey(state, "", VALUES_SLOT)]
        blobs = self._blobs([first])
        if has_complementary_trees(state, blobs[0]):
            blobs += self._blobs([i for i in every if i != first])
        parts = [i for i in trees if self._catalog.fqn[i]]
        return list(dict.fromkeys(blobs)), dict(
            zip(map(self._catalog.fqn.__getitem__, parts), self._blobs(parts), strict=True)
        )

    def _blobs(self, tensors: Sequence[int]) -> list[bytes]:
        if not tensors:
            return []
        shapes = [self._catalog.shape(tensor) for tensor in tensors]
        requests = [BoxRequest(t, [(0,) * len(shape)], shape) for t, shape in zip(tensors, shapes, strict=True)]
        return [data.numpy().tobytes() for data in self._reader.read(requests)]


def _returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def _raising(error: type[Exception], message: str) -> Callable[[], Any]:
    def fail() -> Any:
        raise error(message)

    return fail
