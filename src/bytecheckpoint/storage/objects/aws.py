"""Where S3 is and who asks: from the environment and from the files of the AWS tools.

The client library reads the environment, but no files. What the files say in plain text (endpoint, region, keys) is read
here. Profiles that assume a role, log in or run a program are left to the AWS SDK (boto3), if it is installed.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import UsageError

__all__ = ["CREDENTIAL_FILES", "S3Access", "s3_access", "sdk_credentials"]

#: Files of the AWS tools: the variable that names the file, and the default place.
CREDENTIAL_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
#: Variables by which the client library finds credentials without any file.
_EXPLICIT = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: Properties of a profile whose credentials only the SDK can get.
_FOR_THE_SDK = (
    "role_arn", "credential_process", "sso_session", "sso_start_url", "web_identity_token_file", "login_session",
)  # fmt: skip
#: Seconds for which credentials of the SDK are reused: it renews them ten minutes before they expire.
_SDK_SECONDS = 600.0

#: Returns "access_key_id", "secret_access_key", "token" and perhaps "expires_at".
Credentials = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class S3Access:
    """Where S3 is and who asks.

    Attributes:
        endpoint: URL of the server; "" for AWS.
        region: "" if nothing names one.
        keys: access key, secret key and token of the environment or of a profile; None: see `provider`.
        provider: asks the SDK; None: the client library looks for credentials itself.
    """

    endpoint: str
    region: str
    keys: tuple[str, str, str] | None = None
    provider: Credentials | None = None


def s3_access(variables: Mapping[str, str]) -> S3Access:
    """Read the environment and the files that it names.

    Args:
        variables: the environment variables for object stores.

    Raises:
        UsageError: AWS_PROFILE names a profile that is not there or cannot be used, or a file is broken.
    """
    named = variables.get("AWS_PROFILE") or variables.get("AWS_DEFAULT_PROFILE") or ""
    profile, endpoint = _profile(variables, named)
    endpoint = next(
        filter(None, map(variables.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))), endpoint
    )
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or profile.get("region", "")
    if any(name in variables for name in _EXPLICIT):
        key, secret = variables.get("AWS_ACCESS_KEY_ID"), variables.get("AWS_SECRET_ACCESS_KEY")
        keys = (key, secret, variables.get("AWS_SESSION_TOKEN", "")) if key and secret else None
        return S3Access(endpoint, region, keys)
    if any(name in profile for name in _FOR_THE_SDK):
        return S3Access(endpoint, region, provider=sdk_credentials(f"profile {named or 'default'}" if named else ""))
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret:
        return S3Access(endpoint, region, (key, secret, profile.get("aws_session_token", "")))
    return S3Access(endpoint, region)


def sdk_credentials(wanted: str = "") -> Credentials | None:
    """Return what asks the AWS SDK; None if it is not installed or finds no credentials.

    Args:
        wanted: what needs the SDK, for the error if it is not installed; "": that is no error.

    Raises:
        UsageError: the SDK is wanted and not installed, or the files of the AWS tools are wrong.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        if not wanted:
            return None
        raise UsageError(
            f"cannot use s3://: {wanted} needs the package boto3 (pip install 'bytecheckpoint[s3-profiles]')"
        ) from None
    try:
        credentials = boto3.Session().get_credentials()
    except BotoCoreError as error:
        raise UsageError(f"cannot use s3://: {error}; see AWS_PROFILE and the files in ~/.aws") from None
    if credentials is None:
        return None

    def current() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renewed before they expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_SDK_SECONDS),
        }

    return current


def _profile(variables: Mapping[str, str], named: str) -> tuple[dict[str, str], str]:
    """Return the properties of a profile, and the endpoint that it names for S3; {} and "" without one."""
    credentials, config = (
        _sections(Path(os.path.expanduser(variables.get(name, default)))) for name, default in CREDENTIAL_FILES.items()
    )
    name = named or "default"
    in_config = config.get(name if name == "default" else f"profile {name}")
    found = [section for section in (in_config, credentials.get(name)) if section is not None]
    if not found and named:
        raise UsageError(f"cannot use s3://: the profile {named!r} is not in the files of AWS_PROFILE, in ~/.aws")
    profile = {key: value for section in found for key, value in section.items()}
    ignored = variables.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get("ignore_configured_endpoint_urls", "")
    if ignored.lower() == "true":
        return profile, ""
    services = config.get(f"services {profile.get('services', '')}", {})
    nested = (line.partition("=") for line in services.get("s3", "").splitlines())
    of_s3 = next((value.strip() for key, _, value in nested if key.strip() == "endpoint_url"), "")
    return profile, of_s3 or profile.get("endpoint_url", "")


def _sections(path: Path) -> dict[str, dict[str, str]]:
    """Read a file of the AWS tools: properties by section; {} if there is none."""
    parser = configparser.RawConfigParser(default_section="", strict=False)
    try:
        parser.read_string(path.read_text())
    except OSError:
        return {}
    except (configparser.Error, UnicodeDecodeError):
        raise UsageError(f"cannot use s3://: {path} is no configuration of the AWS tools") from None
    return {" ".join(name.split()): dict(parser[name]) for name in parser.sections()}
