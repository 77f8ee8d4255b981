"""The client of one HDFS cluster, which all checkpoints in it share, with timeouts and retries around every call.

The client library alone waits three minutes for a NameNode that is gone, and without end for one that hangs. Here every
call has a timeout and is retried. If a NameNode has ever answered this process, retries go on for long, because it restarts
or another one takes over. If none has answered yet, its address may be wrong, and retries end sooner.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import hdfs_native

from bytecheckpoint.calls import SharedLock
from bytecheckpoint.concurrency import CallTimeoutError, wait_for_call
from bytecheckpoint.errors import StorageError, StorageFullError
from bytecheckpoint.retries import RetryBudget
from bytecheckpoint.settings import settings
from bytecheckpoint.storage.hdfs.config import Address, ClusterAddress, target_of
from bytecheckpoint.storage.hdfs.errors import facts_of, storage_error
from bytecheckpoint.storage.hdfs.rpc import concat, remaining_bytes
from bytecheckpoint.storage.remote import BriefRetries, ClientCache, RemoteClient, is_panic
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = ["Cluster", "call_client", "check_room", "cluster_of"]

_T = TypeVar("_T")
#: Lower bound of timeouts that follow `storage_timeout`.
_SHORTEST_SECONDS = 2.0
#: Seconds for which a lack of space is retried: the NameNode learns late of the space on a DataNode that has just started.
_NO_ROOM_SECONDS = 15.0
#: A read that takes this many seconds has waited for a DataNode that does not answer. For a while a client with a shorter
#: timeout for DataNodes then opens the files.
_SLOW_READ_SECONDS = 10.0
_SHORT_TIMEOUT_SECONDS = 600.0
_SHORT_TIMEOUT = {"dfs.client.socket-timeout": "2000"}


class Cluster(RemoteClient):
    """A cluster and its client.

    Args:
        target: address and configuration of the cluster.

    Attributes:
        client: hdfs_native's client, for all threads. Another one replaces it when its first NameNode hangs.
        joins: True if the cluster can join sub-files, False if not, as far as is known.
        answered: True once a NameNode has answered this process.
        without_quota: folders that had no space quota when they were looked at.
    """

    service = "HDFS"
    brief_retries = BriefRetries(120.0, 1.0)

    def __init__(self, target: ClusterAddress) -> None:
        super().__init__(f"hdfs://{target.authority}")
        self.joins = not target.secure
        self._target = target
        self._lock = SharedLock()
        self.answered = False
        self.without_quota: set[str] = set()
        self._joined_by: Address | None = None
        self.client: Any = self._connect({})
        self._short_client: Any = None
        self._short_client_until = 0.0

    def _connect(self, options: Mapping[str, str]) -> Any:
        try:
            return hdfs_native.Client(self.name, {**dict(self._target.options), **options})
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"cannot use {self.name}: {facts_of(error).reason}") from None

    def _rotate_namenodes(self, client: Any) -> None:
        """Ask another NameNode first from now on, if there is one.

        Args:
            client: the client whose call timed out; it would ask the hanging NameNode first for ever.
        """
        with self._lock:
            if self.client is client and len(self._target.namenodes) > 1:
                self._target = self._target.rotated()
                self.client = self._connect({})
                self._short_client = None

    @property
    def reader(self) -> Any:
        """The client that opens files now: for a while after a slow read, one with a shorter timeout for DataNodes.

        No client remembers which DataNodes do not answer: each range whose first replica is on one costs a timeout.
        """
        client = self._short_client
        return self.client if client is None or time.monotonic() > self._short_client_until else client

    def read(self, call: Callable[[], _T]) -> _T:
        """Return `call()`, which reads from DataNodes through a file that `reader` has opened."""
        begun = time.monotonic()
        try:
            result = call()
        except Exception:
            self._short_client = None  # perhaps all DataNodes are only slow
            raise
        if time.monotonic() - begun > _SLOW_READ_SECONDS:
            with self._lock:
                self._short_client = self._short_client or self._connect(_SHORT_TIMEOUT)
                self._short_client_until = time.monotonic() + _SHORT_TIMEOUT_SECONDS
        return result

    def run(
        self,
        action: str,
        label: str,
        call: Callable[[], _T],
        *,
        writes: bool = False,
        brief: bool = False,
        timeout: bool = True,
    ) -> _T:
        """Return `call()`, and call it again after transient errors.

        Args:
            action: verb for messages, "read".
            label: address of the file or folder, for messages.
            call: one attempt. A CheckpointError and FileExistsError pass through.
            writes: `call` changes something, so it may have taken effect even when its answer is lost.
            brief: retry for a short time only, if the cluster was unreachable a moment ago.
            timeout: apply the timeout of one call; otherwise `call` has timeouts of its own.

        Raises:
            StorageError: typed; FileNotFoundError: there is no such file.
        """
        self.refuse_fork(self.name)
        seconds = min(settings().storage.timeout, self._retry_seconds(math.inf, brief))
        in_contact = RetryBudget(seconds)
        first_contact = tuning().hdfs_first_write if writes else tuning().hdfs_first_contact
        without_contact = RetryBudget(min(seconds, first_contact))
        no_room = RetryBudget(min(seconds, _NO_ROOM_SECONDS))
        client = self.client

        def attempt() -> _T:
            nonlocal client
            client = self.client
            limit = min(self.call_timeout(), max(seconds, _SHORTEST_SECONDS))
            result = call_client(call, limit) if timeout else call()
            self.answered = True
            return result

        def classify(error: BaseException, count: int) -> tuple[Exception, RetryBudget | None]:
            if isinstance(error, FileExistsError) or not (isinstance(error, Exception) or is_panic(error)):
                raise error
            facts = facts_of(error)
            if facts.answered:
                self.answered = True
            if isinstance(error, TimeoutError):
                self._rotate_namenodes(client)
            typed = storage_error(facts, action, label, count, self._target.namenodes, undecided=writes)
            if not facts.transient:
                return typed, None
            if not self.answered:
                return typed, without_contact
            return typed, no_room if facts.no_room and facts.running != 0 else in_contact

        return self._retry(attempt, classify, at_least=len(self._target.namenodes))

    def call_timeout(self) -> float:
        """Return the timeout of one call of the NameNode, in seconds."""
        seconds = tuning().hdfs_call if self.answered else tuning().hdfs_first_call
        share = max(seconds / len(self._target.namenodes), tuning().hdfs_shortest_call)
        return min(seconds, share, max(settings().storage.timeout, _SHORTEST_SECONDS))

    def join(self, target: str, sources: Sequence[str], client_id: bytes) -> None:
        """Append closed files to another file of their folder: one attempt.

        Args:
            target: path of the file that remains.
            sources: paths of the files to append.
            client_id: 16 bytes, the same in all attempts of this call and in no other call.

        Raises:
            RemoteError: the NameNode refuses. OSError: it does not answer.
        """
        namenodes = sorted(self._target.namenodes, key=lambda address: address != self._joined_by)
        timeout = min(tuning().hdfs_call / len(namenodes), max(settings().storage.timeout, _SHORTEST_SECONDS))
        self._joined_by = concat(namenodes, self._target.user, target, sources, client_id, timeout=timeout)

    def remaining_bytes(self, timeout: float) -> int | None:
        """Return the bytes that are left, or None if nobody knows: `rpc` has no Kerberos. Raises as `join`."""
        if self._target.secure:
            return None
        return remaining_bytes(self._target.namenodes, self._target.user, timeout=timeout)


def call_client(call: Callable[[], _T], seconds: float) -> _T:
    """Return `call()`, a call of the client library, which has no timeouts of its own.

    Raises:
        TimeoutError: it takes longer than `seconds`.
        RuntimeError: the library panics, or any other error of the library.
    """

    def attempt() -> _T:
        try:
            return call()
        except BaseException as error:
            if is_panic(error):
                raise RuntimeError(f"the HDFS client failed: {error}") from None
            raise

    try:
        return wait_for_call(attempt, seconds)
    except CallTimeoutError:
        raise TimeoutError(f"no answer in {seconds:g} s") from None


_clusters: ClientCache[ClusterAddress, Cluster] = ClientCache(lambda: tuning().hdfs_clients)


def cluster_of(authority: str) -> Cluster:
    """Return this process's client of a cluster, a new one after the configuration has changed."""
    target = target_of(authority)
    Cluster.refuse_fork(f"hdfs://{authority}")
    return _clusters.get(target, lambda _: Cluster(target))


