"""Read documents from an object with a length and items, such as a list or a map-style data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from bytecheckpoint.dataloader.sources.base import Document, MapSource
from bytecheckpoint.dataloader.sources.fingerprint import even_places, value_fingerprint
from bytecheckpoint.errors import UsageError

__all__ = ["Items", "SequenceSource"]

_SAMPLES: Final = 16


class Items(Protocol):
    """Object with a length and items of every number below it."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, index: int, /) -> Any:
        """Return an item, equal at every call."""


class SequenceSource(MapSource):
    """The items of `items`, or one column of them.

    Args:
        items: object with the items. An item is equal each time that it is read.
        name: name of the source.
        column: column of an item that is the document; None for the whole item.
        shuffle: True for a random order of its own in every epoch.
        fingerprint: version of the data. Without it, `describe` reads some items and hashes them.

    Raises:
        UsageError: there are no items, or they have no such column.
    """

    def __init__(
        self,
        items: Items,
        name: str,
        *,
        column: str | None = None,
        shuffle: bool = True,
        fingerprint: str | None = None,
    ) -> None:
        if not len(items):
            raise UsageError(f"the source {name!r} has no documents: give it at least one item")
        columns = getattr(items, "column_names", None)
        if column is not None and columns is not None and column not in columns:
            raise UsageError(f"the source {name!r} has no column {column!r}, but {', '.join(columns)}")
        if column is not None and hasattr(items, "select_columns"):
            items = items.select_columns([column])  # else Hugging Face decodes all columns of a row
        self.name = name
        self.shuffle = shuffle
        self._items = items
        self._column = column
        self._fingerprint = fingerprint
        self._length = len(items)  # a list may grow, but not in the middle of a job
        self._sampled: dict[int, str] = {}  # number of first items -> fingerprint

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Document:
        item = self._items[index]
        return item if self._column is None else item[self._column]

    def describe(self) -> dict[str, Any]:
        """Return the number of items, and a fingerprint of 16 of them that lie evenly."""
        return self._described(len(self))

    def describe_first(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the description of the first items; see `Source`."""
        return self._described(saved["documents"])

    def _described(self, count: int) -> dict[str, Any]:
        if self._fingerprint is None and count not in self._sampled:
            self._sampled[count] = value_fingerprint([self[place] for place in even_places(count, _SAMPLES)])
        return {
            "kind": "sequence",
            "documents": count,
            "bytes": None,
            "column": self._column,
            "shuffle": self.shuffle,
            "fingerprint": self._sampled.get(count, self._fingerprint),
        }
