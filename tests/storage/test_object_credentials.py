"""Credentials of object stores: where they come from, what becomes of those that end, and that nothing shows them."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, StorageError, StorageUnavailableError, UsageError
from bytecheckpoint.collectives import current
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.objects.aws import has_sdk, s3_access
from bytecheckpoint.storage.objects.config import environment
from bytecheckpoint.storage.testing import content, write_file
from bytecheckpoint.tuning import tuned
from bytecheckpoint.world import world_of
from tests.servers.fault_proxy import FaultProxy, HttpFault, fault_proxy, s3_error
from tests.servers.s3 import KEY, SECRET, S3Server
from tests.storage.checks import check_save, within
from tests.storage.conftest import use
from tests.support.coded import load_step, states
from tests.support.settings import forget_failure

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


needs_sdk = pytest.mark.skipif(not has_sdk(), reason="boto3 is not installed (the extra s3-profiles)")


@pytest.fixture
def storage(bucket: str) -> Storage:
    return resolve(f"s3://{bucket}/runs/step")


def test_wrong_credentials(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = s3.environment() | {"AWS_SECRET_ACCESS_KEY": "WRONG-SECRET", "AWS_SESSION_TOKEN": "TOKEN-SECRET"}
    use(monkeypatch, variables)
    for asynchronous in (False, True):
        says = rf"s3://{bucket}/step/\S+: \w+: .*check the credentials"
        with within(20), pytest.raises(StorageError, match=says) as raised:
            bytecheckpoint.save(f"s3://{bucket}/step", states(step=1), async_checkpoint=asynchronous).result(60)
        for secret in ("WRONG-SECRET", "TOKEN-SECRET", SECRET, "Signature=", "StringToSign"):
            assert secret not in str(raised.value)
        forget_failure()


def test_no_credentials(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1", "HOME": "/nowhere"}
    use(monkeypatch, {"AWS_ENDPOINT_URL": s3.endpoint, **nowhere})
    with within(20), pytest.raises(StorageError, match="found no credentials in the environment"):
        resolve(f"s3://{bucket}/step").read("metadata.parquet")


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes the files of the AWS tools; the variables say nothing but where the files are."""
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    use(monkeypatch, {
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials), "AWS_CONFIG_FILE": str(config),
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
    })  # fmt: skip

    def write(of_credentials: str, of_config: str) -> None:
        known = {"ENDPOINT": s3.endpoint, "KEY": KEY, "SECRET": SECRET}
        credentials.write_text(re.sub("ENDPOINT|KEY|SECRET", lambda m: known[m[0]], of_credentials))
        config.write_text(re.sub("ENDPOINT|KEY|SECRET", lambda m: known[m[0]], of_config))

    return write


KEYS = "aws_access_key_id = KEY\naws_secret_access_key = SECRET\n"
PROFILES = {
    "default": (f"[default]\n{KEYS}", "[default]\nregion = us-east-1\nendpoint_url = ENDPOINT\n"),
    "team": (f"[default]\nbroken = 1\n[team]\n{KEYS}", "[profile team]\nendpoint_url = ENDPOINT\n"),
    "of the config alone": ("", f"[profile team]\n{KEYS}endpoint_url = ENDPOINT\n"),
    "services": (
        f"[team]\n{KEYS}",
        "# comment\n[profile team]\nservices = local\nendpoint_url = http://127.0.0.1:1\n"
        "[services local]\ndynamodb =\n  endpoint_url = http://127.0.0.1:2\ns3 =\n  endpoint_url = ENDPOINT\n",
    ),
}


@pytest.fixture
def without_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytecheckpoint.storage.objects.aws.has_sdk", lambda: False)


