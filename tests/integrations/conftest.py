"""Tests with real training tools need them, in environments of their own (`make test-integrations` and others)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import Engine
from tests.support.worlds import PRELOADED

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is asked of the Hugging Face Hub

#: The packages that the tests of a folder need.
NEEDED = {
    "accelerate": ("accelerate", "torchdata", "datasets", "transformers"),
    "lightning": ("lightning",),
    "ray": ("ray",),
    "sglang": ("sglang", "transformers"),
    "torchtitan": ("torchtitan",),
    "transformers": ("transformers", "accelerate", "trl", "peft"),
    "veomni": ("veomni",),
    "verl": ("verl",),
    "vllm": ("vllm", "transformers"),
}
#: Folders with an environment of their own.
OWN_TARGETS = {
    "torchtitan": "test-torchtitan", "ray": "test-ray", "veomni": "test-verl", "verl": "test-verl", "vllm": "test-vllm",
    "sglang": "test-sglang",
}  # fmt: skip


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines that end with the test."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have worlds import the tools once, in their template, and skip the tests of a tool that is missing.

    With BYTECHECKPOINT_REQUIRE_INTEGRATIONS those tests fail.
    """
    for tool in sorted({item.path.parent.name for item in items} & NEEDED.keys()):
        if importlib.util.find_spec(tool) and (Path(__file__).parent / tool / "preloaded.py").exists():
            PRELOADED.append(f"tests.integrations.{tool}.preloaded")
    if os.environ.get("BYTECHECKPOINT_REQUIRE_INTEGRATIONS"):
        return
    for folder, packages in NEEDED.items():
        if not all(map(importlib.util.find_spec, packages)):
            here = f"{Path(__file__).parent / folder}/"
            skipped = [item for item in items if str(item.path).startswith(here)]
            skipped.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # which is deselected
            others = set(skipped[1:])  # one stands for all of the folder
            items[:] = [item for item in items if item not in others]
            target = OWN_TARGETS.get(folder, "test-integrations")
            reason = f"NOT TESTED HERE: needs {' and '.join(packages)}: `make {target}`"
            for item in skipped[:1]:
                item.add_marker(pytest.mark.skip(reason=f"{reason} ({len(skipped)} tests)"))
