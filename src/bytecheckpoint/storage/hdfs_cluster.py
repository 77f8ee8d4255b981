"""One HDFS as one process sees it: its client, kept for all checkpoints in it, with time limits and patience around it.

The client alone waits three minutes for a NameNode that is gone, and for ever for one that hangs. Here every call has a
time limit, and is tried again as long as that makes sense: a NameNode that a save or load has already spoken with is
waited for (it restarts, or another takes over), one that does not answer in the first place is not.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import hdfs_native

from ..errors import CheckpointError, StorageError
from ..settings import settings
from .hdfs_config import Address, Target, target_of
from .hdfs_errors import facts_of, storage_error
from .hdfs_rpc import concat
from .ranged import Connections
from .retrying import Attempts

__all__ = ["Cluster", "Contact", "bounded", "cluster_of"]

_T = TypeVar("_T")
#: How long a NameNode is tried that has not answered this save or load before, in seconds: one that this process has
#: never heard of, one that it has (it may be restarting), and to write (the writer of a save may speak with it for the
#: first time while it is being restarted).
_FIRST_SECONDS = 5.0
_KNOWN_SECONDS = 15.0
_FIRST_WRITE_SECONDS = 30.0
_FRESH_SECONDS = 600.0
#: Time limit of one call, once the NameNode has answered and before. Several NameNodes share it.
_CALL_SECONDS = 60.0
_FIRST_CALL_SECONDS = 20.0
_LEAST_CALL_SECONDS = 5.0
#: "No room" is believed after so long: a DataNode that has just started is not known to have any.
_NO_ROOM_SECONDS = 15.0
#: How long a call that is not important is tried, when another one was given up so many seconds ago.
_TIRED_SECONDS = 1.0
_TIRED_FOR_SECONDS = 120.0
#: A read that takes so long has waited for a DataNode that says nothing. For some minutes files are then opened by a client
#: that waits less for DataNodes.
_SLOW_SECONDS = 10.0
_HURRY_SECONDS = 600.0
_HURRIED = {"dfs.client.socket-timeout": "2000"}
#: Clients kept. Each has threads and connections.
_KEPT = 8


class Contact:
    """When a NameNode last answered the save or load that holds this."""

    def __init__(self) -> None:
        self._answered = -_FRESH_SECONDS

    def made(self) -> None:
        """It answers."""
        self._answered = time.monotonic()

    @property
    def fresh(self) -> bool:
        """Whether it has answered lately."""
        return time.monotonic() - self._answered < _FRESH_SECONDS


class Cluster:
    """A client and what was found out about its cluster.

    Args:
        target: whom it speaks with.

    Attributes:
        client: hdfs_native's. Several threads use it at once. It is replaced when it is stuck.
        joins: whether sub-files can be joined there, as far as is known.
        connections: of reads.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self.joins = not target.secure
        self.connections = Connections()
        self._known = False
        self._joined_by: Address | None = None
        self._failed_at = -_FRESH_SECONDS
        self.client: Any = self._connect({})
        self._hurried: Any = None
        self._hurried_until = 0.0

    def _connect(self, more: Mapping[str, str]) -> Any:
        try:
            return hdfs_native.Client(f"hdfs://{self._target.authority}", {**dict(self._target.options), **more})
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(f"cannot use hdfs://{self._target.authority}: {facts_of(error).reason}") from None

    def _turn_from(self, client: Any) -> None:
        """Ask another NameNode first from now on, if there is one.

        Args:
            client: it waits for one that says nothing, and would ask that one again for ever.
        """
        with self._lock:
            if self.client is client and len(self._target.namenodes) > 1:
                self._target = self._target.turned()
                self.client = self._connect({})
                self._hurried = None

    @property
    def reader(self) -> Any:
        """The client that opens files now.

        The client forgets which DataNodes say nothing: a range whose first copy is on one costs its patience each time.
        """
        hurried = self._hurried
        return self.client if hurried is None or time.monotonic() > self._hurried_until else hurried

    def read(self, call: Callable[[], _T]) -> _T:
        """What `call()` returns, which reads from DataNodes by a file that `reader` has opened."""
        begun = time.monotonic()
        try:
            result = call()
        except Exception:
            self._hurried = None  # perhaps all are only slow
            raise
        if time.monotonic() - begun > _SLOW_SECONDS:
            with self._lock:
                self._hurried = self._hurried or self._connect(_HURRIED)
                self._hurried_until = time.monotonic() + _HURRY_SECONDS
        return result

    def run(
        self,
        action: str,
        shown: str,
        call: Callable[[], _T],
        contact: Contact,
        *,
        writes: bool = False,
        brief: bool = False,
        limited: bool = True,
    ) -> _T:
        """What `call()` returns, tried again after transient errors.

        Args:
            action: what is being done, for messages.
            shown: what it is done to, for messages.
            call: one try. A CheckpointError and FileExistsError pass through.
            contact: of the storage that asks.
            writes: the call changes something: if its answer is lost it may have taken effect.
            brief: give up soon if the cluster was out of reach a moment ago.
            limited: apply the time limit of a call; otherwise `call` has limits of its own.

        Raises:
            StorageError: typed; FileNotFoundError: no such file.
        """
        _refuse_fork(f"hdfs://{self._target.authority}")
        tired = brief and time.monotonic() - self._failed_at < _TIRED_FOR_SECONDS
        patience = min(settings().storage_timeout, _TIRED_SECONDS if tired else math.inf)
        whole = Attempts(patience)
        known = _KNOWN_SECONDS if self._known else _FIRST_SECONDS
        first = Attempts(min(patience, _FIRST_WRITE_SECONDS if writes else known))
        room = Attempts(min(patience, _NO_ROOM_SECONDS))
        while True:
            whole.count += 1
            client = self.client
            try:
                limit = min(self.limit(contact), max(patience, 2.0))
                result = bounded(call, limit) if limited else call()
            except (CheckpointError, FileExistsError):
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise  # panics of the client are no ordinary exceptions
                facts = facts_of(error)
                if facts.answered:
                    self._answered(contact)
                if isinstance(error, TimeoutError):
                    self._turn_from(client)
                found = storage_error(facts, action, shown, whole.count, self._target.namenodes, undecided=writes)
                if not facts.transient:
                    raise found from None
                left = room if facts.no_room and facts.running != 0 else whole
                if not contact.fresh:
                    left = first
                if not left.pause() and whole.count >= len(self._target.namenodes):
                    self._failed_at = time.monotonic()
                    raise found from None
            else:
                self._answered(contact)
                return result

    def _answered(self, contact: Contact) -> None:
        self._known = True
        contact.made()

    def limit(self, contact: Contact) -> float:
        """Time limit of one call of the NameNode, in seconds."""
        seconds = _CALL_SECONDS if contact.fresh else _FIRST_CALL_SECONDS
        share = max(seconds / len(self._target.namenodes), _LEAST_CALL_SECONDS)
        return min(seconds, share, max(settings().storage_timeout, 2.0))

    def join(self, target: str, sources: Sequence[str], call: bytes) -> None:
        """Append closed files to another one of their folder: one try.

        Args:
            target: path of the file that remains.
            sources: paths.
            call: 16 bytes that name this call in every try of it.

        Raises:
            RemoteError: the NameNode refuses. OSError: it does not answer.
        """
        asked = sorted(self._target.namenodes, key=lambda address: address != self._joined_by)
        timeout = min(_CALL_SECONDS / len(asked), max(settings().storage_timeout, 2.0))
        self._joined_by = concat(asked, self._target.user, target, sources, call, timeout=timeout)


