"""An adapter that counts the trees of plain values that it reads from a checkpoint."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.base import Destination

__all__ = ["counted_trees"]


class _CountedStates:
    """The `SavedStates` of one load; `found` counts trees by the thread's name and the kind."""

    def __init__(self, saved: Any, found: Counter[tuple[str, str]]) -> None:
        self._saved, self._found = saved, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saved, name)

    def _count(self, state: str, number: int) -> None:
        self._found[threading.current_thread().name, state] += number

    def tree(self, state: str) -> bytes | None:
        found: bytes | None = self._saved.tree(state)
        self._count(state, int(found is not None))
        return found

    def trees(self, state: str) -> list[bytes]:
        found: list[bytes] = self._saved.trees(state)
        self._count(state, len(found))
        return found

    def trees_about(self, state: str, names: Collection[str]) -> Iterator[bytes]:
        for tree in self._saved.trees_about(state, names):
            self._count(state, 1)
            yield tree


@contextmanager
def counted_trees(framework: Any) -> Iterator[Counter[tuple[str, str]]]:
    """Register the adapter "counted", which does what `framework` does; yield its counts by (thread, kind)."""
    found: Counter[tuple[str, str]] = Counter()

    class Counted(framework):  # type: ignore[misc]
        def destination(self, states: Any, saved: Any, **options: Any) -> Destination:
            return super().destination(states, _CountedStates(saved, found), **options)  # type: ignore[no-any-return]

    registry.register("counted", Counted)
    try:
        yield found
    finally:
        registry.unregister("counted")
