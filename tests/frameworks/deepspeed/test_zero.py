"""Every ZeRO stage and every other layout load each other, bit for bit, and train on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fsdp1_layouts import WORLD_SIZE
from tests.frameworks.deepspeed import jobs
from tests.frameworks.deepspeed.engines import ENGINES
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

#: Layouts without DeepSpeed, in float32.
TORCH = ["one", "ddp2", "fsdp3", "full2-deep", "full4-orig"]
FULL = ["z0x2", "z1x3", "z2x2", "z2x4", "z3x2", "z3x3", "z3x1"]
LOW = ["b0x2", "b1x2", "b1x3-own", "b2x3", "b2x1", "b2x4", "b2x2-aligned", "b3x2", "b3x3", "b3x4"]
_EXACT, _ROUGH = 2e-5, 0.02  # of losses about 3.5: float32 in another order of summation; bfloat16


class Matrix:
    """The saves and loads that have been run so far: one run per layout saves, one loads all sources into it."""

    def __init__(self, worlds: Worlds, folder: Path) -> None:
        self._worlds = worlds
        self._folder = folder
        self.saved = cache(self._saved)
        self.loaded = cache(self._loaded)

    def _saved(self, name: str, optimizer: str) -> list[dict[str, Any]]:
        folder = self._folder / optimizer
        folder.mkdir(exist_ok=True)
        return self._worlds.run(size(name), jobs.save, name, str(folder), optimizer, timeout=300)

    def _loaded(self, name: str, sources: tuple[str, ...], optimizer: str) -> list[dict[str, dict[str, Any]]]:
        for source in sources:
            self.saved(source, optimizer)
        folder = str(self._folder / optimizer)
        return self._worlds.run(size(name), jobs.load, name, sources, folder, optimizer, timeout=500)


def size(name: str) -> int:
    return ENGINES[name].size if name in ENGINES else WORLD_SIZE[name]


@pytest.fixture(scope="session")
def matrix(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(worlds, tmp_path_factory.mktemp("zero"))


def check(matrix: Matrix, source: str, destination: str, sources: list[str], optimizer: str = "adamw") -> None:
    ranks = matrix.loaded(destination, tuple(sources), optimizer)
    for rank, result in enumerate(ranks):
        assert not result[source]["problems"], f"rank {rank}: {result[source]['problems'][:5]}"
    losses = ranks[0][source]["losses"]
    uninterrupted = matrix.saved(source, optimizer)[0]["after"]
    low = jobs.precision(source) or jobs.precision(destination)
    assert losses == pytest.approx(uninterrupted, abs=_ROUGH if low else _EXACT, rel=0)
    if source == destination:
        # The last bit of a product depends on where in memory its operands lie; test_states.py compares bit for bit.
        assert losses == pytest.approx(uninterrupted, abs=2e-3 if low else 1e-6, rel=0)


@pytest.mark.parametrize("source", [*FULL, *TORCH])
@pytest.mark.parametrize("destination", FULL)
def test_full_precision_loads_every_layout(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, [*FULL, *TORCH])


@pytest.mark.parametrize("source", [*FULL, *LOW])
@pytest.mark.parametrize("destination", TORCH)
def test_other_layouts_load_zero(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, [*FULL, *LOW])


@pytest.mark.parametrize("source", [*LOW, "z1x3", "z3x2", "one", "full4-orig"])
@pytest.mark.parametrize("destination", LOW)
def test_low_precision_loads_every_layout(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, [*LOW, "z1x3", "z3x2", "one", "full4-orig"])


@pytest.mark.parametrize("source", LOW)
@pytest.mark.parametrize("destination", ["z1x3", "z3x2"])
def test_full_precision_takes_master_weights(matrix: Matrix, source: str, destination: str) -> None:
    check(matrix, source, destination, LOW)


def test_sgd_with_momentum(matrix: Matrix) -> None:
    names = ["z1x3", "z3x3", "one", "fsdp3", "b2x3", "b3x2", "b1x3-own"]
    for destination in names:
        for source in names:
            check(matrix, source, destination, names, "sgd")


def test_float16_with_a_dynamic_scale(matrix: Matrix) -> None:
    names = ["h2x2", "h3x3"]
    for destination in names:
        for source in names:
            check(matrix, source, destination, names)
    # Without ZeRO this version of DeepSpeed divides gradients by the scale that it has not multiplied the loss with.
    check(matrix, "h0x2", "h0x2", ["h0x2"])


def test_offload_to_the_cpu(matrix: Matrix) -> None:
    names = ["b2x2-cpu", "b3x2-cpu", "b2x3"]
    for destination in names:
        for source in names:
            check(matrix, source, destination, names)


def test_the_layouts_train_alike(matrix: Matrix) -> None:
    reference = matrix.saved("one", "adamw")[0]
    for name in FULL:
        assert matrix.saved(name, "adamw")[0]["after"] == pytest.approx(reference["after"], abs=_EXACT, rel=0)
