"""The commit: two jobs that save to one path, ranks that do not share it, storages that only one process sees."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.saving.commit import may_have_committed, stale_files
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.storage import PosixStorage
from tests.support.coded import files_of, load_step, states
from tests.support.faulty_storage import Faults
from tests.support.processes import wait_until
from tests.support.ranks import attempt, save_all, succeeded
from tests.support.settings import using


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with using(writer="thread", timeout=20.0):
        yield


@contextlib.contextmanager
def save_that_waits(call: str, path: Path, ranks: int) -> Iterator[Future[list[Any]]]:
    """Save step 2 on another thread; run the block while the save stands still at a call of its storage."""
    gate, faults = threading.Event(), Faults()
    rule = faults.add(call, hold=gate)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_all, ThreadWorld(ranks), path, 2, faults=faults)
        try:
            assert wait_until(lambda: rule.hits > 0, 30)
            yield saving
        finally:
            gate.set()


@pytest.mark.parametrize("replacing", [False, True])
def test_the_second_of_two_jobs_gets_an_error(tmp_path: Path, replacing: bool) -> None:
    """It began before the first one's commit, which removes its files: it must not commit after that."""
    path = tmp_path / "s"
    if replacing:
        save_all(ThreadWorld(1), path, 1)
    with save_that_waits("publish", path, ranks=2) as saving:
        save_all(ThreadWorld(3), path, 3)
    got = saving.result(30)
    assert all(type(raised) is StorageConflictError for raised in got), got
    assert "another save" in str(got[0]) and "metadata.parquet" in str(got[0])
    assert load_step(path) == 3
    assert not any("publishing" in name for name in files_of(path))
    save_all(ThreadWorld(2), path, 4)
    assert load_step(path) == 4


def test_a_save_that_begins_during_anothers_commit_keeps_its_files(tmp_path: Path) -> None:
    """The first job removes files that were there before its commit, and none of the second job's."""
    path = tmp_path / "s"
    save_all(ThreadWorld(1), path, 1)
    with save_that_waits("delete", path, ranks=1):
        succeeded(save_all(ThreadWorld(2), path, 3))
    assert load_step(path) == 3


@pytest.mark.parametrize(("asynchronous", "listed"), [(False, True), (True, True), (False, False)])
def test_ranks_that_do_not_share_the_path(tmp_path: Path, asynchronous: bool, listed: bool) -> None:
    """Every machine may have a disk of its own at the same path: no checkpoint without rank 1's files."""
    world = ThreadWorld(2)

    class Unlisted(PosixStorage):
        def list(self) -> list[tuple[str, int]]:
            raise StorageError("permission denied")

    def run(collective: Collective) -> Any:
        storage = (PosixStorage if listed else Unlisted)(str(tmp_path / str(collective.rank)), "mem://x/step")
        handle = attempt(bytecheckpoint.save, storage, states(collective.rank, 2, 1), async_checkpoint=asynchronous)
        return handle if isinstance(handle, Exception) else attempt(handle.result, 30)

    got = world.run(run, timeout=60)
    for raised in got:
        assert type(raised) is StorageError, got
        assert "rank 0 sees nothing of it" in str(raised) and "all ranks share" in str(raised)
    assert not (tmp_path / "0" / "metadata.parquet").exists()


def test_a_commit_whose_answer_is_lost_for_good_keeps_the_files(tmp_path: Path) -> None:
    """The storage may carry the commit out later, when the save has long failed."""
    path, faults = tmp_path / "s", Faults()
    save_all(ThreadWorld(1), path, 1)
    before = files_of(path)
    faults.add("publish", StorageUnavailableError("no answer", undecided=True))
    got = save_all(ThreadWorld(2), path, 2, faults=faults)
    assert all(type(raised) is StorageUnavailableError for raised in got), got
    assert load_step(path) == 1
    assert len(files_of(path)) > len(before)
    save_all(ThreadWorld(2), path, 3)
    assert load_step(path) == 3


def test_files_that_only_this_process_sees_are_not_left_to_the_writer_process() -> None:
    bytecheckpoint.configure(writer="process")
    url = f"fsspec+memory://{uuid.uuid4().hex}/step"
    bytecheckpoint.save(url, states(step=5), async_checkpoint=True).result(60)
    assert load_step(url) == 5
    fsspec.filesystem("memory").store.clear()


# --- the parts of a commit ----------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path) -> Any:
    save_all(ThreadWorld(1), tmp_path / "s", 1)
    return resolve(tmp_path / "s")


def test_stale_files_are_those_that_the_new_catalog_does_not_name(committed: Any) -> None:
    files = {name: size for name, size in committed.list() if name != "metadata.parquet"}
    first = next(iter(files))
    version = committed.version("metadata.parquet")
    assert stale_files(committed, files, version) == []
    assert stale_files(committed, {first: files[first]}, version) == [name for name in files if name != first]


def test_a_file_that_rank_0_does_not_see_stops_the_commit(committed: Any) -> None:
    name = next(name for name, _ in committed.list() if name != "metadata.parquet")
    version = committed.version("metadata.parquet")
    with pytest.raises(StorageError, match=r"rank 0 sees .* bytes of it"):
        stale_files(committed, {name: 1}, version)
    with pytest.raises(StorageError, match="rank 0 sees nothing of it"):
        stale_files(committed, {"model/other": 1}, version)
    with pytest.raises(StorageConflictError, match="another save replaced it"):
        stale_files(committed, {"model/other": 1}, "another version")


def test_whether_a_failed_publish_took_effect(committed: Any) -> None:
    catalog = committed.read("metadata.parquet")
    assert may_have_committed(committed, catalog, StorageError("fsync"))
    assert not may_have_committed(committed, b"another catalog", StorageError("fsync"))
    assert may_have_committed(committed, b"another catalog", StorageUnavailableError("no answer", undecided=True))
    committed.delete(["metadata.parquet"])
    assert not may_have_committed(committed, catalog, StorageError("fsync"))
