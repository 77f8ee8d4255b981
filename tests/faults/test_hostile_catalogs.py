"""Catalogs of a newer or a hostile writer: their seal is valid, and a load refuses their content."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.storage import resolve
from tests.faults.coded import load_step, states
from tests.support.catalogs import resealed, with_footer

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


def test_a_catalog_of_a_newer_version(damaged: Path) -> None:
    data = (damaged / CATALOG).read_bytes()
    newer = with_footer(data, lambda footer: footer.update(version=7))
    for content, version in ((resealed(data, b"bytecheckpoint02"), "02"), (newer, "7")):
        (damaged / CATALOG).write_bytes(content)
        error = refused(damaged)
        assert type(error) is IncompatibleCheckpointError
        assert f"version {version}" in str(error) and "upgrade" in str(error)


OUTSIDE = ("../../secret", "/etc/passwd", "model/../../secret", "..", "C:/x", "model\\..\\x")
MALFORMED = ("", ".", "a\0b", "a//b", "a\nb")


@pytest.mark.parametrize("name", OUTSIDE + MALFORMED)
def test_a_catalog_that_names_files_outside_is_refused(damaged: Path, tmp_path: Path, name: str) -> None:
    catalog, _ = read_catalog(resolve(damaged))
    (tmp_path / "secret").write_bytes((damaged / catalog.files[0].name).read_bytes())
    first = dataclasses.replace(catalog.files[0], name=name)
    hostile = dataclasses.replace(catalog, files=(first, *catalog.files[1:]))
    (damaged / CATALOG).write_bytes(encode(hostile, check=False))
    error = refused(damaged)
    assert type(error) is CorruptCheckpointError and error.file == CATALOG