# --- time limits ------------------------------------------------------------------------------------------------------


class _Task:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


_idle: list[queue.SimpleQueue[_Task]] = []


def _work(inbox: queue.SimpleQueue[_Task]) -> None:
    while True:
        task = inbox.get()
        try:
            task.result = task.call()
        except BaseException as error:  # noqa: BLE001  raised by who waits
            task.error = error
        _idle.append(inbox)  # before the answer: who asks next finds it
        task.done.set()
        del task


def bounded(call: Callable[[], _T], seconds: float) -> _T:
    """What `call()` returns, if that takes no longer than `seconds`.

    The client's calls cannot be ended. One that exceeds its time keeps a thread until it returns; nobody waits for it.

    Raises:
        TimeoutError: it took longer.
    """
    task = _Task(call)
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        try:
            threading.Thread(target=_work, args=(inbox,), name="bytecheckpoint-hdfs", daemon=True).start()
        except RuntimeError:  # the interpreter ends: without a time limit, then
            return call()
    inbox.put(task)
    if not task.done.wait(seconds):
        raise TimeoutError(f"no answer in {seconds:g} s")
    if task.error is not None:
        if not isinstance(task.error, Exception):
            raise RuntimeError(f"the HDFS client failed: {task.error}")  # a panic of the client
        raise task.error
    result: _T = task.result
    return result


# --- one cluster per process ------------------------------------------------------------------------------------------

#: The process in which the client's threads run.
_user: int | None = None
#: The most recently used last.
_clusters: dict[Target, Cluster] = {}
_clusters_lock = threading.Lock()


def _refuse_fork(name: str) -> None:
    global _user  # noqa: PLW0603  one runtime per process
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise StorageError(
            f"cannot use {name} in a fork of a process that has used HDFS: start the process with the method 'spawn'"
        )


def cluster_of(authority: str) -> Cluster:
    """The cluster, the same one for all who ask while the configuration stays as it is."""
    target = target_of(authority)
    _refuse_fork(f"hdfs://{authority}")
    with _clusters_lock:
        cluster = _clusters.pop(target, None) or Cluster(target)
        _clusters[target] = cluster
        if len(_clusters) > _KEPT:
            del _clusters[next(iter(_clusters))]
        return cluster


def _after_fork() -> None:
    global _clusters_lock  # noqa: PLW0603  the parent's threads do not exist in the child
    _clusters_lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)
