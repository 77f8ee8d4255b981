"""The mapping that `bytecheckpoint.open` returns."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, MissingKeyError
from bytecheckpoint.lazy import lazy
from bytecheckpoint.opening.box_reader import BoxReader, BoxRequest
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.plain_values import has_complementary_trees, plain_values
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_index import CatalogIndex, stored_tree
from bytecheckpoint.representation.names import unique_name
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.similar_names import SimilarNames

__all__ = ["Checkpoint"]


@dataclass(frozen=True, slots=True)
class _TensorKeys:
    """The keys of a checkpoint's tensors, as one rank sees them.

    Attributes:
        of_state: state -> key -> number of the tensor.
        number: key -> number of the tensor, for all states together.
        chosen: number of the tensor to show under each catalog key, without the further names of tied tensors.
    """

    of_state: dict[str, dict[str, int]]
    number: dict[str, int]
    chosen: dict[TensorKey, int]

    def add(self, key: TensorKey, number: int) -> None:
        """Add a tensor under a name of its own."""
        name = unique_name(str(key), self.number)
        self.of_state[key.state][name] = self.number[name] = number


class Checkpoint(Mapping[str, Any]):
    """A checkpoint as a read-only mapping; see `bytecheckpoint.open`.

    Keys are `model/<fqn>`, `optimizer/state/<param fqn>/<state name>`, `optimizer/param_groups`, and for other states
    `<state>/<path joined by dots>`. Every name of a tied tensor is a key. If two values have the same key, the second
    key gets `#2`. The value of a key is an `Entry` for a tensor, else the plain value that was saved.

    The type of such a value depends on the key, so type checkers see `Any`; in `tensors` they see an `Entry`.

    Several threads may use one checkpoint. After a fork the child may continue to use it.

    Args:
        reader: reader of the checkpoint's boxes, with its catalog.
        rank: rank whose values are shown where ranks differ; None as for `bytecheckpoint.open`.

    Attributes:
        path: path or URL of the checkpoint.
        rank: rank whose values are shown where ranks differ; see `bytecheckpoint.open`.
        info: facts about the save: world size, framework, layout, time, versions.
    """

    def __init__(self, reader: BoxReader, rank: int | None = None) -> None:
        self.path = reader.storage.url
        self.rank = rank
        self.info: Mapping[str, Any] = MappingProxyType(dict(reader.catalog.info))
        self._reader = reader
        self._index = CatalogIndex(reader.catalog)
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
    def _catalog(self) -> Catalog:
        return self._index.catalog

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the checkpoint holds, such as "model" and "optimizer"."""
        return tuple(self._catalog.states())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with values of their own; `open(path, rank=...)` shows these values."""
        return tuple(int(r) for r in np.unique(self._catalog.owner) if r != SHARED)

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """The tensors alone, under the same keys. Reads no plain values."""
        return _Tensors(self)

    def __iter__(self) -> Iterator[str]:
        for state in self.states:
            yield from self._keys.of_state[state]
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

    def _similar(self, key: object) -> str:
        """Return the end of an error message for a missing key: a similar key, or what the checkpoint holds."""
        keys = SimilarNames([*self._keys.number, *(k for values in self._plain.values() for k in values)])
        if isinstance(key, str):
            for similar in keys.of(key, cutoff=0.7):
                return f"; did you mean {similar!r}?"
        return f"; it holds {', '.join(self.states) or 'nothing'}"

    def _number(self, key: str) -> int | None:
        return self._keys.number.get(key)

    def _value(self, key: str) -> Callable[[], Any] | None:
        for state in self.states:
            if key.startswith(f"{state}/"):
                found = self._plain_of(state).get(key)
                if found is not None:
                    return found
        return None

    # --- tensors ----------------------------------------------------------------------------------------------

    @lazy
    def _keys(self) -> _TensorKeys:
        """Keys of the tensors."""
        aliases = self._catalog.aliases
        keys = _TensorKeys({state: {} for state in self.states}, {}, self._index.of_rank(self.rank))
        tied = {(state, fqn) for state, names in aliases.items() for fqn in names.values()}
        by_fqn: dict[tuple[str, str], list[tuple[TensorKey, int]]] = {}
        for key, number in keys.chosen.items():
            if key.slot == VALUES_SLOT:
                continue
            keys.add(key, number)
            if (key.state, key.fqn) in tied:
                by_fqn.setdefault((key.state, key.fqn), []).append((key, number))
        for state, names in aliases.items():
            for alias, fqn in names.items():
                for key, number in by_fqn.get((state, fqn), []):
                    keys.add(TensorKey(state, alias, key.slot), number)
        return keys

    def _entry(self, state: str, fqn: str, slot: str) -> Entry | None:
        """Return the tensor that a plain value refers to."""
        chosen = self._keys.chosen
        for name in (fqn, self._index.stored_name(state, fqn)):
            key = TensorKey(state, name, slot)
            if key in chosen:
                return Entry(self._reader, chosen[key], str(key))
        return None

    # --- plain values -----------------------------------------------------------------------------------------

    def _plain_of(self, state: str) -> dict[str, Callable[[], Any]]:
        """Return key -> function that returns the plain value, or raises the reason why it cannot be shown."""
        found = self._plain.get(state)
        if found is None:
            taken = set(self._keys.of_state[state])
            try:
                trees, streams = self._trees(state)
                names = self._reader.shown_names
                values = plain_values(
                    state, trees, streams, lambda fqn, slot: self._entry(state, fqn, slot), taken, names
                )
                found = {key: _returning(value) for key, value in values.items()}
            except IncompatibleCheckpointError as error:
                # The tensors stay readable: one key stands for the state's values, and reading it raises.
                found = {unique_name(f"{state}/value", taken): _raising(IncompatibleCheckpointError, str(error))}
            self._plain[state] = found
        return found

    def _trees(self, state: str) -> tuple[list[bytes], dict[str, bytes]]:
        """Return the encoded trees to show, of one rank or of all that complement each other; and those of streams."""
        every = self._index.trees(state).tolist()
        if not every:
            return [], {}
        first = self._keys.chosen[TensorKey(state, "", VALUES_SLOT)]
        blobs = self._blobs([first])
        if has_complementary_trees(state, blobs[0]):
            blobs += self._blobs(sorted(i for i in every if i != first))
        streams = self._index.streams(state).tolist()
        names = [self._index.keys[i].fqn for i in streams]
        return list(dict.fromkeys(blobs)), dict(zip(names, self._blobs(streams), strict=True))

    def _blobs(self, tensors: Sequence[int]) -> list[bytes]:
        if not tensors:
            return []
        shapes = [self._catalog.shape(tensor) for tensor in tensors]
        requests = [BoxRequest(t, [(0,) * len(shape)], shape) for t, shape in zip(tensors, shapes, strict=True)]
        read = self._reader.read(requests)
        return [stored_tree(self._catalog, t, data.numpy().tobytes()) for t, data in zip(tensors, read, strict=True)]


class _Tensors(Mapping[str, Entry]):
    """The tensors of a checkpoint; see `Checkpoint.tensors`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, key: str) -> Entry:
        number = self._checkpoint._number(key)
        if number is not None:
            return Entry(self._checkpoint._reader, number, key)
        plain = key in self._checkpoint
        raise MissingKeyError(
            f"{self._checkpoint.path} holds a plain value under {key!r}, no tensor: read checkpoint[{key!r}]"
            if plain else f"{self._checkpoint.path} has no {key!r}{self._checkpoint._similar(key)}"
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._checkpoint._keys.of_state.values())

    def __len__(self) -> int:
        return len(self._checkpoint._keys.number)


def _returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def _raising(error: type[Exception], message: str) -> Callable[[], Any]:
    def fail() -> Any:
        raise error(message)

    return fail
