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
    """The folder in which one process saves the checkpoint that others load."""
    return str(tmp_path / "first")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a package skip the tests that need it, loudly, unless BYTECHECKPOINT_REQUIRE_FRAMEWORKS is set."""
    if os.environ.get("BYTECHECKPOINT_REQUIRE_FRAMEWORKS"):
        return
    for folder, packages in NEEDED.items():
        if not all(map(importlib.util.find_spec, packages)):
            here = Path(__file__).parent / folder
            skipped = [item for item in items if item.path.parent == here and item.path.name != NEEDS_NOTHING]
            # One stands for all of the folder: to skip two thousand tests one by one takes half a minute.
            others = set(skipped[1:])
            items[:] = [item for item in items if item not in others]
            reason = f"NOT TESTED HERE: needs {' and '.join(packages)}, which `make test-frameworks` installs"
            for item in skipped[:1]:
                item.add_marker(pytest.mark.skip(reason=f"{reason} ({len(skipped)} tests)"))
