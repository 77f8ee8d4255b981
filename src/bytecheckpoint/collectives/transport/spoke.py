"""Connect the ranks other than 0. In a tree, one rank of each machine passes on the messages of the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.packs import Place, merged, pack, unpack
from bytecheckpoint.collectives.transport.sockets import Search, listen, listen_beside, remote_end
from bytecheckpoint.collectives.transport.star import PLACE, PLACES, Star
from bytecheckpoint.collectives.transport.wire import ANYBODY, FrameReader, Kind, Payload, ProtocolError
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError
from bytecheckpoint.tuning import tuning

__all__ = ["Spoke"]

_KILLED = "was killed, crashed or was cut off"
_LEFT = "has left this world or ended"
#: Seconds in which rank 0 must answer again after it has ended a connection.
_RETURN = 5.0
_BACKLOG = 1024  # connections that wait while this process does something else
#: Bytes of a message that travels alone: joining it with others would only copy it.
_LARGE = 64 << 10


class Spoke(Star):
    """The message connections of a rank other than 0."""

    def __init__(self, rank: int, world_size: int, inbox: Inbox, secret: bytes, linger: float) -> None:
        super().__init__(rank, world_size, inbox, secret, linger)
        self._up: Link | None = None  # towards rank 0
        self._trying: dict[Link, socket.socket] = {}  # connections that may lead there
        self._searching = Search([], 0, self._greet)
        self._welcomed = False  # every rank has joined
        self._moved: Place | None = None  # address to which rank 0 has redirected this rank
        self._message_port = 0  # port at which ranks of other machines connect
        self._sending_over = False  # rank 0 takes no more messages
        self._said_bye = False
        self._watched: set[int] = set()
        self._gone: set[int] = set()  # ranks below that have left or are lost
        self._hung_up = False
        self._pending: dict[bytes, list[tuple[bytes, int]]] = {}  # by tag, on their way up: payload, rank
        self._flushes = False

    # --- connecting -------------------------------------------------------------------------------------------------

    def connect(
        self,
        hosts: Iterable[str],
        port: int,
        timeout: float,
        *,
        beside: str = "",
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join the world, and wait until every rank has joined.

        Args:
            hosts: addresses of rank 0, tried side by side, the first one a little earlier.
            port: port at which rank 0 listens.
            timeout: seconds.
            beside: name under which the ranks of one machine find each other in a tree. The first one there passes on the
                messages of the others.
            superseded: function that returns whether rank 0 listens elsewhere by now; called while nobody answers.

        Raises:
            PeerLostError: rank 0 cannot be reached, or went away.
            CheckpointTimeoutError: not every rank joined in time.
        """
        deadline = time.monotonic() + timeout
        too_late = f"rank {self.rank}: not every rank connected to rank 0 within {round(timeout, 2):g} s"
        hub = list(hosts), port
        limit, target = deadline, hub
        try:
            local = self._dial_beside(beside, deadline) if beside else None
            self._start_thread()
        except BaseException:
            self._release()
            raise
        try:
            while True:
                search = Search(*target, self._greet, settles_address=target is hub)
                self._searching = search
                search.run(limit, local, lambda: self.inbox.closed is not None or superseded(), self.rank, too_late)
                if not self.ready.wait(max(0.0, deadline - time.monotonic())):
                    raise CheckpointTimeoutError(too_late)
                if self.inbox.closed:
                    raise PeerLostError(f"rank {self.rank}: cannot join rank 0: {self.inbox.closed}")
                if self._welcomed:
                    return
                self.ready.clear()
                place, self._moved = self._moved, None
                limit, target, local = deadline, hub, None
                if place is not None:
                    target = [place.host or self.hub_address], place.messages
                else:  # the connection ended before all ranks had joined: rank 0 has lost it, or has ended itself
                    limit = min(deadline, time.monotonic() + _RETURN)
                    if beside and not self._message_port:
                        local = self._dial_beside(beside, deadline)
        except BaseException:
            self.leave()
            raise

    def _dial_beside(self, name: str, deadline: float) -> socket.socket | None:
        """Connect to the rank that passes on the messages of this machine; None if this rank has to pass them on."""
        while True:
            try:
                sock = socket.socket(socket.AF_UNIX)
                try:
                    sock.connect(f"\0{name}")
                    return sock
                except ConnectionRefusedError:  # nobody listens, or not yet
                    sock.close()
                except OSError:
                    sock.close()
                    return None
                local = listen_beside(name, _BACKLOG)
            except OSError:  # a sandbox: this rank speaks for itself
                return None
            if local is not None:
                others = listen(_BACKLOG)
                self._message_port = others.getsockname()[1]
                self._accept_from(local)
                self._accept_from(others)
                return None
            if time.monotonic() > deadline:
                raise CheckpointTimeoutError(f"rank {self.rank}: no rank of this machine passes on messages")
            time.sleep(0.01)

    def _greet(self, sock: socket.socket, search: Search) -> None:
        """Begin the handshake over a connection that may lead to rank 0, on the thread of this object."""
        if not self._call_soon(partial(self._begin_greeting, sock, search)):
            search.ended(sock, "")
            sock.close()

    def _begin_greeting(self, sock: socket.socket, search: Search) -> None:
        if search.over.is_set() or self._deadline is not None:
            search.ended(sock, "")
            sock.close()
            return
        place = msgspec.msgpack.encode(Place(self.data_port, self._message_port))
        greeting = Greeting(self._thread.name, self.secret, self.rank, ANYBODY, place)
        try:
            link = Link(self.security.over(sock, dials=True), FrameReader(), greeting)
        except OSError as error:
            search.ended(sock, f"the connection broke at once: {error}")
            sock.close()
            return
        self._trying[link] = sock
        self._add(link)
        self._post(link, Kind.HELLO, self.rank, ANYBODY, b"", greeting.hello())

    def _on_greeting(self, link: Link, kind: Kind, source: int, to: int, payload: bytes) -> None:
        # The first one that proves that it belongs to this world gets this rank's own proof; no other one does.
        if link in self._trying and self._up is not None:
            self._drop(link)
        else:
            super()._on_greeting(link, kind, source, to, payload)

    # --- called from any thread -------------------------------------------------------------------------------------

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self.check_open(tag)
        if to == self.rank:
            self.inbox.put(to, tag, payload)
            return
        assert to == 0, "messages go to rank 0 or come from it"
        if self._sending_over:
            raise PeerLostError(f"rank {self.rank}: cannot send {tag!r}: rank 0 has left this world or ended")
        if self.below:
            self._call_soon(partial(self._pass_on, self.rank, tag.encode(), payload))
        else:
            self._post_up(Kind.MESSAGE, self.rank, 0, tag.encode(), payload)

    def watch(self, other: int) -> None:  # noqa: D102 (inherited)
        if other not in self._watched and not self._sending_over and not self._leave_asked:
            self._watched.add(other)
            self._post_up(Kind.WATCH, self.rank, other)

    def locate(self, other: int) -> None:  # noqa: D102 (inherited)
        self._post_up(Kind.WHERE, self.rank, other)

    def _post_up(self, kind: Kind, source: int, to: int, tag: bytes = b"", payload: Payload = b"") -> None:
        if self._up is not None:
            self._post(self._up, kind, source, to, tag, payload)

    # --- on the thread only: towards rank 0 ---------------------------------------------------------------------------

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if link is not self._up:
            self._on_frame_from_below(link, kind, source, to, tag, payload)
        elif kind in (Kind.MESSAGE, Kind.PACK):
            self._on_messages_down(kind, source, to, tag, payload)
        elif kind is Kind.PLACE:
            self._on_place(source, to, payload)
        elif kind is Kind.LOST and source == 0:
            self._end(bytes(payload).decode())
        elif kind is Kind.LOST and to == self.rank:
            self.inbox.mark_lost(source, bytes(payload).decode())
        elif kind is Kind.LOST:
            self._post(self.below[to], Kind.LOST, source, to, b"", payload)
        elif kind is Kind.CLOSING:
            self._sending_over = True
            self._send_all_below(Kind.CLOSING)
            self._say_bye()
        elif kind is Kind.WELCOME:
            self._stop_accepting()
            self._welcomed = True
            self._send_all_below(Kind.WELCOME)
            self.ready.set()
        elif kind is Kind.REDIRECT and not self._welcomed:
            self._moved, self._up = PLACES.decode(payload), None
            self.ready.set()
        else:
            raise ProtocolError(f"{kind.name} from above")

    def _on_place(self, source: int, to: int, payload: Payload) -> None:
        place = PLACES.decode(payload)
        if not place.host:  # on the machine of rank 0, which this rank may reach and others may not
            payload = msgspec.msgpack.encode(msgspec.structs.replace(place, host=self.hub_address))
        if to == self.rank:
            self.inbox.put(source, PLACE, bytes(payload))
        else:
            self._post(self.below[to], Kind.PLACE, source, to, b"", payload)

    def _say_bye(self) -> None:
        if not self._said_bye:
            self._said_bye = True
            self._flush_pending()
            self._post_up(Kind.BYE, self.rank, 0)

    def _on_leave(self) -> None:
        self._sending_over = True
        self._stop_accepting()
        self._send_all_below(Kind.CLOSING)
        self._say_bye()

    def _on_turn(self) -> None:
        # As rank 0 does: only when no rank below can send any more.
        if self._deadline is not None and not self._hung_up and len(self._gone) == len(self.below):
            self._hung_up = True
            self._flush_pending()
            for link in self._open:
                self._hang_up(link)

    def _on_gone(self, link: Link) -> None:
        if link in self._trying:
            sock = self._trying.pop(link)
            self._searching.ended(sock, link.ungreeted())
            if link.distrusted:
                self._end(link.ungreeted())
        elif link is self._up and not (self._welcomed or self._sending_over or self._deadline is not None):
            self._up = None
            self.ready.set()  # `connect` tries again
        elif link is self._up:
            above = "rank 0" if link.rank < 1 else f"rank {link.rank}, which passes messages on,"
            happened = _LEFT if self._sending_over else _KILLED
            self._end(f"{above} {happened}; restart the job from its last committed checkpoint")
        for rank, through in list(self.below.items()):
            if through is link and rank not in self._gone:
                self._lose(rank)
                reason = "its connection closed without a word: it " + _KILLED
                if rank != link.rank:
                    reason = f"rank {link.rank}, which passes its messages on, is gone"
                self._post_up(Kind.LOST, rank, 0, b"", reason.encode())

    def _lose(self, rank: int) -> None:
        """Note the end of a rank below, after the messages that it has sent. Before this world begins it may come back."""
        if self._welcomed:
            self._gone.add(rank)
            self._flush_pending()
        else:
            self._forget(rank)

    def _end(self, reason: str) -> None:
        """End all waits: rank 0 cannot be reached."""
        self.inbox.close(reason)
        self._sending_over = True
        self.ready.set()
        self._send_all_below(Kind.LOST, reason)
        for link in set(self.below.values()):
            self._hang_up(link)
        # No more messages can come: let the thread end, with what is still on its way down.
        self._deadline = time.monotonic() + (self.linger if self.below else 0.0)

    # --- on the thread only: of the ranks below -----------------------------------------------------------------------

    def _on_greeted(self, link: Link) -> None:
        if link not in self._trying:
            self._join(link.rank, link, link.greeting.received)
            return
        self._up = link
        trying, self._trying = self._trying, {}
        for other in trying.keys() - {link}:
            self._drop(other)
        if self._searching.settles_address and not link.local:
            self.hub_address = remote_end(link.sock)
        self._searching.found.set()
        for rank in self.below:  # they were quicker
            self._announce(rank)

    def _join(self, rank: int, link: Link, payload: Payload) -> None:
        if not 0 < rank < self.world_size or rank == self.rank or self._welcomed:
            raise ProtocolError("not a rank of this world, or a rank that has joined")
        place = self._place_of(link, payload)
        self._replace(rank, link)
        self._places[rank] = place
        if self._up is not None and self._up.rank >= 0:
            self._announce(rank)

    def _announce(self, rank: int) -> None:
        self._post_up(Kind.JOIN, rank, 0, b"", msgspec.msgpack.encode(self._places[rank]))

    def _on_frame_from_below(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if kind is Kind.JOIN:
            self._join(source, link, payload)
            return
        if kind in (Kind.BYE, Kind.LOST) and self.below.get(source) is not link:
            return  # it has come back by another connection
        self._check_source(link, source)
        if kind is Kind.MESSAGE:
            self._pass_on(source, tag, bytes(payload))
        elif kind is Kind.PACK:
            for message in unpack(bytes(payload)):
                for rank in message.ranks:
                    self._check_source(link, rank)
                    self._pass_on(rank, message.tag, message.payload)
        elif kind in (Kind.WATCH, Kind.WHERE, Kind.BYE, Kind.LOST):
            if kind in (Kind.BYE, Kind.LOST):  # after the messages that this rank has sent
                self._lose(source)
            self._post_up(kind, source, to, tag, payload)
        else:
            raise ProtocolError(f"{kind.name} from rank {source}")

    def _pass_on(self, source: int, tag: bytes, payload: bytes) -> None:
        """Send a message up, with those that other ranks send under the same tag at about the same time."""
        if len(payload) > _LARGE:
            self._send_up({tag: self._pending.pop(tag, [])})
            self._post_up(Kind.MESSAGE, source, 0, tag, payload)
            return
        waiting = self._pending.setdefault(tag, [])
        waiting.append((payload, source))
        if len(waiting) > len(self.below):  # of all these ranks, and of this one
            self._send_up({tag: self._pending.pop(tag)})
        elif not self._flushes:
            self._flushes = True
            self._call_later(tuning().pack_delay, self._flush_pending)

    def _flush_pending(self) -> None:
        self._flushes = False
        pending, self._pending = self._pending, {}
        self._send_up(pending)

    def _send_up(self, pending: Mapping[bytes, list[tuple[bytes, int]]]) -> None:
        messages = [message for tag, sent in pending.items() for message in merged(tag, sent)]
        if len(messages) == 1 and len(messages[0].ranks) == 1:
            tag, payload, (rank,) = messages[0]
            self._post_up(Kind.MESSAGE, rank, 0, tag, payload)
        elif messages:
            self._post_up(Kind.PACK, self.rank, 0, b"", pack(messages))
