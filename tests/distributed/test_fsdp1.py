"""FSDP1 over real ranks: every layout loads every layout, FSDP1's and native ones, and trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools.diff import compare
from bytecheckpoint.tools.verify import verify_checkpoint
from tests.distributed import fsdp1_jobs as jobs
from tests.distributed.fsdp1_layouts import FSDP1, WORLD_SIZE
from tests.support.matrices import TOLERANCE, Matrix, pairs
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

NATIVE = ["one", "ddp2", "fsdp3", "tp2-fsdp2"]
EVERY = [name for name in FSDP1 if not name.startswith("low")]
#: Both settings of use_orig_params, all strategies, four world sizes and tensor parallelism; the rest is `slow`.
CHOSEN = ["full4-orig", "full3-flat", "grad2-flat", "hybrid4-flat", "none2-orig", "full1-flat", "tp2-full2-orig"]
ORIGINAL = [name for name in EVERY if FSDP1[name].use_orig_params]


@pytest.fixture(scope="session")
def flat_matrix(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(worlds, tmp_path_factory.mktemp("flat_matrix"), WORLD_SIZE, jobs.save_both, jobs.load_both)


def check(matrix: Matrix, source: str, destination: str, sources: Sequence[str], optimizer: str = "adamw") -> None:
    matrix.check(source, destination, sources, optimizer)


@pytest.mark.parametrize(("destination", "source", "batch"), pairs(CHOSEN, [*CHOSEN, *NATIVE]))
def test_fsdp1_loads_every_layout(flat_matrix: Matrix, source: str, destination: str, batch: tuple[str, ...]) -> None:
    check(flat_matrix, source, destination, batch)


@pytest.mark.parametrize(("destination", "source", "batch"), pairs(NATIVE, CHOSEN))
def test_native_layouts_load_fsdp1(flat_matrix: Matrix, source: str, destination: str, batch: tuple[str, ...]) -> None:
    check(flat_matrix, source, destination, batch)


@pytest.mark.slow
@pytest.mark.parametrize("source", [*EVERY, *NATIVE])
@pytest.mark.parametrize("destination", [*EVERY, *NATIVE])
def test_all_of_them(flat_matrix: Matrix, source: str, destination: str) -> None:
    flat_matrix.check(source, destination, [*EVERY, *NATIVE], "adamw")


@pytest.mark.parametrize("layout", CHOSEN)
def test_the_layouts_train_alike(flat_matrix: Matrix, layout: str) -> None:
    flat_matrix.check_training(layout, "adamw")


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("sgd", ["full3-flat", "full4-orig", "one", "fsdp3"]),
        pytest.param("adagrad", ["full3-flat", "full4-orig", "one", "fsdp3"], marks=pytest.mark.slow),
        pytest.param("two", ["full2-deep", "grad3-orig", "one", "ddp2"], marks=pytest.mark.slow),
    ],
)
def test_other_optimizers(flat_matrix: Matrix, optimizer: str, names: list[str]) -> None:
    for destination in names:
        for source in names:
            flat_matrix.check(source, destination, names, optimizer)


def test_open_shows_whole_tensors(flat_matrix: Matrix, worlds: Worlds) -> None:
    for layout in CHOSEN:
        flat_matrix.saved(layout, "adamw")
    assert worlds.run(1, jobs.open_all, CHOSEN, flat_matrix.folder("adamw")) == [{name: [] for name in CHOSEN}]


def test_verify_and_compare(flat_matrix: Matrix) -> None:
    names = ["one", "full4-orig", "full3-flat"]
    for layout in names:
        flat_matrix.saved(layout, "adamw")
    paths = [f"{flat_matrix.folder('adamw')}/coordinates/{layout}" for layout in names]
    for path in paths:
        report = verify_checkpoint(resolve(path))
        assert report.ok and not report.notes
    with bytecheckpoint.open(paths[0]) as plain:
        for path in paths[1:]:
            with bytecheckpoint.open(path) as flat:
                found = compare(plain, flat)
            assert found.tensors > 50
            # The layouts have other extra states, and another order of parameters within a group.
            assert {d.key for d in found.differences if not d.key.startswith("extra_states")} <= {
                "optimizer/param_groups"
            }


@pytest.mark.parametrize("layout", ["low2-orig", "low3-flat"])
def test_mixed_precision(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    size = WORLD_SIZE[layout]
    assert worlds.run(size, jobs.low_precision, layout, str(tmp_path / "step")) == [[]] * size


@pytest.mark.parametrize("layout", ["full4-orig", "full3-flat", "hybrid4-flat"])
def test_nothing_is_communicated_over_process_groups(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    for found in worlds.run(WORLD_SIZE[layout], jobs.communication, layout, str(tmp_path)):
        assert found.pop("FSDP1's own"), "the recorder records"
        assert found == {"capture": [], "save": [], "async": [], "load": []}


@pytest.mark.parametrize("layout", ["full4-orig", "full3-flat", "grad2-flat", "grad3-orig", "low2-orig", "low3-flat"])
@pytest.mark.parametrize("how", ["evaluation", "evaluation with grad", "train with grad"])
def test_parameters_that_are_still_gathered(worlds: Worlds, layout: str, how: str, tmp_path: Path) -> None:
    size = WORLD_SIZE[layout]
    assert worlds.run(size, jobs.save_while_gathered, layout, how, str(tmp_path / "step")) == [[]] * size


@pytest.mark.parametrize("layout", ["full2-deep", "grad2-flat", "none2-orig", "low2-orig"])
def test_a_save_after_a_failed_forward_pass(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.save_after_failed_forward, layout, str(tmp_path / "step")) == [[]] * 2


@pytest.mark.parametrize("layout", ["full2-deep", "grad2-flat"])
def test_inside_summon_full_params_a_save_is_refused(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    for message in worlds.run(2, jobs.save_inside_summon, layout, str(tmp_path / "step")):
        assert "summon_full_params" in message


@pytest.mark.parametrize("layout", ["full2-deep", "full3-flat", "grad2-flat"])
def test_names_are_those_of_the_bare_model(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    size = WORLD_SIZE[layout]
    assert worlds.run(size, jobs.wrapped_names, layout, str(tmp_path / "step")) == [[]] * size


def test_tied_weights(worlds: Worlds, tmp_path: Path) -> None:
    names = ["one", "full4-orig", "full3-flat", "grad2-flat", "fsdp3"]
    folder = str(tmp_path)
    for layout in names:
        worlds.run(WORLD_SIZE[layout], jobs.save_and_load_tied, layout, folder, [])
    reference = None
    for layout in names:
        for found in worlds.run(WORLD_SIZE[layout], jobs.save_and_load_tied, layout, folder, names):
            reference = reference or found[""]
            assert found[layout] == found[""]
            for source, losses in found.items():
                assert losses == pytest.approx(reference, abs=TOLERANCE, rel=0), (source, layout)


@pytest.mark.parametrize(
    ("source", "layout"), [("full4-orig", "full4-orig"), ("grad3-orig", "fsdp3"), ("fsdp3", "grad3-orig")]
)
def test_steps_and_settings_by_name(worlds: Worlds, source: str, layout: str, tmp_path: Path) -> None:
    size = WORLD_SIZE[source]
    assert worlds.run(size, jobs.steps_by_name, source, layout, str(tmp_path / "step")) == [[]] * size


def test_a_flat_parameter_has_one_step(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(3, jobs.load_different_steps, str(tmp_path / "step"), "grad3-orig", "full3-flat"):
        assert "the flat parameter of 'the root'" in message
        assert "4.0 for 'norm.weight'" in message
        assert "1.0 for" in message


@pytest.mark.parametrize("layout", ["full4-orig", "full3-flat", "none2-flat"])
def test_prepared_and_repeated_saves(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    for found in worlds.run(WORLD_SIZE[layout], jobs.prepare_and_save, layout, str(tmp_path / "step")):
        assert found["wrong"] == []
        assert found["report"] == []
        assert found["cached"] == [True] * 3


def test_hybrid_sharding_by_groups_writes_everything_once(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(4, jobs.hybrid_with_process_groups, str(tmp_path / "step")) == [[]] * 4


@pytest.mark.parametrize(("source", "layout"), [("full3-flat", "grad3-orig"), ("grad3-orig", "full3-flat")])
def test_another_dtype(worlds: Worlds, source: str, layout: str, tmp_path: Path) -> None:
    assert worlds.run(3, jobs.load_into_another_dtype, source, layout, str(tmp_path / "step")) == [[]] * 3


def test_extra_states_beside_flat_parameters(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(3, jobs.module_with_extra_state, str(tmp_path / "step")) == [[]] * 3


def test_the_checkpoint_records_the_layout(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, jobs.save_both, "hybrid4-orig", str(tmp_path))
    with bytecheckpoint.open(tmp_path / "trained" / "hybrid4-orig") as checkpoint:
        text = str(checkpoint.catalog.info)
    assert "HYBRID_SHARD on (replicate=2, shard=2), use_orig_params=True" in text
