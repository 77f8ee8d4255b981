"""Read documents from iterables of any kind, such as streaming datasets of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils.data

from bytecheckpoint.dataloader.hugging_face_steps import part_of, passes_all_rows, steps_of
from bytecheckpoint.dataloader.sources.base import Cursor, Document, Source
from bytecheckpoint.dataloader.sources.facts import data_facts
from bytecheckpoint.dataloader.sources.fingerprint import value_fingerprint
from bytecheckpoint.dataloader.sources.sequence import SequenceSource
from bytecheckpoint.errors import UsageError

__all__ = ["IterableSource", "from_hugging_face"]


class IterableSource(Source):
    """The documents of an iterable that `make` returns for a stream of an epoch.

    A cursor resumes by the `state_dict` and `load_state_dict` of the iterable, or of its iterator. They must be exact after
    every document. Without them, it reads the taken documents again, and drops them.

    Args:
        make: function (stream, streams, epoch) that returns an iterable of the documents of that stream, in the same order
            each time. Each document is in one stream.
        name: name of the source.
        column: column of an item that is the document; None for the whole item.
        fingerprint: version of the data and its order, which `describe` cannot find.
        facts: plain values about the data, compared where a checkpoint has them too.
    """

    def __init__(
        self,
        make: Callable[[int, int, int], Iterable[Any]],
        name: str,
        *,
        column: str | None = None,
        fingerprint: str | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._column = column
        self._fingerprint = fingerprint
        self._facts = facts or {}

    def describe(self) -> dict[str, Any]:
        """Return the given fingerprint and facts, and the column."""
        return {
            "kind": "iterable",
            "documents": None,
            "bytes": None,
            "column": self._column,
            "fingerprint": self._fingerprint,
            "data": self._facts,
        }

    def cursor(self, stream: int, streams: int, epoch: int, seed: int, state: Any = None) -> Cursor:
        """Return a cursor; its state is the number of documents that were taken, and the state of the iterable."""
        return _IterableCursor(self.name, self._make(stream, streams, epoch), self._column, state)

    @property
    def positions(self) -> bool:
        """False, because this depends on the iterable."""
        return False


class _IterableCursor:
    def __init__(self, name: str, iterable: Iterable[Any], column: str | None, state: Any) -> None:
        self._column = column
        self._taken = 0 if state is None else int(state["taken"])
        saved = state["iterable"] if self._taken else None
        loaded = saved is not None and hasattr(iterable, "load_state_dict")
        if loaded:
            iterable.load_state_dict(saved)  # type: ignore[attr-defined]
        self._iterator: Iterator[Any] = iter(iterable)
        if saved is not None and not loaded and hasattr(self._iterator, "load_state_dict"):
            self._iterator.load_state_dict(saved)
            loaded = True
        # Before the first document, some iterables have no state, or not the one that they loaded.
        self._fresh, self._saved = True, saved if loaded else None
        self._stateful = next((one for one in (iterable, self._iterator) if hasattr(one, "state_dict")), None)
        for number in range(0 if loaded else self._taken):
            if next(self._iterator, self) is self:
                raise UsageError(
                    f"the checkpoint has read {self._taken} documents of a stream of {name!r}, which ends after "
                    f"{number}: use the data and the number of streams of the run that saved it"
                )

    def __next__(self) -> Document:
        item = next(self._iterator)
        self._fresh = False
        self._taken += 1
        return item if self._column is None else item[self._column]

    def state(self) -> dict[str, Any]:
        if not self._fresh:
            # A copy, since many return an object that they change later.
            self._saved = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
        return {"taken": self._taken, "iterable": self._saved}


def from_hugging_face(
    dataset: Any, name: str, column: str | None = None, *, shuffle: bool = True, fingerprint: str | None = None
) -> SequenceSource | IterableSource:
    """Return a source of a dataset of Hugging Face, map-style or streaming.

    A streaming dataset is split among the streams by `split_dataset_by_node`. It resumes by its own state where that is
    exact: from `datasets` 5.2 on (before, `map` and `filter` made it skip rows), without a buffer of `shuffle` and
    without a format, whose contents the state lacks. Else it is read again from the beginning of the epoch. Give its
    `shuffle` a seed: the epoch is added to it.

    Args:
        dataset: `Dataset` or `IterableDataset`.
        name: name of the source.
        column: column of a row that is the document; None for the whole row.
        shuffle: True for a random order of its own in every epoch of a map-style dataset. A streaming one has the order of
            its own `shuffle`.
        fingerprint: version of the data.

    Raises:
        UsageError: `dataset` is of another kind, or has no such column.
    """
    if hasattr(dataset, "keys") or not hasattr(dataset, "column_names"):
        raise UsageError(
            f"the source {name!r} is a {type(dataset).__name__}: give one Dataset or IterableDataset, a split"
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return SequenceSource(dataset, name, column=column, shuffle=shuffle, fingerprint=fingerprint)
    columns = dataset.column_names  # None where the dataset does not know them
    if column is not None and columns is not None and column not in columns:
        raise UsageError(f"the source {name!r} has no column {column!r}, but {', '.join(columns)}")
    generators = _shuffle_generators(dataset)
    facts = data_facts(dataset) if fingerprint is None else {}
    if fingerprint is None:
        fingerprint = value_fingerprint([getattr(dataset, "num_shards", None), columns, generators])
    exact = generators == [] and getattr(dataset, "_formatting", None) is None and passes_all_rows()
    streams = _HuggingFaceStreams(dataset, exact)
    return IterableSource(streams, name, column=column, fingerprint=fingerprint, facts=facts)


class _HuggingFaceStreams:
    """The streams of a streaming dataset.

    Args:
        dataset: streaming dataset.
        exact: True if its state is exact.
    """

    def __init__(self, dataset: Any, exact: bool) -> None:
        self._dataset = dataset
        self._exact = exact

    def __call__(self, stream: int, streams: int, epoch: int) -> Iterable[Any]:
        if torch.utils.data.get_worker_info() is not None:
            raise UsageError(
                "a streaming dataset in a worker of torch's DataLoader deals its shards out to the workers, so a stream "
                "would lack documents: read the source in a process of another kind"
            )
        dataset = part_of(self._dataset, stream, streams, epoch)
        documents: Iterable[Any] = dataset if self._exact else iter(dataset)
        return documents


def _shuffle_generators(dataset: Any) -> list[Any] | None:
    """Return the states of the generators of all shuffle buffers, or None for a dataset of an unknown make."""
    if not hasattr(dataset, "_ex_iterable"):
        return None
    shuffled = (step for step in steps_of(dataset) if type(step).__name__ == "BufferShuffledExamplesIterable")
    return [step.generator.bit_generator.state for step in shuffled]
