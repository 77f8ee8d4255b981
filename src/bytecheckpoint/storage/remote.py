"""Share code between the clients of remote storages: retries, a cache of clients, errors after a fork, texts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from bytecheckpoint.calls import SharedLock
from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.liveness import busy
from bytecheckpoint.retries import RetryBudget, retry_classified
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.ranged import ConnectionShares

__all__ = ["BriefRetries", "ClientCache", "RemoteClient", "cleaned", "is_panic"]

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
_C = TypeVar("_C")
_QUERY = re.compile(r"\?[^\s\"'<>)]*")
_USER = re.compile(r"//[^/\s@]+@")


def cleaned(text: str) -> str:
    """Return `text` on one line, without the queries and user parts of URLs, which may be secret."""
    return _USER.sub("//", _QUERY.sub("", " ".join(text.split())))


@dataclass(frozen=True, slots=True)
class BriefRetries:
    """Limits for the retries of a cleanup after a failed operation, so that it does not wait for the full time again.

    Attributes:
        window: seconds after the failure for which this holds.
        seconds: time for which an operation is then retried.
    """

    window: float
    seconds: float


class RemoteClient:
    """Base of the clients of remote storages.

    Args:
        name: address of the server, for messages: "s3://bucket".

    Attributes:
        connections: the connections that all reads of this process share.
    """

    #: The kind of server, for messages.
    service: ClassVar[str]
    brief_retries: ClassVar[BriefRetries]
    #: The process that runs the client library's threads, by service. A fork of it lacks the threads.
    _owners: ClassVar[dict[str, int]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = ConnectionShares()
        self._failed_at = float("-inf")

    @classmethod
    def refuse_fork(cls, name: str) -> None:
        """Raise StorageError in a fork of a process that has used the client library."""
        if cls._owners.setdefault(cls.service, os.getpid()) != os.getpid():
            raise StorageError(
                f"cannot use {name} in a fork of a process that has used {cls.service}: start the process with the method "
                f"'spawn'"
            )

    def _retry_seconds(self, seconds: float, brief: bool) -> float:
        """Return how long to retry an operation; `brief`: for a short time if another one has failed a moment ago."""
        failed_recently = time.monotonic() - self._failed_at < self.brief_retries.window
        return self.brief_retries.seconds if brief and failed_recently else seconds

    def _retry(
        self,
        call: Callable[[], _T],
        classify: Callable[[BaseException, int], tuple[Exception, RetryBudget | None]],
        *,
        at_least: int = 1,
    ) -> _T:
        """Return `call()`, and call it again after transient errors.

        Args:
            call: one attempt.
            classify: function of an error and the number of attempts. It returns the typed error, and the attempts that may
                follow, None for a permanent error. Raises an error that is not of the client library.
            at_least: attempts that are made even past the deadline.

        Raises:
            StorageError: from `classify`. A CheckpointError of `call` passes through.
        """
        budget: RetryBudget | None = None

        def attempt() -> _T:
            with busy(settings().storage.timeout):
                return call()

        def classify_error(error: BaseException, count: int) -> tuple[Exception, RetryBudget | None]:
            nonlocal budget
            if isinstance(error, CheckpointError):
                raise error
            typed, budget = classify(error, count)
            return typed, budget

        try:
            return retry_classified(attempt, classify_error, at_least=at_least)
        except BaseException:
            if budget is not None and budget.exhausted:
                self._failed_at = time.monotonic()
            raise


def is_panic(error: BaseException) -> bool:
    """Return whether a client library written in Rust has panicked, which is no ordinary exception."""
    return type(error).__name__ == "PanicException"


class ClientCache(Generic[_K, _C]):
    """The most recently used clients of a process. Only some are cached, because each has connections and threads.

    Args:
        limit: returns the largest number of clients to cache.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._clients: dict[_K, _C] = {}  # the most recently used last
        self._replace_lock()
        os.register_at_fork(after_in_child=self._replace_lock)

    def _replace_lock(self) -> None:
        # New in a forked child, where the parent's thread that held it does not exist.
        self._lock = SharedLock()

    def get(self, key: _K, make: Callable[[Iterable[tuple[_K, _C]]], _C]) -> _C:
        """Return the client for `key`; `make` creates it, given the cached keys and clients."""
        with self._lock:
            client = self._clients.pop(key, None)
            if client is None:
                client = make(list(self._clients.items()))
            self._clients[key] = client
            while len(self._clients) > self._limit():
                del self._clients[next(iter(self._clients))]
            return client

    def __len__(self) -> int:
        return len(self._clients)
