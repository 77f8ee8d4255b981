"""Tests with real frameworks need DeepSpeed or Megatron-Core, in an environment of its own: `make test-frameworks`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"  # the ranks of worlds inherit it

#: The packages that the tests of a folder need.
NEEDED = {"deepspeed": ("deepspeed",), "megatron": ("megatron",), "interchange": ("deepspeed", "megatron")}
NEEDS_NOTHING = "test_names.py"


@pytest.fixture
def first(tmp_path: Path) -> str:
    """Where one process saves the checkpoint that others load."""
    return str(tmp_path / "first")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests, loudly, if a package is missing and BYTECHECKPOINT_REQUIRE_FRAMEWORKS is not set."""
    if os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"):
        return
    for folder, packages in NEEDED.items():
        if not all(map(importlib.util.find_spec, packages)):
            reason = f"NOT TESTED HERE: needs {' and '.join(packages)}, which `make test-frameworks` installs"
            for item in items:
                if item.path.parent == Path(__file__).parent / folder and item.path.name != NEEDS_NOTHING:
                    item.add_marker(pytest.mark.skip(reason=reason))
