"""Every layout of torch, FSDP1's too, loads what every other one saved; tests/frameworks/interchange adds frameworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.support.interchange.families import FAMILIES
from tests.support.interchange.matrix import Matrices
from tests.support.variants import quick
from tests.support.worlds import Worlds

# The first test that needs a world's run pays for all tests that share the run.
pytestmark = pytest.mark.timeout(400)

MEMBERS = [member.name for member in FAMILIES["torch"].members]
#: The families, and whether all of their pairs are slow.
CHOSEN = {
    "torch": False,
    "torch-tied": False,
    "torch-sgd": True,
    "torch-groups": True,
    "torch-adagrad": True,
    "torch-fsdp1": True,
}
#: The short pass loads into each layout what the one at this distance in the list has saved.
DISTANCE = 5
#: Of the tied family, the short pass loads these four pairs: test_models.py saves a tied pair in every kind of layout.
TIED = {"one": "full4-orig", "tp2-fsdp2": "grad2-flat", "pp2-fsdp2": "fsdp3", "full3-flat": "pp2"}


def pairs() -> list[Any]:
    """Return every ordered pair of members; in the short pass, each saves and each loads another's checkpoint."""
    found = []
    for family, slow in CHOSEN.items():
        names = [member.name for member in FAMILIES[family].members]
        for number, destination in enumerate(names):
            short = TIED.get(destination) if family == "torch-tied" else names[(number + DISTANCE) % len(names)]
            for source in names:
                marks = [pytest.mark.slow] if slow or source != short else []
                found.append(pytest.param(family, source, destination, marks=marks))
    return found


@pytest.fixture(scope="session")
def matrices(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrices:
    folder = tmp_path_factory.mktemp("matrix")
    return Matrices(request.session, worlds, folder, "test_every_layout_loads_every_layout")


@pytest.mark.parametrize(("family", "source", "destination"), pairs())
def test_every_layout_loads_every_layout(matrices: Matrices, family: str, source: str, destination: str) -> None:
    matrices.of(family).check(source, destination)


@pytest.mark.parametrize("name", quick(MEMBERS, every=2))
def test_open_shows_whole_tensors(matrices: Matrices, name: str) -> None:
    matrices.of("torch").check_opened(name)


@pytest.mark.parametrize("name", sorted(TIED.values()))
def test_both_names_of_a_tied_pair_show_it(matrices: Matrices, name: str) -> None:
    with bytecheckpoint.open(matrices.of("torch-tied").path(name)) as checkpoint:
        for key in ("model/{}.weight", "optimizer/state/{}.weight/exp_avg", "optimizer/state/{}.weight/step"):
            assert torch.equal(checkpoint[key.format("embed")][...], checkpoint[key.format("head")][...]), key


@pytest.mark.parametrize("name", ["tp2-fsdp2", "full4-orig", "hybrid4-flat"])
def test_checkpoints_verify_and_record_their_layout(matrices: Matrices, name: str) -> None:
    path = matrices.of("torch").path(name)
    report = verify(resolve(path))
    assert report.ok and not report.notes
    if name == "hybrid4-flat":
        with bytecheckpoint.open(path) as checkpoint:
            assert "_HYBRID_SHARD_ZERO2 on (replicate=2, shard=2), use_orig_params=False" in str(checkpoint.info)
