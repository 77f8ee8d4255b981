"""Matrices of layouts: what every layout saves, every layout loads, and training goes on with equal losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.worlds import Worlds

__all__ = ["TOLERANCE", "Matrix", "pairs"]

#: Of losses about 3.5 in float64: the order of summation differs between layouts.
TOLERANCE = 1e-9
#: The short pass loads into each layout what the one at this distance in the list of sources has saved.
_SHORT_DISTANCE = 4


def pairs(destinations: Sequence[str], sources: Sequence[str]) -> list[Any]:
    """List parameters (destination, source, batch) for every pair; all but the short pass are marked slow.

    The sources of a batch are loaded in one run. In the short pass each layout saves, and each loads another's checkpoint.
    """
    parameters = []
    for number, destination in enumerate(destinations):
        start = sources.index(destination) if destination in sources else number
        short = sources[(start + _SHORT_DISTANCE) % len(sources)]
        rest = tuple(source for source in sources if source != short)
        for source in sources:
            batch, marks = ((short,), ()) if source == short else (rest, pytest.mark.slow)
            parameters.append(pytest.param(destination, source, batch, id=f"{destination}-{source}", marks=marks))
    return parameters


class Matrix:
    """The saves and loads of one session: each layout saves once, and loads a batch of sources in one run.

    Args:
        worlds: the pool of worlds.
        folder: for the checkpoints.
        sizes: the world size of every layout.
        save: `save(layout, folder, *options)` on every rank; returns the losses "before" and "after" the save.
        load: `load(layout, sources, folder, *options)` on every rank; returns "problems" and "losses" by source.
    """

    def __init__(
        self,
        worlds: Worlds,
        folder: Path,
        sizes: Mapping[str, int],
        save: Callable[..., dict[str, Any]],
        load: Callable[..., dict[str, dict[str, Any]]],
    ) -> None:
        self._worlds, self._folder, self._sizes = worlds, folder, sizes
        self._save, self._load = save, load
        self.saved = cache(self._saved)
        self.loaded = cache(self._loaded)

    def folder(self, *options: str) -> str:
        """The folder of the checkpoints that were saved with these options."""
        return str(self._folder.joinpath(*options))

    def _saved(self, layout: str, *options: str) -> list[dict[str, Any]]:
        return self._worlds.run(self._sizes[layout], self._save, layout, self.folder(*options), *options)

    def _loaded(self, layout: str, sources: tuple[str, ...], *options: str) -> list[dict[str, dict[str, Any]]]:
        for source in sources:
            self.saved(source, *options)
        arguments = (layout, sources, self.folder(*options), *options)
        return self._worlds.run(self._sizes[layout], self._load, *arguments, timeout=300)

    def check(self, source: str, destination: str, sources: Sequence[str], *options: str) -> None:
        """`destination` loads what `source` saved, every element at its place, and trains on as one process does."""
        ranks = self.loaded(destination, tuple(sources), *options)
        for rank, result in enumerate(ranks):
            assert not result[source]["problems"], f"rank {rank}: {result[source]['problems'][:5]}"
            assert result[source]["losses"] == ranks[0][source]["losses"]
        losses = ranks[0][source]["losses"]
        reference = self.saved("one", *options)[0]["after"]
        assert losses == pytest.approx(reference, abs=TOLERANCE, rel=0)
        if source == destination:
            assert losses == self.saved(source, *options)[0]["after"], "the same layout goes on bit for bit"

    def check_training(self, layout: str, *options: str) -> None:
        """`layout` trains as one process does, before its save and after it."""
        reference = self.saved("one", *options)[0]
        for rank in self.saved(layout, *options):
            for part in ("before", "after"):
                assert rank[part] == pytest.approx(reference[part], abs=TOLERANCE, rel=0)
