"""Tiers in front of real servers, and cool-down to them: S3 that is killed and comes back, HDFS."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, StorageConflictError, StorageUnavailableError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.storage.testing import StorageTests
from bytecheckpoint.tiers import copying
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.tiers.lease import LEASE_FILE, Lease, leased
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tuning import tuned
from bytecheckpoint.world import world_of
from tests.servers.fault_proxy import FaultProxy, asks, fault_proxy
from tests.servers.s3 import S3Server
from tests.storage.checks import within
from tests.storage.conftest import place, use
from tests.support.coded import files_of, load_step, states, step_of
from tests.support.memory import folder_in_memory, hot_tier
from tests.support.modes import MODES
from tests.support.processes import environment, python, run_program
from tests.support.saves import load
from tests.support.variants import crossed

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def hot(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a hot tier of the test's own."""
    with hot_tier(monkeypatch) as url:
        yield url


@pytest.fixture(params=["s3", "hdfs"])
def durable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a training run in a durable storage."""
    yield from place(request, monkeypatch, tmp_path)


def forget(path: str) -> None:
    """Lose the hot copy, at once: the flusher may still remove files of it."""
    storage = resolve(path)
    assert isinstance(storage, TierStorage)
    lost = Path(f"{storage.hot.root}.lost")
    Path(storage.hot.root).rename(lost)
    shutil.rmtree(lost)


def load_on(path: str, world: int) -> set[int]:
    """The steps that the ranks of another layout load."""
    return load(path, world, rows=24)


class TestConformance(StorageTests):
    @pytest.fixture
    def storage(self, bucket: str) -> TierStorage:
        storage = resolve(f"tier+s3://{bucket}/runs/step")
        assert isinstance(storage, TierStorage) and isinstance(storage.durable, ObjectStorage)
        return storage


@pytest.mark.parametrize("mode", MODES)
def test_save_load_and_look(durable: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"tier+{durable}"

    def save(collective: Collective, name: str, step: int) -> None:
        handle = bytecheckpoint.save(f"{run}/{name}", states(collective.rank, 2, step), **MODES[mode])
        handle.restorable.result(60)
        assert handle.result(60).phases["flush"] > 0

    world = ThreadWorld(2)
    for name, step in (("a", 1), ("b", 2), ("a", 3)):  # one is replaced
        world.run(lambda collective, name=name, step=step: save(collective, name, step), timeout=100)
    assert load_on(f"{run}/a", 3) == {3} and load_on(f"{durable}/a", 1) == {3}
    assert len([name for name, _ in resolve(f"{durable}/a").list() if name.startswith("model/rank")]) == 2
    for path in (f"{run}/a", f"{durable}/a"):
        assert command(["ls", path]) == command(["inspect", path]) == command(["verify", path]) == 0
        with bytecheckpoint.open(path) as checkpoint:
            assert checkpoint["extra_states/step"] == 3
    capsys.readouterr()
    assert command(["ls", run]) == 0
    assert capsys.readouterr().out.count("committed") == 2
    forget(f"{run}/a")
    assert load_on(f"{run}/a", 2) == {3} and load_step(f"{run}/b") == 2
    assert command(["verify", f"{run}/a"]) == 0


# --- servers that die ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mortal(mortal: S3Server) -> Iterator[S3Server]:
    """A server of the test's own, for which nobody waits long."""
    with tuned(tier_save_timeout=1.0, tier_load_timeout=2.0):
        yield mortal


