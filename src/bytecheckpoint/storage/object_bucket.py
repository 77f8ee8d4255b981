"""One bucket as one process sees it: its client, kept for all checkpoints in it, and what was found out about it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import obstore

from ..errors import StorageError, StorageUnavailableError
from ..settings import settings
from .object_config import environment, make_client
from .object_errors import facts_of, no_credentials, storage_error
from .parallel import at_the_same_time
from .retrying import Attempts

__all__ = ["Bucket", "bucket_of"]

_T = TypeVar("_T")
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
        known: nothing has to be found out about the configuration.

    Attributes:
        commits: what `object_commit` found out about conditional puts; None: nothing yet.
        lock: held by who finds something out.
    """

    def __init__(
        self,
        name: str,
        client: Any,
        seconds: float,
        single: Any = None,
        deleting: Callable[[], Any] | None = None,
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
        self._known = known
        self._failed_at = -_TIRED_SECONDS
        self._checking = threading.Lock()

    def check(self) -> None:
        """Refuse a bucket that is not there and credentials that are not accepted, without the patience of `run`.

        Done once. A store that does not answer at all is left to the operation that follows, which waits for it.

        Raises:
            StorageError: the bucket cannot be used.
        """
        _refuse_fork(self.name)
        with self._checking:
            if not self._known:
                self._try_out()
                self._known = True

    def _try_out(self) -> None:
        try:
            obstore.list_with_delimiter(self._single, "bytecheckpoint-no-such-folder")
        except (obstore.exceptions.BaseError, OSError) as error:
            facts = facts_of(error)
            if facts.credentials:
                raise no_credentials("use", self.name, facts) from None
            if facts.code not in _MAY_STILL_WRITE and not facts.transient:
                found = storage_error(error, "use", self.name)
                raise found if isinstance(found, StorageError) else StorageError(str(found)) from None

    def run(
        self, action: str, shown: str, call: Callable[[Any], _T], *, patient: bool = False, brief: bool = False
    ) -> _T:
        """What `call(client)` returns, tried again after transient errors.

        Args:
            action: what is being done, for messages.
            shown: what it is done to, for messages.
            call: one try. Errors that are not the client's pass through.
            patient: the client itself tries each of its requests again, because `call` consists of many.
            brief: give up soon if the bucket was out of reach a moment ago.

        Raises:
            StorageError: typed; FileNotFoundError: no such object.
            obstore.exceptions.AlreadyExistsError, PreconditionError: of a conditional put.
        """
        self.check()
        client = self._client if patient else self._single
        tired = brief and time.monotonic() - self._failed_at < _TIRED_SECONDS
        seconds = _TIRED_LIMIT if tired else self.seconds
        attempts: Attempts | None = None
        tries = 0
        while True:
            tries += 1
            try:
                return call(client)
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                raise
            except (obstore.exceptions.BaseError, OSError, ValueError) as error:
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


_buckets: dict[tuple[str, str, float, int], Bucket] = {}
_buckets_lock = threading.Lock()


def bucket_of(scheme: str, name: str) -> Bucket:
    """The bucket, the same one for all who ask while the environment stays as it is."""
    variables, seconds = environment(), settings().storage_timeout
    who = hash(tuple(sorted(variables.items())))
    key = (scheme, name, seconds, who)
    with _buckets_lock:
        if key not in _buckets:
            like = next((b for k, b in _buckets.items() if k[:2] == key[:2] and k[3] == who), None)
            client = make_client(scheme, name, seconds, variables, patient=True)
            single = make_client(scheme, name, seconds, variables)
            _buckets[key] = Bucket(
                f"{scheme}://{name}",
                client,
                seconds,
                single,
                lambda: make_client(scheme, name, seconds, variables, disable_bulk_delete=True),
            )
            _buckets[key].commits = like.commits if like else None
        return _buckets[key]


def _forget_lock() -> None:
    global _buckets_lock  # noqa: PLW0603  the parent's thread that held it does not exist in the child
    _buckets_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
