"""Uploads to S3 that nobody will complete: the next save to the path aborts them, or `bytecheckpoint gc` does."""

from __future__ import annotations

import email.utils
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.representation.names import new_generation
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.optional import unfinished_uploads
from bytecheckpoint.tools.removal import collect_garbage, remove
from tests.servers.fault_proxy import FaultProxy, HttpFault, asks, s3_error
from tests.servers.s3 import S3Server
from tests.storage.conftest import use
from tests.support.coded import load_step, states
from tests.support.processes import environment, python

pytest.importorskip("boto3", reason="boto3 is not installed (the extra s3-profiles)")

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

#: As a file of a save that was killed is called.
OWN = f"model/rank-00000.{new_generation('killed', 1)}.safetensors"
LISTED = "<ListMultipartUploadsResult>{}</ListMultipartUploadsResult>"


@pytest.fixture
def begin(s3: S3Server, bucket: str) -> Callable[[str], str]:
    """Begins an upload to a key as a save does that is killed then; returns the key."""

    def begin(key: str) -> str:
        s3.request("POST", f"/{bucket}/{key}", "uploads=")
        return key

    return begin


def test_the_next_save_aborts_what_a_killed_one_began(
    s3: S3Server, bucket: str, path: str, begin: Callable[[str], str]
) -> None:
    begin(f"runs/step/{OWN}")
    others = [
        begin("runs/step/model/notes.txt"),
        begin(f"runs/step/deeper/{OWN}"),
        begin(f"runs/step_2/{OWN}"),
    ]
    bytecheckpoint.save(path, states(step=1))
    assert sorted(s3.uploads(bucket)) == sorted(others), "nobody else's"


_SAVE = """
import sys
import bytecheckpoint
from tests.support.coded import states

bytecheckpoint.configure(writer="thread")
bytecheckpoint.save(sys.argv[1], states(step=2, rows=60_000))
"""


def test_a_writer_that_is_killed_in_the_middle_of_a_file(
    s3: S3Server, bucket: str, path: str, between: FaultProxy
) -> None:
    killed = threading.Event()

    def kill() -> None:
        child.kill()
        child.wait(30)
        killed.set()

    bytecheckpoint.save(path, states(step=1))
    between.add(asks("PUT", "partNumber=2"), before=kill)
    child = subprocess.Popen(python("-c", _SAVE, path), env=environment())
    assert killed.wait(120)
    between.rules.clear()
    assert s3.uploads(bucket), "the killed writer left one"
    assert load_step(path) == 1
    bytecheckpoint.save(path, states(step=3))
    assert s3.uploads(bucket) == []
    assert load_step(path) == 3


def test_a_save_that_does_not_commit_aborts_nothing(
    s3: S3Server, bucket: str, path: str, between: FaultProxy, begin: Callable[[str], str]
) -> None:
    """The other save may be alive, and it is the one that commits."""
    bytecheckpoint.save(path, states(step=1))
    begin(f"runs/step/{OWN}")
    before = resolve(path).read("metadata.parquet")
    between.add(
        asks("PUT", "metadata"), before=lambda: s3.request("PUT", f"/{bucket}/runs/step/metadata.parquet", body=b"x")
    )
    with pytest.raises(StorageConflictError):
        bytecheckpoint.save(path, states(step=2))
    assert len(s3.uploads(bucket)) == 1
    assert resolve(path).read("metadata.parquet") != before


def later(between: FaultProxy) -> HttpFault:
    """Let the store's clock be a day ahead, so that what was begun a moment ago is old."""
    date = email.utils.formatdate(time.time() + 86_400, usegmt=True)
    return between.add(asks("GET", "uploads"), headers={"date": date}, times=-1)


# --- gc and rm --------------------------------------------------------------------------------------------------------


def test_gc_aborts_old_uploads(
    s3: S3Server, bucket: str, between: FaultProxy, begin: Callable[[str], str], capsys: Any
) -> None:
    """Also of a step that has nothing else; of a folder of steps or of one step."""
    root = f"s3://{bucket}/runs"
    begin(f"runs/step/{OWN}")
    other = begin(f"runs/{OWN.replace('.safetensors', '.txt')}")
    found = collect_garbage(root, older_than=3600)
    assert not found and len(s3.uploads(bucket)) == 2, "it may be of a save that goes on"
    later(between)
    (removal,) = collect_garbage(root, older_than=3600, dry_run=True)
    assert (removal.path, removal.what, removal.files) == (root, "upload", 1)
    assert len(s3.uploads(bucket)) == 2
    assert run(["gc", root, "--older-than", "1h", "--json"]) == 0
    assert [r["what"] for r in json.loads(capsys.readouterr().out)["removed"] if r["path"] == root] == ["upload"]
    assert s3.uploads(bucket) == [other]
    begin(f"runs/step/{OWN}")
    assert [r.what for r in collect_garbage(f"{root}/step", older_than=3600)] == ["upload"]
    assert s3.uploads(bucket) == [other]


def test_rm_aborts_uploads(s3: S3Server, bucket: str, path: str, begin: Callable[[str], str]) -> None:
    bytecheckpoint.save(path, states(step=1))
    begin(f"runs/step/{OWN}")
    remove(path)
    assert s3.uploads(bucket) == []


