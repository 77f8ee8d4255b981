"""Failures of some percent of all requests: nothing is lost, nothing is left, and the reports say what it cost."""

from __future__ import annotations

import random
import uuid

import pytest

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import Storage, resolve
from tests.servers.azure import AzureServer
from tests.servers.fault_proxy import FaultProxy, Request, asks, fail_at_rate, fault_proxy, repeated_by_client
from tests.servers.s3 import S3Server
from tests.servers.tcp_proxy import TcpProxy
from tests.storage.checks import within
from tests.storage.conftest import use
from tests.support.catalogs import catalog_at
from tests.support.coded import states, step_of
from tests.support.variants import crossed

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

#: Rows of states of 29 MB in two files, which go in several parts.
ROWS = 30_000
#: Steps that are saved and loaded, by the percentage of requests that fail: some must.
STEPS = {0: 1, 1: 6, 5: 3, 20: 3}


def of_race(request: Request) -> bool:
    """Return whether a request is one of the puts that race while the store is probed: half of them may fail."""
    return "-probe-" in request.path and request.method == "PUT"


def of_cleanup(request: Request) -> bool:
    """Return whether a request looks for old files or deletes them: an asynchronous save may do so behind its report."""
    return "list-type=2" in request.path or "?delete" in request.path


def of_contact(request: Request) -> bool:
    """Return whether a request is the first one of a process to a bucket, to which a refusal is a sufficient answer."""
    return "bytecheckpoint-no-such-folder" in request.path


def retries_of(path: str, steps: int, *, rows: int = ROWS, **options: bool) -> int:
    """Save and load each step, check every value, and return the retries of all reports."""
    retries, waited = 0, 0.0
    for step in range(1, steps + 1):
        target = states(rows=rows)
        for report in (
            bytecheckpoint.save(path, states(step=step, rows=rows), **options).result(300),  # type: ignore[arg-type]
            bytecheckpoint.load(path, target),
        ):
            retries += report.retries
            waited += report.retry_seconds
        assert step_of(target) == step
    assert waited >= 0.05 * (retries - steps)  # a read that has made progress continues at once
    return retries


def check_nothing_else(path: str, found: list[str]) -> None:
    """Fail unless the checkpoint is sound and nothing else lies beside it."""
    assert run(["verify", path]) == 0
    named = {"metadata.parquet", *(file.name for file in catalog_at(path).files)}
    assert sorted(found) == sorted(named)


@pytest.mark.parametrize(("percent", "asynchronous"), crossed(list(STEPS), [False, True]))
def test_object_stores(
    storage: Storage,
    between: FaultProxy,
    s3: S3Server,
    bucket: str,
    path: str,
    percent: int,
    asynchronous: bool,
) -> None:
    """The first save probes the bucket under these failures too."""
    resolve(path)._bucket.commits = None  # type: ignore[attr-defined]
    failed = fail_at_rate(between, percent / 100, seed=1)
    retries = retries_of(path, STEPS[percent], async_checkpoint=asynchronous)
    between.rules.clear()
    check_nothing_else(path, [key.removeprefix("runs/step/") for key in s3.keys(bucket)])
    assert s3.uploads(bucket) == []
    told = [request for request in failed if not repeated_by_client(request)]
    sure = [request for request in told if not (of_race(request) or of_contact(request))]
    if asynchronous:
        sure = [request for request in sure if not of_cleanup(request)]
    assert bool(sure) == bool(percent)
    assert len(sure) <= retries <= len(told)


def test_azure(az_server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of blocks whose answer is lost, too: Azure refuses the second one."""
    path = f"az://container/{uuid.uuid4().hex}/step"
    with fault_proxy(az_server.endpoint) as proxy:
        use(monkeypatch, {**az_server.environment(), "AZURE_STORAGE_ENDPOINT": proxy.endpoint})
        resolve(path).check_publish("metadata.parquet", "")
        lost = proxy.add(asks("PUT", "comp=blocklist"), lose=True, times=2)
        failed = fail_at_rate(proxy, 0.2, seed=1)
        retries = retries_of(path, 3)
        proxy.rules.clear()
        check_nothing_else(path, [name for name, _ in resolve(path).list()])
    assert lost.hits == 2
    assert retries == sum(not repeated_by_client(request) for request in failed)


@pytest.mark.parametrize(("percent", "asynchronous"), crossed([20, 5, 1], [True, False], every=3))
def test_namenodes(rpc_proxy: TcpProxy, hdfs_path: str, short_parts: None, percent: int, asynchronous: bool) -> None:
    """The connection to the NameNode breaks before a call or after it, and all calls on it with it."""
    chance = random.Random(1)

    def is_hit(_: object) -> bool:
        return chance.random() < percent / 200

    def break_off() -> None:
        raise ConnectionResetError

    rules = [rpc_proxy.add(is_hit, times=-1, before=break_off), rpc_proxy.add(is_hit, times=-1, lose=True)]
    retries = retries_of(hdfs_path, 2, rows=3000, async_checkpoint=asynchronous)
    rpc_proxy.rules.clear()
    check_nothing_else(hdfs_path, [name for name, _ in resolve(hdfs_path).list()])
    # The client library opens a connection anew by itself where no call was under way.
    assert any(rule.hits for rule in rules)
    assert percent < 5 or retries


@pytest.mark.parametrize("asynchronous", [False, True])
def test_when_all_requests_fail(storage: Storage, between: FaultProxy, path: str, asynchronous: bool) -> None:
    """A save and a load end after their time, having tried for so long."""
    bytecheckpoint.save(path, states(step=1))
    bytecheckpoint.configure(storage_timeout=4.0)
    failed = fail_at_rate(between, 1.0)
    with within(40), pytest.raises(StorageUnavailableError, match=r"\(attempt \d+\)"):
        bytecheckpoint.save(path, states(step=2), async_checkpoint=asynchronous).result(60)
    with within(40), pytest.raises(StorageUnavailableError, match=r"\(attempt \d+\)"):
        bytecheckpoint.load(path, states())
    assert 8 <= len(failed) < 200
    between.rules.clear()
    bytecheckpoint.configure(storage_timeout=60.0)
    assert retries_of(path, 2) == 0
