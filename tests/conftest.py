"""Settings for all tests: threads, hypothesis profiles, and what to do without an accelerator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Before anything imports torch, and for every child process: many ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples are timed by pytest's limit only: one slow example on a busy machine is no failure.
settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.register_profile("quick", parent=settings.get_profile("default"), max_examples=5, phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests/gpu, and skips what needs an accelerator where there is none."""
    for item in items:
        if item.path.is_relative_to(_GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in wanting:
        item.add_marker(pytest.mark.skip(reason="NOT TESTED HERE: needs an accelerator, torch.accelerator finds none"))
