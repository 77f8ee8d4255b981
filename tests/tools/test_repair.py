"""Repair: a catalog made from the files alone is as good as the lost one, or is not made."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import compare, repair, verify
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import catalog_at
from tests.support.damage import flip_bit
from tests.tools.conftest import save_layout

FOLDER = Path(__file__).parents[1] / "golden/v1"


def files_of(path: Path, pattern: str) -> list[Path]:
    found = sorted(path.glob(pattern))
    assert found, pattern
    return found


@pytest.fixture
def lost(copied: Path) -> Path:
    """A checkpoint that has lost its catalog."""
    (copied / "metadata.parquet").unlink()
    return copied


def same(a: Path, b: Path) -> bool:
    with bytecheckpoint.open(a) as one, bytecheckpoint.open(b) as two:
        return compare(one, two).equal and set(one) == set(two) and one.ranks == two.ranks


def test_a_lost_catalog_comes_back(saved: Path, lost: Path) -> None:
    report = repair(resolve(lost))
    assert report.written and not report.findings
    assert [g.complete for g in report.generations] == [True]
    assert same(saved, lost) and verify(resolve(lost)).ok
    with bytecheckpoint.open(lost) as checkpoint:
        assert checkpoint.info["world_size"] == 3 and "rebuilt" in checkpoint.info
        assert bytecheckpoint.open(lost, rank=2)["extra_states/rank"] == 2
    # And it loads.
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    bytecheckpoint.load(lost, {"layer": layer, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_damaged_catalog_is_replaced_and_a_sound_one_is_not(saved: Path, copied: Path) -> None:
    catalog = copied / "metadata.parquet"
    good = catalog.read_bytes()
    assert not repair(resolve(copied)).written
    assert catalog.read_bytes() == good
    catalog.write_bytes(good[: len(good) // 2])
    assert repair(resolve(copied)).written
    assert same(saved, copied)
    assert any("replaced" in note for note in repair(resolve(copied), force=True).notes)


def test_tied_names_come_back(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    for name in ("s", "t"):
        bytecheckpoint.save(tmp_path / name, {"model": model})
    (tmp_path / "s/metadata.parquet").unlink()
    repair(resolve(tmp_path / "s"))
    assert same(tmp_path / "s", tmp_path / "t")
    assert "model/b.weight" in bytecheckpoint.open(tmp_path / "s")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("model/rank-00001*", "incomplete"), ("optimizer/values-00000*", "settings"), ("model/rank-00002*", "incomplete")],
)
def test_a_lost_file_keeps_it_from_being_rebuilt(lost: Path, pattern: str, why: str) -> None:
    files_of(lost, pattern)[0].unlink()
    with pytest.raises(CorruptCheckpointError, match=why):
        repair(resolve(lost))
    assert not (lost / "metadata.parquet").exists()


def test_a_lost_parameter_of_the_optimizer_is_missed(tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        stage = torch.nn.ModuleDict({f"l{collective.rank}": torch.nn.Linear(3, 3)})
        states = {"model": stage, "optimizer": torch.optim.SGD(stage.parameters(), lr=0.1)}
        bytecheckpoint.save(tmp_path / "s", states, timeout=30)

    ThreadWorld(2).run(save, timeout=60)
    (tmp_path / "s/metadata.parquet").unlink()
    files_of(tmp_path / "s", "model/rank-00001*")[0].unlink()
    with pytest.raises(CorruptCheckpointError, match="parameters of the optimizer are in no file"):
        repair(resolve(tmp_path / "s"))
    assert repair(resolve(tmp_path / "s"), force=True).written
    assert "model/l0.weight" in bytecheckpoint.open(tmp_path / "s")


def test_a_reference_to_a_lost_tensor_is_noticed(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"a": torch.ones(3), "n": 1}})
    (tmp_path / "s/metadata.parquet").unlink()
    files_of(tmp_path / "s", "model/rank-*")[0].unlink()
    with pytest.raises(CorruptCheckpointError, match="'a', which the catalog lacks"):
        repair(resolve(tmp_path / "s"))


def save_stages(path: Path, ranks: int, silent: tuple[int, ...] = ()) -> None:
    """Whole tensors that no other rank speaks of, and a value of each rank's own; nothing from `silent` ranks."""

    def save(collective: Collective) -> None:
        rank = collective.rank
        stage = {} if rank in silent else {f"l{rank}": torch.nn.Linear(3, 3), f"m{rank}": torch.nn.Linear(3, 3)}
        states: dict[str, object] = {"model": torch.nn.ModuleDict(stage), "other": torch.nn.ModuleDict(stage)}
        if rank not in silent:
            states["extra_states"] = {"rank": rank}
        bytecheckpoint.save(path, states, timeout=30)

    ThreadWorld(ranks).run(save, timeout=60)
    (path / "metadata.parquet").unlink()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("model/rank-00001.*", "model/rank-00001 is missing, which other files of rank 1 name"),
        ("model/rank-00001-p001.*", "model/rank-00001-p001 is missing, which other files of rank 1 name"),
        ("extra/values-00001.*", "1 of the 5 files that rank 1 wrote are missing, with plain values"),
        ("*/rank-00002*", "model/rank-00002 is missing, which other files of rank 2 name"),
    ],
)
def test_a_lost_file_of_whole_tensors_is_missed(tmp_path: Path, pattern: str, why: str) -> None:
    path = tmp_path / "s"
    with tuned(max_entries_per_file=2):  # two parts of each state
        save_stages(path, 3)
    lost = {file: file.read_bytes() for file in files_of(path, pattern)}
    for file in lost:
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=re.escape(why)):
        repair(resolve(path))
    assert repair(resolve(path), force=True).written
    # With its files back it is whole, and nothing is said to be missing.
    for file, data in lost.items():
        file.write_bytes(data)
    report = repair(resolve(path), force=True)
    assert [g.problems for g in report.generations] == [()]
    assert not any("found (" in note or "early" in note for note in report.notes)


