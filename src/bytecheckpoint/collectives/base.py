"""How ranks agree: mail with unique tags, and the collective operations that follow from it.

Control messages never travel through the training's process groups. A message is named by (source, tag), waits at its
receiver until it is consumed, and needs no order relative to other messages, so that the foreground and background
threads of a rank can talk at the same time, and a failed operation leaves nothing behind that a later one could trip over.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    error_from_report,
    error_report,
)

__all__ = ["Collective", "MailObserver", "Mailbox", "MailboxCollective", "host_id", "names_of_ranks", "new_world_id"]


def new_world_id() -> str:
    """16 random hex characters."""
    return secrets.token_hex(8)


@functools.cache
def host_id() -> str:
    """Name of this machine and boot: equal for two processes that share memory and page cache."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def names_of_ranks(ranks: Collection[int], limit: int = 16) -> str:
    """For messages: "rank 3", "ranks 1, 2 and 9 more"."""
    listed = sorted(ranks)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed[:limit])) + more


# First byte of what rank 0 answers: the answer follows, or what failed, or the length of an answer that is relayed.
_FINE, _FAILED, _RELAYED = b"\0", b"\1", b"\2"
#: An answer for all ranks that is longer than this is relayed in larger worlds: rank 0 alone would send it to each of them.
_LONG = 256 << 10
#: Ranks to which one rank hands on a relayed answer.
_FAN_OUT = 8


def _pack(payloads: list[bytes]) -> bytes:
    """One message for all of them: a table of lengths, then the payloads."""
    return np.array([len(payload) for payload in payloads], "<u8").tobytes() + b"".join(payloads)


def _unpack(word: bytes, count: int) -> list[bytes]:
    """What `_pack` has packed."""
    head = 8 * count
    ends = (head + np.cumsum(np.frombuffer(word, "<u8", count)).astype(np.int64)).tolist()
    return [word[start:end] for start, end in zip([head, *ends[:-1]], ends, strict=True)]


