"""Saves and loads at layouts of several ranks, which are threads of this process."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.representation.names import generation_of
from bytecheckpoint.storage import Storage, resolve
from tests.support.catalogs import catalog_at
from tests.support.ranks import load_all, save_all

__all__ = ["ROWS", "check_folder", "load", "save"]

#: Three tensors of 6.4 MB: files of several parts, several times a small staging pool.
ROWS = 20_000


def save(path: str, step: int, world: int = 1, rows: int = ROWS, **options: Any) -> list[Any]:
    """Save from `world` ranks; return each rank's report or exception."""
    return save_all(ThreadWorld(world), path, step, rows=rows, **options)


def load(path: str | Storage, world: int, rows: int = ROWS) -> set[int]:
    """Load at a layout of `world` ranks; return the steps that the ranks found."""
    return set(load_all(ThreadWorld(world), path, rows=rows, prepare_save=False))


def check_folder(path: str) -> None:
    """Fail unless the checkpoint verifies, and its folder has no storage files but those that the catalog names."""
    assert run(["verify", path]) == 0
    named = {file.name for file in catalog_at(path).files}
    assert {name for name, _ in resolve(path).list() if generation_of(name)} == named
