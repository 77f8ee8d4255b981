"""Object stores that are not where the environment says, or do not answer, and the errors that their clients report."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError, UsageError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.objects.bucket import _buckets, bucket_of
from bytecheckpoint.storage.objects.errors import facts_of, storage_error
from bytecheckpoint.storage.remote import cleaned
from bytecheckpoint.tuning import tuned
from tests.servers.peers import silent
from tests.storage.checks import within
from tests.storage.conftest import use
from tests.support.coded import load_step, states
from tests.support.ranks import attempt

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

    with tuned(object_first_contact=0.5):
        yield point


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_an_endpoint_where_nobody_is(at: Callable[[str], str], endpoint: str) -> None:
    """The default timeout of three minutes is for stores that have answered once."""
    path = at(endpoint)
    says = r"(Connection refused|dns error).* \(attempt \d+\); check"
    with within(40):
        with pytest.raises(StorageUnavailableError, match=rf"cannot open {path}/metadata\.parquet: {says}") as raised:
            load_step(path)
        with pytest.raises(StorageUnavailableError, match=rf"cannot \w+.* {path}\S*: {says}"):
            bytecheckpoint.save(path, states(step=1))
    assert "MARK" not in str(raised.value)


def test_a_peer_that_is_no_store(at: Callable[[str], str], peer: str) -> None:
    path = at(f"http://{peer}")
    with within(25):
        with pytest.raises(StorageError, match=rf"cannot open {path}/metadata\.parquet: .*\(attempt \d+\)") as raised:
            load_step(path)
        with pytest.raises(StorageError, match=path):
            bytecheckpoint.save(path, states(step=1))
    assert "MARK" not in str(raised.value)


def test_threads_do_not_wait_one_after_the_other(at: Callable[[str], str]) -> None:
    with silent() as peer, ThreadPoolExecutor(16) as pool, within(20):
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


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may run under a number without a name."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    use(monkeypatch, {**_VARIABLES["s3"], "AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert bucket_of("s3", "bucket-homeless")


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
    assert bucket_of("az", "c").clients.retrying.config["endpoint"] == "http://name.blob.core.example.invalid"


@tuned(object_clients=3)
def test_only_so_many_clients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {**_VARIABLES["s3"], "AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    first = bucket_of("s3", "bucket-first")
    for number in range(10):
        bucket_of("s3", f"bucket-{number}")
        assert bucket_of("s3", "bucket-first") is first, "what is in use stays"
    assert len(_buckets) == 3


# --- errors that the client reports, and the secrets in them ------------------------------------------------------


_ANSWER = (
    "Generic S3 error: Error performing PUT https://host/bucket/key?X-Amz-Signature=SECRET in 12.5s, after 3 retries, "
    "max_retries: 10, retry_timeout: 180s  - Server returned non-2xx status code: {status} Words: "
    "<Error><Code>{code}</Code><Message>say &#39;https://u:SECRET@host/x&#63;sig=SECRET&#39;</Message><StringToSign>SECRET</StringToSign>"
    "</Error>\n\nDebug source:\nGeneric {{ body: SECRET }}"
)
_BROKEN = (
    "Generic S3 error: Error performing GET REDACTED in 218.7ms, after 2 retries, max_retries: 2, retry_timeout: 5s  - "
    "HTTP error: error sending request\n\nDebug source:\nHttpError {{ kind: {kind}, source: {source} }}"
)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (503, "SlowDown", StorageUnavailableError, "(attempt 5)"),
        (500, "InternalError", StorageUnavailableError, "check that the storage can be reached"),
        (429, "TooManyRequests", StorageUnavailableError, "attempt"),
        (403, "SignatureDoesNotMatch", StorageError, "check the credentials"),
        (400, "InvalidToken", StorageError, "check the credentials"),
        (403, "RequestTimeTooSkewed", StorageError, "set the clock of this machine"),
        (404, "NoSuchBucket", StorageError, "check the bucket's name"),
        (404, "ContainerNotFound", StorageError, "check the bucket's name"),
        (507, "XMinioStorageFull", StorageFullError, "free space"),
        (500, "QuotaExceeded", StorageFullError, "free space"),
        (501, "NotImplemented", StorageError, "NotImplemented"),
        (400, "EntityTooLarge", StorageError, "EntityTooLarge"),
    ],
)
def test_answers_with_a_code(status: int, code: str, error: type[Exception], words: str) -> None:
    found = storage_error(ValueError(_ANSWER.format(status=status, code=code)), "upload", "s3://bucket/key", 2)
    assert type(found) is error
    text = str(found)
    assert text.startswith(f"cannot upload s3://bucket/key: {code}: say 'https://host/x") and words in text
    assert "SECRET" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("kind", "source", "words", "error"),
    [
        ("Connect", 'Os { code: 111, message: "Connection refused" }', "Connection refused", StorageUnavailableError),
        ("Connect", 'ConnectError("dns error", failed to lookup)', "dns error", StorageUnavailableError),
        ("Timeout", "TimedOut", "no answer in time", StorageUnavailableError),
        ("Interrupted", "Closed", "the connection broke", StorageUnavailableError),
        ("Connect", '"invalid peer certificate: UnknownIssuer"', "peer certificate: UnknownIssuer", StorageError),
    ],
)
def test_no_answer_at_all(kind: str, source: str, words: str, error: type[StorageError]) -> None:
    found = storage_error(ValueError(_BROKEN.format(kind=kind, source=source)), "read", "az://container/key")
    assert type(found) is error and words in str(found)
    if isinstance(found, StorageUnavailableError):
        assert found.undecided and "attempt 3" in str(found)


@pytest.mark.parametrize(
    ("took", "seconds"), [("12.5s", 12.5), ("218.7ms", 0.2187), ("506.285µs", 0.000506285), ("15ns", 15e-9)]
)
def test_how_long_the_client_tried(took: str, seconds: float) -> None:
    facts = facts_of(ValueError(f"Error performing GET x in {took}, after 7 retries, max_retries: 9 - HTTP error: x"))
    assert facts.elapsed == pytest.approx(seconds)
    assert facts.retries == 7 and facts.transient


@pytest.mark.parametrize(
    "host",
    ["http://169.254.169.254/latest/api/token", "http://metadata.google.internal/computeMetadata/v1", "https://sts.x/"],
)
@pytest.mark.parametrize(("status", "error"), [(403, StorageError), (503, StorageUnavailableError)])
def test_the_search_for_credentials(host: str, status: int, error: type[Exception]) -> None:
    text = f"Generic S3 error: Error performing PUT {host} in 1ms - Server returned non-2xx status code: {status} No: x"
    facts = facts_of(ValueError(text))
    assert facts.credentials
    found = storage_error(ValueError(text), "read", "s3://bucket/key")
    assert type(found) is error
    says = "found no credentials in the environment" if error is StorageError else "service that lends credentials"
    assert says in str(found)


def test_absent_objects_and_urls_in_text() -> None:
    assert isinstance(storage_error(FileNotFoundError("x"), "read", "s3://b/k"), FileNotFoundError)
    assert cleaned("see\n https://key:SECRET@host/a?b=SECRET&c=d now") == "see https://host/a now"
