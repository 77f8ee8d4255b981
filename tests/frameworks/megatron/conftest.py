"""The tests of this folder but test_names.py need Megatron-Core, in an environment of its own: `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.real_frameworks import skip_without, worlds

__all__ = ["worlds"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(["megatron"], [item for item in items if item.path.name != "test_names.py"], Path(__file__).parent)
