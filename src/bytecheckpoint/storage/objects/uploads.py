"""List and abort the multipart uploads to S3 that were begun and not completed, through the AWS SDK.

The client library can do neither. Where the SDK is not installed, a lifecycle rule of the bucket aborts such uploads.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from botocore.loaders import Loader, create_loader
from botocore.session import Session

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.storage.objects.aws import s3_access
from bytecheckpoint.storage.objects.errors import failed_request, storage_error
from bytecheckpoint.storage.optional import UnfinishedUpload

__all__ = ["Uploads"]

#: Timeout of one request, and of all that belong together.
_SECONDS, _SECONDS_IN_ALL = 10.0, 60.0
_ATTEMPTS = 3
#: Time for which a listing that has failed is not tried again.
_SECONDS_REFUSED = 600.0
#: Pages of a listing, of a thousand uploads each: a listing that a server never ends is cut here.
_MAX_PAGES = 100
_ABORTS = 8


class Uploads:
    """The unfinished uploads in one bucket.

    Args:
        bucket: name of the bucket.
        variables: environment variables for object stores.
    """

    def __init__(self, bucket: str, variables: Mapping[str, str]) -> None:
        self._bucket = bucket
        self._variables = variables
        self._failed: tuple[float, StorageError] | None = None

    @functools.cached_property
    def _client(self) -> Any:
        access = s3_access(self._variables)
        virtual = self._variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true", "on", "yes")
        endpoint = re.sub(r"//[^/]*@", "//", access.endpoint)  # a user name, which belongs to nothing
        if virtual:
            endpoint = endpoint.replace(f"//{self._bucket}.", "//")  # the SDK puts the bucket in front itself
        config = Config(
            connect_timeout=_SECONDS,
            read_timeout=_SECONDS,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            s3={"addressing_style": "virtual" if virtual else "path"},
            signature_version=UNSIGNED if "AWS_SKIP_SIGNATURE" in self._variables else None,
        )
        region = access.region or "us-east-1"
        session = Session()
        session.register_component("data_loader", _service_models())
        return session.create_client("s3", region_name=region, endpoint_url=endpoint or None, config=config)

    def list(self, prefix: str) -> list[UnfinishedUpload]:
        """List the uploads whose keys begin with `prefix`, by their names behind it.

        Raises:
            StorageError: the store refuses the listing, or cannot be reached, now or a while ago. Many clients may write
                and not list uploads, so a later save does not ask again soon.
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
        with _typed_errors("list the uploads to", f"s3://{self._bucket}/{prefix}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in itertools.islice(pages, _MAX_PAGES):
                now = _server_time(page)
                for upload in page.get("Uploads", ()):
                    if upload["Key"].startswith(prefix):  # some stores ignore the prefix
                        age = now - upload["Initiated"].timestamp()
                        yield UnfinishedUpload(upload["Key"][len(prefix) :], age, upload["UploadId"])

    def abort(self, prefix: str, uploads: Sequence[UnfinishedUpload]) -> None:
        """Abort uploads that `list` has found under `prefix`; ignore those that are gone."""

        def abort_one(upload: UnfinishedUpload) -> None:
            key = prefix + upload.name
            with (
                contextlib.suppress(FileNotFoundError),
                _typed_errors("abort the upload to", f"s3://{self._bucket}/{key}"),
            ):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload.token)

        what = f"cannot abort the uploads to s3://{self._bucket}/{prefix}"
        call_with_timeout(
            _SECONDS_IN_ALL, lambda: parallel_map(abort_one, uploads, _ABORTS, "bytecheckpoint-abort"), what
        )


@functools.cache
def _service_models() -> Loader:
    """Return the reader of the SDK's descriptions of services, which keeps them: each takes 0.1 s and megabytes to read."""
    return create_loader()


def _server_time(answer: Mapping[str, Any]) -> float:
    """Return the time of an answer by the server's clock, seconds since 1970."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()


@contextlib.contextmanager
def _typed_errors(action: str, label: str) -> Iterator[None]:
    """Raise the errors of the SDK as errors of the storage. Their texts may hold secrets, so only their codes are kept."""
    what = f"cannot {action} {label}"
    try:
        yield
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        failed = failed_request(error.response["ResponseMetadata"]["HTTPStatusCode"], f"<Code>{code}</Code>")
        raise storage_error(failed, action, label) from None
    except NoCredentialsError:
        raise StorageError(f"{what}: found no credentials; set them as the AWS tools want them") from None
    except HTTPClientError as error:
        raise StorageUnavailableError(
            f"{what}: {type(error).__name__}; check that the storage can be reached"
        ) from None
    except BotoCoreError as error:
        raise StorageError(f"{what}: {type(error).__name__}") from None