def test_the_store_is_away_during_a_flush_and_comes_back_in_time(
    mortal: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(mortal.endpoint) as between:
        use(monkeypatch, mortal.environment(between.endpoint))
        between.add(asks("PUT", "/model/rank"), before=lambda: mortal.server.kill_for(2.0))
        handle = bytecheckpoint.save("tier+s3://bucket/run/1", states(step=1), async_checkpoint=True)
        handle.restorable.result(60)
        assert load_step("tier+s3://bucket/run/1") == 1, "whatever becomes of the store"
        handle.result(100)
    use(monkeypatch, mortal.environment())
    assert load_step("s3://bucket/run/1") == 1
    assert command(["verify", "s3://bucket/run/1"]) == 0


def test_the_store_is_away_and_comes_back_later(mortal: S3Server) -> None:
    """Flushes fail with an error, loads and further saves work, and the first flush that works again copies all steps."""
    run = "tier+s3://bucket/run"
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    bytecheckpoint.configure(storage_timeout=2.0)
    mortal.server.kill()
    with within(60):
        handle = bytecheckpoint.save(f"{run}/2", states(step=2), async_checkpoint=True)
        handle.restorable.result(30)
        assert load_step(f"{run}/2") == 2
        with pytest.raises(StorageUnavailableError, match=r"flush of tier\+s3://bucket/run/2: .*s3://bucket.*attempt"):
            handle.result(60)
    assert command(["flush", run]) == 1
    mortal.server.start()
    bytecheckpoint.configure(storage_timeout=60.0)
    with pytest.raises(CheckpointNotFoundError):
        load_step("s3://bucket/run/2")
    bytecheckpoint.save(f"{run}/3", states(step=3)).result(60)
    world_of(current()).flusher.drain()
    for step in (1, 2, 3):
        assert load_step(f"s3://bucket/run/{step}") == step
        assert command(["verify", f"s3://bucket/run/{step}"]) == 0


_SAVE = """
import sys
import bytecheckpoint
from tests.support.coded import states

run, step = sys.argv[1], int(sys.argv[2])
handle = bytecheckpoint.save(f"{run}/{step}", states(step=step), async_checkpoint=step == 1)
handle.restorable.result(60)
print("restorable", flush=True)
sys.stdin.read()  # and then the step is flushed, with what was left, before the program ends
"""


@pytest.mark.parametrize(
    ("moment", "then"), crossed(["model/rank", "optimizer/", "metadata.parquet"], ["flush", "save"])
)
def test_a_job_killed_between_the_hot_commit_and_the_end_of_its_flush(mortal: S3Server, moment: str, then: str) -> None:
    """Loads find the step at once; a flush by hand, or the next job's first save, brings it to the store."""
    run = "tier+s3://bucket/run"
    reached, go_on = threading.Event(), threading.Event()
    with fault_proxy(mortal.endpoint) as between:
        between.add(asks("PUT", f"/run/1/{moment}"), before=reached.set, hold=go_on, status=503)
        job = subprocess.Popen(
            python("-c", _SAVE, run, 1), env={**environment(), **mortal.environment(between.endpoint)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert job.stdout is not None
        assert job.stdout.readline() == "restorable\n"
        assert reached.wait(60)
        job.send_signal(signal.SIGKILL)
        assert job.wait(60) == -signal.SIGKILL
        go_on.set()
    with pytest.raises(CheckpointNotFoundError):
        load_step("s3://bucket/run/1")
    assert load_on(f"{run}/1", 2) == {1}
    if then == "flush":
        assert command(["flush", run]) == 0
    else:
        assert run_program(_SAVE, run, 2).returncode == 0
        assert load_step("s3://bucket/run/2") == 2
    assert load_step("s3://bucket/run/1") == 1
    assert command(["verify", "s3://bucket/run/1"]) == 0


def test_wrong_credentials_are_told_before_anything_is_written(
    s3: S3Server, bucket: str, hot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, {**s3.environment(), "AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"})
    with pytest.raises(bytecheckpoint.StorageError, match=f"s3://{bucket}/run/1") as caught:
        bytecheckpoint.save(f"tier+s3://{bucket}/run/1", states(step=1))
    assert "wrong-wrong" not in str(caught.value)
    assert files_of(folder_in_memory(hot)) == []


# --- cool-down ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["to", "from"])
def test_cooldown_to_and_from_a_server(durable: str, direction: str, tmp_path: Path) -> None:
    root, cold = (str(tmp_path / "run"), f"{durable}/cold") if direction == "to" else (f"{durable}/run", str(tmp_path))
    for step in (1, 2, 3):
        bytecheckpoint.save(f"{root}/{step}", states(step=step))
    plan = plan_cooldown(root, cold, older_than=0)
    assert [step.action for step in plan] == ["move", "move", "keep"]
    assert [cool(step).error for step in plan] == ["", "", ""]
    assert [name for name, _ in resolve(f"{root}/1").list()] == ["metadata.parquet"]
    for step in (1, 2, 3):
        assert load_on(f"{root}/{step}", 2) == {step}
        assert command(["verify", f"{root}/{step}"]) == 0
    for step in (1, 2):
        assert load_step(f"{cold}/{step}") == step
        assert command(["diff", f"{root}/{step}", f"{cold}/{step}"]) == 0
        assert {name.split("/")[0] for name, _ in resolve(f"{cold}/{step}").list()} == {
            "metadata.parquet", "model", "optimizer", "extra",
        }  # fmt: skip
    with bytecheckpoint.open(f"{root}/1") as checkpoint:
        assert checkpoint["extra_states/step"] == 1
    assert command(["ls", root]) == 0
    assert command(["export", f"{root}/1", str(tmp_path / "hf")]) == 0


@pytest.mark.parametrize("direction", ["to", "from"])
def test_a_run_is_copied_to_and_from_a_server(durable: str, direction: str, tmp_path: Path) -> None:
    here, there = str(tmp_path / "a run"), f"{durable}/a run"
    root, copy = (here, there) if direction == "to" else (there, here)
    for step in (1, 2):
        bytecheckpoint.save(f"{root}/{step}", states(step=step))
    assert command(["cp", root, copy]) == command(["cp", root, copy]) == 0
    assert resolve(f"{copy}/1").list() == resolve(f"{root}/1").list()
    assert command(["verify", copy]) == 0 and [load_step(f"{copy}/{step}") for step in (1, 2)] == [1, 2]
    assert command(["cp", f"{root}/1", f"{copy}/2"]) == 2


@pytest.mark.parametrize("can_copy", [True, False])
def test_cooldown_inside_a_bucket_is_left_to_the_store(
    bucket: str, can_copy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """... and a store that cannot copy, or a damaged file, is dealt with by copying through this machine."""
    root, cold = f"s3://{bucket}/run", f"s3://{bucket}/cold"
    for step in (1, 2, 3):
        bytecheckpoint.save(f"{root}/{step}", states(step=step))
    hot = resolve(f"{root}/2")
    name = next(name for name, _ in hot.list() if name.startswith("model"))
    data = bytearray(hot.read(name))
    data[-1] ^= 1
    hot.publish(name, bytes(data))
    through: list[str] = []
    real = copying.copy_file

    def copy_file(source: Storage, target: Storage, catalog: Catalog, number: int, *more: Any) -> None:
        through.append(catalog.files[number].name)
        real(source, target, catalog, number, *more)

    def refuse(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.NotSupportedError("not here")

    monkeypatch.setattr(copying, "copy_file", copy_file)
    if not can_copy:
        monkeypatch.setattr(obstore, "copy", refuse)
    first, second, _ = plan_cooldown(root, cold, older_than=0)
    assert cool(first).done and load_step(f"{root}/1") == load_step(f"{cold}/1") == 1
    assert (not through) == can_copy
    assert f"checksum mismatch in {root}/2/{name}" in cool(second).error


def test_leases_are_renewed_and_taken_over(durable: str) -> None:
    storage = resolve(f"{durable}/cold/1")
    with tuned(lease_renewal=0.2, lease_expiry=2.0):
        with leased(storage) as renewed:
            first = storage.read(LEASE_FILE)
            with pytest.raises(StorageConflictError, match="let it finish"):
                Lease(storage)
            renewed.check()
            assert storage.read(LEASE_FILE) != first
        lost = Lease(storage)  # which nobody renews, as if its process had been killed
        with leased(storage) as lease:
            lease.check()
            with pytest.raises(StorageConflictError, match=f"this process lost {LEASE_FILE}"):
                lost.check()
            lost.release()
            lease.check()
    assert storage.list() == []


def test_the_cold_store_is_away(mortal: S3Server, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        bytecheckpoint.save(root / str(step), states(step=step))
    (plan, _) = plan_cooldown(str(root), "s3://bucket/cold", older_than=0)
    bytecheckpoint.configure(storage_timeout=2.0)
    mortal.server.kill()
    assert "s3://bucket" in cool(plan).error and load_step(root / "1") == 1
    assert len(files_of(root / "1")) == 6
    mortal.server.start()
    assert cool(plan).done and load_step(root / "1") == 1
    mortal.server.kill()
    with pytest.raises(StorageUnavailableError, match=r"s3://bucket/cold/1/.*attempt"):
        load_step(root / "1")
    assert load_step(root / "2") == 2
    mortal.server.start()
    assert load_step(root / "1") == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_report_tells_the_retries_of_the_flush(bucket: str, between: FaultProxy, asynchronous: bool) -> None:
    """And that of a load those of reads from the durable storage."""
    path = f"tier+s3://{bucket}/runs/{asynchronous}"
    failing = between.add(asks("PUT", "model/rank"), status=503, times=3)
    report = bytecheckpoint.save(path, states(step=1), async_checkpoint=asynchronous).result(60)
    assert (report.retries, failing.times) == (3, 0)
    forget(path)
    between.add(asks("GET", "model/rank"), status=503, times=2)
    target = states()
    assert bytecheckpoint.load(path, target).retries == 2
    assert step_of(target) == 1
