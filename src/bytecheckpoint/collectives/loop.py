"""One thread that serves non-blocking connections: without polling, and without ever waiting for one of them."""

from __future__ import annotations

import heapq
import hmac
import itertools
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

from bytecheckpoint.collectives.sockets import SCARCE
from bytecheckpoint.collectives.wire import Kind, Link, Payload
from bytecheckpoint.errors import UsageError

__all__ = ["Loop", "leave_all", "release_inherited"]

_STRANGER_PATIENCE = 30.0  # seconds in which a connection must say whose it is
_ACCEPT_PAUSE = 0.2  # seconds without accepting after descriptors ran out


class Loop(ABC):
    """Connections of one rank and the thread that serves them.

    Args:
        rank: of this process.
        world_size: number of ranks.
        name: of the thread.
        secret: what only ranks of this world know.
        linger: most seconds that leaving waits until what was sent is delivered.
    """

    def __init__(self, rank: int, world_size: int, name: str, secret: bytes, linger: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.linger = linger
        self.secret = secret
        self._selector = selectors.DefaultSelector()  # data of a key: who takes its events
        self._kept: deque[Link] = deque()  # links that have something left to send
        self._open: set[Link] = set()
        self._asked: deque[Callable[[], None]] = deque()
        self._ask_lock = threading.Lock()
        self._over = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._listeners: set[socket.socket] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)
        self._leave_asked = False
        self._deadline: float | None = None  # of leaving
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        _loops.add(self)

    # Called from any thread.

    def leave(self) -> None:
        """Deliver what was sent, then disconnect: in the background. Takes no lock, so a finalizer may call it."""
        if os.getpid() == self._pid:
            self._leave_asked = True
            self._wake()

    def join(self, timeout: float) -> bool:
        """Wait until `leave` has finished; whether it has."""
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def check_process(self) -> None:
        """Refuse to work in a forked child (`UsageError`)."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"rank {self.rank}: this is a forked child: it cannot take part in its parent's collectives; "
                "call from the parent, or start the child with the 'spawn' method"
            )

    def _post(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if not link.post(kind, source, to, tag, payload):
            self._kept.append(link)
            self._wake()

    def _ask(self, action: Callable[[], None]) -> bool:
        """Have the thread call `action`; False when it has ended, and will not."""
        with self._ask_lock:
            if self._over:
                return False
            self._asked.append(action)
        self._wake()
        return True

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except OSError:
            pass  # full: a wake-up is already pending; closed: nobody to wake

    # Below: on the thread only.

    @abstractmethod
    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None: ...

    @abstractmethod
    def _on_gone(self, link: Link) -> None:
        """The other side closed `link`, or it broke; it is dropped already."""

    @abstractmethod
    def _on_leave(self) -> None: ...

    @abstractmethod
    def _on_end(self, reason: str) -> None:
        """The thread ends: nothing will be sent or received any more."""

    def _on_turn(self) -> None:
        """After each round of events."""

    def _link_of(self, sock: socket.socket) -> Link:
        return Link(sock)

    def _add(self, link: Link) -> None:
        self._open.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, partial(self._serve, link))

    def _drop(self, link: Link) -> None:
        if link in self._open:
            self._open.discard(link)
            self._selector.unregister(link.sock)
            link.kill()

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._numbers), action))

    def _accept_from(self, listener: socket.socket) -> None:
        self._listeners.add(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _stop_accepting(self) -> None:
        """Close the listeners, and the connections that have not said whose they are."""
        for listener in self._listeners:
            if listener in self._selector.get_map():
                self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        for stranger in [link for link in self._open if link.rank < 0]:
            self._drop(stranger)

    def _accept(self, listener: socket.socket, _mask: int = 0) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in SCARCE:
                    # It would be reported again at once, for as long as nobody closes anything.
                    self._selector.unregister(listener)
                    self._after(_ACCEPT_PAUSE, partial(self._accept_again, listener))
                return
            link = self._link_of(sock)
            self._add(link)
            self._after(_STRANGER_PATIENCE, partial(self._drop_stranger, link))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._accept_from(listener)

    def _drop_stranger(self, link: Link) -> None:
        if link.rank < 0:
            self._drop(link)

    def _finished(self) -> bool:
        return self._deadline is not None and (not self._open or time.monotonic() > self._deadline)

    def _patience(self) -> float | None:
        """Seconds until there is something to do without an event."""
        times = [self._deadline] if self._deadline is not None else []
        if self._timers:
            times.append(self._timers[0][0])
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _loop(self) -> None:
        reason = "this world was closed"
        try:
            while not self._finished():
                for key, mask in self._selector.select(self._patience()):
                    key.data(mask)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
                while self._asked:
                    self._asked.popleft()()
                while self._kept:
                    link = self._kept.popleft()
                    if link in self._open:
                        self._watch_for(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if self._leave_asked and self._deadline is None:
                    self._deadline = time.monotonic() + self.linger
                    self._on_leave()
                self._on_turn()
        except BaseException as error:
            reason = f"the thread {self._thread.name} failed: {type(error).__name__}: {error}"
            raise
        finally:
            with self._ask_lock:
                self._over = True
            self._on_end(reason)
            self._release()

    def _watch_for(self, link: Link, mask: int) -> None:
        self._selector.modify(link.sock, mask, self._selector.get_key(link.sock).data)

    def _serve(self, link: Link, mask: int) -> None:
        if link not in self._open:
            return  # dropped while other events of this round were served
        if mask & selectors.EVENT_WRITE and link.flush():
            self._watch_for(link, selectors.EVENT_READ)
        if mask & selectors.EVENT_READ:
            try:
                for kind, source, to, tag, payload in link.frames():
                    self._on_frame(link, kind, source, to, tag, payload)
            except (EOFError, OSError):
                if link in self._open:
                    self._drop(link)
                    self._on_gone(link)

    def _drain_wakes(self, _mask: int) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _release(self) -> None:
        """Close every descriptor; in a forked child too, where nothing else of this object may be touched."""
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
        link.hang_up = True
        if not link.flush():
            self._kept.append(link)

    def _is_ours(self, payload: Payload) -> bool:
        return hmac.compare_digest(bytes(payload), self.secret)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def leave_all() -> None:
    """At the end of the program: deliver what is still under way, for at most the longest `linger`."""
    loops = [loop for loop in list(_loops) if loop._pid == os.getpid()]
    for loop in loops:
        loop.leave()
    deadline = time.monotonic() + max((loop.linger for loop in loops), default=0.0) + 0.5
    for loop in loops:
        loop.join(max(0.0, deadline - time.monotonic()))


def release_inherited() -> None:
    """In a forked child: close the parent's connections, which would otherwise seem alive after it has died."""
    for loop in list(_loops):
        loop._release()
