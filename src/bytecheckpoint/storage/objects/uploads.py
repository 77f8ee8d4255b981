"""Multipart uploads that were begun on S3 and not completed: listed and aborted.

The client library can do neither, and what it signs has no query. So this module makes the two requests itself, with AWS's
signature, version 4, over Python's HTTP client. It retries them for a short time only: a save goes on without them.
"""

from __future__ import annotations

import email.utils
import hashlib
import hmac
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.errors import StorageError
from bytecheckpoint.retries import retry
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.objects.aws import s3_access, sdk_credentials
from bytecheckpoint.storage.objects.errors import failed_request, storage_error
from bytecheckpoint.storage.optional import UnfinishedUpload

__all__ = ["Uploads"]

#: Timeout of one request, and of all that belong together.
_SECONDS, _SECONDS_IN_ALL = 10.0, 60.0
#: Time for which one request is retried.
_RETRY_SECONDS = 15.0
#: Time for which a listing that has failed is not tried again.
_SECONDS_REFUSED = 600.0
_MAX_ANSWER_BYTES = 16 << 20
#: Pages of a listing, of a thousand uploads each: a server that never ends a listing is left.
_MAX_PAGES = 1000
_ABORTS = 8
_EMPTY = hashlib.sha256(b"").hexdigest()


class Uploads:
    """The unfinished uploads in one bucket.

    Args:
        bucket: its name.
        variables: the environment variables for object stores.
    """

    def __init__(self, bucket: str, variables: Mapping[str, str]) -> None:
        self._bucket = bucket
        self._variables = variables
        self._failed: tuple[float, StorageError] | None = None

    def list(self, prefix: str) -> list[UnfinishedUpload]:
        """List the uploads whose keys begin with `prefix`, by their names behind it.

        Raises:
            StorageError: the store does not list them for this client, or cannot be reached, now or a while ago. Many
                clients may write and not list uploads: they need not find that out in every save.
        """
        if self._failed is not None and time.monotonic() < self._failed[0] + _SECONDS_REFUSED:
            raise self._failed[1]
        what = f"cannot list the uploads to s3://{self._bucket}/{prefix}"
        try:
            return call_with_timeout(_SECONDS_IN_ALL, lambda: [*self._pages(prefix)], what)
        except FileNotFoundError:
            error = StorageError(f"{what}: the store does not know this request")
        except StorageError as raised:
            error = raised
        self._failed = time.monotonic(), error
        raise error

    def _pages(self, prefix: str) -> Iterator[UnfinishedUpload]:
        label = f"s3://{self._bucket}/{prefix}"
        markers: dict[str, str] = {}
        for _ in range(_MAX_PAGES):
            query = {"uploads": "", "prefix": prefix, **markers}
            data, now = self._retried("GET", "", query, "list the uploads to", label)
            try:
                root = ElementTree.fromstring(data)
            except ElementTree.ParseError:
                raise StorageError(f"cannot list the uploads to {label}: the answer is no XML") from None
            for element in root:
                element.tag = element.tag.rpartition("}")[2]
            for upload in root.iterfind("Upload"):
                found = {field.tag.rpartition("}")[2]: field.text or "" for field in upload}
                key, token = found.get("Key", ""), found.get("UploadId", "")
                if key.startswith(prefix) and token:  # some stores list all uploads, whatever the prefix
                    yield UnfinishedUpload(key[len(prefix) :], now - _seconds(found.get("Initiated", "")), token)
            following = {
                "key-marker": root.findtext("NextKeyMarker", ""),
                "upload-id-marker": root.findtext("NextUploadIdMarker", ""),
            }
            if (
                root.findtext("IsTruncated", "").lower() != "true"
                or following == markers
                or not following["key-marker"]
            ):
                return
            markers = following

    def abort(self, prefix: str, uploads: Sequence[UnfinishedUpload]) -> None:
        """Abort uploads that `list` has found under `prefix`; those that are gone are ignored."""

        def abort_one(upload: UnfinishedUpload) -> None:
            label = f"s3://{self._bucket}/{prefix}{upload.name}"
            try:
                self._retried("DELETE", prefix + upload.name, {"uploadId": upload.token}, "abort the upload to", label)
            except FileNotFoundError:
                pass

        what = f"cannot abort the uploads to s3://{self._bucket}/{prefix}"
        call_with_timeout(
            _SECONDS_IN_ALL, lambda: parallel_map(abort_one, uploads, _ABORTS, "bytecheckpoint-abort"), what
        )

    def _retried(self, *request: Any) -> tuple[bytes, float]:
        """Make a request, and make it again for a while after transient errors. As `_request`."""
        return retry(lambda: self._request(*request), min(_RETRY_SECONDS, settings().storage.timeout))

    def _request(self, method: str, key: str, query: Mapping[str, str], action: str, label: str) -> tuple[bytes, float]:
        """Make a request; return the answer's body, and its time by the server's clock in seconds since 1970."""
        access = s3_access(self._variables)
        region = access.region or "us-east-1"
        # Without a user name, which urllib takes for a part of the host.
        base = re.sub(r"//[^/]*@", "//", access.endpoint.rstrip("/")) or f"https://s3.{region}.amazonaws.com"
        virtual = self._variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true", "on", "yes")
        if virtual and not access.endpoint:
            base = base.replace("//", f"//{self._bucket}.", 1)
        elif not virtual:
            base += f"/{self._bucket}"
        url = f"{base}/{quote(key)}".rstrip("/")
        request = urllib.request.Request(f"{url}?{_encoded(query)}", method=method)
        if "AWS_SKIP_SIGNATURE" not in self._variables:
            provider = access.provider or (sdk_credentials() if access.keys is None else None)
            if provider is None and access.keys is None:
                raise StorageError(
                    f"cannot {action} {label}: that needs credentials in the environment or in a profile, or the package "
                    f"boto3, which finds those of the machine"
                )
            lent: dict[str, Any] = provider() if provider is not None else {}
            keys = access.keys or (lent["access_key_id"], lent["secret_access_key"], lent["token"] or "")
            _sign(request, url, query, region, keys)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                data: bytes = answer.read(_MAX_ANSWER_BYTES)
                if answer.length:
                    raise ConnectionResetError("the answer broke off")
                date = email.utils.parsedate_to_datetime(answer.headers["date"]) if answer.headers["date"] else None
        except urllib.error.HTTPError as error:
            failed = failed_request(error.code, error.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace"))
            raise storage_error(failed, action, label) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise storage_error(failed_request(0, str(getattr(error, "reason", error))), action, label) from None
        return data, date.timestamp() if date is not None else time.time()


def _seconds(text: str) -> float:
    """Return an ISO time as seconds since 1970; the present for one that cannot be read, which is never old."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return time.time()
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _encoded(query: Mapping[str, str]) -> str:
    return urlencode(sorted(query.items()), quote_via=quote, safe="-_.~")


def _sign(
    request: urllib.request.Request, url: str, query: Mapping[str, str], region: str, keys: tuple[str, str, str]
) -> None:
    """Add AWS's signature, version 4, to a request without a body."""
    access_key, secret, token = keys
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(headers)
    signed = [f"{name}:{value}" for name, value in headers.items()]
    canonical = "\n".join([request.get_method(), parts.path or "/", _encoded(query), *signed, "", names, _EMPTY])
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (now[:8], region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    for name, value in headers.items():
        request.add_unredirected_header(name.capitalize(), value)
    request.add_unredirected_header(
        "Authorization",
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}",
    )
