"""Define data sources: documents that every epoch deals out to the streams, each once.

A stream reads a source by a cursor, whose state is enough to continue exactly. Sources are pickled into worker processes:
they open files when these are first needed, in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np

from bytecheckpoint.dataloader.permutation import Permutation, order_key, order_of
from bytecheckpoint.errors import UsageError

__all__ = ["Cursor", "Document", "MapSource", "OrderedCursor", "Source", "checked_taken"]

#: Text, bytes, a 1-D integer array of tokens, or any other item for the user's tokenizer.
Document = Any

#: Places of an order that are computed at once, so that each takes a fraction of a microsecond.
_BLOCK: Final = 1024


class Cursor(Protocol):
    """The documents of one stream in one epoch, in order.

    If it has a method `place`, that says in words which document was read last, for messages. If it has a method `skip`,
    that passes over the next document, which could not be read.
    """

    def __next__(self) -> Document:
        """Return the next document; `StopIteration` is the end of the epoch."""

    def state(self) -> Any:
        """Return the position behind the taken documents, as plain values for `Source.cursor`."""


class Source(ABC):
    """Documents under a name. The order of an epoch depends on the name, the seed and the epoch.

    Attributes:
        name: name, unique among the sources of a loader.
    """

    name: str

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain values that identify this data and its order.

        They contain a fingerprint of sizes and of samples of the content, so they are cheap, and equal for data that
        was moved. A change of the content between the samples that keeps all sizes stays unseen.
        """

    @abstractmethod
    def cursor(self, stream: int, streams: int, epoch: int, seed: int, state: Any = None) -> Cursor:
        """Return the documents of one of `streams` streams in an epoch, from the start or from a cursor's state.

        Each document of the source is in exactly one stream. Which one a stream of the loader reads changes with the epoch
        if the source has a length (`__len__`); it is never asked for more streams than that. Without a length, the numbers
        are those of the loader's streams, and every stream should have documents.
        """

    def describe_first(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what `describe` returned when the source had only its first documents; None if it cannot tell.

        A load finds by it that documents were added behind those of a run.

        Args:
            saved: description with fewer documents, under "documents".
        """
        return None

    def section(self, first: int, stop: int) -> Source:
        """Return the documents from a number on up to another one, as a source of the same name, for `describe_first`."""
        raise NotImplementedError

    @property
    def positions(self) -> bool:
        """True if a cursor continues from a state without reading the documents before it."""
        return True


class MapSource(Source):
    """A source whose documents have numbers. Stream s has the places s, s + streams, ... of the epoch's order.

    Attributes:
        shuffle: True for a random order of its own in every epoch, False for the order of the source.
    """

    shuffle: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def __getitem__(self, index: int) -> Document:
        """Return the document of a number from 0 on."""

    def place(self, index: int) -> str:
        """Return where the document of a number is, in words, for messages."""
        return f"document {index}"

    def section(self, first: int, stop: int) -> Source:
        """Return the documents from a number on up to another one, as a source of the same name."""
        return _Section(self, first, stop)

    def cursor(self, stream: int, streams: int, epoch: int, seed: int, state: Any = None) -> Cursor:
        """Return a cursor; its state is the number of documents that were taken."""
        places = range(stream, len(self), streams)
        order = order_of(len(self), order_key(seed, epoch, self.name)) if self.shuffle and len(self) > 1 else None
        return OrderedCursor(self, places, order, checked_taken(self.name, state, len(places)))


class _Section(MapSource):
    def __init__(self, source: MapSource, first: int, stop: int) -> None:
        self.name, self.shuffle = source.name, source.shuffle
        self._source, self._numbers = source, range(first, stop)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Document:
        return self._source[self._numbers[index]]

    def place(self, index: int) -> str:
        return self._source.place(self._numbers[index])

    def describe(self) -> dict[str, Any]:
        return self._source.describe()


def checked_taken(name: str, state: Any, most: int) -> int:
    """Return the number of taken documents in a saved state.

    Raises:
        UsageError: the stream has fewer documents, because the data changed.
    """
    taken = 0 if state is None else int(state)
    if not 0 <= taken <= most:
        raise UsageError(
            f"the checkpoint has read {taken} documents of a stream of {name!r}, which now has {most}: "
            "use the data and the number of streams of the run that saved it"
        )
    return taken


class _Numbered(Protocol):
    def __getitem__(self, index: int, /) -> Document: ...

    def place(self, index: int, /) -> str: ...


class OrderedCursor:
    """The documents at some places of an order.

    Args:
        documents: object with documents under numbers.
        places: places of the order.
        order: order of the documents; None for the order of the source.
        taken: number of places before the first document.
    """

    def __init__(self, documents: _Numbered, places: range, order: Permutation | None, taken: int) -> None:
        self._documents = documents
        self._places = places
        self._order = order
        self._taken = taken
        self._first = taken  # the place of the block's first number, counted in `places`
        self._block: list[int] = []
        self._last = -1

    def __next__(self) -> Document:
        """Return the next document."""
        inside = self._taken - self._first
        if inside == len(self._block):
            places = self._places[self._taken : self._taken + _BLOCK]
            if not places:
                raise StopIteration
            numbers = np.arange(places.start, places.stop, places.step, dtype=np.int64)
            self._block = (numbers if self._order is None else self._order.at(numbers)).tolist()
            self._first, inside = self._taken, 0
        self._last = self._block[inside]
        try:
            document = self._documents[self._last]
        except StopIteration as error:  # which would end the epoch
            raise RuntimeError(f"{self.place()} raised StopIteration") from error
        self._taken += 1
        return document

    def skip(self) -> None:
        """Pass over the next document, which cannot be read."""
        self._taken += 1

    def state(self) -> int:
        """Return the number of taken places."""
        return self._taken

    def place(self) -> str:
        """Return which document was read last, in words."""
        return self._documents.place(self._last)
