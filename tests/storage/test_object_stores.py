"""Object stores: uploads in parts, reads of ranges, stores that stay away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.testing import content, write_file
from bytecheckpoint.storage.uploading import UploadingStorage
from tests.servers.fault_proxy import FaultProxy, asks, s3_error
from tests.servers.s3 import S3Server
from tests.storage.checks import check_file, within
from tests.support.coded import load_step, states
from tests.support.processes import wait_until
from tests.support.ranks import attempt

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

LARGE = content((20 << 20) + 77)


# --- uploads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_a_large_file_goes_in_parts_and_a_small_one_in_one_request(
    storage: Storage, between: FaultProxy, stable: bool
) -> None:
    write_file(storage, "model/large", LARGE, stable=stable, piece=4 << 20)
    parts = [r for r in between.requests if "partNumber" in r.path]
    assert len(parts) == 3
    between.requests.clear()
    write_file(storage, "model/small", LARGE[: 1 << 20], stable=stable)
    assert [r.method for r in between.requests] == ["PUT"]


def test_parts_that_fail_are_sent_again(storage: Storage, between: FaultProxy) -> None:
    slow = between.add(asks("PUT", "partNumber=2"), status=503, body=s3_error("SlowDown"), times=2)
    lost = between.add(asks("PUT", "partNumber=1"), lose=True)
    check_file(storage, "model/large", LARGE)
    assert (slow.hits, lost.hits) == (2, 1)


def test_a_completion_whose_answer_gets_lost(storage: Storage, between: FaultProxy) -> None:
    lost = between.add(asks("POST", "uploadId"), lose=True)
    check_file(storage, "model/large", LARGE)
    assert lost.hits == 1


@pytest.mark.parametrize("answer", ["done", "no such upload"])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_completion_that_is_answered_wrongly(
    storage: Storage, between: FaultProxy, answer: str, carried_out: bool
) -> None:
    """Servers that were killed while they carried it out answer so."""
    done = b"<CompleteMultipartUploadResult><ETag>&quot;x&quot;</ETag></CompleteMultipartUploadResult>"
    status, body = (200, done) if answer == "done" else (404, s3_error("NoSuchUpload"))
    if carried_out:  # the rule that comes first is the one that applies
        between.add(asks("POST", "uploadId"), lose=True)
    wrong = between.add(asks("POST", "uploadId"), status=status, body=body)
    check_file(storage, "model/large", LARGE)
    assert wrong.hits == 1


def test_an_upload_that_fails_leaves_nothing(storage: Storage, s3: S3Server, bucket: str) -> None:
    assert isinstance(storage, UploadingStorage)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(LARGE)[: 18 << 20]
        wait_until(lambda: bool(s3.uploads(bucket)), 5)
        raise CheckpointError("given up")

    with pytest.raises(CheckpointError, match="given up"):
        storage.upload("model/file", len(LARGE), pieces)
    assert storage.list() == []
    assert s3.uploads(bucket) == []


def test_an_upload_that_is_refused_half_way_leaves_nothing(
    storage: Storage, between: FaultProxy, s3: S3Server, bucket: str
) -> None:
    # After a second the other parts have arrived: versitygw may keep one that meets the abort on its way.
    between.add(asks("PUT", "partNumber=2"), status=403, body=s3_error("AccessDenied", "no"), times=-1, delay=1.0)
    says = r"cannot upload s3://.*/model/file: AccessDenied: no \(attempt 1\); check the credentials"
    with pytest.raises(StorageError, match=says):
        write_file(storage, "model/file", LARGE)
    assert storage.list() == []
    assert s3.uploads(bucket) == []


def test_an_abort_ends_an_upload_that_is_under_way(storage: Storage, between: FaultProxy) -> None:
    writer = storage.create(NewFile("model/file", len(LARGE) * 8, stable=True))
    for number in range(8):
        writer.write_at(number * len(LARGE), [memoryview(LARGE)])
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(attempt, writer.finish, len(LARGE) * 8)
        assert wait_until(lambda: any("partNumber" in r.path for r in between.requests), 60)
        writer.interrupt()
    writer.abort()
    assert isinstance(finished.result(), CheckpointError) and "was aborted" in str(finished.result())
    assert storage.list() == []


# --- reads ------------------------------------------------------------------------------------------------------------


def test_reads_ask_for_ranges_only(storage: Storage, between: FaultProxy) -> None:
    write_file(storage, "model/file", LARGE)
    between.requests.clear()
    reader = storage.open("model/file")
    out = np.zeros(1000, np.uint8)
    reader.read_into(5 << 20, [memoryview(out)[:400], memoryview(out)[400:]])
    assert sorted(r.headers["range"] for r in between.requests if r.method == "GET") == [
        f"bytes={5 << 20}-{(5 << 20) + 399}", f"bytes={(5 << 20) + 400}-{(5 << 20) + 999}",
    ]  # fmt: skip
    assert np.array_equal(out, LARGE[5 << 20 : (5 << 20) + 1000])


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["upload", "read", "list", "publish", "delete"])
def test_a_store_that_stays_away_is_an_error_that_says_all(
    storage: Storage, between: FaultProxy, path: str, operation: str
) -> None:
    bytecheckpoint.configure(storage_timeout=1.5)
    storage = resolve(path)
    between.add(lambda r: True, status=503, body=s3_error("SlowDown"), times=-1)
    with within(20), pytest.raises(StorageUnavailableError) as raised:
        {
            "upload": lambda: write_file(storage, "model/file", content(100)),
            "read": lambda: storage.read("model/file"),
            "list": storage.list,
            "publish": lambda: storage.publish("model/file", b"x", expected=""),
            "delete": lambda: storage.delete(["model/file"]),
        }[operation]()
    text = str(raised.value)
    assert re.search(rf"cannot {operation}.* {path}.*: SlowDown: so it is \(attempt \d+\)", text), text
    assert int(re.search(r"attempt (\d+)", text)[1]) > 1  # type: ignore[index]


def test_wrong_bucket(s3: S3Server) -> None:
    path = "s3://no-such-bucket/step"
    for call in (lambda: bytecheckpoint.save(path, states(step=1)), lambda: load_step(path)):
        says = rf"{path}/\S+: NoSuchBucket: .*attempt 1.*check the bucket's"
        with within(20), pytest.raises(StorageError, match=says):
            call()


def test_objects_that_stand_for_folders(storage: Storage, s3: S3Server, bucket: str) -> None:
    for key in ("runs/", "runs/step/", "runs/step/model/"):
        s3.request("PUT", f"/{bucket}/{key}")
    write_file(storage, "model/file", content(10))
    assert storage.list() == [("model/file", 10)]
    assert storage.folders() == ["model"]
    assert resolve(f"s3://{bucket}/runs").folders() == ["step"]
