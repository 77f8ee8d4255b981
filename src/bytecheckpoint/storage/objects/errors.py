"""Typed errors for what the client library of object stores raises.

The library reports nearly everything as one class with a long text: the request, its attempts, the status, the server's XML
and a dump of the library's state. This module extracts the facts and drops the rest, because responses can hold keys and
signed requests. tests/storage/test_object_client.py holds it to the errors of the installed version.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import obstore

from bytecheckpoint.errors import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage.remote import cleaned

__all__ = ["Facts", "facts_of", "failed_request", "no_credentials", "storage_error"]

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z ]+))?")
_RETRIES = re.compile(r"after (\d+) retries")
_ELAPSED = re.compile(r" in ([0-9.]+)(ns|µs|ms|s)\b")
#: The server's error code, in its response or, for one object of a bulk request, in the client's sentence.
_CODE = re.compile(r"<Code>([A-Za-z0-9.]+)</Code>|\(code: ([A-Za-z0-9.]+)\)")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_KIND = re.compile(r"kind: (Connect|Timeout|Interrupted|Decode|Request|Unknown)\b")
_SYSTEM = re.compile(r'message: "([^"]{1,100})"|(invalid peer certificate[^"]{0,80}|dns error[^"]{0,80})')
_CREDENTIALS = re.compile(
    r"//169\.254\.|//metadata\.google\.internal|//login\.microsoftonline|//sts\.|token request|/latest/api/token|"
    r"/latest/meta-data|/computeMetadata/|/metadata/identity|/oauth2/"
)
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "InvalidResourceName", "PermanentRedirect"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity", "AccountQuotaExceeded", "StorageFull"}
_NOT_ACCEPTED = {"InvalidToken", "ExpiredToken", "TokenRefreshRequired", "AuthenticationFailed"}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_FOREIGN = "Encountered object with invalid path"
_WRONG_REGION = "incorrectly configured region"
_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidRegion"}
#: Error codes that another attempt may cure, with any status.
_TRANSIENT_CODES = {
    "RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException",
    "RequestThrottled", "TooManyRequests", "OperationAborted", "ConditionalRequestConflict", "ServerBusy",
    "OperationTimedOut",
    # A gateway over a file system makes an object's folders while another request removes them with their last object.
    "ExistingObjectIsDirectory",
}  # fmt: skip
#: Statuses of the errors for which the library has a class.
_TYPED = {
    obstore.exceptions.UnauthenticatedError: 401, obstore.exceptions.PermissionDeniedError: 403, FileNotFoundError: 404,
    obstore.exceptions.PreconditionError: 412,
}  # fmt: skip
#: Statuses that another attempt may cure.
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a failed request.

    Attributes:
        status: HTTP status, 0 without a response.
        code: the server's error code, such as "NoSuchBucket"; "" when it gave none.
        reason: the error in a few words, free of secrets.
        retries: attempts that the client repeated by itself.
        elapsed: seconds that the client spent.
        credentials: the search for credentials failed, so the request was not sent.
        transient: another attempt may succeed.
    """

    status: int
    code: str
    reason: str
    retries: int
    elapsed: float
    credentials: bool
    transient: bool


def facts_of(error: BaseException) -> Facts:
    """Extract the facts from an error of the client library."""
    text, _, dump = str(error).partition("\n\nDebug source")
    found = _STATUS.search(text)
    typed = next((status for kind, status in _TYPED.items() if isinstance(error, kind)), 0)
    status = typed or (int(found[1]) if found else 0)
    code = found_code[1] or found_code[2] if (found_code := _CODE.search(text)) else ""
    retries = int(found_retries[1]) if (found_retries := _RETRIES.search(text)) else 0
    elapsed = float(took[1]) * _UNITS[took[2]] if (took := _ELAPSED.search(text)) else 0.0
    head = text.partition("status code")[0]
    return Facts(
        status=status,
        code=code,
        reason=_reason(text, dump, code),
        retries=retries,
        elapsed=elapsed,
        credentials=_CREDENTIALS.search(head) is not None,
        transient=_is_transient(text, dump, status, code),
    )


def _is_transient(text: str, dump: str, status: int, code: str) -> bool:
    if code in _FULL:
        return False
    if code in _TRANSIENT_CODES:
        return True
    if status:
        return status in _TRANSIENT
    if "builder error" in text or "invalid peer certificate" in dump:
        return False
    return "HTTP error" in text or _KIND.search(dump) is not None


def _reason(text: str, dump: str, code: str) -> str:
    if code:
        message = html.unescape(found[1]).strip() if (found := _MESSAGE.search(text)) else ""
        return f"{code}: {cleaned(message)[:200]}" if message else code
    if found := _STATUS.search(text):
        return f"HTTP status {found[1]} {(found[2] or '').strip()}".strip()
    if "builder error" in text:
        return "the request could not be made, as of an address that is none"
    if found := _SYSTEM.search(dump):
        return cleaned(found[1] or found[2])
    if found := _KIND.search(dump):
        return {"Connect": "no connection", "Timeout": "no answer in time"}.get(found[1], "the connection broke")
    return cleaned(text)[:200]


def failed_request(status: int, text: str) -> Exception:
    """Return the error for a request that this package has made itself, in the words of the client library.

    Args:
        status: HTTP status; 0 without a response.
        text: the response, or what went wrong.
    """
    if status == 404:
        return FileNotFoundError(f"status code: 404: {text}")
    return ValueError(f"status code: {status}: {text}" if status else f"HTTP error: {text}")


def no_credentials(action: str, label: str, facts: Facts, attempts: int) -> StorageError:
    """Return the error for a process that finds no credentials."""
    files = " (profiles in ~/.aws need boto3)" if label.startswith("s3://") else ""
    return StorageError(
        f"cannot {action} {label}: found no credentials in the environment, and the machine's own service gave none "
        f"({facts.reason}, attempt {attempts}); set them as the storage's own tools want them{files}"
    )


def storage_error(error: BaseException, action: str, label: str, attempts: int = 1) -> Exception:
    """Return the typed error for an error of the client library.

    Args:
        error: from the client library.
        action: verb for messages, "read".
        label: address of the file or folder, for messages.
        attempts: attempts so far, without those that the client repeated by itself.

    Returns:
        A StorageError, or FileNotFoundError for an object that does not exist.
    """
    facts = facts_of(error)
    tries = attempts + facts.retries
    what = f"cannot {action} {label}: {facts.reason} (attempt {tries})"
    if facts.credentials and facts.transient:
        return StorageUnavailableError(
            f"cannot {action} {label}: the service that lends credentials to this machine fails ({facts.reason}, "
            f"attempt {tries})"
        )
    if facts.credentials:
        return no_credentials(action, label, facts, tries)
    if facts.code in _NO_BUCKET | _REGION or _WRONG_REGION in str(error):
        return StorageError(f"{what}; check the bucket's name, its region and the endpoint")
    if facts.code in _FULL or facts.status == 507:
        return StorageFullError(f"{what}; free space or raise the quota, then save again")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(2, "no such object", label)
    if facts.transient:
        return StorageUnavailableError(f"{what}; check that the storage can be reached", undecided=facts.status != 429)
    if _FOREIGN in str(error):
        return StorageError(f"{what}; something else put an object there whose key the client cannot read: remove it")
    if facts.code in _CLOCK:
        return StorageError(f"{what}; set the clock of this machine")
    if facts.status in (401, 403) or facts.code in _NOT_ACCEPTED:
        return StorageError(f"{what}; check the credentials and what they are allowed to do")
    return StorageError(what)
