"""Object stores that are not where the environment says, or that do not answer: an error soon, on every thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageUnavailableError, UsageError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.objects.bucket import _buckets, bucket_of
from bytecheckpoint.tuning import tuned
from tests.faults.coded import load_step, states
from tests.faults.ranks import attempt
from tests.servers.peers import silent
from tests.storage.checks import within
from tests.storage.conftest import use

_VARIABLES = {
    "s3": {
        "AWS_ACCESS_KEY_ID": "KEY-MARK",
        "AWS_SECRET_ACCESS_KEY": "SECRET-MARK",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": "",
    },
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": "sv=2022&sig=SECRET-MARK",
        "AZURE_STORAGE_ENDPOINT": "",
    },
}


@pytest.fixture(params=list(_VARIABLES))
def at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Lets an endpoint be the store's; the URL of a checkpoint there."""

    def point(endpoint: str) -> str:
        found = _VARIABLES[request.param]
        use(monkeypatch, {name: value or endpoint for name, value in found.items()})
        return f"{request.param}://bucket-1/step"

    with tuned(object_first_contact=1.0):
        yield point


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_an_endpoint_where_nobody_is(at: Callable[[str], str], endpoint: str) -> None:
    """The default timeout of three minutes is for stores that have answered once."""
    path = at(endpoint)
    says = r"(Connection refused|dns error).* \(attempt \d+\); check"
    with within(20):
        with pytest.raises(StorageUnavailableError, match=rf"cannot read {path}/metadata\.parquet: {says}") as raised:
            load_step(path)
        with pytest.raises(StorageUnavailableError, match=rf"cannot \w+.* {path}\S*: {says}"):
            bytecheckpoint.save(path, states(step=1))
    assert "MARK" not in str(raised.value)


def test_a_peer_that_is_no_store(at: Callable[[str], str], peer: str) -> None:
    path = at(f"http://{peer}")
    with within(25):
        with pytest.raises(StorageError, match=rf"cannot read {path}/metadata\.parquet: .*\(attempt \d+\)") as raised:
            load_step(path)
        with pytest.raises(StorageError, match=path):
            bytecheckpoint.save(path, states(step=1))
    assert "MARK" not in str(raised.value)


def test_threads_do_not_wait_one_after_the_other(at: Callable[[str], str]) -> None:
    with silent() as peer, ThreadPoolExecutor(16) as pool, within(10):
        path = at(f"http://{peer}")
        said = list(pool.map(lambda number: attempt(resolve(path).read, f"file-{number}"), range(16)))
    for number, error in enumerate(said):
        assert isinstance(error, StorageUnavailableError) and f"cannot read {path}/file-{number}: " in str(error)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AWS_SECRET_ACCESS_KEY", "SECRET-MARK\n", "AWS_SECRET_ACCESS_KEY holds a line break"),
        ("AWS_SESSION_TOKEN", "SECRET-MARK\r\n", "AWS_SESSION_TOKEN holds a line break"),
        ("AWS_ACCESS_KEY_ID", "\tSECRET-MARK", "AWS_ACCESS_KEY_ID holds a line break or another control character"),
        ("AWS_ENDPOINT_URL", "user:SECRET-MARK@127.0.0.1:9000", "AWS_ENDPOINT_URL is no URL: write http://host:port"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "AWS_ENDPOINT_URL is no URL"),
        ("AWS_ENDPOINT_URL_S3", "ftp://SECRET-MARK/", "AWS_ENDPOINT_URL_S3 is no URL"),
        ("AWS_ENDPOINT_URL", "http://host:SECRET-MARK", "AWS_ENDPOINT_URL is no URL"),
        ("AWS_ENDPOINT_URL", "https://host:99999/SECRET-MARK", "AWS_ENDPOINT_URL is no URL"),
        ("AWS_ENDPOINT_URL", "http://[SECRET-MARK", "AWS_ENDPOINT_URL is no URL"),
    ],
)
def test_variables_on_which_the_client_panics(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line break at the end of a key, for one, as it comes out of a file."""
    use(monkeypatch, {**_VARIABLES["s3"], "AWS_ENDPOINT_URL": "http://127.0.0.1:1", name: value})
    with pytest.raises(UsageError, match=says) as raised:
        resolve("s3://bucket-1/step")
    assert "SECRET-MARK" not in str(raised.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "AccountName=a;AccountKey=a2V5;BlobEndpoint=SECRET-MARK",
            "BlobEndpoint in AZURE_STORAGE_CONNECTION_STRING is no",
        ),
        ("AccountName=a;AccountKey=SECRET-MARK", "Invalid Access Key"),
        ("SECRET-MARK", "Account must be specified"),
    ],
)
def test_a_broken_connection_string(monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    use(monkeypatch, {"AZURE_STORAGE_CONNECTION_STRING": text})
    with pytest.raises(UsageError, match=rf"cannot use az://.*{says}") as raised:
        resolve("az://container/step")
    assert "SECRET-MARK" not in str(raised.value)


def test_where_a_connection_string_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its suffix, in national clouds."""
    parts = "DefaultEndpointsProtocol=http;AccountName=name;AccountKey=a2V5;EndpointSuffix=core.example.invalid"
    use(monkeypatch, {"AZURE_STORAGE_CONNECTION_STRING": parts})
    assert bucket_of("az", "c")._client.config["endpoint"] == "http://name.blob.core.example.invalid"


@tuned(object_clients=3)
def test_only_so_many_clients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {**_VARIABLES["s3"], "AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    first = bucket_of("s3", "bucket-first")
    for number in range(10):
        bucket_of("s3", f"bucket-{number}")
        assert bucket_of("s3", "bucket-first") is first, "what is in use stays"
    assert len(_buckets) == 3
