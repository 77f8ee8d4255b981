"""HDFS addresses where there is no NameNode: an error in seconds that says where was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.tuning import tuned
from tests.faults.coded import load_step, states
from tests.servers.hdfs import Hdfs, write_configuration
from tests.storage.conftest import use
from tests.support.settings import forget_failure


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    with tuned(hdfs_first_contact=1.0, hdfs_first_write=1.0, hdfs_first_call=1.0):
        yield


def refused(path: str, says: str = "") -> None:
    """Load and save are refused soon, by errors that say what, where and how often."""
    begun = time.monotonic()
    for call in (
        lambda: load_step(path),
        lambda: resolve(path).list(),
        lambda: bytecheckpoint.save(path, states(step=1)),
        lambda: bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60),
    ):
        with pytest.raises(StorageError, match=rf"cannot [\w ]+ {path}\S*: .*{says}.*\(attempt \d+\)") as raised:
            call()
        assert "\n" not in str(raised.value)
        forget_failure()
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("form", ["no such host", "nobody listens", "a name service nobody knows"])
def test_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    use(monkeypatch, {"HADOOP_CONF_DIR": str(write_configuration(tmp_path, {}, {})), "HADOOP_USER_NAME": "alice"})
    authority = {"no such host": "no-such-host.invalid:8020", "nobody listens": "127.0.0.1:1"}.get(form, "demo-nobody")
    refused(f"hdfs://{authority}/step")
    with pytest.raises(StorageUnavailableError, match=rf"NameNode \({authority}(:8020)?\)"):
        load_step(f"hdfs://{authority}/step")


def test_something_else_is_there(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"HADOOP_USER_NAME": "alice"})
    refused(f"hdfs://{peer}/step")


@pytest.mark.server
@pytest.mark.timeout(200)
@pytest.mark.parametrize("port", ["web", "data"])
def test_another_port_of_the_same_cluster(hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    refused(f"hdfs://127.0.0.1:{hdfs._http if port == 'web' else hdfs.ports[0]}/step")


@pytest.mark.server
@pytest.mark.timeout(200)
def test_a_file_where_a_folder_should_be(hdfs: Hdfs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = f"hdfs://demo_0/{tmp_path.name}"
    hdfs.client().create(f"/{tmp_path.name}").close()
    with pytest.raises(StorageError, match=rf"{path}/step/\S+: "):
        bytecheckpoint.save(f"{path}/step", states(step=1))
    with pytest.raises(bytecheckpoint.CheckpointError, match=path):
        load_step(f"{path}/step")
    with pytest.raises(StorageError, match=rf"{path}/\S+: "):
        bytecheckpoint.save(path, states(step=1))
    assert "could not be removed" not in caplog.text, "nothing was sent"
