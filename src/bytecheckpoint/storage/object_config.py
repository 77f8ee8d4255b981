"""Clients of object stores, configured from the environment that their own tools use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import UsageError

__all__ = ["SCHEMES", "environment", "fingerprint", "make_client"]

#: What the store calls its top-level folders, by scheme.
SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container"}
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINTS = {
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
    "AZURE_STORAGE_BLOB_ENDPOINT",
}  # fmt: skip
#: A request whose signature is this old is refused by some stores, and the client does not sign anew.
_LONGEST_RETRY = 240.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Variables that may hold whole documents.
_DOCUMENTS = {"GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS_JSON"}
#: Files that hold credentials and are read once per client, by the variable that names them; where they are by default.
_CREDENTIAL_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
    "GOOGLE_SERVICE_ACCOUNT": "", "GOOGLE_SERVICE_ACCOUNT_PATH": "",
}  # fmt: skip
#: For how long credentials of the AWS SDK are taken as they are: it renews them ten minutes before they end.
_PROFILE_SECONDS = 600.0
#: Time limit of one request, which carries at most some ten megabytes.
_REQUEST_SECONDS = 120.0


def environment() -> dict[str, str]:
    """The variables that configure object stores."""
    return {name: value for name, value in os.environ.items() if name.startswith(tuple(_PREFIXES.values()))}


def fingerprint(variables: Mapping[str, str]) -> int:
    """A number that changes when the variables do, or the files that they name: clients made before are outdated then."""
    seen: list[object] = [*sorted(variables.items())]
    for path in _credential_files(variables):
        try:
            found = path.stat()
        except OSError:
            continue
        seen.append((str(path), found.st_mtime_ns, found.st_size, found.st_ino))
    return hash(tuple(seen))


def _credential_files(variables: Mapping[str, str], prefix: str = "") -> list[Path]:
    named = {name: variables.get(name, default) for name, default in _CREDENTIAL_FILES.items()}
    return [Path(path).expanduser() for name, path in named.items() if path and name.startswith(prefix)]


def make_client(
    scheme: str, bucket: str, seconds: float, variables: Mapping[str, str], *, patient: bool = False, **options: Any
) -> Any:
    """A client of one bucket.

    Args:
        scheme: "s3", "gs" or "az".
        bucket: its name.
        seconds: for how long an operation may be tried.
        variables: from `environment`.
        patient: it tries each request again after transient errors, for as long.
        **options: of the client's class.

    Raises:
        UsageError: variables that contradict each other, or lack what is needed.
    """
    import obstore.store

    _refuse_broken(scheme, variables)
    retry = {
        "max_retries": 10_000 if patient else 0,
        "retry_timeout": timedelta(seconds=min(seconds, _LONGEST_RETRY)),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
    }
    client: dict[str, Any] = {}
    if not any(name.endswith("_TIMEOUT") for name in variables):
        client["timeout"] = timedelta(seconds=min(_REQUEST_SECONDS, seconds))
    try:
        if scheme == "s3":
            options = {**_s3(variables, client), **options}
            return obstore.store.S3Store(bucket, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type]
        if scheme == "gs":
            return obstore.store.GCSStore(bucket, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type]
        options = {**_azure(variables, client), **options}
        return obstore.store.AzureStore(bucket, client_options=client, retry_config=retry, **options)  # type: ignore[arg-type]
    except UsageError:
        raise
    except (obstore.exceptions.BaseError, ValueError) as error:
        from .object_errors import facts_of

        raise UsageError(f"cannot use {scheme}://{bucket}: {facts_of(error).reason}; see its variables") from None


def _refuse_broken(scheme: str, variables: Mapping[str, str]) -> None:
    """Refuse variables on which the client ends with a panic, without repeating what they hold."""
    for name, value in variables.items():
        if not name.startswith(_PREFIXES[scheme]):
            continue
        if _CONTROL.search(value) and name not in _DOCUMENTS:
            raise UsageError(
                f"cannot use {scheme}://: {name} holds a line break or another control character; set it without that"
            )
        if name in _ENDPOINTS and value:
            _check_endpoint(scheme, name, value)


def _check_endpoint(scheme: str, name: str, value: str) -> None:
    try:
        url = urlsplit(value)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"cannot use {scheme}://: {name} is no URL: write http://host:port or https://host")


def _s3(variables: Mapping[str, str], client: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    endpoint = (
        variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or variables.get("AWS_ENDPOINT")
    )
    if endpoint and endpoint.startswith("http://"):
        client["allow_http"] = True  # whoever writes http means it
    own = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if not any(name in variables for name in own):
        named = "AWS_PROFILE" in variables
        if named or any(path.exists() for path in _credential_files(variables, "AWS_")):
            provider = _Profile.find(named=named)
            if provider is not None:
                options["credential_provider"] = provider
    return options


class _Profile:
    """Credentials from where the AWS SDK finds them: the client itself reads no profiles.

    Args:
        session: of boto3.
        credentials: what it found.

    Attributes:
        config: what the client takes over besides.
    """

    def __init__(self, session: Any, credentials: Any) -> None:
        self._credentials = credentials
        self.config = {"region": session.region_name} if session.region_name else {}

    @classmethod
    def find(cls, *, named: bool) -> _Profile | None:
        """None where the SDK is not installed or has nothing.

        Args:
            named: a profile was asked for by its name.

        Raises:
            UsageError: profiles that it cannot use.
        """
        try:
            import boto3
            from botocore.exceptions import BotoCoreError
        except ImportError:
            if named:
                raise UsageError(
                    "cannot use s3://: AWS_PROFILE is set, and profiles need the package boto3 (pip install boto3)"
                ) from None
            return None
        try:
            session = boto3.Session()
            credentials = session.get_credentials()
        except BotoCoreError as error:
            raise UsageError(f"cannot use s3://: {error}; see AWS_PROFILE and the files in ~/.aws") from None
        return cls(session, credentials) if credentials is not None else None

    def __call__(self) -> dict[str, Any]:
        """The credentials of now; those that are lent are renewed before they end."""
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_PROFILE_SECONDS),
        }


def _azure(variables: Mapping[str, str], client: dict[str, Any]) -> dict[str, Any]:
    """The variables of Azure's own tools, which the client knows by other names."""
    options: dict[str, Any] = {}
    parts = dict(
        part.partition("=")[::2] for part in variables.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";") if part
    )
    names = {
        "account_name": ("AccountName", "AZURE_STORAGE_ACCOUNT"),
        "account_key": ("AccountKey", "AZURE_STORAGE_KEY"),
        "sas_key": ("SharedAccessSignature", "AZURE_STORAGE_SAS_TOKEN"),
        "endpoint": ("BlobEndpoint", "AZURE_STORAGE_BLOB_ENDPOINT"),
    }
    for option, (part, variable) in names.items():
        value = parts.get(part) or variables.get(variable)
        if value:
            options[option] = value
    if parts.get("BlobEndpoint"):
        _check_endpoint("az", "BlobEndpoint in AZURE_STORAGE_CONNECTION_STRING", parts["BlobEndpoint"])
    endpoint = options.get("endpoint") or variables.get("AZURE_STORAGE_ENDPOINT") or variables.get("AZURE_ENDPOINT", "")
    if not endpoint and parts.get("EndpointSuffix") and parts.get("AccountName"):  # national clouds
        protocol = parts.get("DefaultEndpointsProtocol", "https")
        endpoint = options["endpoint"] = f"{protocol}://{parts['AccountName']}.blob.{parts['EndpointSuffix']}"
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    return options
