"""Object stores: commit by conditional put, uploads in parts, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from bytecheckpoint.storage import NewFile, Storage, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.storage.uploading import UploadingStorage
from tests.faults.coded import load_step, states
from tests.servers.meddler import Meddler, Request, Rule
from tests.servers.s3 import SECRET, S3Server, s3proxy
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

LARGE = content((20 << 20) + 77)


@pytest.fixture
def storage(bucket: str) -> Storage:
    return resolve(f"s3://{bucket}/runs/step")


@pytest.fixture
def meddled(between: Meddler, bucket: str) -> Storage:
    storage = resolve(f"s3://{bucket}/runs/step")
    storage.probe("metadata.parquet", "")
    between.requests.clear()
    return storage


def is_put(name: str, *, conditional: bool | None = None) -> Rule:
    def fits(request: Request) -> bool:
        given = bool({"if-none-match", "if-match"} & request.headers.keys())
        return request.method == "PUT" and name in request.path and conditional in (None, given)

    return Rule(fits)


# --- commit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
def test_a_put_that_meets_its_own_earlier_write_is_a_success(
    meddled: Storage, between: Meddler, replacing: bool
) -> None:
    if replacing:
        meddled.publish("metadata.parquet", b"old", expected="")
    version = meddled.version("metadata.parquet")
    rule = is_put("metadata.parquet", conditional=True)
    rule.lose, rule.times = True, 2
    between.rules.append(rule)
    meddled.publish("metadata.parquet", b"new", expected=version)
    assert rule.hits >= 1
    assert len([r for r in between.requests if r.method == "PUT" and "metadata" in r.path]) > 1, "it was tried again"
    assert meddled.read("metadata.parquet") == b"new"


@pytest.mark.parametrize("replacing", [False, True])
def test_a_put_that_meets_another_writers_is_a_conflict(meddled: Storage, between: Meddler, replacing: bool) -> None:
    if replacing:
        meddled.publish("metadata.parquet", b"old", expected="")
    version = meddled.version("metadata.parquet")
    meddled.publish("metadata.parquet", b"theirs")
    with pytest.raises(StorageConflictError, match=r"cannot publish s3://.*/metadata\.parquet: another save"):
        meddled.publish("metadata.parquet", b"ours", expected=version)
    assert meddled.read("metadata.parquet") == b"theirs"


def test_the_probe_runs_once_and_leaves_nothing(between: Meddler, bucket: str) -> None:
    for step in range(3):
        storage = resolve(f"s3://{bucket}/runs/{step}")
        storage.probe("metadata.parquet", "")
        storage.publish("metadata.parquet", b"x", expected="")
    probes = {r.path.split("?")[0] for r in between.requests if "probe" in r.path}
    assert len(probes) == 3, "three races, for the first step only"
    everything = resolve(f"s3://{bucket}").folders(), resolve(f"s3://{bucket}/runs").list()
    assert everything == (["runs"], [(f"{step}/metadata.parquet", 1) for step in range(3)])


def test_a_save_from_inside_an_event_loop(bucket: str) -> None:
    """As in a notebook."""

    async def main() -> None:
        bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))

    asyncio.run(main())
    assert load_step(f"s3://{bucket}/step") == 1


def test_a_store_that_cannot_replace_conditionally(between: Meddler, bucket: str) -> None:
    """Ceph refuses a right If-Match: checkpoints can be created there, each at a path of its own."""
    between.rules.append(Rule(lambda r: "if-match" in r.headers, status=412, times=-1))
    path = f"s3://{bucket}/runs/step"
    bytecheckpoint.save(path, states(step=1))
    files = resolve(path).list()
    between.requests.clear()
    with pytest.raises(StorageError, match=r"cannot replace .* as Ceph does; save each step to a path of its own"):
        bytecheckpoint.save(path, states(step=2))
    assert not any(r.method in ("PUT", "POST") for r in between.requests), "it is told before anything is sent"
    assert load_step(path) == 1
    assert resolve(path).list() == files
    bytecheckpoint.configure(commit="plain")
    bytecheckpoint.save(path, states(step=3))
    assert load_step(path) == 3


@pytest.fixture
def racy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = s3proxy(tmp_path)
    server.make_bucket("bucket")
    use(monkeypatch, server.environment())
    yield "s3://bucket/runs/step"
    server.server.stop()


def test_a_store_with_broken_conditional_puts_is_refused(racy: str) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket does not honour conditional puts.*settings\.commit='plain'"):
        bytecheckpoint.save(racy, states(step=1))
    assert resolve(racy).list() == []
    bytecheckpoint.configure(commit="plain")
    counts = set()
    for step in (2, 3):
        bytecheckpoint.save(racy, states(step=step), async_checkpoint=step == 3).result(60)
        assert load_step(racy) == step
        counts.add(len(resolve(racy).list()))
    assert len(counts) == 1, "files of the replaced step are gone, without the bulk deletion that this store lacks"


# --- uploads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_a_large_file_goes_in_parts_and_a_small_one_in_one_request(
    meddled: Storage, between: Meddler, stable: bool
) -> None:
    write_file(meddled, "model/large", LARGE, stable=stable, piece=4 << 20)
    parts = [r for r in between.requests if "partNumber" in r.path]
    assert len(parts) == 3
    between.requests.clear()
    write_file(meddled, "model/small", LARGE[: 1 << 20], stable=stable)
    assert [r.method for r in between.requests] == ["PUT"]


def test_parts_that_fail_are_sent_again(meddled: Storage, between: Meddler) -> None:
    slow = Rule(lambda r: "partNumber=2" in r.path, status=503, body=b"<Error><Code>SlowDown</Code></Error>", times=2)
    lost = Rule(lambda r: "partNumber=1" in r.path, lose=True, times=1)
    between.rules += [slow, lost]
    write_file(meddled, "model/large", LARGE)
    assert (slow.hits, lost.hits) == (2, 1)
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


def test_a_completion_whose_answer_gets_lost(meddled: Storage, between: Meddler) -> None:
    lost = Rule(lambda r: r.method == "POST" and "uploadId" in r.path, lose=True, times=1)
    between.rules.append(lost)
    write_file(meddled, "model/large", LARGE)
    assert lost.hits == 1
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


@pytest.mark.parametrize("answer", ["done", "no such upload"])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_completion_that_is_answered_wrongly(
    meddled: Storage, between: Meddler, answer: str, carried_out: bool
) -> None:
    """As servers do that were killed while they carried it out."""
    done = "<CompleteMultipartUploadResult><ETag>&quot;x&quot;</ETag></CompleteMultipartUploadResult>"
    body = done if answer == "done" else "<Error><Code>NoSuchUpload</Code></Error>"
    status = 200 if answer == "done" else 404

    def completes(request: Request) -> bool:
        return request.method == "POST" and "uploadId" in request.path

    wrong = Rule(completes, status=status, body=body.encode(), times=1)
    # The rule that comes first is the one that applies.
    between.rules += [Rule(completes, lose=True, times=1), wrong] if carried_out else [wrong]
    write_file(meddled, "model/large", LARGE)
    assert wrong.hits == 1
    assert np.array_equal(read_all(meddled, "model/large"), LARGE)


def test_an_upload_that_fails_leaves_nothing(storage: Storage, s3: S3Server, bucket: str) -> None:
    assert isinstance(storage, UploadingStorage)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(LARGE)[: 18 << 20]
        time.sleep(0.5)  # the first parts are under way
        raise CheckpointError("given up")

    with pytest.raises(CheckpointError, match="given up"):
        storage.upload("model/file", len(LARGE), pieces)
    assert storage.list() == []
    assert s3.uploads(bucket) == []


def test_an_upload_that_is_refused_half_way_leaves_nothing(
    meddled: Storage, between: Meddler, s3: S3Server, bucket: str
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    def refused(request: Request) -> bool:
        if "partNumber=2" not in request.path:
            return False
        time.sleep(1)  # the other parts have arrived: versitygw may keep one that meets the abort on its way
        return True

    between.rules.append(Rule(refused, status=403, body=denied, times=-1))
    with pytest.raises(
        StorageError, match=r"cannot upload s3://.*/model/file: AccessDenied: no \(attempt 1\); check the credentials"
    ):
        write_file(meddled, "model/file", LARGE)
    assert meddled.list() == []
    assert s3.uploads(bucket) == []


def test_an_abort_ends_an_upload_that_is_under_way(meddled: Storage, between: Meddler) -> None:
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
    assert failed and "given up" in str(failed[0])
    assert meddled.list() == []


# --- reads ------------------------------------------------------------------------------------------------------------


def test_reads_ask_for_ranges_only(meddled: Storage, between: Meddler) -> None:
    write_file(meddled, "model/file", LARGE)
    between.requests.clear()
    reader = meddled.open("model/file")
    out = np.zeros(1000, np.uint8)
    reader.read_into(5 << 20, [memoryview(out)[:400], memoryview(out)[400:]])
    assert sorted(r.headers["range"] for r in between.requests if r.method == "GET") == [
        f"bytes={5 << 20}-{(5 << 20) + 399}", f"bytes={(5 << 20) + 400}-{(5 << 20) + 999}",
    ]  # fmt: skip
    assert np.array_equal(out, LARGE[5 << 20 : (5 << 20) + 1000])


def test_reads_that_fail_are_tried_again(meddled: Storage, between: Meddler) -> None:
    write_file(meddled, "model/file", LARGE)
    between.rules += [
        Rule(lambda r: r.method == "GET", status=500, times=2),
        Rule(lambda r: r.method == "GET", lose=True, times=2),
        Rule(lambda r: r.method == "HEAD", status=503, times=1),
    ]
    assert np.array_equal(read_all(meddled, "model/file"), LARGE)
    assert [r.hits for r in between.rules] == [2, 2, 1]


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["upload", "read", "list", "publish", "delete"])
def test_a_store_that_stays_away_is_an_error_that_says_all(between: Meddler, bucket: str, operation: str) -> None:
    bytecheckpoint.configure(storage_timeout=1.5)
    storage = resolve(f"s3://{bucket}/runs/step")
    storage.probe("metadata.parquet", "")
    between.rules.append(Rule(lambda r: True, status=503, body=b"<Error><Code>SlowDown</Code></Error>", times=-1))
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


def test_wrong_credentials(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = s3.environment() | {"AWS_SECRET_ACCESS_KEY": "WRONG-SECRET", "AWS_SESSION_TOKEN": "TOKEN-SECRET"}
    use(monkeypatch, variables)
    begun = time.monotonic()
    for asynchronous in (False, True):
        with pytest.raises(StorageError, match=rf"s3://{bucket}/step/\S+: \w+: .*check the credentials") as raised:
            bytecheckpoint.save(f"s3://{bucket}/step", states(step=1), async_checkpoint=asynchronous).result(60)
        text = str(raised.value)
        assert not any(
            secret in text for secret in ("WRONG-SECRET", "TOKEN-SECRET", SECRET, "Signature=", "StringToSign")
        )
        bytecheckpoint.saving.saver.saver_of(bytecheckpoint.collectives.current())._failed = None
    assert time.monotonic() - begun < 10


def test_no_credentials(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(
        monkeypatch,
        {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1", "HOME": "/nowhere"},
    )
    begun = time.monotonic()
    with pytest.raises(StorageError, match="found no credentials in the environment"):
        resolve(f"s3://{bucket}/step").read("metadata.parquet")
    assert time.monotonic() - begun < 10


def test_a_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"AWS_PROFILE": "team"})
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(bytecheckpoint.UsageError, match="pip install boto3"):
        resolve("s3://bucket/step")


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


def test_the_environment_may_change(storage: Storage, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.publish("x", b"content")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    with pytest.raises(StorageError, match="check the credentials"):
        resolve(storage.url).read("x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert resolve(storage.url).read("x") == b"content"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET


def test_the_writer_process_follows_the_environment(
    bucket: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that are set, changed and taken away after it has started are those that the next save uses."""
    for name in s3.environment():
        monkeypatch.delenv(name)
    bytecheckpoint.save(tmp_path / "step", states(step=1), async_checkpoint=True).result(60)
    use(monkeypatch, s3.environment())
    path = f"s3://{bucket}/step"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60)
    helper = saver_of(current())._helper
    assert helper is not None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    with pytest.raises(StorageError, match="check the credentials"):
        bytecheckpoint.save(path, states(step=2), async_checkpoint=True).result(60)
    saver_of(current())._failed = None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    bytecheckpoint.save(path, states(step=3), async_checkpoint=True).result(60)
    assert load_step(path) == 3
    assert saver_of(current())._helper is helper, "it is the same process"
