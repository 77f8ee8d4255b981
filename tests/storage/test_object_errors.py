"""What becomes of the errors that object stores' clients report, and of the secrets in them."""

from __future__ import annotations

import pytest

from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage.objects.errors import cleaned, facts_of, storage_error

_ANSWER = (
    "Generic S3 error: Error performing PUT https://host/bucket/key?X-Amz-Signature=SECRET in 12.5s, after 3 retries, "
    "max_retries: 10, retry_timeout: 180s  - Server returned non-2xx status code: {status} Words: "
    "<Error><Code>{code}</Code><Message>say &#39;https://u:SECRET@host/x&#63;sig=SECRET&#39;</Message><StringToSign>SECRET</StringToSign>"
    "</Error>\n\nDebug source:\nGeneric {{ body: SECRET }}"
)
_BROKEN = (
    "Generic S3 error: Error performing GET REDACTED in 218.7ms, after 2 retries, max_retries: 2, retry_timeout: 5s  - "
    "HTTP error: error sending request\n\nDebug source:\nHttpError {{ kind: {kind}, source: {source} }}"
)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (503, "SlowDown", StorageUnavailableError, "(attempt 5)"),
        (500, "InternalError", StorageUnavailableError, "check that the storage can be reached"),
        (429, "TooManyRequests", StorageUnavailableError, "attempt"),
        (403, "SignatureDoesNotMatch", StorageError, "check the credentials"),
        (400, "InvalidToken", StorageError, "check the credentials"),
        (403, "RequestTimeTooSkewed", StorageError, "set the clock of this machine"),
        (404, "NoSuchBucket", StorageError, "check the bucket's name"),
        (404, "ContainerNotFound", StorageError, "check the bucket's name"),
        (507, "XMinioStorageFull", StorageFullError, "free space"),
        (500, "QuotaExceeded", StorageFullError, "free space"),
        (501, "NotImplemented", StorageError, "NotImplemented"),
        (400, "EntityTooLarge", StorageError, "EntityTooLarge"),
    ],
)
def test_answers_with_a_code(status: int, code: str, error: type[Exception], words: str) -> None:
    found = storage_error(ValueError(_ANSWER.format(status=status, code=code)), "upload", "s3://bucket/key", 2)
    assert type(found) is error
    text = str(found)
    assert text.startswith(f"cannot upload s3://bucket/key: {code}: say 'https://host/x") and words in text
    assert "SECRET" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("Connect", 'Os { code: 111, message: "Connection refused" }', "Connection refused"),
        ("Connect", 'ConnectError("dns error", failed to lookup)', "dns error"),
        ("Timeout", "TimedOut", "no answer in time"),
        ("Interrupted", "Closed", "the connection broke"),
    ],
)
def test_no_answer_at_all(kind: str, source: str, words: str) -> None:
    found = storage_error(ValueError(_BROKEN.format(kind=kind, source=source)), "read", "az://container/key")
    assert isinstance(found, StorageUnavailableError) and found.undecided
    assert words in str(found) and "attempt 3" in str(found)


def test_a_certificate_that_is_not_trusted_is_not_tried_again() -> None:
    error = ValueError(_BROKEN.format(kind="Connect", source='"invalid peer certificate: UnknownIssuer"'))
    found = storage_error(error, "read", "s3://bucket/key")
    assert type(found) is StorageError and "invalid peer certificate: UnknownIssuer" in str(found)


@pytest.mark.parametrize(
    ("took", "seconds"), [("12.5s", 12.5), ("218.7ms", 0.2187), ("506.285µs", 0.000506285), ("15ns", 15e-9)]
)
def test_how_long_the_client_tried(took: str, seconds: float) -> None:
    facts = facts_of(ValueError(f"Error performing GET x in {took}, after 7 retries, max_retries: 9 - HTTP error: x"))
    assert facts.elapsed == pytest.approx(seconds)
    assert facts.retries == 7 and facts.transient


@pytest.mark.parametrize(
    "host",
    ["http://169.254.169.254/latest/api/token", "http://metadata.google.internal/computeMetadata/v1", "https://sts.x/"],
)
@pytest.mark.parametrize(("status", "error"), [(403, StorageError), (503, StorageUnavailableError)])
def test_the_search_for_credentials(host: str, status: int, error: type[Exception]) -> None:
    text = f"Generic S3 error: Error performing PUT {host} in 1ms - Server returned non-2xx status code: {status} No: x"
    facts = facts_of(ValueError(text))
    assert facts.credentials
    found = storage_error(ValueError(text), "read", "s3://bucket/key")
    assert type(found) is error
    says = "found no credentials in the environment" if error is StorageError else "service that lends credentials"
    assert says in str(found)


def test_absent_objects_and_urls_in_text() -> None:
    assert isinstance(storage_error(FileNotFoundError("x"), "read", "s3://b/k"), FileNotFoundError)
    assert cleaned("see\n https://key:SECRET@host/a?b=SECRET&c=d now") == "see https://host/a now"
