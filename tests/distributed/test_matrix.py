"""Every layout loads what every layout saved: by coordinates, and by the losses of the next steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import matrix_jobs
from tests.distributed.layouts import LAYOUTS, MORE, WORLD_SIZE
from tests.support.worlds import Worlds

# The first test that asks for a world pays for all that others share.
pytestmark = pytest.mark.timeout(400)

NAMES = list(LAYOUTS)
_TOLERANCE = 1e-9  # of losses about 3.5 in float64; the order of summation differs between layouts


class Matrix:
    """The saves and loads that have been run so far: one run per layout saves, one loads all sources into it."""

    def __init__(self, worlds: Worlds, folder: Path) -> None:
        self._worlds = worlds
        self.folder = str(folder)
        self.saved = cache(self._saved)
        self.loaded = cache(self._loaded)

    def _saved(self, layout: str) -> list[dict[str, Any]]:
        return self._worlds.run(WORLD_SIZE[layout], matrix_jobs.save_all, layout, self.folder)

    def _loaded(self, layout: str, sources: tuple[str, ...]) -> list[dict[str, dict[str, Any]]]:
        for source in sources:
            self.saved(source)
        size = WORLD_SIZE[layout]
        return self._worlds.run(size, matrix_jobs.load_all, layout, sources, self.folder, timeout=240)


@pytest.fixture(scope="session")
def matrix(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(worlds, tmp_path_factory.mktemp("matrix"))


def check(matrix: Matrix, source: str, destination: str, sources: tuple[str, ...]) -> None:
    ranks = matrix.loaded(destination, sources)
    for rank, result in enumerate(ranks):
        assert not result[source]["problems"], f"rank {rank}: {result[source]['problems'][:5]}"
        assert result[source]["losses"] == ranks[0][source]["losses"]
    losses = ranks[0][source]["losses"]
    reference = matrix.saved("one")[0]["after"]
    assert losses == pytest.approx(reference, abs=_TOLERANCE, rel=0)
    if source == destination:
        assert losses == matrix.saved(source)[0]["after"], "the same layout goes on bit for bit"


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("destination", NAMES)
def test_every_layout_loads_every_layout(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, tuple(NAMES))


@pytest.mark.parametrize("source", NAMES)
def test_the_layouts_train_alike(matrix: Matrix, source: str) -> None:
    reference = matrix.saved("one")[0]
    for rank in matrix.saved(source):
        for part in ("before", "after"):
            assert rank[part] == pytest.approx(reference[part], abs=_TOLERANCE, rel=0)


@pytest.fixture(scope="session")
def opened(matrix: Matrix, worlds: Worlds) -> dict[str, list[str]]:
    for layout in NAMES:
        matrix.saved(layout)
    return worlds.run(1, matrix_jobs.open_all, NAMES, matrix.folder)[0]


@pytest.mark.parametrize("source", NAMES)
def test_open_shows_whole_tensors_of_every_layout(opened: dict[str, list[str]], source: str) -> None:
    assert opened[source] == []


# 6 processes: TP 2 × FSDP 3 cuts 7 rows of a tensor-parallel piece into 3, 3 and 1, which is an uneven _StridedShard.
@pytest.mark.parametrize("source", ["one", "fsdp4", "tp2-fsdp2", "tp2-fsdp3"])
def test_an_uneven_strided_shard_loads(matrix: Matrix, source: str) -> None:
    check(matrix, source, "tp2-fsdp3", ("one", "fsdp4", "tp2-fsdp2", "tp2-fsdp3"))


@pytest.mark.parametrize("destination", ["one", "fsdp3", "tp2-fsdp2"])
def test_an_uneven_strided_shard_was_saved(matrix: Matrix, destination: str) -> None:
    check(matrix, "tp2-fsdp3", destination, ("tp2-fsdp3",))


@pytest.mark.slow
@pytest.mark.parametrize("source", [*NAMES, *MORE])
@pytest.mark.parametrize("destination", MORE)
def test_more_layouts(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, (*NAMES, *MORE))
