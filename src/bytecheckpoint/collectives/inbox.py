"""The messages that have arrived at one rank, and the collective that receives through such an inbox."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import Collective, DataProvider, host_id, names_of_ranks, provide
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError

__all__ = ["Inbox", "InboxCollective", "MessageHandler"]


class MessageHandler(Protocol):
    """Receiver of all messages under one tag. The inbox calls it under its lock, so the methods must return at once."""

    def on_message(self, source: int, payload: bytes) -> None:
        """Take a message of rank `source`."""

    def on_lost(self, source: int, reason: str) -> None:
        """Note that rank `source` sends no more messages."""

    def on_closed(self, reason: str) -> None:
        """Note that no rank sends any more messages."""


class _Wait:
    """One thread that waits for messages under one tag."""

    def __init__(self, missing: set[int], lock: threading.Lock) -> None:
        self.missing = missing
        self.over = threading.Condition(lock)


class Inbox:
    """Messages that have arrived at one rank and that no thread of it has taken yet. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._messages: dict[str, dict[int, deque[bytes]]] = {}  # by tag, then source
        self._waits: dict[str, list[_Wait]] = {}  # by tag
        self._handlers: dict[str, MessageHandler] = {}  # by tag
        self._lost: dict[int, str] = {}
        self._closed: str | None = None
        self._lock = threading.Lock()

    def put(self, source: int, tag: str, payload: bytes) -> None:
        """Give a message to the handler of its tag, or keep it and wake the threads that have all their messages now."""
        with self._lock:
            if (handler := self._handlers.get(tag)) is not None:
                handler.on_message(source, payload)
                return
            self._messages.setdefault(tag, {}).setdefault(source, deque()).append(payload)
            for wait in self._waits.get(tag, ()):
                wait.missing.discard(source)
                if not wait.missing:
                    wait.over.notify()

    def mark_lost(self, source: int, reason: str) -> None:
        """Fail all waits for rank `source`, now and later. Messages that have arrived stay."""
        with self._lock:
            if source in self._lost:
                return
            self._lost[source] = reason
            for handler in self._handlers.values():
                handler.on_lost(source, reason)
            for wait in itertools.chain(*self._waits.values()):
                if source in wait.missing:
                    wait.over.notify()

    def close(self, reason: str) -> None:
        """Fail all waits, now and later. Messages that have arrived stay."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            for handler in self._handlers.values():
                handler.on_closed(reason)
            for wait in itertools.chain(*self._waits.values()):
                wait.over.notify()

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

    @property
    def closed(self) -> str | None:
        """Why no more messages come, or None."""
        return self._closed

    def has(self, source: int, tag: str) -> bool:
        """Whether a message of rank `source` under `tag` has arrived."""
        return source in self._messages.get(tag, ())

    def take(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:
        """Wait for one message under `tag` from each of `sources`, and take all of them or none.

        Raises:
            CheckpointTimeoutError, PeerLostError: as `Collective.collect`.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                by_source = self._messages.get(tag, {})
                missing = {source for source in sources if source not in by_source}
                if not missing:
                    return [self._pop(source, tag) for source in sources]
                if self._lost or self._closed is not None:
                    self._raise_if_lost(sorted(missing), tag)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise CheckpointTimeoutError(
                        f"rank {self.rank}: no message {tag!r} from {names_of_ranks(missing)} within {timeout:g} s; "
                        "look for a hung rank, or raise the time-out"
                    )
                # Woken when nothing is missing, not by each message: that would be quadratic in the number of ranks.
                wait = _Wait(missing, self._lock)
                waits = self._waits.setdefault(tag, [])
                waits.append(wait)
                try:
                    wait.over.wait(remaining)
                finally:
                    waits.remove(wait)
                    if not waits:
                        del self._waits[tag]

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
            raise PeerLostError(
                f"rank {self.rank}: lost {names_of_ranks(lost)} while waiting for {tag!r}: {self._lost[lost[0]]}; "
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

    def recv(self, source: int, tag: str, *, timeout: float) -> bytes:  # noqa: D102 (inherited)
        return self.collect((source,), tag, timeout=timeout)[0]

    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:  # noqa: D102
        return self.inbox.take(sources, tag, timeout=timeout)

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
        self, rank: int, tag: str, request: bytes, into: NDArray[np.uint8], *, timeout: float
    ) -> None:
        if (provider := self._providers.get(tag)) is None:
            raise CheckpointError(f"rank {self.rank} does not serve {tag!r} now")
        np.copyto(into, provide(provider, request, into.nbytes))
