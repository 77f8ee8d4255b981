"""The numbers of the calls that all ranks make together, and how ranks find each other again after one left a call out.

A call takes its number without a message. After a failure that may mean that ranks were in different calls, the next call
of every rank begins with a meeting instead: rank 0 compares the calls, and all take the same number (decision 0061).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import msgspec

from bytecheckpoint.collectives.base import Collective, names_of_ranks
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, UsageError
from bytecheckpoint.failures import Failure
from bytecheckpoint.liveness import busy
from bytecheckpoint.threads import try_start
from bytecheckpoint.tuning import tuning

__all__ = ["CallOrder"]

_log = logging.getLogger("bytecheckpoint")
#: Calls that a rank remembers, to find the one that another rank left out.
_REMEMBERED = 16


class _BegunCall(msgspec.Struct, frozen=True, array_like=True):
    """One call: "save", "prepare", "load" or "manager", its number, and its path as UTF-8 of any file name."""

    kind: str
    number: int
    path: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.path})" if self.path else f"{self.kind} {self.number}"


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank that begins a call and meets the others.

    Attributes:
        rank: the rank.
        attempt: number of the message among those of this rank and meeting.
        call: call that begins; None if the rank does not wait any more.
        numbers: last number of each kind.
        made: calls before that one, oldest first.
    """

    rank: int
    attempt: int
    call: _BegunCall | None
    numbers: dict[str, int]
    made: list[_BegunCall]


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    """The reply of rank 0: the last numbers of all kinds, or the failure of the call."""

    attempt: int
    numbers: dict[str, int]
    failure: Failure | None = None


_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_reply_decoder = msgspec.msgpack.Decoder(_Reply)
_call_decoder = msgspec.msgpack.Decoder(_BegunCall)
#: Kinds that take numbers of another one.
_COUNTED_AS = {"prepare": "save"}


