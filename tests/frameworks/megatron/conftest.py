"""These tests need megatron-core, in an environment of its own: `make test-frameworks`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worlds import Worlds

_HERE = Path(__file__).parent
_WITHOUT = {"test_names.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS") or importlib.util.find_spec("megatron") is not None:
        return
    reason = "NOT TESTED HERE: megatron-core is not installed; `make test-frameworks` installs it"
    for item in items:
        if item.path.is_relative_to(_HERE) and item.path.name not in _WITHOUT:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()