@needs_sdk
@pytest.mark.parametrize("kind", PROFILES)
def test_profiles(files: Callable[[str, str], None], bucket: str, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    files(*PROFILES[kind])
    if kind != "default":
        monkeypatch.setenv("AWS_PROFILE", "team")
    check_save(f"s3://{bucket}/step", 1)
    check_save(f"s3://{bucket}/step", 2, async_checkpoint=True)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_variables_take_precedence(
    files: Callable[[str, str], None], s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    files(
        "[default]\naws_access_key_id = x\naws_secret_access_key = x\n",
        "[default]\nendpoint_url = http://127.0.0.1:1\n",
    )
    monkeypatch.setenv(variable, s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    check_save(f"s3://{bucket}/step", 1)


@needs_sdk
def test_the_endpoint_of_a_profile_with_keys_of_the_environment(
    files: Callable[[str, str], None], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files("", "[default]\nendpoint_url = ENDPOINT\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    check_save(f"s3://{bucket}/step", 1)


@needs_sdk
def test_endpoints_of_files_can_be_switched_off(
    files: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(*PROFILES["default"])
    assert s3_access(environment()).endpoint
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert not s3_access(environment()).endpoint


@pytest.fixture
def program(files: Callable[[str, str], None], tmp_path: Path) -> Path:
    """A profile whose credentials a program prints: only the SDK runs it. It leaves a line in the file for each run."""
    if not has_sdk():
        pytest.skip("boto3 is not installed (the extra s3-profiles)")
    runs = tmp_path / "runs"
    script = tmp_path / "program.py"
    found = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "Expiration": "2099-01-01T00:00:00Z"}
    script.write_text(f"open({str(runs)!r}, 'a').write('run\\n')\nprint({json.dumps(json.dumps(found))})\n")
    files("", f"[profile team]\ncredential_process = {sys.executable} {script}\nendpoint_url = ENDPOINT\n")
    return runs


def test_a_profile_of_a_program(program: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "team")
    check_save(f"s3://{bucket}/step", 1)
    check_save(f"s3://{bucket}/step", 2, async_checkpoint=True)
    assert program.read_text()


def test_lent_credentials_are_asked_for_again_in_time(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK renews them ten minutes before they end: for longer than that nobody may keep what it gave."""
    monkeypatch.setenv("AWS_PROFILE", "team")
    provider = s3_access(environment()).provider
    assert provider is not None
    left = provider()["expires_at"] - datetime.now(UTC)
    assert 60 < left.total_seconds() <= 600


@needs_sdk
def test_a_file_of_credentials_that_changes(files: Callable[[str, str], None], bucket: str) -> None:
    """Another program rewrites the file every hour or so, without notice."""
    files(*PROFILES["default"])
    bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))
    files(PROFILES["default"][0].replace("SECRET", "WRONG"), PROFILES["default"][1])
    with pytest.raises(StorageError, match="check the credentials"):
        load_step(f"s3://{bucket}/step")
    files(*PROFILES["default"])
    assert load_step(f"s3://{bucket}/step") == 1


@needs_sdk
def test_a_profile_that_is_not_there(
    files: Callable[[str, str], None], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(*PROFILES["default"])
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UsageError, match=r"cannot use s3://: .*profile \(other\) could not be found"):
        resolve(f"s3://{bucket}/step")


@needs_sdk
@pytest.mark.parametrize(
    ("of_credentials", "of_config", "says"),
    [
        ("no section = 1", "", "Unable to parse config file: .*credentials"),
        ("", "[default]\nendpoint_url = SECRET-MARK", "endpoint_url of the profile is no URL"),
    ],
)
def test_broken_files(files: Callable[[str, str], None], of_credentials: str, of_config: str, says: str) -> None:
    files(of_credentials, of_config)
    with pytest.raises(UsageError, match=says) as raised:
        resolve("s3://bucket/step")
    assert "MARK" not in str(raised.value)


@needs_sdk
def test_nothing_in_the_profiles(files: Callable[[str, str], None], bucket: str) -> None:
    """Then the client's own chain has the last word, and says where else credentials could come from."""
    files("", "[default]\nendpoint_url = ENDPOINT\n")
    with pytest.raises(StorageError, match=r"found no credentials.*profiles in ~/\.aws need boto3"):
        resolve(f"s3://{bucket}/step").read("metadata.parquet")


@pytest.mark.usefixtures("without_sdk")
def test_profiles_need_the_sdk(
    files: Callable[[str, str], None], s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the endpoint of a profile, credentials of the environment would go to another store."""
    files(*PROFILES["default"])
    with pytest.raises(UsageError, match=r"endpoint_url in the files of the AWS tools needs the package boto3"):
        resolve("s3://bucket/step")
    use(monkeypatch, s3.environment())
    check_save(f"s3://{bucket}/step", 1)
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(
        UsageError, match=r"profile team needs the package boto3.*bytecheckpoint-unified\[s3-profiles\]"
    ):
        resolve("s3://bucket/step")


# --- the machine's own service ----------------------------------------------------------------------------------------


@pytest.fixture
def metadata(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A service that lends the server's credentials for a second each, as the machines of a cloud do."""
    lent = {
        "Code": "Success", "AccessKeyId": KEY, "SecretAccessKey": SECRET, "Token": "",
        "LastUpdated": "2023-01-02T03:04:05Z", "Type": "AWS-HMAC",
    }  # fmt: skip

    def lend() -> None:
        end = datetime.now(UTC) + timedelta(seconds=1)
        credentials.body = json.dumps({**lent, "Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}"}).encode()

    with fault_proxy("http://127.0.0.1:1") as made:
        credentials = made.add(lambda request: request.path.endswith("/role"), status=200, before=lend, times=-1)
        made.add(lambda request: True, status=200, body=b"role", times=-1)
        variables = {
            "AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "us-east-1", "AWS_METADATA_ENDPOINT": made.endpoint,
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere",
        }  # fmt: skip
        use(monkeypatch, variables)
        yield made


def fail(metadata: FaultProxy, status: int, seconds: float) -> None:
    """Let the service refuse everything for some seconds."""
    rule = HttpFault(lambda request: True, status=status, times=-1)
    metadata.rules.insert(0, rule)
    threading.Timer(seconds, setattr, [rule, "times", 0]).start()


def test_credentials_that_the_machine_lends(metadata: FaultProxy, bucket: str) -> None:
    """Each holds for a second only: it is asked for again in the middle of a save."""
    check_save(f"s3://{bucket}/step", 1)
    check_save(f"s3://{bucket}/step", 2, async_checkpoint=True)
    assert len(metadata.requests) > 10


@pytest.mark.parametrize("status", [500, 429])
def test_a_service_of_credentials_that_fails_for_a_while(metadata: FaultProxy, bucket: str, status: int) -> None:
    """It may refuse when all ranks of a job ask at once: the client tries again, at the first contact too."""
    fail(metadata, status, 1.5)
    bytecheckpoint.save(f"s3://{bucket}/step", states(step=1))
    fail(metadata, status, 1.5)
    assert load_step(f"s3://{bucket}/step") == 1


def test_a_service_of_credentials_that_goes_on_failing(metadata: FaultProxy, bucket: str) -> None:
    bytecheckpoint.configure(storage_timeout=2.0)
    fail(metadata, 503, 10)
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError, match=r"service that lends credentials .*503.*, attempt \d+\)"):
        load_step(f"s3://{bucket}/step")
    assert 2 < time.monotonic() - begun < 10


# --- variables that change ------------------------------------------------------------------------------------------------


def test_the_environment_may_change(storage: Storage, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.publish("x", b"content")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    with pytest.raises(StorageError, match="check the credentials"):
        resolve(storage.url).read("x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert resolve(storage.url).read("x") == b"content"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == SECRET


@pytest.mark.parametrize("change", ["token", "timeout"])
def test_a_store_that_has_answered_is_waited_for(
    between: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Also by a client that is new, because credentials or settings have changed."""
    path = f"s3://{bucket}/step"
    bytecheckpoint.save(path, states(step=1))
    if change == "token":
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "renewed")
    else:
        bytecheckpoint.configure(storage_timeout=60.0)
    busy = between.add(lambda request: True, cut=0, times=-1)
    threading.Timer(6.0, setattr, [busy, "times", 0]).start()
    with tuned(object_first_contact=1.0):
        assert load_step(path) == 1
    assert busy.hits


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
    helper = world_of(current()).resources.running_helper
    assert helper is not None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    with pytest.raises(StorageError, match="check the credentials"):
        bytecheckpoint.save(path, states(step=2), async_checkpoint=True).result(60)
    forget_failure()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    check_save(path, 3, async_checkpoint=True)
    assert world_of(current()).resources.running_helper is helper, "it is the same process"


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_secret_is_shown_anywhere(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Neither in errors of all kinds, nor in logs, nor in what objects say of themselves, nor in files."""
    caplog.set_level(0)
    said: list[str] = []
    token = "TOKEN-MARK"
    with fault_proxy(s3.endpoint) as between:
        endpoint = between.endpoint.replace("http://", "http://user:USERINFO-MARK@")
        use(monkeypatch, s3.environment(endpoint))
        path = f"s3://{bucket}/runs/step"
        bytecheckpoint.configure(writer="thread")
        bytecheckpoint.save(path, states(step=1))  # with time for the probe
        bytecheckpoint.configure(storage_timeout=1.0)
        storage = resolve(path)
        stored = b"".join(storage.read(name) for name, _ in storage.list())
        assert not any(word.encode() in stored for word in (SECRET, "USERINFO-MARK", KEY))
        said += [repr(storage), str(storage), storage.url, repr(vars(storage))]
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        echo = f"see http://h/?X-Amz-Security-Token={token}&X-Amz-Signature=SIGNATURE-MARK"
        codes = {500: "Odd", 403: "AccessDenied", 400: "Odd", 404: "NoSuchBucket", 301: "Odd", 418: "Odd"}
        for status, code in codes.items():
            between.rules.clear()
            between.add(lambda r: True, status=status, body=s3_error(code, echo) + token.encode(), times=-1)
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
