"""The client of one bucket, which all checkpoints in the bucket share. It remembers how the bucket commits."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import obstore

from bytecheckpoint.calls import SharedLock
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageError, StorageUnavailableError
from bytecheckpoint.retries import RetryBudget
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.objects.aws import has_sdk
from bytecheckpoint.storage.objects.config import environment, fingerprint, make_client, without_secrets
from bytecheckpoint.storage.objects.errors import facts_of, no_credentials, storage_error
from bytecheckpoint.storage.remote import BriefRetries, ClientCache, RemoteClient, is_panic
from bytecheckpoint.tracing.operation import count_retries
from bytecheckpoint.tuning import tuning

if TYPE_CHECKING:
    from bytecheckpoint.storage.objects.uploads import Uploads

__all__ = ["REFUSED", "Bucket", "BucketClients", "bucket_of"]

_T = TypeVar("_T")
#: How the client library reports that a store refused a conditional put.
REFUSED = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError)
_DELETIONS = 8
#: Error codes of servers that know the client but refuse it a listing: it may be allowed to write all the same.
_MAY_STILL_WRITE = {"AccessDenied", "AuthorizationPermissionMismatch"}


@dataclass(frozen=True, slots=True)
class BucketClients:
    """The clients of one bucket.

    Attributes:
        retrying: obstore client that retries each of its requests.
        single: obstore client that makes every request once.
        first: obstore client with a shorter timeout, for the first request.
        make_deleter: function that makes a client which deletes one object per request, for stores without bulk deletion.
        uploads: function that returns the unfinished uploads; None where these end by themselves or cannot be listed.
    """

    retrying: Any
    single: Any
    first: Any
    make_deleter: Callable[[], Any] | None = None
    uploads: Callable[[], Uploads | None] = lambda: None


class Bucket(RemoteClient):
    """A bucket and its clients.

    Args:
        name: "s3://bucket", for messages.
        clients: clients of the bucket.
        seconds: time for which an operation is retried after transient errors.
        store: key that is equal for buckets of the same name in the same store.

    Attributes:
        clients, seconds, store: the arguments.
        known: True once the store has answered this process, perhaps under other credentials or settings.
        commits: findings of `commit.py` about conditional puts; None before it has tried them.
        lock: held while `commits` is being determined.
    """

    service = "an object store"
    brief_retries = BriefRetries(120.0, 5.0)

    def __init__(self, name: str, clients: BucketClients, seconds: float, store: Hashable = None) -> None:
        super().__init__(name)
        self.clients = clients
        self.seconds = seconds
        self.store = store
        self.known = False
        self.commits: Any = None
        self.lock = SharedLock()
        self._checked = False
        self._no_answer: tuple[float, BaseException] | None = None
        self._checking = SharedLock()

    def check(self, action: str, label: str) -> None:
        """Raise an error for a missing bucket, refused credentials or a store that does not answer.

        This makes requests until the store has answered once. A store that has never answered this process is given up
        sooner than by `run`: its address may be wrong.

        Args:
            action: verb for messages, "read".
            label: address of the file or folder, for messages.

        Raises:
            StorageError: the bucket cannot be used.
        """
        self.refuse_fork(self.name)
        called_at = time.monotonic()
        if not self._checked:
            with self._checking:
                self._make_contact(action, label, called_at)

    def _make_contact(self, action: str, label: str, called_at: float) -> None:
        if self._checked:
            return
        if self._no_answer is not None and self._no_answer[0] > called_at:
            # While this thread waited for the lock, another one got no answer: this one does not try again.
            raise storage_error(self._no_answer[1], action, label) from None
        attempts = RetryBudget(self.seconds if self.known else min(self.seconds, tuning().object_first_contact))
        client = self.clients.single if self.known else self.clients.first
        last: list[BaseException] = []

        def ask() -> None:
            try:
                obstore.list_with_delimiter(client, "bytecheckpoint-no-such-folder")
            except BaseException as error:
                if not _of_client(error):
                    raise
                facts = facts_of(error)
                busy = facts.transient and facts.status != 0
                may_write = facts.code in _MAY_STILL_WRITE
                if not ((busy and may_write) if facts.credentials else (busy or may_write)):
                    raise
                # The store answers: the operation that follows knows how long to retry.

        def classify(error: BaseException, count: int) -> tuple[Exception, RetryBudget | None]:
            if not _of_client(error):
                raise error
            facts = facts_of(error)
            last[:] = [error.with_traceback(None)]
            if facts.credentials and not (facts.transient and facts.status):
                # Most machines have no service that lends credentials.
                return no_credentials(action, label, facts, count), None
            found = storage_error(error, action, label, count)
            if not facts.transient:
                return (found if isinstance(found, StorageError) else StorageError(str(found))), None
            return found, attempts

        try:
            self._retry(ask, classify)
        except BaseException:
            if attempts.exhausted:
                self._no_answer = time.monotonic(), last[0]
            raise
        self._checked = self.known = True

    def run(
        self,
        action: str,
        label: str,
        call: Callable[[Any], _T],
        *,
        many_requests: bool = False,
        brief: bool = False,
        conditional: bool = False,
    ) -> _T:
        """Return `call(client)`, and call it again after transient errors.

        Args:
            action: verb for messages, "read".
            label: address of the file or folder, for messages.
            call: one attempt. Errors of other origin than the client library pass through.
            many_requests: `call` makes many requests, so the client retries each of them by itself. It reports its retries
                only if it gives up: others show as time alone.
            brief: retry for a short time only, if the bucket was unreachable a moment ago.
            conditional: `call` is a put that the store may rightly refuse.

        Raises:
            StorageError: typed; FileNotFoundError: there is no such object.
            obstore.exceptions.AlreadyExistsError, PreconditionError: a conditional put is refused.
        """
        self.check(action, label)
        client = self.clients.retrying if many_requests else self.clients.single
        seconds = self._retry_seconds(self.seconds, brief)
        attempts: RetryBudget | None = None
        client_retries = 0

        def classify(error: BaseException, count: int) -> tuple[Exception, RetryBudget | None]:
            nonlocal attempts, client_retries
            if not _of_client(error) or (conditional and isinstance(error, REFUSED)):
                raise error
            facts = facts_of(error)
            found = storage_error(error, action, label, count + client_retries)
            client_retries += facts.retries
            count_retries(facts.retries)
            if not isinstance(found, StorageUnavailableError):
                return found, None
            if attempts is None:
                attempts = RetryBudget(seconds - facts.elapsed)  # part of the time went into the client's own retries
            return found, attempts

        return self._retry(lambda: call(client), classify)

    def delete(self, keys: Sequence[str], label: str) -> None:
        """Remove objects; absent ones are ignored.

        Args:
            keys: keys of the objects.
            label: address of their folder, for messages.
        """

        def remove(client: Any) -> Any:
            """Remove all at once, or return the client that can remove them one by one."""
            try:
                obstore.delete(client, keys)
            except FileNotFoundError:  # some stores stop at the first absent object
                return client
            except obstore.exceptions.BaseError as error:
                if facts_of(error).status != 501 or self.clients.make_deleter is None:
                    raise
                return self.clients.make_deleter()
            return None

        def remove_one(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.run("delete from", label, lambda _: obstore.delete(deleter, key), brief=True)

        deleter: Any = self.run("delete from", label, remove, brief=True) if keys else None
        if deleter is not None:
            parallel_map(remove_one, keys, _DELETIONS, "bytecheckpoint-delete")


def _of_client(error: BaseException) -> bool:
    return isinstance(error, obstore.exceptions.BaseError | OSError | ValueError) or is_panic(error)


#: Scheme, name of the bucket, fingerprint of the configuration, and the seconds for which to retry.
_Key = tuple[str, str, int, float]
_buckets: ClientCache[_Key, Bucket] = ClientCache(lambda: tuning().object_clients)


def _uploads(name: str, variables: Mapping[str, str]) -> Uploads | None:
    """Return the unfinished uploads in a bucket of S3; None without the AWS SDK."""
    if not has_sdk():
        return None
    from bytecheckpoint.storage.objects.uploads import Uploads

    return Uploads(name, variables)


def bucket_of(scheme: str, name: str) -> Bucket:
    """Return this process's client of a bucket, a new one after the environment or a credential file has changed."""
    variables, seconds = environment(), settings().storage.timeout
    key = (scheme, name, fingerprint(variables), seconds)
    store = (scheme, name, tuple(sorted(without_secrets(variables).items())))

    def make(cached: Iterable[tuple[_Key, Bucket]]) -> Bucket:
        clients = BucketClients(
            make_client(scheme, name, seconds, variables, retries=True),
            make_client(scheme, name, seconds, variables),
            make_client(scheme, name, min(seconds, tuning().object_first_contact), variables),
            lambda: make_client(scheme, name, seconds, variables, disable_bulk_delete=True),
            functools.cache(lambda: _uploads(name, variables)) if scheme == "s3" else lambda: None,
        )
        bucket = Bucket(f"{scheme}://{name}", clients, seconds, store)
        cached = list(cached)
        bucket.known = any(other.known for _, other in cached if other.store == store)
        # The same bucket with another timeout commits in the same way.
        bucket.commits = next((other.commits for other_key, other in cached if other_key[:3] == key[:3]), None)
        return bucket

    return _buckets.get(key, make)
