"""Every layout loads what every layout saved: by coordinates, and by the losses of the next steps."""

from __future__ import annotations

import pytest

from tests.distributed import matrix_jobs
from tests.support.matrices import Matrix, pairs
from tests.support.torch_layouts import EXTRA_LAYOUTS, LAYOUTS, WORLD_SIZE
from tests.support.variants import quick
from tests.support.worlds import Worlds

# The first test that needs a world's run pays for all tests that share the run.
pytestmark = pytest.mark.timeout(400)

NAMES = list(LAYOUTS)


@pytest.fixture(scope="session")
def matrix(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("matrix")
    return Matrix(worlds, folder, WORLD_SIZE, matrix_jobs.save_all, matrix_jobs.load_all)


@pytest.mark.parametrize(("destination", "source", "batch"), pairs(NAMES, NAMES))
def test_every_layout_loads_every_layout(matrix: Matrix, source: str, destination: str, batch: tuple[str, ...]) -> None:
    matrix.check(source, destination, batch)


@pytest.mark.parametrize("layout", NAMES)
def test_the_layouts_train_alike(matrix: Matrix, layout: str) -> None:
    matrix.check_training(layout)


@pytest.fixture(scope="session")
def opened(matrix: Matrix, worlds: Worlds) -> dict[str, list[str]]:
    for layout in NAMES:
        matrix.saved(layout)
    return worlds.run(1, matrix_jobs.open_all, NAMES, matrix.folder())[0]


@pytest.mark.parametrize("source", NAMES)
def test_open_shows_whole_tensors_of_every_layout(opened: dict[str, list[str]], source: str) -> None:
    assert opened[source] == []


# 6 processes: TP 2 × FSDP 3 cuts 7 rows of a tensor-parallel piece into 3, 3 and 1, which is an uneven _StridedShard.
@pytest.mark.parametrize("source", quick(["fsdp4", "one", "tp2-fsdp2", "tp2-fsdp3"], every=4))
def test_an_uneven_strided_shard_loads(matrix: Matrix, source: str) -> None:
    matrix.check(source, "tp2-fsdp3", (source,))


@pytest.mark.parametrize("destination", quick(["fsdp3", "one", "tp2-fsdp2"], every=3))
def test_a_saved_uneven_strided_shard_loads(matrix: Matrix, destination: str) -> None:
    matrix.check("tp2-fsdp3", destination, ("tp2-fsdp3",))


@pytest.mark.slow
@pytest.mark.parametrize("source", [*NAMES, *EXTRA_LAYOUTS])
@pytest.mark.parametrize("destination", EXTRA_LAYOUTS)
def test_extra_layouts(matrix: Matrix, source: str, destination: str) -> None:
    matrix.check(source, destination, (*NAMES, *EXTRA_LAYOUTS))
