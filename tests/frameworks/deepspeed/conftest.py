"""Worlds of processes with DeepSpeed; loud skips where it is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worlds import Worlds

_HERE = Path(__file__).parent
_REASON = "NOT TESTED HERE: needs DeepSpeed, which `make test-frameworks` installs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder without DeepSpeed, unless BYTECHECKPOINT_REQUIRE_FRAMEWORKS says that this is a failure."""
    if importlib.util.find_spec("deepspeed") or os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"):
        return
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()
