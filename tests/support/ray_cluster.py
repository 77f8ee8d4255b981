"""A real Ray of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.processes import environment

__all__ = ["ray_cluster"]


@contextmanager
def ray_cluster(slots: int) -> Iterator[None]:
    """Start Ray with slots for workers, on this machine only, and without what a test does not need; stop it at the end."""
    import ray

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="bcp-ray-") as folder:
        for name, value in {**environment(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1"}.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=slots, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
            _node_ip_address="127.0.0.1", logging_level="ERROR",
        )  # fmt: skip
        yield
        ray.shutdown()