class Collective(ABC):
    """One rank's view of a world of ranks.

    Tags are chosen by the caller and name one message, or one collective operation, each; a world never reuses one.
    All operations may be called from any thread, several at a time.

    Attributes:
        rank: of this process (or thread) in the world.
        world_size: number of ranks.
        world_id: random hex characters, equal on all ranks, new for each world.
        host: equal for ranks that share memory and page cache (see `host_id`).
    """

    rank: int
    world_size: int
    world_id: str
    host: str

    @abstractmethod
    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Post `payload` to rank `to`; never waits for the receiver.

        Raises:
            PeerLostError: the world was closed, or its rank 0 is gone.
        """

    @abstractmethod
    def recv(self, source: int, tag: str, *, timeout: float) -> bytes:
        """Take the message that rank `source` sent under `tag`; waits at most `timeout` seconds.

        Raises:
            CheckpointTimeoutError: it did not come in time.
            PeerLostError: it cannot come any more: `source` (or rank 0, which relays mail) is gone.
        """

    @abstractmethod
    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:
        """Like `recv` from all `sources` under one deadline; the errors name every rank that is missing."""

    def close(self) -> None:
        """Leave the world. Mail already sent is still delivered; later calls raise `PeerLostError`."""

    def gather(self, tag: str, payload: bytes, *, timeout: float) -> list[bytes] | None:
        """Every rank's payload, in order of rank, on rank 0; None elsewhere (which does not wait)."""
        if self.rank != 0:
            self.send(0, tag, payload)
            return None
        return [payload, *self.collect(range(1, self.world_size), tag, timeout=timeout)]

    def scatter(self, tag: str, payloads: Sequence[bytes] | None, *, timeout: float) -> bytes:
        """Rank 0 gives `payloads`, one per rank; each rank gets its own."""
        if self.rank != 0:
            return self.recv(0, tag, timeout=timeout)
        assert payloads is not None and len(payloads) == self.world_size
        for to in range(1, self.world_size):
            self.send(to, tag, payloads[to])
        return payloads[0]

    def broadcast(self, tag: str, payload: bytes | None, *, timeout: float) -> bytes:
        """Rank 0's payload, on every rank."""
        if self.rank == 0:
            assert payload is not None
            return self.scatter(tag, [payload] * self.world_size, timeout=timeout)
        return self.scatter(tag, None, timeout=timeout)

    def all_gather(self, tag: str, payload: bytes, *, timeout: float) -> list[bytes]:
        """Every rank's payload, in order of rank, on every rank."""
        packed = self.consult(
            tag, payload, lambda all_payloads: [_pack(all_payloads)] * self.world_size, timeout=timeout
        )
        return _unpack(packed, self.world_size)

    def barrier(self, tag: str, *, timeout: float) -> None:
        """Returns when every rank has called it."""
        self.consult(tag, b"", lambda _: [b""] * self.world_size, timeout=timeout)

    def consult(
        self, tag: str, payload: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], *, timeout: float
    ) -> bytes:
        """Rank 0 makes an answer for each rank out of the payloads of all.

        Args:
            tag: as everywhere.
            payload: this rank's.
            decide: payloads in order of rank -> answers in order of rank; called on rank 0 only.
            timeout: seconds for the whole of it.

        Returns:
            The answer for this rank.

        Raises:
            CheckpointTimeoutError, PeerLostError: on every rank at once when not every payload came; what `decide`
                raised, likewise.
        """
        deadline = time.monotonic() + timeout
        up, down = f"{tag}/up", f"{tag}/down"
        answers: list[bytes] | None = None
        relayed = None
        try:
            payloads = self.gather(up, payload, timeout=timeout)
            if payloads is not None:
                decided = decide(payloads)
                shared = {id(answer): answer for answer in decided}
                if len(shared) == 1 and len(decided[0]) > _LONG and self.world_size > _FAN_OUT:
                    relayed = np.frombuffer(decided[0], np.uint8)
                    answers = [_RELAYED + relayed.nbytes.to_bytes(8, "little")] * self.world_size
                else:
                    words = {number: _FINE + answer for number, answer in shared.items()}
                    answers = [words[id(answer)] for answer in decided]
        except Exception as error:
            if self.rank == 0:
                with contextlib.suppress(CheckpointError):
                    self.broadcast(down, _FAILED + json.dumps(error_report(error)).encode(), timeout=0)
            raise
        word = self.scatter(down, answers, timeout=max(0.0, deadline - time.monotonic()))
        if word[:1] == _FAILED:
            raise error_from_report(json.loads(word[1:]), prefix=f"rank {self.rank}: {tag!r} failed on rank 0: ")
        if word[:1] == _RELAYED:
            data = np.empty(int.from_bytes(word[1:], "little"), np.uint8) if relayed is None else relayed
            self._relay(tag, data, deadline)
            return data.tobytes()
        return word[1:]

    def _relay(self, tag: str, data: NDArray[np.uint8], deadline: float) -> None:
        """Take rank 0's data from the rank above in a tree, and hand it on to those below."""
        first = self.rank * _FAN_OUT + 1
        below = range(first, min(first + _FAN_OUT, self.world_size))
        if self.rank:
            above = (self.rank - 1) // _FAN_OUT
            left = max(0.0, deadline - time.monotonic())
            self.exchange(f"{tag}/from {above}", {}, {above: data}, timeout=left)
        if below:
            left = max(0.0, deadline - time.monotonic())
            self.exchange(f"{tag}/from {self.rank}", dict.fromkeys(below, data), {}, timeout=left)

    def exchange(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
    ) -> None:
        """The data plane: send arrays to other ranks and fill arrays from them, all at once.

        Args:
            tag: as everywhere; equal on both sides.
            outgoing: by destination rank, contiguous 1-D uint8; must not change before the call returns.
            incoming: by source rank, contiguous 1-D uint8, of the size that the other side sends.
            timeout: seconds for the whole of it.

        Raises:
            CheckpointTimeoutError, PeerLostError: as `recv`; also what another rank of the exchange failed with. What
                `incoming` holds is then undefined, but no longer written to. Other exchanges are not affected.
        """
        deadline = time.monotonic() + timeout
        for to, array in outgoing.items():
            self.send(to, tag, array.tobytes())
        for source, array in incoming.items():
            payload = self.recv(source, tag, timeout=max(0.0, deadline - time.monotonic()))
            assert len(payload) == array.nbytes, f"exchange {tag}: {len(payload)} bytes for {array.nbytes}"
            np.copyto(array, np.frombuffer(payload, np.uint8))


class MailObserver(Protocol):
    """Who takes one kind of mail as it arrives. Called under the mailbox's lock: must only make a note of it."""

    def on_mail(self, source: int, payload: bytes) -> None:
        """A message under the observed tag."""

    def on_lost(self, source: int, reason: str) -> None:
        """No more mail will come from `source`."""

    def on_closed(self, reason: str) -> None:
        """No more mail will come from anybody."""


class _Wait:
    """One thread that waits for messages under one tag."""

    def __init__(self, missing: set[int], lock: threading.Lock) -> None:
        self.missing = missing
        self.over = threading.Condition(lock)