_log = logging.getLogger("bytecheckpoint")
#: Timeout of one question. Without an answer the save continues, and fails later if it does not fit.
_ROOM_SECONDS = 5.0
#: Seconds in which DataNodes register at a NameNode that was restarted, and until then count as none: two heartbeats.
_REGISTRATION = 6.0
#: Folders that are looked at for a quota: the checkpoint's, and those above it. A NameNode that knows no quota of a folder
#: counts all files in it, which must not be those of the whole cluster.
_FOLDERS = 3
#: The client reports "none", which is -1 for the NameNode, as a number without a sign.
_NO_QUOTA = 1 << 63


def check_room(cluster: Cluster, path: str, label: str, nbytes: int) -> None:
    """Raise an error if `nbytes` more do not fit.

    Args:
        cluster: cluster of the folder.
        path: path of the folder, which need not exist.
        label: address of the folder, for messages.
        nbytes: size of its new files in bytes.

    Raises:
        StorageFullError: they do not fit.
    """
    try:
        remaining = _remaining(cluster)
        if remaining is not None and nbytes > remaining:
            pause(_REGISTRATION)
            remaining = _remaining(cluster)
        limits = [("the cluster", remaining)] if remaining is not None else []
        for what, available in itertools.chain(limits, _quotas(cluster, path)):
            if nbytes > available:
                raise StorageFullError(
                    f"cannot save to {label}: it takes {nbytes} bytes, and {what} has {max(available, 0)} left; free space "
                    f"or raise the quota, then save again"
                )
    except StorageFullError:
        raise
    except Exception as error:  # noqa: BLE001  the NameNode refuses or does not answer: the save finds out if it matters
        _log.info("%s: the free space is unknown: %s", label, facts_of(error).reason)


def _remaining(cluster: Cluster) -> int | None:
    """Return the free bytes of the cluster, which writes fewer replicas than asked for if no more fit."""
    return call_client(lambda: cluster.remaining_bytes(_ROOM_SECONDS), 2 * _ROOM_SECONDS)


def _quotas(cluster: Cluster, path: str) -> Iterator[tuple[str, int]]:
    """Yield the folders with a quota, and the bytes of files that each has left."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), max(len(parts) - _FOLDERS, 0), -1):
        folder = "/" + "/".join(parts[:depth])
        if folder in cluster.without_quota:
            continue
        try:
            summary = call_client(partial(cluster.client.get_content_summary, folder), _ROOM_SECONDS)
        except Exception as error:
            if not facts_of(error).absent:
                raise
            continue
        if summary.space_quota >= _NO_QUOTA:  # a quota that is set later is the NameNode's to enforce
            cluster.without_quota.add(folder)
        else:
            # A byte counts once per replica, or less with erasure coding: as those that are there do.
            per_byte = max(summary.space_consumed / summary.length, 1.0) if summary.length else 1.0
            yield f"the space quota of {folder}", int((summary.space_quota - summary.space_consumed) / per_byte)
