"""Object stores: commit by conditional put, uploads in parts, and what goes wrong on the way."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.storage.uploading import UploadingStorage
from tests.faults.coded import load_step, states
from tests.servers.fault_proxy import FaultProxy, HttpFault, Request
from tests.servers.s3 import S3Server
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

LARGE = content((20 << 20) + 77)


@pytest.fixture
def storage(bucket: str) -> Storage:
    return resolve(f"s3://{bucket}/runs/step")


@pytest.fixture
def meddled(between: FaultProxy, bucket: str) -> Storage:
    storage = resolve(f"s3://{bucket}/runs/step")
    storage.check_publish("metadata.parquet", "")
    between.requests.clear()
    return storage


# --- uploads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_a_large_file_goes_in_parts_and_a_small_one_in_one_request(
    meddled: Storage, between: FaultProxy, stable: bool
) -> None:
    write_file(meddled, "model/large", LARGE, stable=stable, piece=4 << 20)
    parts = [r for r in between.requests if "partNumber" in r.path]
    assert len(parts) == 3
    between.requests.clear()
    write_file(meddled, "model/small", LARGE[: 1 << 20], stable=stable)
    assert [r.method for r in between.requests] == ["PUT"]


def test_parts_that_fail_are_sent_again(meddled: Storage, between: FaultProxy) -> None:
    slow = HttpFault(
        lambda r: "partNumber=2" in r.path, status=503, body=b"<Error><Code>SlowDown</Code></Error>", times=2
    )
    lost = HttpFault(lambda r: "partNumber=1" in r.path, lose=True, times=1)
    between.rules += [slow, lost]
    write_file(meddled, "model/large", LARGE)
    assert (slow.hits, lost.hits) == (2, 1)
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


def test_a_completion_whose_answer_gets_lost(meddled: Storage, between: FaultProxy) -> None:
    lost = HttpFault(lambda r: r.method == "POST" and "uploadId" in r.path, lose=True, times=1)
    between.rules.append(lost)
    write_file(meddled, "model/large", LARGE)
    assert lost.hits == 1
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


@pytest.mark.parametrize("answer", ["done", "no such upload"])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_completion_that_is_answered_wrongly(
    meddled: Storage, between: FaultProxy, answer: str, carried_out: bool
) -> None:
    """As servers do that were killed while they carried it out."""
    done = "<CompleteMultipartUploadResult><ETag>&quot;x&quot;</ETag></CompleteMultipartUploadResult>"
    body = done if answer == "done" else "<Error><Code>NoSuchUpload</Code></Error>"
    status = 200 if answer == "done" else 404

    def completes(request: Request) -> bool:
        return request.method == "POST" and "uploadId" in request.path

    wrong = HttpFault(completes, status=status, body=body.encode(), times=1)
    # The rule that comes first is the one that applies.
    between.rules += [HttpFault(completes, lose=True, times=1), wrong] if carried_out else [wrong]
    write_file(meddled, "model/large", LARGE)
    assert wrong.hits == 1
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


def test_an_upload_that_fails_leaves_nothing(storage: Storage, s3: S3Server, bucket: str) -> None:
    assert isinstance(storage, UploadingStorage)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(LARGE)[: 18 << 20]
        deadline = time.monotonic() + 5
        while not s3.uploads(bucket) and time.monotonic() < deadline:
            time.sleep(0.02)
        raise CheckpointError("given up")

    with pytest.raises(CheckpointError, match="given up"):
        storage.upload("model/file", len(LARGE), pieces)
    assert storage.list() == []
    assert s3.uploads(bucket) == []


def test_an_upload_that_is_refused_half_way_leaves_nothing(
    meddled: Storage, between: FaultProxy, s3: S3Server, bucket: str
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    def refused(request: Request) -> bool:
        if "partNumber=2" not in request.path:
            return False
        time.sleep(1)  # the other parts have arrived: versitygw may keep one that meets the abort on its way
        return True

    between.rules.append(HttpFault(refused, status=403, body=denied, times=-1))
    with pytest.raises(
        StorageError, match=r"cannot upload s3://.*/model/file: AccessDenied: no \(attempt 1\); check the credentials"
    ):
        write_file(meddled, "model/file", LARGE)
    assert meddled.list() == []
    assert s3.uploads(bucket) == []


def test_an_abort_ends_an_upload_that_is_under_way(meddled: Storage, between: FaultProxy) -> None:
    writer = meddled.create(NewFile("model/file", len(LARGE) * 8, stable=True))
    for number in range(8):
        writer.write_at(number * len(LARGE), [memoryview(LARGE)])
    failed: list[BaseException] = []

    def finish() -> None:
        try:
            writer.finish(len(LARGE) * 8)
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    while not any("partNumber" in r.path for r in between.requests):
        time.sleep(0.01)
    writer.interrupt()
    thread.join(60)
    writer.abort()
    assert failed and "was aborted" in str(failed[0])
    assert meddled.list() == []


# --- reads ------------------------------------------------------------------------------------------------------------


def test_reads_ask_for_ranges_only(meddled: Storage, between: FaultProxy) -> None:
    write_file(meddled, "model/file", LARGE)
    between.requests.clear()
    reader = meddled.open("model/file")
    out = np.zeros(1000, np.uint8)
    reader.read_into(5 << 20, [memoryview(out)[:400], memoryview(out)[400:]])
    assert sorted(r.headers["range"] for r in between.requests if r.method == "GET") == [
        f"bytes={5 << 20}-{(5 << 20) + 399}", f"bytes={(5 << 20) + 400}-{(5 << 20) + 999}",
    ]  # fmt: skip
    assert np.array_equal(out, LARGE[5 << 20 : (5 << 20) + 1000])


def test_reads_that_fail_are_tried_again(meddled: Storage, between: FaultProxy) -> None:
    write_file(meddled, "model/file", LARGE)
    between.rules += [
        HttpFault(lambda r: r.method == "GET", status=500, times=2),
        HttpFault(lambda r: r.method == "GET", lose=True, times=2),
        HttpFault(lambda r: r.method == "HEAD", status=503, times=1),
    ]
    assert np.array_equal(read_all(meddled, "model/file"), LARGE)
    assert [r.hits for r in between.rules] == [2, 2, 1]


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["upload", "read", "list", "publish", "delete"])
def test_a_store_that_stays_away_is_an_error_that_says_all(between: FaultProxy, bucket: str, operation: str) -> None:
    bytecheckpoint.configure(storage_timeout=1.5)
    storage = resolve(f"s3://{bucket}/runs/step")
    storage.check_publish("metadata.parquet", "")
    between.rules.append(HttpFault(lambda r: True, status=503, body=b"<Error><Code>SlowDown</Code></Error>", times=-1))
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError) as raised:
        {
            "upload": lambda: write_file(storage, "model/file", content(100)),
            "read": lambda: storage.read("model/file"),
            "list": storage.list,
            "publish": lambda: storage.publish("model/file", b"x", expected=""),
            "delete": lambda: storage.delete(["model/file"]),
        }[operation]()
    assert time.monotonic() - begun < 8
    text = str(raised.value)
    assert re.search(rf"cannot {operation}.* s3://{bucket}/runs/step.*: SlowDown \(attempt \d+\)", text), text
    assert int(re.search(r"attempt (\d+)", text)[1]) > 1  # type: ignore[index]


def test_a_server_that_is_not_there(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, s3.environment("http://127.0.0.1:1"))
    bytecheckpoint.configure(storage_timeout=2.0)
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError, match=rf"s3://{bucket}.*Connection refused.*attempt \d+"):
        bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))
    assert time.monotonic() - begun < 15
    with pytest.raises(StorageUnavailableError, match=rf"s3://{bucket}/step.*Connection refused"):
        load_step(f"s3://{bucket}/step")


def test_wrong_bucket(s3: S3Server) -> None:
    for call in (lambda: bytecheckpoint.save("s3://no-such-bucket/step", states(step=1)),
                 lambda: load_step("s3://no-such-bucket/step")):  # fmt: skip
        begun = time.monotonic()
        with pytest.raises(
            StorageError, match=r"s3://no-such-bucket/step/\S+: NoSuchBucket: .*attempt 1.*check the bucket's"
        ):
            call()
        assert time.monotonic() - begun < 5


def test_objects_that_stand_for_folders(storage: Storage, s3: S3Server, bucket: str) -> None:
    for key in ("runs/", "runs/step/", "runs/step/model/"):
        s3.request("PUT", f"/{bucket}/{key}")
    write_file(storage, "model/file", content(10))
    assert storage.list() == [("model/file", 10)]
    assert storage.folders() == ["model"]
    assert resolve(f"s3://{bucket}/runs").folders() == ["step"]


def _read_in_child(url: str, pipe: object) -> None:
    try:
        pipe.send(resolve(url).read("x"))  # type: ignore[attr-defined]
    except StorageError as error:
        pipe.send(str(error))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_fork_is_refused_and_a_new_process_works(storage: Storage, method: str) -> None:
    storage.publish("x", b"content")
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(storage.url, theirs))
    child.start()
    assert ours.poll(60)
    said = ours.recv()
    child.join(20)
    if method == "fork":
        assert "in a fork of a process that has used an object store" in said
    else:
        assert said == b"content"