class Mailbox:
    """Messages that have arrived at one rank, until a thread of it takes them. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._mail: dict[str, dict[int, deque[bytes]]] = {}  # by tag, then source
        self._waits: dict[str, list[_Wait]] = {}  # by tag
        self._observers: dict[str, MailObserver] = {}  # by tag
        self._lost: dict[int, str] = {}
        self._closed: str | None = None
        self._lock = threading.Lock()

    def deposit(self, source: int, tag: str, payload: bytes) -> None:
        """Put a message in; who waits for it and for nothing else any more is woken."""
        with self._lock:
            if (observer := self._observers.get(tag)) is not None:
                observer.on_mail(source, payload)
                return
            self._mail.setdefault(tag, {}).setdefault(source, deque()).append(payload)
            for wait in self._waits.get(tag, ()):
                wait.missing.discard(source)
                if not wait.missing:
                    wait.over.notify()

    def lose(self, source: int, reason: str) -> None:
        """No more mail will come from `source`: fail waits for it, now and later. Mail that is here stays."""
        with self._lock:
            if source in self._lost:
                return
            self._lost[source] = reason
            for observer in self._observers.values():
                observer.on_lost(source, reason)
            for wait in itertools.chain(*self._waits.values()):
                if source in wait.missing:
                    wait.over.notify()

    def close(self, reason: str) -> None:
        """No more mail will come from anybody. Mail that is here stays."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason
            for observer in self._observers.values():
                observer.on_closed(reason)
            for wait in itertools.chain(*self._waits.values()):
                wait.over.notify()

    def observe(self, tag: str, observer: MailObserver) -> None:
        """Give all messages under `tag` to `observer`, and tell it of losses: those of the past too."""
        with self._lock:
            self._observers[tag] = observer
            for source, messages in self._mail.pop(tag, {}).items():
                for message in messages:
                    observer.on_mail(source, message)
            for source, reason in self._lost.items():
                observer.on_lost(source, reason)
            if self._closed is not None:
                observer.on_closed(self._closed)

    @property
    def closed(self) -> str | None:
        """Why no more mail will come, or None."""
        return self._closed

    def holds(self, source: int, tag: str) -> bool:
        """Whether `take` would return at once."""
        return source in self._mail.get(tag, ())

    def take(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:
        """The messages under `tag` from all `sources`, all or none; errors as `Collective.collect`."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                here = self._mail.get(tag, {})
                missing = {source for source in sources if source not in here}
                if not missing:
                    return [self._pop(source, tag) for source in sources]
                if self._lost or self._closed is not None:
                    self._raise_if_hopeless(sorted(missing), tag)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CheckpointTimeoutError(
                        f"rank {self.rank}: no message {tag!r} from {names_of_ranks(missing)} within {timeout:g} s; "
                        "look for a hung rank, or raise the time-out"
                    )
                # Woken when nothing is missing, not by each message: that would be quadratic in the number of ranks.
                wait = _Wait(missing, self._lock)
                waits = self._waits.setdefault(tag, [])
                waits.append(wait)
                try:
                    wait.over.wait(left)
                finally:
                    waits.remove(wait)
                    if not waits:
                        del self._waits[tag]

    def _pop(self, source: int, tag: str) -> bytes:
        here = self._mail[tag]
        payload = here[source].popleft()
        if not here[source]:
            del here[source]
        if not here:
            del self._mail[tag]
        return payload

    def _raise_if_hopeless(self, missing: list[int], tag: str) -> None:
        lost = [s for s in missing if s in self._lost]
        if lost:
            raise PeerLostError(
                f"rank {self.rank}: lost {names_of_ranks(lost)} while waiting for {tag!r}: {self._lost[lost[0]]}; "
                "restart the job from its last committed checkpoint"
            )
        if self._closed is not None:
            raise PeerLostError(f"rank {self.rank}: no message {tag!r} from {names_of_ranks(missing)}: {self._closed}")


class MailboxCollective(Collective):
    """A collective whose mail arrives in a `Mailbox`."""

    def __init__(self, rank: int, world_size: int, world_id: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world_id = world_id
        self.host = host_id()
        self._mailbox = Mailbox(rank)

    def recv(self, source: int, tag: str, *, timeout: float) -> bytes:  # noqa: D102 (inherited)
        return self.collect((source,), tag, timeout=timeout)[0]

    def collect(self, sources: Collection[int], tag: str, *, timeout: float) -> list[bytes]:  # noqa: D102
        return self._mailbox.take(sources, tag, timeout=timeout)
