"""A file that only has the name of a catalog is not replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import ThreadWorld
from bytecheckpoint.errors import CheckpointError, StorageConflictError
from bytecheckpoint.storage import resolve
from tests.support.modes import MODES
from tests.support.ranks import outcomes

STATES = {"model": {"w": torch.arange(8.0)}}
FOREIGN: dict[str, Callable[[Path], object]] = {
    "a dataset": lambda path: pq.write_table(pa.table({"text": ["a", "b"] * 1000}), path),
    "nothing": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("PAR1 is not all"),
    "a claim": lambda path: path.write_bytes(b"PAR1" + b"\xff" * 60 + b"PAR1"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("prefix", ["", "fsspec+file://", "tier+file://"])
def test_a_foreign_file_is_refused_and_stays(tmp_path: Path, what: str, mode: str, prefix: str) -> None:
    path = tmp_path / "step" / "metadata.parquet"
    path.parent.mkdir()
    FOREIGN[what](path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    for _ in range(2):
        with pytest.raises(StorageConflictError, match="is no catalog of a checkpoint"):
            bytecheckpoint.save(f"{prefix}{path.parent}", STATES, **MODES[mode]).result(30)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [p.name for p in path.parent.rglob("*") if p.is_file()] == [path.name]


def test_all_ranks_hear_of_it_and_leave_nothing(tmp_path: Path) -> None:
    FOREIGN["a dataset"](tmp_path / "metadata.parquet")
    got = outcomes(ThreadWorld(3), lambda _: bytecheckpoint.save(tmp_path, STATES, timeout=20))
    assert all(isinstance(error, StorageConflictError) for error in got), got
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["metadata.parquet"]


@pytest.mark.parametrize("prefix", ["", "fsspec+file://", "tier+file://"])
@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_catalog_is_replaced(tmp_path: Path, damage: str, prefix: str) -> None:
    url = f"{prefix}{tmp_path}/step"
    bytecheckpoint.save(url, STATES).committed.result(30)
    path = tmp_path / "step" / "metadata.parquet"
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-20], "empty": b"", "changed": data[:200] + b"?" + data[201:]}[damage])
    bytecheckpoint.save(url, STATES).committed.result(30)
    assert torch.equal(bytecheckpoint.open(str(path.parent))["model/w"][...], STATES["model"]["w"])


def test_a_newer_version_is_replaced(tmp_path: Path) -> None:
    """Its writer said that it is a checkpoint; only reading it is refused."""
    bytecheckpoint.save(tmp_path, STATES)
    path = tmp_path / "metadata.parquet"
    path.write_bytes(path.read_bytes().replace(b"bytecheckpoint01", b"bytecheckpoint99"))
    for name, _ in resolve(tmp_path).list():
        if name != path.name:
            (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="seal"):
        bytecheckpoint.open(tmp_path)
    bytecheckpoint.save(tmp_path, STATES)
