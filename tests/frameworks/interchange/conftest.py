"""The tests of this folder need DeepSpeed and Megatron-Core, in an environment of their own: `make test-frameworks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.real_frameworks import skip_without, worlds

__all__ = ["worlds"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(["deepspeed", "megatron"], items, Path(__file__).parent)
