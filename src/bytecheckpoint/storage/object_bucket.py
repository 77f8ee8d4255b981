"""One bucket as one process sees it: its client, kept for all checkpoints in it, and what was found out about it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import obstore

from ..errors import CheckpointError, StorageError, StorageUnavailableError
from ..settings import settings
from .object_config import environment, fingerprint, make_client
from .object_errors import facts_of, no_credentials, storage_error
from .parallel import at_the_same_time
from .ranged import Connections
from .retrying import Attempts

__all__ = ["REFUSED", "Bucket", "bucket_of"]

_T = TypeVar("_T")
#: How the client says that a store refused a conditional put.
REFUSED = (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError)
#: How long a store is tried that has not answered this process before: a wrong endpoint is told soon, and a server that is
#: being restarted is waited for.
_FIRST_SECONDS = 30.0
#: Clients kept. Each has connections; programs that go through many buckets or credentials shall not collect them.
_KEPT = 16
#: After an operation that failed to the end of its time limit, cleaning up does not wait for as long again.
_TIRED_SECONDS = 120.0
_TIRED_LIMIT = 5.0
_DELETIONS = 8
#: Refusals of a listing by servers that know who asks: writing may be allowed all the same.
_MAY_STILL_WRITE = {"AccessDenied", "AuthorizationPermissionMismatch"}


class Bucket:
    """A client and its state.

    Args:
        name: "s3://bucket", for messages.
        client: obstore's.
        seconds: for how long operations are tried again after transient errors.
        single: a client of the same bucket that tries everything once, by default the same.
        deleting: makes a client that deletes one object at a time, for stores that know no bulk deletion.
        first: a client for the first request, with less patience, by default the same.
        known: nothing has to be found out about the configuration.

    Attributes:
        commits: what `object_commit` found out about conditional puts; None: nothing yet.
        lock: held by who finds something out.
        connections: of reads.
    """

    def __init__(
        self,
        name: str,
        client: Any,
        seconds: float,
        single: Any = None,
        deleting: Callable[[], Any] | None = None,
        first: Any = None,
        *,
        known: bool = False,
    ) -> None:
        self.name = name
        self.seconds = seconds
        self.commits: Any = None
        self.lock = threading.Lock()
        self._client = client
        self._single = client if single is None else single
        self._deleting = deleting
        self._first = self._single if first is None else first
        self._known = known
        self._failed_at = -_TIRED_SECONDS
        self._silence: tuple[float, BaseException] | None = None
        self._checking = threading.Lock()
        self.connections = Connections()

    def check(self, action: str, shown: str) -> None:
        """Refuse a bucket that is not there, credentials that are not accepted, and a store that does not answer.

        Done until it has answered once, with less patience than `run` has.

        Args:
            action: what is to be done, for messages.
            shown: what it is to be done to, for messages.

        Raises:
            StorageError: the bucket cannot be used.
        """
        _refuse_fork(self.name)
        asked = time.monotonic()
        if not self._known:
            with self._checking:
                self._meet(action, shown, asked)

    def _meet(self, action: str, shown: str, asked: float) -> None:
        if self._silence is not None and self._silence[0] > asked:
            # Threads that waited for one which got no answer do not try for as long, one after the other.
            raise storage_error(self._silence[1], action, shown) from None
        attempts = Attempts(min(self.seconds, _FIRST_SECONDS))
        while not self._known:
            attempts.count += 1
            try:
                obstore.list_with_delimiter(self._first, "bytecheckpoint-no-such-folder")
                self._known = True
            except BaseException as error:
                if not _of_client(error):
                    raise
                facts = facts_of(error)
                answered = facts.transient and facts.status
                if facts.credentials and not answered:
                    # Most machines have no such service.
                    raise no_credentials(action, shown, facts, attempts.count) from None
                if facts.code in _MAY_STILL_WRITE or (answered and not facts.credentials):
                    self._known = True  # it answers: the operation that follows knows how long to wait
                    return
                found = storage_error(error, action, shown, attempts.count)
                if not facts.transient:
                    raise found if isinstance(found, StorageError) else StorageError(str(found)) from None
                if not attempts.pause():
                    self._failed_at = time.monotonic()
                    self._silence = self._failed_at, error.with_traceback(None)
                    raise found from None

    def run(
        self,
        action: str,
        shown: str,
        call: Callable[[Any], _T],
        *,
        patient: bool = False,
        brief: bool = False,
        conditional: bool = False,
    ) -> _T:
        """What `call(client)` returns, tried again after transient errors.

        Args:
            action: what is being done, for messages.
            shown: what it is done to, for messages.
            call: one try. Errors that are not the client's pass through.
            patient: the client itself tries each of its requests again, because `call` consists of many.
            brief: give up soon if the bucket was out of reach a moment ago.
            conditional: it is a put that the store may rightly refuse.

        Raises:
            StorageError: typed; FileNotFoundError: no such object.
            obstore.exceptions.AlreadyExistsError, PreconditionError: of a conditional put.
        """
        self.check(action, shown)
        client = self._client if patient else self._single
        tired = brief and time.monotonic() - self._failed_at < _TIRED_SECONDS
        seconds = _TIRED_LIMIT if tired else self.seconds
        attempts: Attempts | None = None
        tries = 0
        while True:
            tries += 1
            try:
                return call(client)
            except CheckpointError:
                raise
            except BaseException as error:
                if not _of_client(error) or (conditional and isinstance(error, REFUSED)):
                    raise
                facts = facts_of(error)
                found = storage_error(error, action, shown, tries)
                tries += facts.retries
                if not isinstance(found, StorageUnavailableError):
                    raise found from None
                if attempts is None:
                    # The client has spent some of the time already, trying by itself.
                    attempts = Attempts(seconds - facts.elapsed)
                if not attempts.pause():
                    self._failed_at = time.monotonic()
                    raise found from None

    def delete(self, keys: Sequence[str], shown: str) -> None:
        """Remove objects; absent ones are fine.

        Args:
            keys: of the objects.
            shown: their folder, for messages.
        """
        by_one: list[Any] = []

        def one(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(by_one[0], key)

        def remove(client: Any) -> None:
            try:
                obstore.delete(client, keys)
            except (FileNotFoundError, obstore.exceptions.BaseError) as error:
                # Some stores stop at the first absent object, and some know no deletion of several.
                missing = isinstance(error, FileNotFoundError)
                if not missing and (facts_of(error).status != 501 or self._deleting is None):
                    raise
                by_one[:] = [client if missing or self._deleting is None else self._deleting()]
                at_the_same_time(one, keys, _DELETIONS, "bytecheckpoint-delete")

        if keys:
            self.run("delete from", shown, remove, brief=True)


#: The process in which the client's threads run.
_user: int | None = None


def _refuse_fork(name: str) -> None:
    global _user  # noqa: PLW0603  one runtime per process
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise StorageError(
            f"cannot use {name} in a fork of a process that has used an object store: start the process with the method "
            f"'spawn'"
        )


def _of_client(error: BaseException) -> bool:
    """Whether the client raised it. Its panics are no ordinary exceptions."""
    known = (obstore.exceptions.BaseError, OSError, ValueError)
    return isinstance(error, known) or type(error).__name__ == "PanicException"


#: The most recently used last.
_buckets: dict[tuple[str, str, float, int], Bucket] = {}
_buckets_lock = threading.Lock()


def bucket_of(scheme: str, name: str) -> Bucket:
    """The bucket, the same one for all who ask while the environment and its files of credentials stay as they are."""
    variables, seconds = environment(), settings().storage_timeout
    who = fingerprint(variables)
    key = (scheme, name, seconds, who)
    with _buckets_lock:
        bucket = _buckets.pop(key, None)
        if bucket is None:
            like = next((b for k, b in _buckets.items() if k[:2] == key[:2] and k[3] == who), None)
            client = make_client(scheme, name, seconds, variables, patient=True)
            single = make_client(scheme, name, seconds, variables)
            bucket = Bucket(
                f"{scheme}://{name}",
                client,
                seconds,
                single,
                lambda: make_client(scheme, name, seconds, variables, disable_bulk_delete=True),
                make_client(scheme, name, min(seconds, _FIRST_SECONDS), variables),
            )
            bucket.commits = like.commits if like else None
        _buckets[key] = bucket
        while len(_buckets) > _KEPT:
            del _buckets[next(iter(_buckets))]
        return bucket


def _forget_lock() -> None:
    global _buckets_lock  # noqa: PLW0603  the parent's thread that held it does not exist in the child
    _buckets_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
