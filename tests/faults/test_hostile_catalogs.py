"""Catalogs that a newer or a hostile writer made: validly sealed, and refused for what they say."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation import catalog_file
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog, StorageFile
from bytecheckpoint.storage import resolve
from tests.faults.coded import load_step, states

CATALOG = "metadata.parquet"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A sound checkpoint, whose catalog the tests replace."""
    path = tmp_path / "folder" / "s"
    bytecheckpoint.save(path, states(step=3))
    return path


def refused(path: Path) -> bytecheckpoint.CheckpointError:
    with pytest.raises(bytecheckpoint.CheckpointError) as caught:
        load_step(path)
    return caught.value


def resealed(data: bytes, magic: bytes) -> bytes:
    """The catalog with another magic, sealed as its writer would have."""
    (length,) = struct.unpack("<I", data[-8:-4])
    at = len(data) - 8 - length - catalog_file.SEAL_BYTES
    pages, footer = data[:at], data[at + catalog_file.SEAL_BYTES :]
    return b"".join((pages, magic, catalog_file._seal_hash(pages, magic, footer), footer))


def test_a_catalog_of_a_newer_version(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (damaged / CATALOG).read_bytes()
    (damaged / CATALOG).write_bytes(resealed(data, b"bytecheckpoint02"))
    error = refused(damaged)
    assert type(error) is IncompatibleCheckpointError and "version 02" in str(error) and "upgrade" in str(error)
    catalog = catalog_file.decode(data)
    monkeypatch.setattr(catalog_file, "CATALOG_FORMAT_VERSION", 7)
    newer = catalog_file.encode(catalog)
    monkeypatch.undo()
    (damaged / CATALOG).write_bytes(newer)
    error = refused(damaged)
    assert type(error) is IncompatibleCheckpointError and "version 7" in str(error) and "upgrade" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "../../secret",
        "/etc/passwd",
        "model/../../secret",
        "a\0b",
        "",
        ".",
        "..",
        "C:/x",
        "model\\..\\x",
        "a//b",
        "a\nb",
    ],
)
def test_a_catalog_that_names_files_outside_is_refused(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    catalog, _ = read_catalog(resolve(damaged))
    (tmp_path / "secret").write_bytes((damaged / catalog.files[0].name).read_bytes())
    first = dataclasses.replace(catalog.files[0], name=name)
    hostile = dataclasses.replace(catalog, files=(first, *catalog.files[1:]))
    monkeypatch.setattr(catalog_file, "catalog_problem", lambda _: None)
    data = catalog_file.encode(hostile)
    monkeypatch.undo()
    (damaged / CATALOG).write_bytes(data)
    error = refused(damaged)
    assert type(error) is CorruptCheckpointError and error.file == CATALOG


@hypothesis_settings(max_examples=150)
@given(st.binary(max_size=300), st.integers(0, 5000))
def test_no_bytes_make_the_catalog_reader_raise_anything_else(data: bytes, at: int) -> None:
    """Damage with a valid seal: only a hostile writer makes such a file."""
    sound = catalog_file.encode(Catalog.from_columns(**minimal()))
    at %= len(sound)
    changed = sound[:at] + data + sound[at + len(data) :]
    try:
        changed = resealed(changed, b"bytecheckpoint01")
    except struct.error:
        return
    try:
        catalog_file.decode(changed)
    except (CorruptCheckpointError, IncompatibleCheckpointError):
        pass


def minimal() -> dict[str, Any]:
    name = "model/rank-00000." + "ab" * 12 + ".safetensors"
    return {
        "kinds": ["model"], "fqns": ["w"], "slots": [""], "dtypes": ["float32"], "devices": ["cpu"],
        "shapes": np.array([[4]]), "ndims": np.array([1]), "owner": np.array([-1], np.int32),
        "requires_grad": np.array([True]), "boxes": BoxTable.build([0], [(0,)], [(4,)]),
        "file": np.zeros(1, np.int32), "byte_offset": np.array([4096]), "byte_length": np.array([16]),
        "files": [StorageFile(name, "model", 0, 4112, 4096, 7, 65536, "ab" * 12)],
        "sums": [np.array([5], np.uint64)], "aliases": {}, "info": {"world_size": 1},
    }  # fmt: skip
