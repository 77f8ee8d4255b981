"""Object stores: commit by conditional put, and the probe that finds out which stores honour that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tuning import tuned
from tests.servers.fault_proxy import FaultProxy, Request, asks, fault_proxy, s3_error
from tests.servers.s3 import S3Server, s3proxy
from tests.storage.checks import check_save
from tests.storage.conftest import use
from tests.support.coded import load_step, states

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def replaces(request: Request) -> bool:
    return "if-match" in request.headers


def creates(request: Request) -> bool:
    return "if-none-match" in request.headers


def conditional(request: Request) -> bool:
    return replaces(request) or creates(request)


#: What a save says that cannot replace a checkpoint.
CANNOT_REPLACE = r"cannot replace .* \(If-Match\); save each step to a path of its own"


# --- commit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("fault", [{"lose": True}, {"status": 409}, {"status": 412}], ids=["lost", "409", "412"])
def test_a_conditional_put_is_tried_again(
    storage: Storage, between: FaultProxy, replacing: bool, fault: dict[str, Any]
) -> None:
    """It may meet its own earlier write, and S3 answers 409 when requests of others were under way."""
    if replacing:
        storage.publish("metadata.parquet", b"old", expected="")
    version = storage.version("metadata.parquet")
    rule = between.add(asks("PUT", "metadata"), body=s3_error("ConditionalRequestConflict"), times=2, **fault)
    between.requests.clear()
    storage.publish("metadata.parquet", b"new", expected=version)
    assert rule.hits == 2 or ("lose" in fault and rule.hits == 1)
    puts = [request for request in between.requests if request.method == "PUT"]
    assert len(puts) > 1 and all(map(conditional, puts))
    assert storage.read("metadata.parquet") == b"new"


def test_the_probe_runs_once_and_leaves_nothing(between: FaultProxy, bucket: str) -> None:
    for step in range(3):
        storage = resolve(f"s3://{bucket}/runs/{step}")
        storage.check_publish("metadata.parquet", "")
        storage.publish("metadata.parquet", b"x", expected="")
    probes = {r.path.split("?")[0] for r in between.requests if "probe" in r.path}
    assert len(probes) == 3, "three races, for the first step only"
    everything = resolve(f"s3://{bucket}").folders(), resolve(f"s3://{bucket}/runs").list()
    assert everything == (["runs"], [(f"{step}/metadata.parquet", 1) for step in range(3)])


def test_a_save_from_inside_an_event_loop(bucket: str) -> None:
    """Notebooks have such a loop."""

    async def main() -> None:
        bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))

    asyncio.run(main())
    assert load_step(f"s3://{bucket}/step") == 1


def test_a_store_that_cannot_replace_conditionally(between: FaultProxy, bucket: str) -> None:
    """Ceph refuses a right If-Match: checkpoints can be created there, each at a path of its own."""
    between.add(replaces, status=412, times=-1)
    path = f"s3://{bucket}/runs/step"
    bytecheckpoint.save(path, states(step=1))
    files = resolve(path).list()
    between.requests.clear()
    with pytest.raises(StorageError, match=CANNOT_REPLACE):
        bytecheckpoint.save(path, states(step=2))
    assert not any(r.method in ("PUT", "POST") for r in between.requests), "the error comes before anything is sent"
    assert load_step(path) == 1
    assert resolve(path).list() == files
    bytecheckpoint.configure(commit="plain")
    check_save(path, 3)


@pytest.fixture
def unsigned(s3: S3Server, bucket: str, between: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may do everything, so headers can be taken out of requests on their way."""
    resources = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": resources}
    policy = {"Version": "2012-10-17", "Statement": [allowed]}
    s3.request("PUT", f"/{bucket}", "policy=", json.dumps(policy).encode())
    use(monkeypatch, {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": between.endpoint})


@pytest.mark.usefixtures("unsigned")
def test_a_store_that_ignores_the_condition_of_a_creation(between: FaultProxy, path: str) -> None:
    between.add(creates, strip=("if-none-match",), times=-1)
    with pytest.raises(StorageError, match=r"does not honour conditional puts.*commit='plain'"):
        bytecheckpoint.save(path, states(step=1))
    assert not any("/rank" in request.path for request in between.requests), "the error comes before anything is sent"


#: As stores answer that do not know a header.
UNKNOWN = [(501, "NotImplemented"), (400, "InvalidArgument"), (400, ""), (405, "MethodNotAllowed")]


@pytest.mark.parametrize(("status", "code"), UNKNOWN)
def test_a_store_that_knows_no_conditions(between: FaultProxy, path: str, status: int, code: str) -> None:
    between.add(conditional, status=status, body=s3_error(code) if code else b"", times=-1)
    says = rf"cannot publish {path}/metadata\.parquet: \S+ does not honour conditional puts.*commit='plain'"
    with pytest.raises(StorageError, match=says):
        bytecheckpoint.save(path, states(step=1))
    assert resolve(path).list() == []
    bytecheckpoint.configure(commit="plain")
    check_save(path, 2, 3)


@pytest.mark.parametrize(
    ("hit", "fault"),
    [
        (lambda r: r.method in ("HEAD", "PUT"), {"headers": {"etag": ""}}),
        (lambda r: r.method in ("HEAD", "PUT"), {"headers": {"etag": '""'}}),
        *((replaces, {"status": status, "body": s3_error(code) if code else b""}) for status, code in UNKNOWN),
        (replaces, {"strip": ("if-match",)}),
    ],
    ids=["no tag", "an empty tag", *(f"{status} {code}" for status, code in UNKNOWN), "ignored"],
)
def test_a_store_without_the_condition_of_a_replacement(
    request: pytest.FixtureRequest,
    between: FaultProxy,
    path: str,
    hit: Callable[[Request], bool],
    fault: dict[str, Any],
) -> None:
    """It has no versions, does not know the header, or ignores it."""
    if "strip" in fault:
        request.getfixturevalue("unsigned")
    between.add(hit, **fault, times=-1)
    bytecheckpoint.save(path, states(step=1))
    with pytest.raises(StorageError, match=CANNOT_REPLACE):
        bytecheckpoint.save(path, states(step=2))
    assert load_step(path) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "ExpiredToken"),
        (403, "AccessDenied"),
        (501, "NotImplemented"),
        (409, "ObjectParentIsFile"),
        (412, "Locked"),
    ],
)
def test_what_keeps_the_probe_from_its_puts_is_no_verdict(
    between: FaultProxy, path: str, status: int, code: str
) -> None:
    """The store refuses every put, not the condition."""
    between.add(asks("PUT"), status=status, body=s3_error(code), times=-1)
    with pytest.raises(StorageError, match=rf"cannot try conditional puts on s3://\S+: {code}: so it is"):
        bytecheckpoint.save(path, states(step=1))
    between.rules.clear()
    check_save(path, 2, 3)


