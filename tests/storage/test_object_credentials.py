"""Credentials of object stores: where they come from, what becomes of those that end, and that nothing shows them."""

from __future__ import annotations

import os
import sys
import time
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageError, UsageError
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.object_config import _Profile
from bytecheckpoint.storage.testing import content, write_file
from tests.faults.coded import load_step, states
from tests.servers.meddler import Rule, coded, meddler
from tests.servers.s3 import KEY, SECRET, S3Server
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


@pytest.fixture
def storage(bucket: str) -> Storage:
    return resolve(f"s3://{bucket}/runs/step")


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
        saver_of(current())._failed = None
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


# --- profiles ---------------------------------------------------------------------------------------------------------


class Sdk:
    """What stands for boto3, which is not installed for the tests: it reads a file of `key = value` lines.

    Attributes:
        renewed: how often credentials were asked for.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.renewed = 0
        modules = {name: types.ModuleType(name) for name in ("boto3", "botocore", "botocore.exceptions")}
        modules["boto3"].Session = self._session  # type: ignore[attr-defined]
        modules["botocore.exceptions"].BotoCoreError = type("BotoCoreError", (Exception,), {})  # type: ignore[attr-defined]
        self.modules = modules

    def _session(self) -> Any:
        if os.environ.get("AWS_PROFILE", "team") != "team":
            raise self.modules["botocore.exceptions"].BotoCoreError("The config profile (other) could not be found")
        found = dict(line.split(" = ") for line in self._file.read_text().splitlines() if " = " in line)

        def frozen() -> Any:
            self.renewed += 1
            return types.SimpleNamespace(access_key=found["id"], secret_key=found["secret"], token=None)

        credentials = types.SimpleNamespace(get_frozen_credentials=frozen) if found else None
        return types.SimpleNamespace(region_name="us-east-1", get_credentials=lambda: credentials)


@pytest.fixture
def file(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of credentials, and nothing in the variables but where it is."""
    made = tmp_path / "credentials"
    made.write_text(f"id = {KEY}\nsecret = {SECRET}\n")
    variables = {
        "AWS_ENDPOINT_URL": s3.endpoint, "AWS_SHARED_CREDENTIALS_FILE": str(made), "AWS_CONFIG_FILE": str(tmp_path / "no"),
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
    }  # fmt: skip
    use(monkeypatch, variables)
    return made


@pytest.fixture
def sdk(file: Path, monkeypatch: pytest.MonkeyPatch) -> Sdk:
    made = Sdk(file)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize("profile", [None, "team"])
def test_credentials_of_a_profile(sdk: Sdk, bucket: str, monkeypatch: pytest.MonkeyPatch, profile: str | None) -> None:
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    bytecheckpoint.configure(writer="thread")
    bytecheckpoint.save(f"s3://{bucket}/step", states(step=1), async_checkpoint=True).result(60)
    assert load_step(f"s3://{bucket}/step") == 1
    assert sdk.renewed


def test_a_file_of_credentials_that_changes(sdk: Sdk, file: Path, bucket: str) -> None:
    """Somebody else writes it anew, every hour or so; nothing here is told."""
    bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))
    good = file.read_text()
    file.write_text(good.replace(SECRET, "WRONG-SECRET"))
    with pytest.raises(StorageError, match="check the credentials"):
        load_step(f"s3://{bucket}/step")
    file.write_text(good)
    assert load_step(f"s3://{bucket}/step") == 1


def test_lent_credentials_are_asked_for_again_in_time(sdk: Sdk, file: Path, bucket: str) -> None:
    """The SDK renews them ten minutes before they end: for longer than that nobody may keep what it gave."""
    del bucket
    found = _Profile.find(named=False)
    assert found is not None
    left = found()["expires_at"] - datetime.now(UTC)
    assert 60 < left.total_seconds() <= 600


def test_a_profile_that_is_not_there(sdk: Sdk, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(
        UsageError, match=r"cannot use the AWS profile: The config profile \(other\) could not be found"
    ):
        resolve(f"s3://{bucket}/step")


@pytest.mark.parametrize("installed", [True, False])
def test_nothing_in_the_profiles(
    request: pytest.FixtureRequest, file: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Then the client's own chain has the last word, and says where else credentials could come from."""
    if installed:
        request.getfixturevalue("sdk")
        file.write_text("")
    else:
        monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StorageError, match=r"found no credentials.*files in ~/\.aws are read where boto3 is installed"):
        resolve(f"s3://{bucket}/step").read("metadata.parquet")


def test_a_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"AWS_PROFILE": "team"})
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match="pip install boto3"):
        resolve("s3://bucket/step")


# --- variables that change ------------------------------------------------------------------------------------------------


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


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_secret_is_shown_anywhere(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Neither in errors of all kinds, nor in logs, nor in what objects say of themselves, nor in files."""
    caplog.set_level(0)
    said: list[str] = []
    token = "TOKEN-MARK"
    with meddler(s3.endpoint) as between:
        endpoint = between.endpoint.replace("http://", "http://user:USERINFO-MARK@")
        use(monkeypatch, s3.environment(endpoint))
        path = f"s3://{bucket}/runs/step"
        bytecheckpoint.configure(storage_timeout=1.0, writer="thread")
        bytecheckpoint.save(path, states(step=1))
        storage = resolve(path)
        stored = b"".join(storage.read(name) for name, _ in storage.list())
        assert not any(word.encode() in stored for word in (SECRET, "USERINFO-MARK", KEY))
        said += [repr(storage), str(storage), storage.url, repr(vars(storage))]
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        echo = (
            coded("Odd", f"see http://h/?X-Amz-Security-Token={token}&X-Amz-Signature=SIGNATURE-MARK") + token.encode()
        )
        for status, code in (
            (500, ""),
            (403, "AccessDenied"),
            (400, "Odd"),
            (404, "NoSuchBucket"),
            (301, ""),
            (418, ""),
        ):
            body = echo.replace(b"Odd", code.encode()) if code else echo
            between.rules[:] = [Rule(lambda r: True, status=status, body=body, times=-1)]
            for call in (
                lambda: resolve(path).read("metadata.parquet"),
                lambda: resolve(path).list(),
                lambda: write_file(resolve(path), "model/file", content(10)),
                lambda: bytecheckpoint.save(path, states(step=2)),
                lambda: load_step(path),
            ):
                try:
                    call()
                except (CheckpointError, FileNotFoundError) as error:
                    said.append(f"{error!r} {error}")
    said += [caplog.text, *capfd.readouterr()]
    for word in (SECRET, "USERINFO-MARK", "TOKEN-MARK", "SIGNATURE-MARK"):
        assert not [text for text in said if word in text], word
    assert len(said) > 20
