"""FSDP1 over real ranks: every layout loads every layout, FSDP1's and native ones, and trains on."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import compare, verify
from tests.distributed.matrix_jobs import AFTER, BEFORE, coordinates, open_all
from tests.support.comparisons import differences, report_problems
from tests.support.fsdp1_layouts import FSDP1, WORLD_SIZE, adagrad, build, full_state, sgd
from tests.support.matrices import Matrix, pairs
from tests.support.tiny_model import source_values, target_values
from tests.support.torch_layouts import adamw as two_groups
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

NATIVE = ["one", "ddp2", "fsdp3", "tp2-fsdp2"]
EVERY = [name for name in FSDP1 if not name.startswith("low")]
#: Both settings of use_orig_params, all strategies, four world sizes and tensor parallelism; the rest is `slow`.
CHOSEN = ["full4-orig", "full3-flat", "grad2-flat", "hybrid4-flat", "none2-orig", "full1-flat", "tp2-full2-orig"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "two": {"optimizer": two_groups},
    "sgd": {"optimizer": sgd},
    "adagrad": {"optimizer": adagrad},
}
#: Of all parameters in the state of coordinates: a flat parameter has one step.
STEP = 7.0


def save_both(layout: str, folder: str, optimizer: str) -> dict[str, Any]:
    """Save a trained state, asynchronously during training, and under AdamW a state of coordinates."""
    trainer = build(layout, source_values, **OPTIMIZERS[optimizer])
    before = trainer.train(BEFORE)
    handle = bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states(), async_checkpoint=True)
    after = trainer.train(AFTER)
    handle.result(60)
    if optimizer == "adamw":
        bytecheckpoint.save(f"{folder}/coordinates/{layout}", coordinates(layout, STEP, build).states())
    return {"before": before, "after": after}


def load_both(layout: str, sources: Sequence[str], folder: str, optimizer: str) -> dict[str, dict[str, Any]]:
    """Load what every source saved; return the problems of the state of coordinates and the next losses, by source."""
    expected = full_state(coordinates("one", STEP, build)) if optimizer == "adamw" else {}
    # `resumed` loads the first source into an optimizer without state, and the others over a state that trained on.
    fresh, resumed = build(layout, target_values), build(layout, target_values, **OPTIMIZERS[optimizer])
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        losses: list[float] = []
        problems: list[str] = []
        try:
            if optimizer == "adamw":
                fresh.erase()
                report = bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
                problems += differences(expected, full_state(fresh)) + report_problems(report)
                problems += [f"{n}: {s}" for n, s in fresh.settings().items() if s["lr"] != 0.5]
            bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
            losses = resumed.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


@pytest.fixture(scope="session")
def matrix(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(worlds, tmp_path_factory.mktemp("flat_matrix"), WORLD_SIZE, save_both, load_both)


@pytest.mark.parametrize(("destination", "source", "batch"), pairs(CHOSEN, [*CHOSEN, *NATIVE]))
def test_fsdp1_loads_every_layout(matrix: Matrix, source: str, destination: str, batch: tuple[str, ...]) -> None:
    matrix.check(source, destination, batch, "adamw")


@pytest.mark.parametrize(("destination", "source", "batch"), pairs(NATIVE, CHOSEN))
def test_native_layouts_load_fsdp1(matrix: Matrix, source: str, destination: str, batch: tuple[str, ...]) -> None:
    matrix.check(source, destination, batch, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("source", [*EVERY, *NATIVE])
@pytest.mark.parametrize("destination", [*EVERY, *NATIVE])
def test_every_layout_loads_every_layout(matrix: Matrix, source: str, destination: str) -> None:
    matrix.check(source, destination, [*EVERY, *NATIVE], "adamw")


@pytest.mark.parametrize("layout", CHOSEN)
def test_the_layouts_train_alike(matrix: Matrix, layout: str) -> None:
    matrix.check_training(layout, "adamw")


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("sgd", ["full3-flat", "full4-orig", "one", "fsdp3"]),
        pytest.param("adagrad", ["full3-flat", "full4-orig", "one", "fsdp3"], marks=pytest.mark.slow),
        pytest.param("two", ["full2-deep", "grad3-orig", "one", "ddp2"], marks=pytest.mark.slow),
    ],
)
def test_other_optimizers(matrix: Matrix, optimizer: str, names: list[str]) -> None:
    for destination in names:
        for source in names:
            matrix.check(source, destination, names, optimizer)


def test_open_shows_whole_tensors(matrix: Matrix, worlds: Worlds) -> None:
    for layout in CHOSEN:
        matrix.saved(layout, "adamw")
    assert worlds.run(1, open_all, CHOSEN, matrix.folder("adamw"), STEP) == [{name: [] for name in CHOSEN}]


def test_verify_and_compare(matrix: Matrix) -> None:
    names = ["one", "full4-orig", "full3-flat"]
    for layout in names:
        matrix.saved(layout, "adamw")
    paths = [f"{matrix.folder('adamw')}/coordinates/{layout}" for layout in names]
    for path in paths:
        report = verify(resolve(path))
        assert report.ok and not report.notes
    with bytecheckpoint.open(paths[0]) as plain:
        for path in paths[1:]:
            with bytecheckpoint.open(path) as flat:
                found = compare(plain, flat)
            assert found.tensors > 50
            # The layouts have other extra states, and another order of parameters within a group.
            different = {d.key for d in found.differences if not d.key.startswith("extra_states")}
            assert different <= {"optimizer/param_groups"}


def test_the_checkpoint_records_the_layout(matrix: Matrix) -> None:
    matrix.saved("hybrid4-flat", "adamw")
    with bytecheckpoint.open(f"{matrix.folder('adamw')}/trained/hybrid4-flat") as checkpoint:
        text = str(checkpoint.info)
    assert "_HYBRID_SHARD_ZERO2 on (replicate=2, shard=2), use_orig_params=False" in text
