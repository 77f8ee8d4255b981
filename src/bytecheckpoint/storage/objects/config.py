"""Clients of object stores, configured by the environment variables of the stores' own tools."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bytecheckpoint.errors import UsageError
from bytecheckpoint.storage.objects.aws import CREDENTIAL_FILES, s3_access

__all__ = ["SCHEMES", "environment", "fingerprint", "make_client", "without_secrets"]

#: The store's name for its top-level folders, by scheme.
SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container"}
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINTS = {
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
    "AZURE_STORAGE_BLOB_ENDPOINT",
}  # fmt: skip
#: Some stores refuse a request whose signature is this many seconds old, and the client does not sign a retry anew.
_MAX_RETRY_SECONDS = 240.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Variables that may hold whole documents.
_DOCUMENTS = {"GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS_JSON"}
#: Files with credentials, which are read once per client: the variable that names the file, and the default place.
_CREDENTIAL_FILES = {
    **CREDENTIAL_FILES,
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
    "GOOGLE_SERVICE_ACCOUNT": "", "GOOGLE_SERVICE_ACCOUNT_PATH": "",
}  # fmt: skip
#: Variables that change when credentials are renewed.
_SECRET = re.compile(r"KEY|SECRET|TOKEN|SAS|CONNECTION_STRING")
#: Timeout of one request, which carries at most some ten megabytes.
_REQUEST_SECONDS = 120.0


def environment() -> dict[str, str]:
    """Return the environment variables that configure object stores."""
    return {name: value for name, value in os.environ.items() if name.startswith(tuple(_PREFIXES.values()))}


def fingerprint(variables: Mapping[str, str]) -> int:
    """Return a number that changes with the variables and with the credential files that they name."""
    seen: list[object] = [*sorted(variables.items())]
    for path in _credential_files(variables):
        try:
            found = path.stat()
        except OSError:
            continue
        seen.append((str(path), found.st_mtime_ns, found.st_size, found.st_ino))
    return hash(tuple(seen))


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say which store is meant, not who asks."""
    return {name: value for name, value in variables.items() if not _SECRET.search(name)}


def _credential_files(variables: Mapping[str, str]) -> list[Path]:
    paths = (variables.get(name, default) for name, default in _CREDENTIAL_FILES.items())
    return [Path(os.path.expanduser(path)) for path in paths if path]  # Path's own raises for a user without a home


def make_client(
    scheme: str, bucket: str, seconds: float, variables: Mapping[str, str], *, retries: bool = False, **options: Any
) -> Any:
    """Make a client of one bucket.

    Args:
        scheme: "s3", "gs" or "az".
        bucket: name of the bucket.
        seconds: time for which an operation is retried.
        variables: from `environment`.
        retries: the client retries each request by itself, for that time.
        **options: arguments of the client's class.

    Raises:
        UsageError: the variables are contradictory or incomplete.
    """
    import obstore.store

    _refuse_broken(scheme, variables)
    retry = {
        "max_retries": 10_000 if retries else 0,
        "retry_timeout": timedelta(seconds=min(seconds, _MAX_RETRY_SECONDS)),
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
        from bytecheckpoint.storage.objects.errors import facts_of

        raise UsageError(f"cannot use {scheme}://{bucket}: {facts_of(error).reason}; see its variables") from None


def _refuse_broken(scheme: str, variables: Mapping[str, str]) -> None:
    """Raise UsageError for values on which the client library panics; the message does not repeat them."""
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
    """Return options from the variables and files of the AWS tools; `client` gets the options of the HTTP client."""
    access = s3_access(variables)
    options: dict[str, Any] = {}
    if access.endpoint:
        _check_endpoint("s3", "the endpoint_url of the profile", access.endpoint)
        options["endpoint"] = access.endpoint
        if access.endpoint.startswith("http://"):
            client["allow_http"] = True  # an http:// endpoint is explicit
    if access.region:
        options["region"] = access.region
    if access.provider is not None:
        options["credential_provider"] = access.provider
    return options


def _azure(variables: Mapping[str, str], client: dict[str, Any]) -> dict[str, Any]:
    """Return options from the variables of Azure's own tools. The client library has other names for them."""
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
