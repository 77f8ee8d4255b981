"""The I/O thread of one rank, which serves non-blocking connections without polling or waiting for any single one."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.sockets import SCARCE
from bytecheckpoint.collectives.transport.tls import Security
from bytecheckpoint.collectives.transport.wire import FrameReader, Kind, Payload, ProtocolError
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import start
from bytecheckpoint.tuning import tuning

__all__ = ["Loop", "leave_all", "release_inherited"]

_log = logging.getLogger("bytecheckpoint")
_MOST_COMPLAINTS = 20  # lines about connections that have not authenticated themselves, which cost a sender nothing
_ACCEPT_PAUSE = 0.2  # seconds without accepting after descriptors ran out


class Loop(ABC):
    """Connections of one rank and the thread that serves them.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        name: name of the thread.
        secret: secret of the world, which authenticates connections.
        linger: most seconds that `leave` spends on delivering the last messages.

    Raises:
        UsageError: the settings name certificates that cannot be used.
        CheckpointError: this process may open no sockets, or start no thread.
    """

    def __init__(self, rank: int, world_size: int, name: str, secret: bytes, linger: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.linger = linger
        self.secret = secret
        self.security = Security()
        self._selector = selectors.DefaultSelector()  # data of a key: the handler of its events
        self._unsent: deque[Link] = deque()  # links with data that the socket did not take yet
        self._open: set[Link] = set()
        self._strangers: dict[Link, float] = {}  # accepted ones that have not shown who they are: until when they may
        self._complaints = 0
        self._most_strangers = tuning().strangers
        self._calls: deque[Callable[[], None]] = deque()
        self._calls_lock = threading.Lock()
        self._ended: str | None = None  # why the thread has ended
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._listeners: set[socket.socket] = set()
        try:
            self._wake_read, self._wake_write = socket.socketpair()
        except OSError as error:
            raise CheckpointError(f"rank {rank}: cannot open a socket pair, for messages of ranks: {error}") from error
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)
        self._leave_asked = False
        self._deadline: float | None = None  # of leaving; None before it begins
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        _loops.add(self)

    def _start_thread(self) -> None:
        try:
            start(self._thread)
        except BaseException:
            self._release()
            raise

    # --- called from any thread -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Deliver the last messages, then disconnect, in the background. Takes no lock, so a finalizer may call it."""
        if os.getpid() == self._pid:
            self._leave_asked = True
            self._wake()

    def join(self, timeout: float) -> bool:
        """Wait until `leave` has finished; return whether it has."""
        if self._thread.ident is not None:  # None: the thread was never started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def check_process(self) -> None:
        """Raise `UsageError` in a forked child."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"rank {self.rank}: this is a forked child: it cannot take part in its parent's collectives; "
                "call from the parent, or start the child with the 'spawn' method"
            )

    def _post(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if not link.post(kind, source, to, tag, payload):
            self._unsent.append(link)
            self._wake()

    def _call_soon(self, action: Callable[[], None]) -> bool:
        """Let the thread call `action`; return False if the thread has ended and will not."""
        with self._calls_lock:
            if self._ended is not None:
                return False
            self._calls.append(action)
        self._wake()
        return True

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except OSError:
            pass  # full: a wake-up is pending already; closed: the thread has ended

    # --- called on the thread only ----------------------------------------------------------------------------

    @abstractmethod
    def _on_greeted(self, link: Link) -> None:
        """Handle a connection whose sides know each other now."""

    @abstractmethod
    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None: ...

    @abstractmethod
    def _on_gone(self, link: Link) -> None:
        """Handle the end of `link`, which is dropped already: the other side closed it, or it broke."""

    @abstractmethod
    def _on_leave(self) -> None: ...

    @abstractmethod
    def _on_end(self, reason: str) -> None:
        """Handle the end of the thread, which sends and receives nothing any more."""

    def _on_turn(self) -> None:
        """Act after each round of events."""

    def _new_link(self, sock: socket.socket) -> Link:
        """Make a link of a connection that was accepted."""
        sock = self.security.over(sock, dials=False)
        return Link(sock, FrameReader(), Greeting(self._thread.name, self.secret, self.rank))

    def _add(self, link: Link) -> None:
        self._open.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, partial(self._on_events, link))

    def _drop(self, link: Link) -> None:
        if link in self._open:
            self._open.discard(link)
            self._strangers.pop(link, None)
            self._selector.unregister(link.sock)
            link.kill()

    def _call_later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._numbers), action))

    def _accept_from(self, listener: socket.socket) -> None:
        self._listeners.add(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _stop_accepting(self) -> None:
        """Close the listeners and the unauthenticated connections."""
        for listener in self._listeners:
            if listener in self._selector.get_map():
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        for link in [link for link in self._open if link.rank < 0]:
            self._drop(link)

    def _accept(self, listener: socket.socket, _mask: int = 0) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in SCARCE:
                    # Without a pause the selector would report the listener again at once, until a descriptor is closed.
                    self._selector.unregister(listener)
                    self._call_later(_ACCEPT_PAUSE, partial(self._accept_again, listener))
                return
            try:
                link = self._new_link(sock)
            except OSError:
                sock.close()
                continue
            self._add(link)
            self._strangers[link] = time.monotonic() + tuning().handshake_timeout
            if len(self._strangers) > self._most_strangers:  # a scan of ports must not use up the descriptors
                self._drop(next(iter(self._strangers)))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._accept_from(listener)

    def _finished(self) -> bool:
        return self._deadline is not None and (not self._open or time.monotonic() > self._deadline)

    def _seconds_to_timer(self) -> float | None:
        """Return the seconds until the next timer or deadline; None without one."""
        times = [self._deadline] if self._deadline is not None else []
        times += itertools.islice(self._strangers.values(), 1)
        if self._timers:
            times.append(self._timers[0][0])
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _loop(self) -> None:
        reason = "this world was closed"
        self._drop_cut_off()
        try:
            while not self._finished():
                for key, mask in self._selector.select(self._seconds_to_timer()):
                    key.data(mask)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
                while self._strangers and next(iter(self._strangers.values())) <= time.monotonic():
                    self._drop(next(iter(self._strangers)))
                while self._calls:
                    self._calls.popleft()()
                while self._unsent:
                    link = self._unsent.popleft()
                    if link in self._open:
                        self._set_events(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if self._leave_asked and self._deadline is None:
                    self._deadline = time.monotonic() + self.linger
                    self._on_leave()
                self._on_turn()
        except BaseException as error:
            reason = f"the thread {self._thread.name} failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._calls_lock:
                self._ended = reason
            self._on_end(reason)
            self._release()

    def _set_events(self, link: Link, mask: int) -> None:
        self._selector.modify(link.sock, mask, self._selector.get_key(link.sock).data)

    def _on_events(self, link: Link, mask: int) -> None:
        if link not in self._open:
            return  # dropped by another event of this round
        if mask & selectors.EVENT_WRITE and link.flush():
            self._set_events(link, selectors.EVENT_READ)
        if mask & selectors.EVENT_READ:
            try:
                for kind, source, to, tag, payload in link.frames():
                    if link.rank >= 0:
                        self._on_frame(link, kind, source, to, tag, payload)
                    else:
                        self._on_greeting(link, kind, source, to, bytes(payload))
                if link in self._open and not link.resume():
                    self._unsent.append(link)
            except Exception as error:  # noqa: BLE001  an error over a frame ends its connection and no other one
                if isinstance(error, ProtocolError) or not isinstance(error, EOFError | OSError):
                    self._complain(link, error)
                if link in self._open:
                    link.note_failure(error)
                    self._drop(link)
                    self._on_gone(link)

    def _complain(self, link: Link, error: Exception) -> None:
        """Log that a connection ends for what the other side has sent."""
        sender = f"rank {link.rank}" if link.rank >= 0 else "an unknown peer"
        if link.rank < 0:
            self._complaints += 1
            if self._complaints > _MOST_COMPLAINTS:
                return
        _log.warning(
            "rank %d: ends the connection with %s at %s, which has sent what no rank of this world sends: %s: %s",
            self.rank, sender, link.remote, type(error).__name__, error,
        )  # fmt: skip

    def _on_greeting(self, link: Link, kind: Kind, source: int, to: int, payload: bytes) -> None:
        greeting = link.greeting
        if (answer := greeting.answer(kind, source, to, payload)) is not None:
            self._post(link, answer[0], self.rank, greeting.other, b"", answer[1])
        if greeting.over:
            if not 0 <= greeting.other < self.world_size or greeting.other == self.rank:
                raise ProtocolError("not a rank of this world")
            link.rank = greeting.other
            self._strangers.pop(link, None)
            self._on_greeted(link)

    def _drop_cut_off(self) -> None:
        for link in [link for link in self._open if link.is_cut_off()]:
            self._drop(link)
            self._on_gone(link)
        self._call_later(min(2.0, settings().transport.peer_timeout / 8), self._drop_cut_off)

    def _drain_wakes(self, _mask: int) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _release(self) -> None:
        """Close every descriptor. A forked child calls this too, and must use nothing else of this object."""
        if (registered := self._selector.get_map()) is not None:  # None: closed already
            for key in list(registered.values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
        for listener in list(self._listeners):
            listener.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _hang_up(self, link: Link) -> None:
        if not link.hang_up():
            self._unsent.append(link)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def leave_all() -> None:
    """Deliver the last messages of all loops, for at most the longest `linger`. Called at the end of the program."""
    loops = [loop for loop in list(_loops) if loop._pid == os.getpid()]
    for loop in loops:
        loop.leave()
    deadline = time.monotonic() + max((loop.linger for loop in loops), default=0.0) + 0.5
    for loop in loops:
        loop.join(max(0.0, deadline - time.monotonic()))


def release_inherited() -> None:
    """Close the parent's connections in a forked child: they would seem alive after the parent has died."""
    for loop in list(_loops):
        loop._release()
