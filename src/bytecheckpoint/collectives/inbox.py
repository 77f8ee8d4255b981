"""The messages that have arrived at one rank, and the collective that receives through such an inbox."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import (
    Collective,
    DataProvider,
    host_id,
    names_of_ranks,
    provide,
)
from bytecheckpoint.collectives.call_log import CallLog
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.liveness import note_activity, seconds_busy, seconds_idle
from bytecheckpoint.tuning import tuning

__all__ = ["ASK", "Inbox", "InboxCollective", "MessageHandler"]

#: Tag of a message to which the transport of its receiver answers with `Inbox.outlook`, under the tag in the payload.
ASK = "outlook?"
_OUTLOOK = struct.Struct("<dd")
#: Seconds for which a rank is waited for beyond the time at which it must have ended or gone on.
_GRACE = 5.0


def _is_outlook(answer: bytes) -> bool:
    """Return whether a rank has answered with a time until which it may be waited for."""
    if len(answer) < _OUTLOOK.size:
        return False
    busy, idle = _OUTLOOK.unpack_from(answer)
    return bool(busy < math.inf and idle > -math.inf)  # neither holds for a NaN


class MessageHandler(Protocol):
    """Receiver of all messages under one tag. The inbox calls it under its lock, so the methods must return at once."""

    def on_message(self, source: int, payload: bytes) -> None:
        """Take a message of rank `source`."""

    def on_lost(self, source: int, reason: str) -> None:
        """Note that rank `source` sends no more messages."""

    def on_closed(self, reason: str) -> None:
        """Note that no rank sends any more messages."""


class _Waiter(NamedTuple):
    """One thread that waits for messages under one tag.

    Attributes:
        missing: ranks whose message has not come.
        over: queue whose first item ends the wait.
    """

    missing: set[int]
    over: queue.SimpleQueue[None]


class _WatchHandler:
    """A handler that passes messages and losses on to functions."""

    def __init__(
        self, on_message: Callable[[bytes], None] | None = None, on_lost: Callable[[int, str], None] | None = None
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def on_message(self, source: int, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(payload)

    def on_lost(self, source: int, reason: str) -> None:
        if self._on_lost is not None:
            self._on_lost(source, reason)

    def on_closed(self, reason: str) -> None:
        self.on_lost(0, reason)  # rank 0, to which all messages go


class _Wait:
    """One call of `take`: the time at which it ends, unless ranks that it waits for are alive."""

    def __init__(self, until: float) -> None:
        self.until = until


class Inbox:
    """Messages that have arrived at one rank and that no thread of it has taken yet. Thread-safe.

    Attributes:
        explain: function that explains the silence of ranks by the state of the transport, for an error; "" or "; ...".
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.explain: Callable[[Collection[int]], str] = lambda _: ""
        self._messages: dict[str, dict[int, deque[bytes]]] = {}  # by tag, then source
        self._waiters: dict[str, list[_Waiter]] = {}  # by tag
        self._current: set[_Wait] = set()
        self._questions = itertools.count()
        self._handlers: dict[str, MessageHandler] = {}  # by tag
        self._forgotten: set[str] = set()  # tags
        self._lost: dict[int, str] = {}
        self._closed: str | None = None
        self._calls = CallLog()
        self._lock = threading.RLock()  # a handler may set a token that ends a wait here

    def begin_call(self, name: str, path: str = "") -> None:
        """Note that this rank begins a call that all ranks make; its tags begin with `name`."""
        self._calls.begin(name, path)

    def describe_call(self, kind: str, path: str) -> None:
        """Note the kind and the path of the call that this rank has begun."""
        self._calls.describe(kind, path)

    def put(self, source: int, tag: str, payload: bytes) -> None:
        """Give a message to the handler of its tag, or keep it and wake the threads that have all their messages now."""
        with self._lock:
            if tag in self._forgotten:
                return
            if (handler := self._handlers.get(tag)) is not None:
                handler.on_message(source, payload)
                return
            self._messages.setdefault(tag, {}).setdefault(source, deque()).append(payload)
            for waiter in self._waiters.get(tag, ()):
                waiter.missing.discard(source)
                if not waiter.missing:
                    waiter.over.put(None)

    def mark_lost(self, source: int, reason: str) -> None:
        """Fail all waits for rank `source`, now and later. Messages that have arrived stay."""
        with self._lock:
            if source in self._lost:
                return
            self._lost[source] = reason
            for handler in self._handlers.values():
                handler.on_lost(source, reason)
            for waiter in itertools.chain(*self._waiters.values()):
                if source in waiter.missing:
                    waiter.over.put(None)

    def close(self, reason: str) -> None:
        """Fail all waits, now and later. Messages that have arrived stay."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            for handler in self._handlers.values():
                handler.on_closed(reason)
            for waiter in itertools.chain(*self._waiters.values()):
                waiter.over.put(None)

    def set_handler(self, tag: str, handler: MessageHandler) -> None:
        """Give all messages under `tag` and all losses to `handler`, also those of the past."""
        with self._lock:
            self._handlers[tag] = handler
            for source, messages in self._messages.pop(tag, {}).items():
                for message in messages:
                    handler.on_message(source, message)
            for source, reason in self._lost.items():
                handler.on_lost(source, reason)
            if self._closed is not None:
                handler.on_closed(self._closed)

    def remove_handler(self, tag: str) -> None:
        """Keep messages under `tag` again."""
        with self._lock:
            self._handlers.pop(tag, None)

    def forget(self, tag: str) -> None:
        """Drop the messages under `tag`, now and later."""
        with self._lock:
            self._forgotten.add(tag)
            self._messages.pop(tag, None)

    @property
    def closed(self) -> str | None:
        """Why no more messages come, or None."""
        return self._closed

    def has(self, source: int, tag: str) -> bool:
        """Return whether a message of rank `source` under `tag` has arrived."""
        return source in self._messages.get(tag, ())

    def take(
        self,
        sources: Collection[int],
        tag: str,
        *,
        timeout: float,
        ask: Callable[[int, str], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        """Wait for one message under `tag` from each of `sources`, and take all of them or none.

        Args:
            sources: ranks.
            tag: tag of the messages.
            timeout: seconds. After that, a rank that is alive (`liveness`) is waited for as long as it is.
            ask: function `ask(rank, tag)` that lets a rank send its `outlook` under a tag; None to wait no longer.
            cancel: token of the save or load; its failure ends the wait, and is raised.

        Raises:
            CheckpointTimeoutError, PeerLostError: as `Collective.collect`.
            CheckpointError: failure of `cancel`.
        """
        wait = _Wait(time.monotonic() + timeout)
        self._current.add(wait)
        if cancel is not None:
            cancel.on_set(self._wake_all)
        try:
            limit = wait.until
            pause = tuning().call_check
            look = time.monotonic() + pause
            while True:
                missing = self._wait(sources, tag, min(limit, look), cancel)
                with self._lock:
                    if not missing and all(self.has(source, tag) for source in sources):
                        note_activity()
                        return [self._pop(source, tag) for source in sources]
                if not missing:
                    continue  # another thread took one
                if look < limit:
                    if ask is not None and (call := self._calls.of(tag)) is not None:
                        answers = self._outlooks(missing, timeout, ask)
                        self._calls.check(self.rank, call, {r: a[_OUTLOOK.size :] for r, a in answers.items()})
                    pause *= 2
                    look = time.monotonic() + pause
                    continue
                silent, absent = sorted(missing), ""
                if ask is not None:
                    wait.until, silent, answers = self._earliest_outlook(missing, timeout, ask)
                    absent = self._calls.absent(tag, {r: answers[r][_OUTLOOK.size :] for r in silent if r in answers})
                    limit = wait.until + min(_GRACE, timeout / 4)
                    if missing == {0}:
                        # Rank 0 waits for others: it asks them too, and then reports the silent one to all ranks.
                        limit += min(_GRACE, timeout / 4) + min(tuning().outlook_timeout, timeout)
                if limit <= time.monotonic():
                    with self._lock:
                        self._raise_if_lost(sorted(missing), tag)
                    raise CheckpointTimeoutError(
                        f"rank {self.rank}: no message {tag!r} from {names_of_ranks(silent)} within {round(timeout, 2):g} s"
                        f"{absent}{self.explain(silent)}; look for a hung rank, or raise the time-out",
                        calls_differ=True,
                    )
        finally:
            self._current.discard(wait)

    def outlook(self) -> bytes:
        """Return for how long this rank may still be silent, since when it has been inactive, and its call, for `ask`."""
        waiting = max((wait.until for wait in list(self._current)), default=-math.inf) - time.monotonic()
        return _OUTLOOK.pack(max(seconds_busy(), waiting), seconds_idle()) + self._calls.encode()

    def _earliest_outlook(
        self, ranks: Collection[int], timeout: float, ask: Callable[[int, str], None]
    ) -> tuple[float, list[int], dict[int, bytes]]:
        """Ask ranks for how long they may be silent.

        Returns:
            The time at which the first of them counts as hung, the ranks that count as hung then, and all answers.
        """
        asked = sorted(ranks)
        answers = self._outlooks(asked, timeout, ask)
        now = time.monotonic()
        until = dict.fromkeys(asked, -math.inf)
        for rank, answer in answers.items():
            busy, idle = _OUTLOOK.unpack_from(answer)
            until[rank] = now + max(busy, timeout - idle)
        earliest = min(until.values())
        return earliest, [rank for rank in asked if until[rank] <= max(earliest, now)], answers

    def _outlooks(self, ranks: Collection[int], timeout: float, ask: Callable[[int, str], None]) -> dict[int, bytes]:
        """Ask ranks for their outlook; return the answers that come in time."""
        tag = f"outlook/{next(self._questions)}"
        for rank in ranks:
            ask(rank, tag)
        with contextlib.suppress(PeerLostError):
            self._wait(ranks, tag, time.monotonic() + min(tuning().outlook_timeout, timeout))
        with self._lock:
            answers = {rank: self._pop(rank, tag) for rank in ranks if self.has(rank, tag)}
        return {rank: answer for rank, answer in answers.items() if _is_outlook(answer)}

    def _wake_all(self, _: Failure) -> None:
        with self._lock:
            for waiter in itertools.chain(*self._waiters.values()):
                waiter.over.put(None)

    def _wait(self, sources: Collection[int], tag: str, limit: float, cancel: Cancellation | None = None) -> set[int]:
        """Wait until a message under `tag` has come from each of `sources`, or until the time `limit`.

        Returns:
            The ranks whose message is missing.

        Raises:
            CheckpointError: failure of `cancel`.
        """
        while True:
            if cancel is not None:
                cancel.raise_if_set()
            # Woken when nothing is missing, not by each message: that would be quadratic in the number of ranks.
            # By a queue, for the reason that `wait_for_any` gives.
            waiter = _Waiter(set(), queue.SimpleQueue())
            try:
                with self._lock:
                    by_source = self._messages.get(tag, {})
                    missing = {source for source in sources if source not in by_source}
                    if missing and (self._lost or self._closed is not None):
                        self._raise_if_lost(sorted(missing), tag)
                    remaining = limit - time.monotonic()
                    if not missing or remaining <= 0:
                        return missing
                    waiter.missing.update(missing)
                    self._waiters.setdefault(tag, []).append(waiter)
                if cancel is not None and cancel.failure is not None:
                    continue  # it was set before the waiter was there
                with contextlib.suppress(queue.Empty):
                    waiter.over.get(timeout=remaining)
            finally:
                with self._lock:
                    self._waiters[tag] = [other for other in self._waiters.get(tag, ()) if other is not waiter]
                    if not self._waiters[tag]:
                        del self._waiters[tag]

    def _pop(self, source: int, tag: str) -> bytes:
        by_source = self._messages[tag]
        payload = by_source[source].popleft()
        if not by_source[source]:
            del by_source[source]
        if not by_source:
            del self._messages[tag]
        return payload

    def _raise_if_lost(self, missing: list[int], tag: str) -> None:
        lost = [s for s in missing if s in self._lost]
        if lost:
            reason = self._lost[lost[0]]
            if len(lost) > 1:  # the others may have another one
                reason = f"rank {lost[0]}: {reason}"
            raise PeerLostError(
                f"rank {self.rank}: lost {names_of_ranks(lost)} while waiting for {tag!r}: {reason}; "
                "restart the job from its last committed checkpoint"
            )
        if self._closed is not None:
            raise PeerLostError(f"rank {self.rank}: no message {tag!r} from {names_of_ranks(missing)}: {self._closed}")


class InboxCollective(Collective):
    """A collective whose messages arrive in an `Inbox`.

    Attributes:
        inbox: the messages for this rank.
    """

    def __init__(self, rank: int, world_size: int, world_id: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world_id = world_id
        self.host = host_id()
        self.inbox = Inbox(rank)
        self._providers: dict[str, DataProvider] = {}
        self._loss_watches = itertools.count()

    def recv(  # noqa: D102 (inherited)
        self, source: int, tag: str, *, timeout: float, cancel: Cancellation | None = None
    ) -> bytes:
        return self.collect((source,), tag, timeout=timeout, cancel=cancel)[0]

    def collect(  # noqa: D102 (inherited)
        self,
        sources: Collection[int],
        tag: str,
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> list[bytes]:
        return self.inbox.take(sources, tag, timeout=timeout, ask=self._ask, cancel=cancel)

    def watch(  # noqa: D102 (inherited)
        self, tag: str, on_message: Callable[[bytes], None], on_lost: Callable[[int, str], None] | None = None
    ) -> Callable[[], None]:
        self.inbox.set_handler(tag, _WatchHandler(on_message, on_lost))
        return functools.partial(self.inbox.remove_handler, tag)

    def watch_losses(self, on_lost: Callable[[int, str], None]) -> Callable[[], None]:  # noqa: D102 (inherited)
        tag = f"losses/{next(self._loss_watches)}"
        self.inbox.set_handler(tag, _WatchHandler(on_lost=on_lost))
        return functools.partial(self.inbox.remove_handler, tag)

    def forget(self, tag: str) -> None:  # noqa: D102 (inherited)
        self.inbox.forget(tag)

    def begin_call(self, name: str, path: str = "") -> None:  # noqa: D102 (inherited)
        self.inbox.begin_call(name, path)

    def describe_call(self, kind: str, path: str) -> None:  # noqa: D102 (inherited)
        self.inbox.describe_call(kind, path)

    def _ask(self, rank: int, tag: str) -> None:
        """Let a rank send its outlook under `tag`. Every transport answers `ASK` itself, also while its threads work."""
        if rank == self.rank:
            self.inbox.put(rank, tag, self.inbox.outlook())
            return
        with contextlib.suppress(CheckpointError):  # what is wrong shows in the wait
            self.send(rank, ASK, tag.encode())

    def close(self) -> None:  # noqa: D102 (inherited)
        self.inbox.close("this world was closed")

    # --- served data: of this rank to itself ---

    @contextlib.contextmanager
    def serve(self, tag: str, provider: DataProvider) -> Iterator[None]:  # noqa: D102 (inherited)
        self._providers[tag] = provider
        try:
            yield
        finally:
            del self._providers[tag]

    def fetch(  # noqa: D102 (inherited)
        self, rank: int, tag: str, request: bytes, destination: NDArray[np.uint8], *, timeout: float
    ) -> None:
        if (provider := self._providers.get(tag)) is None:
            raise CheckpointError(f"rank {self.rank}: {tag!r} is not served now")
        np.copyto(destination, provide(provider, request, destination.nbytes))
