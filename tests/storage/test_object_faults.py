"""Object stores that answer wrongly, partially or not at all: a retry succeeds, or one error says all."""

from __future__ import annotations

import contextlib
import urllib.parse

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, StorageError, StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.servers.fault_proxy import FaultProxy, HttpFault, asks, s3_error
from tests.servers.s3 import S3Server
from tests.storage.checks import check_save, within
from tests.support.coded import load_step, states
from tests.support.names import ODD_NAMES
from tests.support.settings import forget_failure
from tests.support.variants import quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]
EVERY_S3_SERVER = True

LARGE = content((9 << 20) + 77)
ROWS = 3000


def undeleted(code: str) -> bytes:
    """Return the answer of a bulk deletion, of status 200, that could not delete one object."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error>'
        f"<Key>runs/step/model/1</Key><Code>{code}</Code><Message>so it is</Message></Error></DeleteResult>"
    ).encode()


# --- answers that come in part ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 100_000])
def test_a_body_that_breaks_off_is_asked_for_again(storage: Storage, between: FaultProxy, cut: int) -> None:
    write_file(storage, "model/file", LARGE)
    rule = between.add(asks("GET", "model/file"), cut=cut, times=3)
    assert np.array_equal(read_all(storage, "model/file"), LARGE)
    assert rule.hits == 3
    rule.times = 2
    assert storage.read("model/file") == LARGE.tobytes()
    assert rule.hits == 5


def test_a_body_that_always_breaks_off(storage: Storage, between: FaultProxy, path: str) -> None:
    bytecheckpoint.configure(storage_timeout=1.5)
    storage = resolve(path)
    write_file(storage, "model/file", LARGE)
    between.add(asks("GET", "model/file"), cut=1000, times=-1)
    says = rf"cannot read {path}/model/file: .* \(attempt \d+\)"
    with within(20), pytest.raises(StorageUnavailableError, match=says):
        read_all(storage, "model/file")


def test_a_read_that_makes_headway_is_not_given_up(path: str, between: FaultProxy) -> None:
    """However slow the line is: what counts is the time since bytes came last."""
    storage = resolve(path)
    write_file(storage, "model/file", LARGE)
    bytecheckpoint.configure(storage_timeout=5.0)
    rule = between.add(asks("GET", "model/file"), cut=1_100_000, times=8, delay=0.8)  # more than the limit in all
    with contextlib.ExitStack() as others:
        for _ in range(16):  # so it goes as one request
            others.enter_context(storage._bucket.connections.share())  # type: ignore[attr-defined]
        assert np.array_equal(read_all(storage, "model/file"), LARGE)
    assert rule.hits == 8


def test_a_store_that_knows_no_ranges(storage: Storage, between: FaultProxy, path: str) -> None:
    """Status 200 and the whole object: nothing of it may pass for the range."""
    write_file(storage, "model/file", LARGE)
    headers = {"etag": '"x"', "last-modified": "Mon, 02 Jan 2023 10:00:00 GMT"}
    between.add(asks("GET", "model/file"), status=200, body=LARGE.tobytes(), headers=headers, times=-1)
    error = pytest.raises(StorageError, match=rf"cannot read {path}/model/file: .*attempt")
    with contextlib.closing(storage.open("model/file")) as reader, error:
        reader.read_into(5000, [memoryview(bytearray(1000))])


@pytest.mark.parametrize("sent", [999, 1, 1500])
def test_a_range_of_another_length(storage: Storage, between: FaultProxy, sent: int) -> None:
    """Fewer bytes are completed by further requests or refused, more are refused; none is taken for another."""
    write_file(storage, "model/file", LARGE)
    headers = {
        "etag": '"x"', "last-modified": "Mon, 02 Jan 2023 10:00:00 GMT",
        "content-range": f"bytes 5000-{5000 + sent - 1}/{len(LARGE)}",
    }  # fmt: skip
    body = LARGE[5000 : 5000 + sent].tobytes()
    between.add(asks("GET", "model/file"), status=206, body=body, headers=headers, times=1)
    out = np.zeros(1000, np.uint8)
    with contextlib.closing(storage.open("model/file")) as reader:
        got = 0
        with contextlib.suppress(StorageError):
            got = reader.read_into(5000, [memoryview(out)])
    assert got in (0, 1000)
    assert np.array_equal(out[:got], LARGE[5000 : 5000 + got])


def test_an_object_that_goes_between_the_list_and_the_read(storage: Storage, between: FaultProxy, path: str) -> None:
    bytecheckpoint.save(path, states(step=1))
    between.add(asks("HEAD", "model/rank"), status=404, times=-1)
    with pytest.raises(CorruptCheckpointError, match=rf"{path}: the storage file model/rank.* is missing"):
        load_step(path)


def test_an_object_that_is_replaced_while_it_is_read(storage: Storage, between: FaultProxy, path: str) -> None:
    """Nobody replaces a storage file; if somebody does, its checksums differ."""
    bytecheckpoint.save(path, states(step=1, rows=ROWS))
    (name,) = [name for name, _ in resolve(path).list() if name.startswith("model/rank")]
    good = storage.read(name)
    between.add(asks("GET", "model/rank"), before=lambda: storage.publish(name, good[::-1]))
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch"):
        load_step(path, rows=ROWS)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", quick(["sync", "async"], every=2))
@pytest.mark.parametrize(
    ("method", "word", "says"),
    [
        ("PUT", "model/rank", r"cannot upload {path}/model/rank-\S+: AccessDenied: so it is"),
        ("PUT", "metadata", r"cannot publish {path}/metadata\.parquet: AccessDenied: so it is"),
        ("PUT", "probe", r"cannot try conditional puts on {root}/\S+: AccessDenied: so it is"),
        ("GET", "list-type", r"cannot list {root}\S*: AccessDenied: so it is"),
        ("HEAD", "metadata", r"cannot look at {path}/metadata\.parquet: HTTP status 403 Forbidden"),
    ],
)
def test_permission_denied(
    storage: Storage, between: FaultProxy, path: str, method: str, word: str, says: str, mode: str
) -> None:
    bytecheckpoint.configure(writer="thread")
    bytecheckpoint.save(path, states(step=1))
    files = storage.list()
    resolve(path)._bucket.commits = None  # type: ignore[attr-defined]
    between.add(asks(method, word), status=403, body=s3_error("AccessDenied"), times=-1)
    says = says.format(path=path, root=path.removesuffix("/runs/step")) + r" \(attempt 1\); check the credentials"
    with pytest.raises(StorageError, match=says) as raised:
        bytecheckpoint.save(path, states(step=2), async_checkpoint=mode == "async").result(60)
    assert type(raised.value) is StorageError
    forget_failure()
    between.rules.clear()
    assert load_step(path) == 1
    assert run(["verify", path]) == 0
    assert storage.list() == files, "what the failed save has sent is removed"
    check_save(path, 3)


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "AccessDenied"), (400, "InvalidToken")])
def test_credentials_that_expire(storage: Storage, between: FaultProxy, path: str, status: int, code: str) -> None:
    bytecheckpoint.save(path, states(step=1))
    between.add(lambda r: r.method != "HEAD", status=status, body=s3_error(code), times=-1)
    says = rf"{path}\S*: {code}: so it is \(attempt 1\); check the credentials and what they are allowed to do"
    with within(20):
        with pytest.raises(StorageError, match=rf"cannot read {says}"):
            load_step(path)
        with pytest.raises(StorageError, match=says.replace(path, path.removesuffix("/runs/step"))):
            bytecheckpoint.save(path, states(step=2))
    between.rules.clear()
    assert load_step(path) == 1


def test_a_wrong_region(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-nowhere-1")
    says = rf"cannot open s3://{bucket}/step/metadata\.parquet: .*attempt 1.*region"
    with within(20), pytest.raises(StorageError, match=says):
        load_step(f"s3://{bucket}/step")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"), (502, ""), (503, "SlowDown"), (503, "ServiceUnavailable"), (504, ""),
        (429, "TooManyRequests"), (400, "RequestTimeout"), (409, "OperationAborted"), (409, "ExistingObjectIsDirectory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", quick([len(LARGE), 100], every=2))
def test_a_burst_of_passing_refusals(storage: Storage, between: FaultProxy, size: int, status: int, code: str) -> None:
    """Every operation is hit twice in a row, and nobody notices."""
    data = LARGE[:size]
    # An answer to HEAD has no body, by which these two differ from refusals that stay.
    methods = ("PUT", "GET", "DELETE", "POST", *(["HEAD"] if status not in (400, 409) else []))
    body = s3_error(code) if code else b""

    def again() -> None:
        between.rules[:] = [HttpFault(asks(method), status=status, body=body, times=2) for method in methods]

    for call in (
        lambda: write_file(storage, "model/file", data),
        lambda: storage.publish("metadata.parquet", b"catalog", expected=""),
        storage.list,
        storage.folders,
        lambda: storage.version("metadata.parquet"),
        lambda: storage.publish("metadata.parquet", b"catalog 2"),
    ):
        again()
        call()
    again()
    assert np.array_equal(read_all(storage, "model/file"), data)
    assert storage.read("metadata.parquet") == b"catalog 2"
    again()
    storage.delete(["model/file", "metadata.parquet"])
    assert storage.list() == []


def test_a_deletion_that_fails_for_some_objects(storage: Storage, between: FaultProxy, path: str) -> None:
    """The answer to a bulk deletion is 200 even so."""
    for number in range(3):
        write_file(storage, f"model/{number}", content(10))
    between.add(asks("POST", "delete"), status=200, body=undeleted("InternalError"), times=2)
    storage.delete([f"model/{number}" for number in range(3)])
    assert storage.list() == []
    write_file(storage, "model/1", content(10))
    between.add(asks("POST", "delete"), status=200, body=undeleted("AccessDenied"), times=-1)
    with pytest.raises(StorageError, match=rf"cannot delete from {path}: .*AccessDenied.*\(attempt 1\)") as raised:
        storage.delete(["model/1"])
    assert type(raised.value) is StorageError


# --- names and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [*ODD_NAMES, "s3:"])
def test_other_tools_find_the_same_keys(s3: S3Server, bucket: str, folder: str) -> None:
    resolve(f"s3://{bucket}/{folder}/step").publish("metadata.parquet", b"catalog", expected="")
    assert s3.request("GET", urllib.parse.quote(f"/{bucket}/{folder}/step/metadata.parquet", safe="/~")) == b"catalog"


def test_foreign_objects_are_no_obstacle(s3: S3Server, bucket: str) -> None:
    path = f"s3://{bucket}/runs/step"
    for key in ("runs/step/notes.txt", "runs/step/model/readme%20%25.md", "runs/step/deep/er/x", "runs/stepping/y"):
        s3.request("PUT", f"/{bucket}/{key}", body=b"x")
    for step in (1, 2):
        bytecheckpoint.save(path, states(step=step))
    assert load_step(path) == 2
    names = [name for name, _ in resolve(path).list()]
    assert "notes.txt" in names and "model/readme %.md" in names


def test_a_foreign_object_whose_key_the_client_cannot_read(storage: Storage, between: FaultProxy, path: str) -> None:
    """Stores that are no file systems take keys with "//"; what is there can still be loaded."""
    bytecheckpoint.save(path, states(step=1))
    listing = (
        "<ListBucketResult><Name>b</Name><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>"
        "<CommonPrefixes><Prefix>runs/step//</Prefix></CommonPrefixes></ListBucketResult>"
    )
    between.add(asks("GET", "list-type"), status=200, body=listing.encode(), times=-1)
    with pytest.raises(StorageError, match=rf"cannot list {path}: .*\"runs/step//\".*key .* cannot read: remove it"):
        storage.list()
    assert load_step(path) == 1
