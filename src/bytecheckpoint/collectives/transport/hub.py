"""Receive the messages of all ranks on rank 0, which knows where each rank listens and which ranks are lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.collectives.inbox import Inbox
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.packs import Message, Place, unpack
from bytecheckpoint.collectives.transport.sockets import listen, listen_beside, reserve_descriptors
from bytecheckpoint.collectives.transport.star import PLACE, Star
from bytecheckpoint.collectives.transport.wire import ANYBODY, Kind, Payload, ProtocolError
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError
from bytecheckpoint.failures import Failure
from bytecheckpoint.tuning import tuning

__all__ = ["Hub"]

_KILLED = "its connection closed without a word: it was killed, crashed or was cut off"
_log = logging.getLogger("bytecheckpoint")
#: Seconds between two looks for a rank that cannot connect.
_LOOK = 0.5


class Hub(Star):
    """The message connections of rank 0. The constructor listens on `port`.

    Args:
        world_size: number of ranks.
        inbox: messages for this rank.
        secret: secret of the world, which authenticates connections.
        linger: most seconds that `leave` spends on delivering the last messages.
        beside: name under which the ranks of this machine connect in a tree; "" if every rank connects over TCP.

    Raises:
        UsageError: this process may not open a descriptor per rank, or the settings leave no port to listen at.
    """

    def __init__(self, world_size: int, inbox: Inbox, secret: bytes, linger: float, beside: str = "") -> None:
        links = min(world_size, tuning().direct_links) if beside else world_size
        reserve_descriptors(links, f"rank 0 of a world of {world_size}")
        super().__init__(0, world_size, inbox, secret, linger)
        try:
            listener = listen(max(128, links))
        except BaseException:
            self._release()
            raise
        self.port: int = listener.getsockname()[1]
        self._places[0] = Place(self.data_port)
        self._carriers: list[int] = []  # ranks that pass on messages of other machines
        self._turns = itertools.count()
        self._redirected: set[Link] = set()  # to a rank that passes on messages
        self._gone: dict[int, str] = {}
        self._watchers: dict[int, set[int]] = {}
        self._hung_up = False
        inbox.explain = self._explain
        self._refusal: CheckpointError | None = None  # reason why this world cannot begin
        self._most_strangers = max(self._most_strangers, links)
        self._accept_from(listener)
        try:
            if beside and (local := listen_beside(beside, links)) is not None:
                self._accept_from(local)
        except OSError as error:
            _log.warning(
                "this machine forbids abstract Unix sockets (%s): each of its ranks sends its messages by itself", error
            )
        self._start_thread()

    def wait_ready(self, timeout: float, failure: Callable[[], Failure | None] = lambda: None) -> None:
        """Wait until every rank is connected.

        Args:
            timeout: seconds.
            failure: function that returns the failure of a rank that cannot connect, if there is one; called now and then.

        Raises:
            CheckpointError: failure of a rank that cannot connect.
            CheckpointTimeoutError: the named ranks are not connected.
            PeerLostError: the messages have ended.
        """
        deadline = time.monotonic() + timeout
        while not (connected := self.ready.wait(max(0.0, min(_LOOK, deadline - time.monotonic())))):
            if (found := failure()) is not None:
                self._call_soon(partial(self._refuse, found.as_error()))
            elif time.monotonic() > deadline:
                break
        if self._refusal is not None:
            self.leave()
            raise self._refusal
        if self.inbox.closed:
            raise PeerLostError(f"rank 0: {self.inbox.closed}")
        if not connected:
            missing = [rank for rank in range(1, self.world_size) if rank not in self.below]
            self.leave()
            raise CheckpointTimeoutError(
                f"rank 0: ranks {missing[:16]} of {self.world_size} did not connect to port {self.port} within "
                f"{round(timeout, 2):g} s; every rank makes this call: look for one that does not, as under "
                f"`if rank == 0`, for one that hangs, or for a firewall"
            )

    def send(self, to: int, tag: str, payload: bytes) -> None:  # noqa: D102 (inherited)
        self.check_open(tag)
        if to == 0:
            self.inbox.put(0, tag, payload)
        else:
            self._post(self.below[to], Kind.MESSAGE, 0, to, tag.encode(), payload)

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:
        """Send each rank its payload, as `Collective.send_each`; equal ones travel once over each connection."""
        self.check_open(tag)
        groups: dict[int, Message] = {}
        for rank, payload in payloads.items():
            if rank:
                groups.setdefault(id(payload), Message(tag.encode(), payload, [])).ranks.append(rank)
        self._send_down(list(groups.values()))
        if 0 in payloads:
            self.inbox.put(0, tag, payloads[0])

    def watch(self, other: int) -> None:
        """Do nothing: rank 0 receives every loss."""

    def locate(self, other: int) -> None:  # noqa: D102 (inherited)
        self.inbox.put(other, PLACE, msgspec.msgpack.encode(self._places[other]))

    def _explain(self, silent: Collection[int]) -> str:
        """Name the silent ranks that pass on messages of others: those others may be well."""
        carried: dict[int, list[int]] = {}
        for rank in silent:
            if (link := self.below.get(rank)) is not None and link.rank != rank and link.rank in silent:
                carried.setdefault(link.rank, []).append(rank)
        return "".join(f"; rank {c} passes on the messages of {names_of_ranks(r)}" for c, r in carried.items())

    # --- on the thread only -----------------------------------------------------------------------------------------

    def _on_greeted(self, link: Link) -> None:
        place = self._place_of(link, link.greeting.received)
        if place.messages and self._carriers and len(self._open) > tuning().direct_links:
            carrier = self._carriers[next(self._turns) % len(self._carriers)]
            payload = msgspec.msgpack.encode(self._places[carrier])
            self._post(link, Kind.REDIRECT, 0, link.rank, b"", payload)
            self._hang_up(link)
            self._redirected.add(link)
        else:
            self._join(link.rank, link, place)
            if place.messages:
                self._carriers.append(link.rank)

    def _join(self, rank: int, link: Link, place: Place) -> None:
        """Note the connection of a rank. Before this world begins, the newest claim of a rank counts."""
        if not 0 < rank < self.world_size or self.ready.is_set():
            raise ProtocolError("not a rank of this world, or a rank that has joined")
        self._replace(rank, link)
        self._places[rank] = place
        if len(self.below) == self.world_size - 1:
            self._stop_accepting()
            self._send_all_below(Kind.WELCOME)
            self.ready.set()

    def _forget(self, rank: int) -> None:
        super()._forget(rank)
        if rank in self._carriers:
            self._carriers.remove(rank)

    def _refuse(self, error: CheckpointError) -> None:
        """End this world before it has begun, and send the reason to the ranks that are connected."""
        if self._refusal is None:
            self._refusal = error
            self._send_all_below(Kind.LOST, str(error))
            self.ready.set()

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        if link in self._redirected:
            return  # it sends the same to the rank that passes its messages on
        if kind is Kind.JOIN:
            if not self.ready.is_set():
                self._join(source, link, self._place_of(link, payload))
            return  # else a second process that claims this rank: the one that has joined stays connected
        if kind in (Kind.BYE, Kind.LOST):
            if self.below.get(source) is link:  # only the connection through which a rank is reached can report its end
                self._lose(source, bytes(payload).decode() if payload else "it has left this world or ended")
            return
        self._check_source(link, source)
        if kind is Kind.MESSAGE:
            self._receive(source, tag, payload)
        elif kind is Kind.PACK:
            for message in unpack(bytes(payload)):
                for rank in message.ranks:
                    self._check_source(link, rank)
                    self._receive(rank, message.tag, message.payload)
        elif kind is Kind.WATCH and (to == ANYBODY or to < self.world_size):
            for lost in self._gone if to == ANYBODY else self._gone.keys() & {to}:
                self._report_loss(source, lost)
            self._watchers.setdefault(to, set()).add(source)
        elif kind is Kind.WHERE and to in self._places:
            self._post(link, Kind.PLACE, to, source, b"", msgspec.msgpack.encode(self._places[to]))
        else:
            raise ProtocolError(f"{kind.name} to rank {to}")

    def _on_gone(self, link: Link) -> None:
        self._redirected.discard(link)
        for rank, through in list(self.below.items()):
            if through is link:
                passes_on = f"rank {link.rank}, which passes its messages on, is gone: {_KILLED}"
                self._lose(rank, _KILLED if rank == link.rank else passes_on)

    def _lose(self, rank: int, reason: str) -> None:
        """Record the loss of a rank, and report it to the ranks that watch it. Before the world begins it may come back."""
        if not self.ready.is_set():
            self._forget(rank)
            return
        if rank in self._gone:
            return
        self._gone[rank] = reason
        if self._deadline is not None:
            return
        self.inbox.mark_lost(rank, reason)
        for watcher in self._watchers.pop(rank, set()) | self._watchers.get(ANYBODY, set()):
            self._report_loss(watcher, rank)

    def _report_loss(self, watcher: int, rank: int) -> None:
        self._post(self.below[watcher], Kind.LOST, rank, watcher, b"", self._gone[rank].encode())

    def _on_leave(self) -> None:
        self._stop_accepting()
        self._send_all_below(Kind.CLOSING)

    def _on_turn(self) -> None:
        # Hang up only when no rank can send any more: all their messages are then delivered or in the queues here.
        if self._deadline is not None and not self._hung_up and len(self._gone) == len(self.below):
            self._hung_up = True
            for link in self._open:
                self._hang_up(link)
