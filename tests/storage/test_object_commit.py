"""Object stores: commit by conditional put, and the probe that finds out which stores honour that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tuning import tuned
from tests.faults.coded import load_step, states
from tests.servers.fault_proxy import FaultProxy, HttpFault, Request, asks, s3_error
from tests.servers.s3 import S3Server, s3proxy
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def is_put(name: str, *, conditional: bool | None = None) -> HttpFault:
    def fits(request: Request) -> bool:
        given = bool({"if-none-match", "if-match"} & request.headers.keys())
        return request.method == "PUT" and name in request.path and conditional in (None, given)

    return HttpFault(fits)


# --- commit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
def test_a_put_that_meets_its_own_earlier_write_is_a_success(
    storage: Storage, between: FaultProxy, replacing: bool
) -> None:
    if replacing:
        storage.publish("metadata.parquet", b"old", expected="")
    version = storage.version("metadata.parquet")
    rule = is_put("metadata.parquet", conditional=True)
    rule.lose, rule.times = True, 2
    between.rules.append(rule)
    storage.publish("metadata.parquet", b"new", expected=version)
    assert rule.hits >= 1
    assert len([r for r in between.requests if r.method == "PUT" and "metadata" in r.path]) > 1, "it was tried again"
    assert storage.read("metadata.parquet") == b"new"


@pytest.mark.parametrize("replacing", [False, True])
def test_a_put_that_meets_another_writers_is_a_conflict(storage: Storage, between: FaultProxy, replacing: bool) -> None:
    if replacing:
        storage.publish("metadata.parquet", b"old", expected="")
    version = storage.version("metadata.parquet")
    storage.publish("metadata.parquet", b"theirs")
    with pytest.raises(StorageConflictError, match=r"cannot publish s3://.*/metadata\.parquet: another save"):
        storage.publish("metadata.parquet", b"ours", expected=version)
    assert storage.read("metadata.parquet") == b"theirs"


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
    """As in a notebook."""

    async def main() -> None:
        bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))

    asyncio.run(main())
    assert load_step(f"s3://{bucket}/step") == 1


def test_a_store_that_cannot_replace_conditionally(between: FaultProxy, bucket: str) -> None:
    """Ceph refuses a right If-Match: checkpoints can be created there, each at a path of its own."""
    between.rules.append(HttpFault(lambda r: "if-match" in r.headers, status=412, times=-1))
    path = f"s3://{bucket}/runs/step"
    bytecheckpoint.save(path, states(step=1))
    files = resolve(path).list()
    between.requests.clear()
    with pytest.raises(StorageError, match=r"cannot replace .* \(If-Match\); save each step to a path of its own"):
        bytecheckpoint.save(path, states(step=2))
    assert not any(r.method in ("PUT", "POST") for r in between.requests), "the error comes before anything is sent"
    assert load_step(path) == 1
    assert resolve(path).list() == files
    bytecheckpoint.configure(commit="plain")
    bytecheckpoint.save(path, states(step=3))
    assert load_step(path) == 3


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
    between.rules.append(HttpFault(lambda r: "if-none-match" in r.headers, strip=("if-none-match",), times=-1))
    with pytest.raises(StorageError, match=r"does not honour conditional puts.*settings\.commit='plain'"):
        bytecheckpoint.save(path, states(step=1))
    assert not any("/rank" in request.path for request in between.requests), "the error comes before anything is sent"


@pytest.mark.usefixtures("unsigned")
def test_a_store_that_ignores_the_condition_of_a_replacement(between: FaultProxy, path: str) -> None:
    between.rules.append(HttpFault(lambda r: "if-match" in r.headers, strip=("if-match",), times=-1))
    bytecheckpoint.save(path, states(step=1))
    with pytest.raises(StorageError, match=r"cannot replace .*\(If-Match\); save each step to a path of its own"):
        bytecheckpoint.save(path, states(step=2))
    assert load_step(path) == 1


@pytest.mark.parametrize("tag", ["", '""'])
def test_a_store_that_does_not_tell_versions_apart(between: FaultProxy, path: str, tag: str) -> None:
    between.rules.append(HttpFault(lambda r: r.method in ("HEAD", "PUT"), headers={"etag": tag}, times=-1))
    bytecheckpoint.save(path, states(step=1))
    with pytest.raises(StorageError, match=r"cannot replace .* \(If-Match\); save each step to a path of its own"):
        bytecheckpoint.save(path, states(step=2))
    assert load_step(path) == 1


#: As stores answer that do not know a header.
UNKNOWN = [(501, "NotImplemented"), (400, "InvalidArgument"), (400, ""), (405, "MethodNotAllowed")]


@pytest.mark.parametrize(("status", "code"), UNKNOWN)
def test_a_store_that_knows_no_conditions(between: FaultProxy, path: str, status: int, code: str) -> None:
    body = s3_error(code) if code else b""
    between.rules.append(
        HttpFault(lambda r: bool({"if-none-match", "if-match"} & {*r.headers}), status=status, body=body, times=-1)
    )
    says = rf"cannot publish {path}/metadata\.parquet: \S+ does not honour conditional puts.*settings\.commit='plain'"
    with pytest.raises(StorageError, match=says):
        bytecheckpoint.save(path, states(step=1))
    assert resolve(path).list() == []
    bytecheckpoint.configure(commit="plain")
    for step in (2, 3):
        bytecheckpoint.save(path, states(step=step))
        assert load_step(path) == step


@pytest.mark.parametrize(("status", "code"), UNKNOWN)
def test_a_store_that_knows_no_condition_of_a_replacement(
    between: FaultProxy, path: str, status: int, code: str
) -> None:
    body = s3_error(code) if code else b""
    between.rules.append(HttpFault(lambda r: "if-match" in r.headers, status=status, body=body, times=-1))
    bytecheckpoint.save(path, states(step=1))
    with pytest.raises(StorageError, match=r"cannot replace .* \(If-Match\); save each step to a path of its own"):
        bytecheckpoint.save(path, states(step=2))
    assert load_step(path) == 1


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "AccessDenied"), (501, "NotImplemented")])
def test_what_keeps_the_probe_from_its_puts_is_no_verdict(
    between: FaultProxy, path: str, status: int, code: str
) -> None:
    """The store refuses whatever is put, not the condition."""
    between.rules.append(HttpFault(asks("PUT"), status=status, body=s3_error(code), times=-1))
    with pytest.raises(StorageError, match=rf"cannot try conditional puts on s3://\S+: {code}: so it is"):
        bytecheckpoint.save(path, states(step=1))
    between.rules.clear()
    for step in (2, 3):
        bytecheckpoint.save(path, states(step=step))
        assert load_step(path) == step


def test_a_probe_whose_answers_get_lost(between: FaultProxy, path: str) -> None:
    """What was carried out and is asked for again is refused; that is no fault of the store."""
    lost = [
        HttpFault(lambda r, header=header: "probe" in r.path and header in r.headers, lose=True, times=1)
        for header in ("if-match", "if-none-match")
    ]
    between.rules += lost
    for step in (1, 2):
        bytecheckpoint.save(path, states(step=step))
        assert load_step(path) == step
    assert [rule.hits for rule in lost] == [1, 1]


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


# --- conditional puts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("status", [409, 412])
def test_a_condition_refused_although_nothing_has_changed(
    storage: Storage, between: FaultProxy, replacing: bool, status: int
) -> None:
    """S3 answers 409 when requests of others were under way, whatever became of them."""
    if replacing:
        storage.publish("metadata.parquet", b"old", expected="")
    version = storage.version("metadata.parquet")
    rule = HttpFault(asks("PUT", "metadata"), status=status, body=s3_error("ConditionalRequestConflict"), times=2)
    between.rules.append(rule)
    storage.publish("metadata.parquet", b"new", expected=version)
    assert rule.hits == 2
    assert storage.read("metadata.parquet") == b"new"


@tuned(object_conflict_retry=1.0)
def test_a_condition_refused_for_ever(storage: Storage, between: FaultProxy, path: str) -> None:
    between.rules.append(HttpFault(asks("PUT", "metadata"), status=412, body=s3_error("PreconditionFailed"), times=-1))
    with pytest.raises(
        StorageUnavailableError, match=rf"cannot publish {path}/metadata\.parquet: .*nothing has changed \(\d+ attempts"
    ):
        storage.publish("metadata.parquet", b"new", expected="")


def test_a_conflict_after_refusals(storage: Storage, between: FaultProxy) -> None:
    """Refused twice for nothing; then another writer was quicker indeed."""

    def refuse(request: Request) -> bool:
        if request.method != "PUT" or "metadata" not in request.path or "if-none-match" not in request.headers:
            return False
        if rule.hits == 1:
            storage.publish("metadata.parquet", b"theirs")
        return True

    rule = HttpFault(refuse, status=409, body=s3_error("ConditionalRequestConflict"), times=2)
    between.rules.append(rule)
    with pytest.raises(StorageConflictError, match="another save"):
        storage.publish("metadata.parquet", b"ours", expected="")
    assert storage.read("metadata.parquet") == b"theirs"


def test_a_probe_all_of_whose_puts_are_refused_at_first(between: FaultProxy, path: str) -> None:
    rule = HttpFault(asks("PUT", "probe"), status=409, body=s3_error("ConditionalRequestConflict"), times=12)
    between.rules.append(rule)
    bytecheckpoint.save(path, states(step=1))
    assert rule.hits == 12
    assert load_step(path) == 1
