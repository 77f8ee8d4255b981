"""Number the passes over a source: its epochs, and one over the documents of each addition to it during the run.

The epoch that runs when documents are added ends with a pass over them. From the next epoch on, all documents have one
order. So every document is fed once in each epoch from the running one on.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from bytecheckpoint.dataloader.sources.base import Source

__all__ = ["Additions", "Passes", "with_addition"]

#: Number of the pass over the added documents, and number of the documents before it, of each addition to a source.
Additions = Sequence[tuple[int, int]]


class Passes:
    """The passes over one source, by their number from 0 on.

    Args:
        source: the source.
        additions: additions to sources in this run, by name.
        epochs: number of epochs; None: without end.

    Attributes:
        documents: number of documents; 0 if the source does not know it.
        end: number of passes in all epochs; None: without end.
    """

    def __init__(self, source: Source, additions: Mapping[str, Additions], epochs: int | None = None) -> None:
        self.documents = len(source) if isinstance(source, Sized) else 0
        added = additions.get(source.name, ())
        self.end = epochs
        for number, _ in added:
            if self.end is not None:
                self.end += number <= self.end
        self._added = [number for number, _ in added]
        counts = [*(before for _, before in added), self.documents]
        # First pass, first document, last document + 1 of passes over the same documents.
        self._parts = [(0, 0, counts[0])]
        for (number, before), after in zip(added, counts[1:], strict=True):
            self._parts += [(number, before, after), (number + 1, 0, after)]
        self._begins = [begin for begin, _, _ in self._parts]

    def part(self, number: int) -> tuple[int, int, int | None]:
        """Return the first and the last document + 1 of a pass, and the next pass over others (None: there is none)."""
        place = bisect.bisect_right(self._begins, number)
        return *self._parts[place - 1][1:], next(iter(self._begins[place:]), None)

    def places_before(self, number: int) -> int:
        """Return how many documents the passes before one have."""
        parts = zip(self._parts, [*self._begins[1:], number], strict=True)
        return sum(max(min(number, end) - begin, 0) * (stop - first) for (begin, first, stop), end in parts)

    def epoch(self, number: int) -> int:
        """Return the epoch to which a pass belongs."""
        return number - bisect.bisect_right(self._added, number)


def with_addition(additions: Additions, documents: int, states: Iterable[Mapping[str, Any]]) -> Additions:
    """Add an addition behind some documents, which a load finds, to those before, by the states of all streams."""
    # A stream without a cursor has ended the pass before.
    begun = max((state["epoch"] - (state["cursor"] is None) for state in states), default=-1)
    if begun < 0:  # nothing was fed, so all documents are of the first epoch
        return []
    if additions and additions[-1][0] > begun:  # its documents wait yet, and the new ones are fed with them
        return additions
    return [*additions, (begun + 1, documents)]