def test_a_probe_whose_answers_get_lost(between: FaultProxy, path: str) -> None:
    """The store refuses a repeated put that it has carried out; that is no fault of the store."""
    lost = [between.add(lambda r, fits=fits: "probe" in r.path and fits(r), lose=True) for fits in (replaces, creates)]
    check_save(path, 1, 2)
    assert [rule.hits for rule in lost] == [1, 1]


@pytest.fixture
def racy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = s3proxy(tmp_path)
    try:
        server.make_bucket("bucket")
        with fault_proxy(server.endpoint) as proxy:
            proxy.add(creates, together=2, times=-1)
            use(monkeypatch, server.environment(proxy.endpoint))
            yield "s3://bucket/runs/step"
    finally:
        server.server.stop()


def test_a_store_with_broken_conditional_puts_is_refused(racy: str) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket does not honour conditional puts.*commit='plain'"):
        bytecheckpoint.save(racy, states(step=1))
    assert resolve(racy).list() == []
    bytecheckpoint.configure(commit="plain")
    check_save(racy, 2)
    count = len(resolve(racy).list())
    check_save(racy, 3, async_checkpoint=True)
    assert len(resolve(racy).list()) == count, "files of the replaced step are gone, without the bulk deletion it lacks"


# --- conditional puts -------------------------------------------------------------------------------------------------


@tuned(object_conflict_retry=1.0)
def test_a_condition_refused_for_ever(storage: Storage, between: FaultProxy, path: str) -> None:
    between.add(asks("PUT", "metadata"), status=412, body=s3_error("PreconditionFailed"), times=-1)
    says = rf"cannot publish {path}/metadata\.parquet: .*nothing has changed; save again \(\d+ attempts"
    with pytest.raises(StorageUnavailableError, match=says):
        storage.publish("metadata.parquet", b"new", expected="")


def test_a_conflict_after_refusals(storage: Storage, between: FaultProxy) -> None:
    """Refused twice for nothing; then another writer was quicker indeed."""

    def refuse(request: Request) -> bool:
        if not (asks("PUT", "metadata")(request) and creates(request)):
            return False
        if rule.hits == 1:
            storage.publish("metadata.parquet", b"theirs")
        return True

    rule = between.add(refuse, status=409, body=s3_error("ConditionalRequestConflict"), times=2)
    with pytest.raises(StorageConflictError, match=r"cannot publish s3://.*/metadata\.parquet: another save"):
        storage.publish("metadata.parquet", b"ours", expected="")
    assert storage.read("metadata.parquet") == b"theirs"


def test_a_probe_all_of_whose_puts_are_refused_at_first(between: FaultProxy, path: str) -> None:
    rule = between.add(asks("PUT", "probe"), status=409, body=s3_error("ConditionalRequestConflict"), times=12)
    check_save(path, 1)
    assert rule.hits == 12
