"""Programs that run for weeks: no threads, descriptors or memory stay behind, through however many places they go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import bytecheckpoint
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs.cluster import _clusters
from bytecheckpoint.storage.objects.bucket import _buckets
from bytecheckpoint.tuning import tuned
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import S3Server
from tests.storage.checks import check_save
from tests.storage.conftest import use
from tests.support.variants import quick


def event_descriptors() -> int:
    """Count the descriptors of this process that are neither files nor sockets nor pipes."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{name}").startswith("anon_inode:")
    return found


def growth(visit: Callable[[int], None], warm: int = 8, more: int = 20, *, events: bool = True) -> dict[str, float]:
    """Return the growth of this process by `more` visits, each to another place, after `warm` of them.

    Args:
        visit: makes visit number n.
        warm: visits before the first count.
        more: visits after it.
        events: count event descriptors too.

    Returns:
        Threads of Python, threads of the process, descriptors, and MB of memory.
    """

    def now() -> dict[str, float]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what only the allocator holds is no leak
        process = psutil.Process()
        return {
            "python threads": threading.active_count(),
            "threads": process.num_threads(),
            "descriptors": process.num_fds() - (0 if events else event_descriptors()),
            "MB": process.memory_info().rss / 1e6,
        }

    for number in range(warm):
        visit(number)
    before = now()
    for number in range(warm, warm + more):
        visit(number)
    deadline = time.monotonic() + 60
    while True:
        after = now()
        found = {key: after[key] - before[key] for key in before}
        if max(found["threads"], found["descriptors"]) <= 8 or time.monotonic() > deadline:
            return found  # threads of clients that were let go need a moment
        time.sleep(0.2)


def nothing(found: dict[str, float]) -> None:
    assert found["python threads"] <= 4 and found["threads"] <= 8 and found["descriptors"] <= 8, found
    assert found["MB"] < 40, found


def save_and_load(path: str, step: int) -> None:
    check_save(path, step, rows=200)
    with bytecheckpoint.open(path) as checkpoint:
        assert "model/w" in checkpoint


@pytest.mark.parametrize("scheme", quick(["", "file://", "fsspec+file://"], every=3))
def test_many_folders(tmp_path: Path, scheme: str) -> None:
    nothing(growth(lambda number: save_and_load(f"{scheme}{tmp_path}/{number}/step", number + 1)))


def test_many_places_in_memory(memory: str) -> None:
    nothing(growth(lambda number: save_and_load(f"{memory}/{number}", number + 1)))


@pytest.mark.server
@pytest.mark.timeout(300)
@tuned(object_clients=4)
def test_many_buckets(s3: S3Server) -> None:

    def visit(number: int) -> None:
        name = f"bucket-{uuid.uuid4().hex[:16]}"
        s3.make_bucket(name)
        save_and_load(f"s3://{name}/step", number + 1)

    nothing(growth(visit))


@pytest.mark.server
@pytest.mark.timeout(300)
@tuned(object_clients=4)
def test_credentials_that_change(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lent credentials change every hour, and each time there is another client."""

    def visit(number: int) -> None:
        monkeypatch.setenv("AWS_TIMEOUT", f"{60 + number}s")
        save_and_load(f"s3://{bucket}/{number}", number + 1)

    nothing(growth(visit))
    assert len(_buckets) <= 4


@pytest.mark.server
@pytest.mark.timeout(300)
@tuned(hdfs_clients=2)
def test_many_clusters(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def visit(number: int) -> None:
        use(monkeypatch, hdfs.configuration(tmp_path / f"hadoop-{number}"))
        save_and_load(f"hdfs://demo_0/{tmp_path.name}/{number}", number + 1)

    # hdfs-native leaves the three event descriptors of a runtime behind for some of the clients that are let go. A client
    # that is kept alive has threads and a socket as well.
    nothing(growth(visit, 4, 12, events=False))
    assert len(_clusters) <= 2


@pytest.mark.server
@pytest.mark.timeout(300)
def test_one_place_many_times(root: str) -> None:
    nothing(growth(lambda number: save_and_load(f"{root}/step", number + 1), 4, 10))
    assert len(resolve(f"{root}/step").list()) < 10
