"""Forks: the package works in the child, and the saves of the parent go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.coded import load_step
from tests.faults.scenarios import ROWS, SCENARIOS
from tests.faults.test_exit import play

FORKS = [name for name in SCENARIOS if name.startswith("fork_")]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("forks")
    return folder, play(folder, FORKS)


@pytest.mark.parametrize("name", FORKS)
def test_fork(name: str, played: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, facts = played
    fact = facts[name]
    assert not fact["hangs"], fact
    assert fact["code"] == 0, fact
    assert fact["stderr"] == "", fact
    assert load_step(folder / name / "s", rows=ROWS) == 2
