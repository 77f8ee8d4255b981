"""Find S3's endpoint, region and credentials: in the environment, and by the AWS SDK in the files of the AWS tools.

The client library reads the environment, but no files. The SDK comes with the extra `s3-profiles` (decision 0056).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bytecheckpoint._distribution import install_command
from bytecheckpoint.errors import UsageError

__all__ = ["CREDENTIAL_FILES", "S3Access", "has_sdk", "s3_access"]

#: Files of the AWS tools: the variable that names the file, and the default place.
CREDENTIAL_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
#: Variables by which the client library finds credentials without any file.
_EXPLICIT = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: Properties of a profile that has credentials. Without one the client library asks the machine's own service.
_CREDENTIALS = {
    "aws_access_key_id", "role_arn", "credential_process", "sso_session", "sso_start_url", "web_identity_token_file",
    "login_session",
}  # fmt: skip
#: Seconds for which credentials of the SDK are reused: it renews them ten minutes before they expire.
_SDK_SECONDS = 600.0

#: Function that returns "access_key_id", "secret_access_key", "token" and "expires_at".
Credentials = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class S3Access:
    """The address and credentials of S3.

    Attributes:
        endpoint: URL of the server; "" for AWS.
        region: name of the region; "" if nothing names one.
        provider: function of the SDK that returns credentials; None if the client library finds them itself.
    """

    endpoint: str
    region: str
    provider: Credentials | None = None


def has_sdk() -> bool:
    """Return whether the AWS SDK is installed."""
    return find_spec("botocore") is not None


def s3_access(variables: Mapping[str, str]) -> S3Access:
    """Read the environment, and the files that it names if the SDK is installed.

    Args:
        variables: environment variables for object stores.

    Raises:
        UsageError: AWS_PROFILE names a profile that is absent or unusable, a file is broken, or the SDK is needed.
    """
    endpoint = next(filter(None, map(variables.get, _ENDPOINTS)), "")
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or ""
    named = variables.get("AWS_PROFILE") or variables.get("AWS_DEFAULT_PROFILE")
    places = (os.path.expanduser(variables.get(name, default)) for name, default in CREDENTIAL_FILES.items())
    files = [Path(place) for place in places if os.path.isfile(place)]
    if not (named or files):
        return S3Access(endpoint, region)
    if not has_sdk():
        # Without its endpoint, a profile's credentials would go to another store.
        if named or (not endpoint and any("endpoint_url" in file.read_text(errors="replace") for file in files)):
            wanted = f"profile {named}" if named else "the endpoint_url in the files of the AWS tools"
            raise UsageError(
                f"cannot use s3://: {wanted} needs the package boto3: {install_command('s3-profiles')}, or set "
                f"AWS_ENDPOINT_URL and the keys in the environment"
            )
        return S3Access(endpoint, region)
    return _access_by_sdk(endpoint, region, lend=not any(name in variables for name in _EXPLICIT))


def _access_by_sdk(endpoint: str, region: str, *, lend: bool) -> S3Access:
    """Complete the address from the profile, and take its credentials if `lend` is set."""
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session()
    try:
        profile = session.get_scoped_config()
        if not endpoint and str(session.get_config_variable("ignore_configured_endpoint_urls")).lower() != "true":
            endpoint = ConfiguredEndpointProvider(session.full_config, profile, "s3").provide() or ""
        region = region or session.get_config_variable("region") or ""
        credentials = session.get_credentials() if lend and profile.keys() & _CREDENTIALS else None
    except BotoCoreError as error:
        raise UsageError(f"cannot use s3://: {error}; see AWS_PROFILE and the files in ~/.aws") from None
    if credentials is None:
        return S3Access(endpoint, region)

    def current() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # renewed before they expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_SDK_SECONDS),
        }

    return S3Access(endpoint, region, current)