class CallOrder:
    """The numbers of one rank's calls.

    Args:
        collective: the ranks.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._numbers: Counter[str] = Counter()
        self._made: deque[_BegunCall] = deque(maxlen=_REMEMBERED)
        self._meetings = _Meetings(collective)
        self._late: _BegunCall | None = None

    def begin(self, kind: str, path: str, timeout: float) -> int:
        """Return the number of a call that begins, the same on all ranks.

        Args:
            kind: kind of the call.
            path: address of the checkpoint; "" for a preparation, or if the arguments are wrong.
            timeout: seconds to wait for the other ranks, where they may have made other calls.

        Raises:
            UsageError: the other ranks begin another call. This one takes no number.
            CheckpointTimeoutError, PeerLostError: another rank begins no call.
        """
        counted = _COUNTED_AS.get(kind, kind)
        path = path.encode("utf-8", "backslashreplace").decode()
        failed = self._meetings.due
        if failed is not None:
            call = _BegunCall(kind, self._numbers[counted] + 1, path)
            late = failed == call and self._late != call
            self._late = call
            try:
                self._meet(call, min(timeout, tuning().call_check) if late else timeout)
            except CheckpointError as error:
                # A rank that comes late to the call that has failed without it finds the failure there.
                if not late or not isinstance(error, CheckpointTimeoutError):
                    self._made.append(call)
                    raise
        self._numbers[counted] += 1
        self._made.append(_BegunCall(kind, self._numbers[counted], path))
        return self._numbers[counted]

    def overtaken(self, kind: str, number: int) -> bool:
        """Return whether ranks were found in different calls since this one began."""
        late = self._late is not None and (kind, number) == (self._late.kind, self._late.number)
        return self._meetings.due is not None and not late

    def note_failure(self, kind: str, number: int, path: str, error: BaseException) -> None:
        """Let all ranks meet before their next call, if a call has failed because ranks may be in different ones."""
        if getattr(error, "calls_differ", False) and self._collective.world_size > 1:
            self._meetings.call(_BegunCall(kind, number, path.encode("utf-8", "backslashreplace").decode()))

    def _meet(self, call: _BegunCall, timeout: float) -> None:
        """Meet the other ranks before a call, and take over the numbers that all agree on."""
        reply = self._meetings.meet(call, dict(self._numbers), list(self._made), timeout)
        self._numbers.update({kind: number - self._numbers[kind] for kind, number in reply.numbers.items()})
        self._late = None


class _Meetings:
    """The meetings of the ranks, which are numbered. The next one is due when a call has failed."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._number = 0
        self._attempt = 0
        self._due: _BegunCall | None = None
        self._lock = threading.Lock()
        self._news: queue.SimpleQueue[bytes | tuple[int, str]] = queue.SimpleQueue()
        self._hellos: dict[int, _Hello] = {}  # on rank 0
        self._watches: list[Any] = []
        if collective.world_size > 1:
            self._watch()

    @property
    def due(self) -> _BegunCall | None:
        """The failed call for which the ranks must meet, None if they need not."""
        return self._due

    def call(self, failed: _BegunCall) -> None:
        """Let all ranks meet."""
        if self._mark(failed):
            self._send_on(failed)

    def _mark(self, failed: _BegunCall) -> bool:
        with self._lock:
            first = self._due is None
            self._due = self._due or failed
        return first

    def _tag(self, name: str) -> str:
        return f"meeting/{self._number}/{name}"

    def _send_on(self, failed: _BegunCall) -> None:
        others = range(1, self._collective.world_size) if self._collective.rank == 0 else [0]
        try:
            self._collective.send_each(self._tag("call"), dict.fromkeys(others, msgspec.msgpack.encode(failed)))
        except CheckpointError as error:
            _log.warning("other ranks do not learn that %s has failed: %s", failed, error)

    def _on_call(self, payload: bytes) -> None:
        failed = _call_decoder.decode(payload)
        if self._mark(failed) and self._collective.rank == 0:
            # The transport's thread must not wait for locks of other ranks' messages.
            try_start(threading.Thread(target=self._send_on, args=(failed,), name="bytecheckpoint-meet", daemon=True))

    def _watch(self) -> None:
        watch, news = self._collective.watch, self._news
        # The transport's thread keeps what it calls: a world without users would never end.
        on_call = weakref.WeakMethod(self._on_call)
        self._watches = [watch(self._tag("call"), lambda payload: (call := on_call()) and call(payload))]
        if self._collective.rank == 0:
            self._watches.append(watch(self._tag("hello"), news.put, lambda rank, why: news.put((rank, why))))

    def meet(self, call: _BegunCall, numbers: dict[str, int], made: list[_BegunCall], timeout: float) -> _Reply:
        """Meet the other ranks.

        Args:
            call: call that begins.
            numbers: last number of each kind.
            made: calls before.
            timeout: seconds to wait.

        Raises:
            UsageError: the other ranks begin another call.
            CheckpointTimeoutError, PeerLostError: another rank begins no call.
        """
        rank, collective = self._collective.rank, self._collective
        self._attempt += 1
        hello = _Hello(rank, self._attempt, call, numbers, made)
        if rank == 0:
            reply = self._host(hello, timeout)
        else:
            collective.send(0, self._tag("hello"), msgspec.msgpack.encode(hello))
            try:
                deadline = time.monotonic() + timeout
                while True:
                    left = max(deadline - time.monotonic(), 0.0)
                    reply = _reply_decoder.decode(collective.recv(0, self._tag("reply"), timeout=left))
                    if reply.attempt == self._attempt:
                        break
            except BaseException:
                collective.send(
                    0, self._tag("hello"), msgspec.msgpack.encode(msgspec.structs.replace(hello, call=None))
                )
                raise
        if reply.failure is not None:
            raise reply.failure.as_error()
        self._end()
        return reply

    def _end(self) -> None:
        for end in self._watches:
            end()
        for name in ("call", "hello", "reply"):
            self._collective.forget(self._tag(name))
        with self._lock:
            self._due = None
            self._number += 1
            self._hellos.clear()
        self._watch()

    # --- on rank 0 ---

    def _host(self, own: _Hello, timeout: float) -> _Reply:
        """Compare the calls of all ranks. Ranks that made a call later than others wait until these come to it."""
        self._hellos[0] = own
        size = self._collective.world_size
        deadline = time.monotonic() + timeout
        try:
            while True:
                with busy(timeout):
                    while missing := set(range(size)) - self._hellos.keys():
                        self._receive(missing, own, timeout, deadline)
                calls = {rank: hello.call for rank, hello in self._hellos.items()}
                if len({(call.kind, call.path) for call in calls.values() if call is not None}) == 1:
                    return self._agree()
                behind = {rank for rank in calls if self._is_behind(rank)} or set(calls)
                if len(behind) == size:
                    behind = set(calls)
                failed = self._refuse(behind)
                if 0 in behind:
                    return failed
        finally:
            self._hellos.pop(0, None)

    def _receive(self, missing: set[int], own: _Hello, timeout: float, deadline: float) -> None:
        try:
            news = self._news.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            raise CheckpointTimeoutError(
                f"rank 0: {names_of_ranks(missing)} began no call within {timeout:g} s, while rank 0 waits in {own.call}; "
                f"{self._due} had failed before; make the same calls on all ranks",
                calls_differ=True,
            ) from None
        if isinstance(news, tuple):
            lost = f"rank 0: lost rank {news[0]}: {news[1]}"
            raise PeerLostError(f"{lost}; restart the job from its last committed checkpoint")
        hello = _hello_decoder.decode(news)
        if hello.call is None:
            self._hellos.pop(hello.rank, None)
        else:
            self._hellos[hello.rank] = hello

    def _is_behind(self, rank: int) -> bool:
        """Return whether another rank has made the call of this rank already, and begins a later one."""
        own = self._hellos[rank]
        assert own.call is not None
        name = (own.call.kind, own.call.path)
        count = _count(own.made, name) + 1
        return any(_count(other.made, name) >= count for other in self._hellos.values() if other is not own)

    def _agree(self) -> _Reply:
        numbers: dict[str, int] = {}
        for hello in self._hellos.values():
            for kind, number in hello.numbers.items():
                numbers[kind] = max(numbers.get(kind, 0), number)
        own = self._hellos[0].call
        assert own is not None
        found = self._left_out() or f"{self._due} has failed"
        _log.warning("ranks were in different calls: %s; all continue with %s of %s", found, own.kind, own.path)
        self._reply(self._hellos, numbers)
        return _Reply(self._hellos[0].attempt, numbers)

    def _left_out(self) -> str:
        """Name the calls that some ranks made and others did not, "" if there are none."""
        # What a rank does not remember any more, it may have made.
        floor: Counter[str] = Counter()
        for hello in self._hellos.values():
            for call in hello.made[: len(hello.made) == _REMEMBERED]:
                floor[call.kind] = max(floor[call.kind], call.number)
        known = {r: [c for c in hello.made if c.number > floor[c.kind]] for r, hello in self._hellos.items()}
        made = {rank: Counter((c.kind, c.path) for c in calls) for rank, calls in known.items()}
        names = {(c.kind, c.path): c for calls in known.values() for c in calls}
        found = []
        for name, call in names.items():
            most = max(made[rank][name] for rank in made)
            fewer = [rank for rank in made if made[rank][name] < most]
            if 2 * len(fewer) > len(made):
                found.append(f"only {names_of_ranks(made.keys() - fewer)} made {call}")
            elif fewer:
                found.append(f"{names_of_ranks(fewer)} left out {call}")
        return ", ".join(found[:4])

    def _refuse(self, ranks: set[int]) -> _Reply:
        calls: dict[tuple[str, str], list[int]] = {}
        for rank, hello in sorted(self._hellos.items()):
            assert hello.call is not None
            calls.setdefault((hello.call.kind, hello.call.path), []).append(rank)
        begun = ", ".join(f"{names_of_ranks(found)}: {kind} of {path}" for (kind, path), found in calls.items())
        left = self._left_out()
        error = UsageError(
            f"ranks begin different calls ({begun}){'; before, ' if left else ''}{left}; make the same calls on all ranks",
            calls_differ=True,
        )
        failure = Failure.of(error)
        refused = {rank: self._hellos.pop(rank) for rank in ranks}
        self._reply(refused, {}, failure)
        return _Reply(0, {}, failure)

    def _reply(self, hellos: Mapping[int, _Hello], numbers: dict[str, int], failure: Failure | None = None) -> None:
        for rank, hello in hellos.items():
            if rank:
                reply = msgspec.msgpack.encode(_Reply(hello.attempt, numbers, failure))
                self._collective.send(rank, self._tag("reply"), reply)


def _count(calls: list[_BegunCall], name: tuple[str, str]) -> int:
    return sum((call.kind, call.path) == name for call in calls)
