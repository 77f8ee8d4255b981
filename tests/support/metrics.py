"""Metrics of saves and loads of a test, and the tables that they become."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch

from bytecheckpoint.monitoring import collector, delivery
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, decode_table
from bytecheckpoint.storage import resolve
from tests.support.settings import using

__all__ = ["STATES", "collecting", "tables", "wait_for_operations"]

STATES = {"model": {"w": torch.ones(64, 64)}}


@contextlib.contextmanager
def collecting(metrics: str = "files") -> Iterator[None]:
    """Collect metrics inside the block, and deliver them before it ends, also of operations that lack a rank's."""
    with using(metrics=metrics):
        yield
        collector.deliver_incomplete()  # else they come in the middle of another test
        delivery.finish()


def tables(root: str | Path) -> dict[str, pa.Table]:
    """Return the tables of the run in `root`, by the names of their files."""
    folder = resolve(f"{root}/{METRICS_FOLDER}")
    return {name: decode_table(folder.read(name)) for name, _ in folder.list() if name.endswith(".parquet")}


def wait_for_operations(root: str | Path, count: int, seconds: float = 60.0) -> list[pa.Table]:
    """Wait until the metrics of `count` operations are there; return the tables in order of their names."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):  # files are being joined
            found = tables(root)
            operations = {name for table in found.values() for name in table["operation"].unique().to_pylist()}
            if len(operations) >= count:
                return [found[name] for name in sorted(found)]
        assert time.monotonic() < deadline, f"{count} operations did not come"
        time.sleep(0.01)
