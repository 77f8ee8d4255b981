"""`verify tier+...`: which copy is damaged, and what a load would do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, CorruptCheckpointError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.storage import resolve
from tests.support.coded import load_step, states
from tests.support.damage import damage, storage_file
from tests.support.memory import durable_folder, hot_folder


@pytest.fixture
def path(run: str) -> str:
    """A step that is in memory and flushed."""
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    return f"{run}/1"


def places(path: str) -> dict[str, Path]:
    return {"hot": hot_folder(path), "durable": durable_folder(path)}


def damage_copy(place: Path, kind: str, byte: int = -100) -> None:
    if kind == "header":
        kind, byte = "flip", 20
    damage(storage_file(place), kind, byte)


def verify(path: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    code = command(["verify", path, "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    assert command(["verify", path]) == code
    report["words"] = capsys.readouterr().out
    return report


def loads(path: str) -> bool:
    try:
        return load_step(path) == 1
    except CheckpointError:
        return False


def test_both_copies_are_sound(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    (places(path)["hot"] / ".publishing-0123abcd").touch()  # of a save that was killed: the tier's own business
    report = verify(path, capsys)
    assert report["ok"] and report["restorable"] and not report["notes"], report
    size = sum(size for name, size in resolve(path).list() if "/" in name)
    assert report["bytes_read"] == 2 * size, "both are read"
    assert "sound" in report["words"]


@pytest.mark.parametrize("copy", ["hot", "durable"])
@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "header"])
def test_damage_to_one_copy_is_survived(path: str, copy: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage_copy(places(path)[copy], kind)
    report = verify(path, capsys)
    assert not report["ok"] and report["restorable"] and loads(path)
    assert {finding["copy"] for finding in report["findings"]} == {copy}
    assert f"the {copy} copy (" in report["words"] and str(places(path)["durable"]) in report["words"]
    assert "restorable: a load reads what is wrong in one copy from the other" in report["words"]


@pytest.mark.parametrize("kind", ["flip", "cut", "remove"])
def test_damage_to_both_copies(path: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place in places(path).values():
        damage_copy(place, kind)
    report = verify(path, capsys)
    assert not report["ok"] and not report["restorable"]
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch" if kind == "flip" else None):
        load_step(path)
    assert {finding["copy"] for finding in report["findings"]} == {"hot", "durable"}
    assert "not restorable from here" in report["words"] and "model/rank-00000" in report["words"]


def test_damage_at_different_places_of_the_copies(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block has one sound copy: that suffices for a load, and verify knows it."""
    path = f"{run}/1"
    bytecheckpoint.save(path, states(step=1, rows=8000)).result(60)
    damage_copy(places(path)["hot"], "flip", 5000)
    damage_copy(places(path)["durable"], "flip", -100)
    report = verify(path, capsys)
    assert not report["ok"] and report["restorable"]
    assert load_step(path, rows=8000) == 1
    damage_copy(places(path)["hot"], "flip", -100)
    assert not verify(path, capsys)["restorable"]
    with pytest.raises(CheckpointError):
        load_step(path, rows=8000)


def test_a_damaged_hot_catalog(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    (places(path)["hot"] / "metadata.parquet").write_bytes(b"nonsense" * 100)
    report = verify(path, capsys)
    assert not report["ok"] and report["restorable"] and loads(path)
    assert "its catalog is damaged" in report["words"] and "a load reads the durable copy" in report["words"]


def test_a_step_that_is_not_flushed_yet(path: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    durable = places(path)["durable"]
    for file in sorted(durable.rglob("*")):
        if file.is_file():
            file.unlink()
    report = verify(path, capsys)
    assert report["ok"] and report["restorable"] and loads(path)
    assert any("not flushed" in note and str(durable) in note for note in report["notes"])
    damage_copy(places(path)["hot"], "flip")
    report = verify(path, capsys)
    assert not report["ok"] and not report["restorable"] and not loads(path)


def test_a_step_that_is_being_flushed(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is half written in the durable storage is no damage, unless there is no other copy."""
    (places(path)["durable"] / "metadata.parquet").unlink()
    damage_copy(places(path)["durable"], "cut")
    report = verify(path, capsys)
    assert report["ok"] and report["restorable"] and loads(path)
    storage_file(places(path)["hot"]).unlink()
    report = verify(path, capsys)
    assert {finding["copy"] for finding in report["findings"]} == {"hot", "durable"} and not loads(path)


def test_a_hot_copy_that_was_replaced_elsewhere(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    bytecheckpoint.save(places(path)["durable"], states(step=1))
    damage_copy(places(path)["hot"], "flip")
    report = verify(path, capsys)
    assert report["ok"] and loads(path), "nobody reads the damaged copy"
    assert any("does not count" in note for note in report["notes"])


def test_nothing_there(run: str) -> None:
    assert command(["verify", f"{run}/nothing"]) == 2