def test_the_age_is_by_the_clock_of_the_store(path: str, between: FaultProxy, begin: Callable[[str], str]) -> None:
    """A machine whose clock is wrong must not take a young upload for an old one."""
    begin(f"runs/step/{OWN}")
    (upload,) = unfinished_uploads(resolve(path))
    assert -2 < upload.age < 3600
    between.add(asks("GET", "uploads"), headers={"date": "Mon, 02 Jan 2045 10:00:00 GMT"})
    (upload,) = unfinished_uploads(resolve(path))
    assert upload.age > 1e8
    assert upload.name == OWN


# --- stores that do not play along ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "says", "requests"),
    [
        ({"status": 403, "body": s3_error("AccessDenied")}, "AccessDenied .*check the credentials", 1),
        ({"status": 501, "body": s3_error("NotImplemented")}, "NotImplemented", 1),
        ({"status": 503, "body": s3_error("SlowDown")}, "SlowDown", 3),
        ({"status": 404, "body": b""}, "does not know this request", 1),
        ({"status": 200, "body": b"<html>"}, "cannot list the uploads", 3),
        ({"lose": True}, "cannot list the uploads", 3),
    ],
)
def test_uploads_that_cannot_be_listed(
    path: str, between: FaultProxy, begin: Callable[[str], str], answer: dict[str, Any], says: str, requests: int
) -> None:
    """A save continues, after other attempts where these may help; the next save does not ask, and `gc` reports why."""
    begin(f"runs/step/{OWN}")
    rule = between.add(asks("GET", "uploads"), times=-1, **answer)
    for step in (1, 2):
        bytecheckpoint.save(path, states(step=step)).result()
        assert rule.hits == requests
    assert load_step(path) == 2
    (removal,) = [r for r in collect_garbage(path, older_than=0.0) if r.what == "upload"]
    assert re.search(says, removal.kept) and removal.files == 0


def test_a_listing_that_never_ends(path: str, between: FaultProxy) -> None:
    numbers = iter(range(10_000))
    body = LISTED.format(
        "<IsTruncated>true</IsTruncated><NextKeyMarker>{0}</NextKeyMarker><NextUploadIdMarker>{0}</NextUploadIdMarker>"
    )
    rule = between.add(asks("GET", "uploads"), status=200, times=-1)
    rule.before = lambda: setattr(rule, "body", body.format(next(numbers)).encode())
    assert unfinished_uploads(resolve(path)) == []
    assert rule.hits == 100


def test_other_keys_than_those_asked_for(path: str, between: FaultProxy) -> None:
    """Some stores ignore the prefix and list all uploads of the bucket."""
    upload = "<Upload><Key>{}</Key><UploadId>1</UploadId><Initiated>2020-01-01T00:00:00Z</Initiated></Upload>"
    found = upload.format(f"other/{OWN}") + upload.format(f"runs/step/{OWN}")
    between.add(asks("GET", "uploads"), status=200, body=LISTED.format(found).encode())
    (listed,) = unfinished_uploads(resolve(path))
    assert listed.name == OWN


def test_an_abort_that_fails(path: str, between: FaultProxy, begin: Callable[[str], str], caplog: Any) -> None:
    """A save that has committed says so; `gc` fails."""
    begin(f"runs/step/{OWN}")
    rule = between.add(asks("DELETE", "uploadId="), status=503, body=s3_error("SlowDown"), times=-1)
    bytecheckpoint.save(path, states(step=1))
    assert "cannot abort the upload to" in caplog.text
    later(between)
    with pytest.raises(StorageUnavailableError, match="cannot abort the upload"):
        collect_garbage(path, older_than=3600)
    rule.status, rule.body = 404, s3_error("NoSuchUpload")
    assert [r.what for r in collect_garbage(path, older_than=3600)] == ["upload"], "somebody else has aborted it"


@pytest.mark.parametrize("keys", ["wrong", "none"])
def test_uploads_are_not_listed_without_credentials(
    path: str, between: FaultProxy, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keys == "wrong":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG-SECRET")
    else:
        nowhere = {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}
        service = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
        use(monkeypatch, {"AWS_ENDPOINT_URL": between.endpoint, **nowhere, **service})
    says = "check the credentials" if keys == "wrong" else "found no credentials"
    with pytest.raises(StorageError, match=f"cannot list the uploads to .*{says}") as raised:
        unfinished_uploads(resolve(path))
    assert "WRONG" not in str(raised.value)


def test_a_user_name_in_the_endpoint(
    s3: S3Server, bucket: str, begin: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(f"runs/step/{OWN}")
    use(monkeypatch, s3.environment(s3.endpoint.replace("//", "//user:USERINFO-MARK@")))
    assert [upload.name for upload in unfinished_uploads(resolve(f"s3://{bucket}/runs/step"))] == [OWN]


def test_without_the_sdk_uploads_are_left_to_the_bucket(
    s3: S3Server, bucket: str, path: str, begin: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bytecheckpoint.storage.objects.bucket.has_sdk", lambda: False)
    begin(f"runs/step/{OWN}")
    bytecheckpoint.save(path, states(step=1))
    assert len(s3.uploads(bucket)) == 1
    assert unfinished_uploads(resolve(path)) == ()
