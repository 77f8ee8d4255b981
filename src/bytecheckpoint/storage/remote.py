"""What clients of object stores and of HDFS share: retries, a cooldown after failures, a cache, and no use after a fork."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.storage.ranged import Connections
from bytecheckpoint.storage.retry import Attempts

__all__ = ["ClientCache", "Cooldown", "RemoteClient", "is_panic"]

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
_C = TypeVar("_C")


@dataclass(frozen=True, slots=True)
class Cooldown:
    """The short retries of cleanup after another operation has failed, so that it does not wait for the full timeout again.

    Attributes:
        duration: seconds after the failure for which this holds.
        retry: seconds for which an operation is then retried.
    """

    duration: float
    retry: float


class RemoteClient:
    """Base of the clients of remote storages.

    Args:
        name: address of the server, for messages: "s3://bucket".

    Attributes:
        connections: the connections that all reads of this process share.
    """

    #: What the client library speaks with, for messages.
    service: ClassVar[str]
    cooldown: ClassVar[Cooldown]
    #: The process that runs the library's threads, by service; a fork lacks them.
    _owners: ClassVar[dict[str, int]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = Connections()
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
        """Return how long to retry an operation; a `brief` one is retried for a short time during the cooldown."""
        cooling = brief and time.monotonic() - self._failed_at < self.cooldown.duration
        return self.cooldown.retry if cooling else seconds

    def _retry(
        self,
        call: Callable[[], _T],
        judge: Callable[[BaseException, int], tuple[Exception, Attempts | None]],
        *,
        at_least: int = 1,
    ) -> _T:
        """Return `call()`, and call it again after transient errors.

        Args:
            call: one attempt.
            judge: called with an error and the number of attempts. Returns the typed error, and the attempts that may
                follow, None when the error is permanent. Raises the error when it is not one of the client library.
            at_least: attempts that are made even past the deadline.

        Raises:
            StorageError: typed, by `judge`. A CheckpointError of `call` passes through.
        """
        count = 0
        while True:
            count += 1
            try:
                return call()
            except CheckpointError:
                raise
            except BaseException as error:  # noqa: BLE001  `judge` raises what is not the library's
                typed, attempts = judge(error, count)
                if attempts is None:
                    raise typed from None
                if not attempts.pause() and count >= at_least:
                    self._failed_at = time.monotonic()
                    raise typed from None


def is_panic(error: BaseException) -> bool:
    """Return whether a client library written in Rust has panicked, which is no ordinary exception."""
    return type(error).__name__ == "PanicException"


class ClientCache(Generic[_K, _C]):
    """The most recently used clients of a process. Each has connections and threads, so only some are cached.

    Args:
        limit: returns how many.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._clients: dict[_K, _C] = {}  # the most recently used last
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._replace_lock)

    def _replace_lock(self) -> None:
        self._lock = threading.Lock()  # the parent's thread that held it does not exist in the child

    def get(self, key: _K, make: Callable[[Iterable[tuple[_K, _C]]], _C]) -> _C:
        """Return the client for `key`; `make` creates it, given the cached keys and clients."""
        with self._lock:
            client = self._clients.pop(key, None)
            if client is None:
                client = make(self._clients.items())
            self._clients[key] = client
            while len(self._clients) > self._limit():
                del self._clients[next(iter(self._clients))]
            return client

    def __len__(self) -> int:
        return len(self._clients)