def test_ranks_without_any_file_are_named(tmp_path: Path) -> None:
    save_stages(tmp_path / "lost", 3)
    for file in files_of(tmp_path / "lost", "*/*-00001*"):
        file.unlink()
    save_stages(tmp_path / "nothing", 3, silent=(1,))
    for name in ("lost", "nothing"):  # which nobody can tell apart
        report = repair(resolve(tmp_path / name))
        assert report.written
        (note,) = [note for note in report.notes if "no file of" in note]
        assert note.startswith("no file of 1 of 3 ranks was found (1): either they had nothing to write")


def test_a_value_that_was_written_late_is_no_second_part_of_a_lost_file(tmp_path: Path) -> None:
    """A rank whose copy was stood for by another's, until they differed, writes a second file without a first."""

    def save(collective: Collective) -> None:
        extra = {"n": 1}
        states = {"model": torch.nn.ModuleDict({f"l{collective.rank}": torch.nn.Linear(3, 3)}), "extra_states": extra}
        for name in ("first", "second"):
            bytecheckpoint.save(tmp_path / name, states, timeout=30)
            extra["n"] += collective.rank

    ThreadWorld(2).run(save, timeout=60)
    path = tmp_path / "second"
    assert files_of(path, "extra/values-00001-p001.*") and not [*path.glob("extra/values-00001.*")]
    (path / "metadata.parquet").unlink()
    assert repair(resolve(path)).written
    with bytecheckpoint.open(path, rank=1) as checkpoint:
        assert checkpoint["extra_states/n"] == 2


def test_golden_files_are_repaired(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "v1")
    (tmp_path / "v1/metadata.parquet").unlink()
    assert repair(tmp_path / "v1").written
    assert same(FOLDER, tmp_path / "v1")


def test_damaged_blocks_are_refused_unless_forced(lost: Path) -> None:
    file = files_of(lost, "model/rank-00001*")[0]
    flip_bit(file, -1)
    with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
        repair(resolve(lost))
    assert caught.value.file == str(file.relative_to(lost))
    report = repair(resolve(lost), force=True)
    assert report.written and len(report.findings) == 1
    with bytecheckpoint.open(lost) as checkpoint, pytest.raises(CorruptCheckpointError):
        checkpoint["model/w"][...], checkpoint["model/n"][...]


def test_an_unreadable_header_is_refused_unless_the_rest_is_whole(lost: Path) -> None:
    file = files_of(lost, "layer/rank-*")[0]
    flip_bit(file, 20)
    with pytest.raises(CorruptCheckpointError):
        repair(resolve(lost))
    report = repair(resolve(lost), force=True)
    assert any("left out" in note for note in report.notes)


def test_the_newest_complete_save_and_never_a_mixture(saved: Path, tmp_path: Path) -> None:
    save_layout(tmp_path / "new", 2, [[20], [5]], epoch=2)
    path = tmp_path / "both"
    shutil.copytree(saved, path)
    (path / "metadata.parquet").unlink()
    for file in files_of(tmp_path / "new", "*/*.safetensors"):
        shutil.copy(file, path / file.parent.name / file.name)
        os.utime(path / file.parent.name / file.name, (4e9, 4e9))
    newest = catalog_at(tmp_path / "new").files[0].generation
    report = repair(resolve(path))
    assert report.generation == newest and [g.complete for g in report.generations] == [True, True]
    assert any("older" in note for note in report.notes)
    assert same(path, tmp_path / "new")
    # Without one of its files the newer save does not count, and nothing of it is used.
    (path / "metadata.parquet").unlink()
    files_of(path, f"model/rank-00001.{newest}*")[0].unlink()
    report = repair(resolve(path))
    assert report.generation != newest and [g.complete for g in report.generations] == [False, True]
    assert same(path, saved)


def test_nothing_to_repair(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        repair(resolve(tmp_path))
