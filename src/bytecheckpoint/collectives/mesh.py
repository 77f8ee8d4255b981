"""The data plane: direct connections between pairs of ranks, made when two ranks first exchange bytes.

The receiver decides: it asks for an array (WANT) once it has memory for it, and the sender answers with pieces (DATA)
that are read straight into that memory. So nothing is buffered, nothing is sent that nobody takes, any number of
exchanges share one connection without waiting for each other, and ranks that send to each other at once cannot block.

Of two ranks the lower one listens and mails its address; the higher one dials. When a connection breaks, the exchanges
under way over it fail; the next one dials again.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.collectives.loop import Loop
from bytecheckpoint.collectives.sockets import is_loopback, listen, reserve_descriptors
from bytecheckpoint.collectives.star import Spoke, Star
from bytecheckpoint.collectives.transfers import Job, Peer, PeerLink, Report, Transfer, remember, take
from bytecheckpoint.collectives.wire import Kind, Link, Payload
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    error_from_report,
    error_report,
)

__all__ = ["Mesh"]

_ADDRESS = "bytecheckpoint/direct"  # tag of the mail that says where a rank listens
_REDIAL = 0.5  # seconds after a connection could not be made
_WANT = struct.Struct("<QQ")  # number of the request, bytes expected
_GONE = "its connection closed: it was killed, crashed, was cut off or left this world"


class Mesh(Loop):
    """One rank's direct connections and the thread that serves them.

    Args:
        star: the mail of this world, which knows who is gone.
        linger: as of `Loop`.
    """

    def __init__(self, star: Star, linger: float) -> None:
        super().__init__(star.rank, star.world_size, "bytecheckpoint-data", star.secret, linger)
        self._star = star
        self._peers: dict[int, Peer] = {}
        self._jobs: set[Job] = set()
        self._requests = itertools.count()
        self._port: int | None = None
        self._lost: dict[int, str] = {}
        self._no_mail: str | None = None
        self._ended: str | None = None
        self._reserved: set[int] = set()
        star.mailbox.observe(_ADDRESS, self)
        self._thread.start()

    # Called from any thread.

    def exchange(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
    ) -> None:
        """As `Collective.exchange`, with other ranks, none of the arrays empty."""
        self.check_process()
        new = {*outgoing, *incoming} - self._reserved
        if new:
            reserve_descriptors(len(new) + 1, f"rank {self.rank}, which exchanges data with {len(new)} more ranks,")
            self._reserved |= new
        job = Job(tag, outgoing, incoming, self._jobs.discard)
        if not self._ask(partial(self._begin, job)):
            raise PeerLostError(f"rank {self.rank}: exchange {tag!r}: this world was closed")
        try:
            if not job.over.wait(timeout):
                self._ask(partial(self._expire, job, timeout))
        except BaseException:
            interrupted = CheckpointError(f"rank {self.rank}: exchange {tag!r} was interrupted")
            self._ask(partial(self._fail, job, interrupted))
            raise
        finally:
            # The arrays are the caller's again only when the thread, which never waits, has let go of them.
            while not job.over.wait(1.0) and self._thread.is_alive():
                pass
        if job.error is not None:
            raise job.error

    def on_mail(self, source: int, payload: bytes) -> None:  # noqa: D102 (MailObserver)
        self._ask(partial(self._learn, source, payload))

    def on_lost(self, source: int, reason: str) -> None:  # noqa: D102 (MailObserver)
        self._ask(partial(self._learn_of_loss, source, reason))

    def on_closed(self, reason: str) -> None:  # noqa: D102 (MailObserver)
        self._ask(partial(self._learn_of_silence, reason))

    # Below: on the thread only.

    def _begin(self, job: Job) -> None:
        if self._ended is not None or self._deadline is not None:
            job.end(PeerLostError(f"rank {self.rank}: exchange {job.tag!r}: {self._ended or 'this world was closed'}"))
            return
        self._jobs.add(job)
        peers = [self._peer(rank) for rank in sorted({transfer.peer for transfer in job.left})]
        for peer in peers:
            peer.given_up.pop(job.tag, None)
            if (report := peer.failed.pop(job.tag, None)) is not None:
                self._fail_with(job, peer, report)
                return
        for transfer in list(job.left):
            peer = self._peer(transfer.peer)
            if not transfer.outgoing:
                self._request(peer, transfer)
            elif peer.link is not None and (wanted := take(peer.link.wanted, job.tag)) is not None:
                self._answer(peer.link, transfer, *wanted)
                if job.over.is_set():
                    return
            else:
                peer.offers.setdefault(job.tag, deque()).append(transfer)
        for peer in peers:
            self._reach(peer)

    def _request(self, peer: Peer, transfer: Transfer) -> None:
        if peer.link is None:
            peer.waiting.add(transfer)
            return
        transfer.number = next(self._requests)
        peer.link.ask(transfer)
        want = _WANT.pack(transfer.number, len(transfer.view))
        self._post(peer.link, Kind.WANT, self.rank, peer.rank, transfer.job.tag.encode(), want)

    def _answer(self, link: PeerLink, transfer: Transfer, number: int, size: int) -> None:
        if size != len(transfer.view):
            message = f"has {len(transfer.view)} bytes for rank {link.rank}, which expects {size}"
            self._fail(transfer.job, CheckpointError(f"rank {self.rank}: exchange {transfer.job.tag!r}: {message}"))
            return
        transfer.number = number
        link.offer(transfer)
        if not link.flush():
            self._kept.append(link)

    def _expire(self, job: Job, timeout: float) -> None:
        if job.over.is_set():
            return
        sources, targets = job.missing(outgoing=False), job.missing(outgoing=True)
        parts = [f"not all bytes came from {names_of_ranks(sources)}"] if sources else []
        parts += [f"not all bytes went to {names_of_ranks(targets)}"] if targets else []
        unlinked = [peer for rank in sorted(sources | targets) if (peer := self._peer(rank)).link is None]
        for peer in unlinked[:1]:
            trouble = f" ({peer.trouble})" if peer.trouble else ""
            parts.append(f"not connected with {names_of_ranks([p.rank for p in unlinked])}{trouble}")
        self._fail(
            job,
            CheckpointTimeoutError(
                f"rank {self.rank}: exchange {job.tag!r}: {', '.join(parts)} within {timeout:g} s; look for a hung rank"
                f"{' or a firewall' if unlinked else ''}, or raise the time-out"
            ),
        )

    def _fail(self, job: Job, error: CheckpointError, report: Report | None = None) -> None:
        """Give up `job` here, and tell the ranks that it waits for."""
        if job.over.is_set():
            return
        report = report or error_report(error)
        for transfer in job.left:
            self._peer(transfer.peer).withdraw(transfer)
        for rank in {transfer.peer for transfer in job.left}:
            peer = self._peer(rank)
            remember(peer.given_up, job.tag, report)
            self._tell(peer)
        job.end(error)

    def _tell(self, peer: Peer) -> None:
        """Let it know what was given up here, as soon as there is a connection."""
        if peer.link is not None:
            for tag, report in peer.untold.items():
                self._post(peer.link, Kind.FAILED, self.rank, peer.rank, tag.encode(), json.dumps(report).encode())
                peer.given_up[tag] = None

    def _fail_with(self, job: Job, peer: Peer, report: Report) -> None:
        """`peer` has given up: so do we. What is passed on is the first cause."""
        prefix = f"rank {self.rank}: exchange {job.tag!r} was given up by rank {peer.rank}: "
        self._fail(job, error_from_report(report, prefix=prefix), report)

    def _with(self, peer: Peer) -> list[Job]:
        return [job for job in self._jobs if any(transfer.peer == peer.rank for transfer in job.left)]

    def _lose(self, peer: Peer, how: str) -> None:
        for job in self._with(peer):
            self._fail(
                job,
                PeerLostError(
                    f"rank {self.rank}: exchange {job.tag!r}: lost rank {peer.rank}: {how}; "
                    "restart the job from its last committed checkpoint"
                ),
            )

    # Connecting.

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            self._peers[rank] = Peer(rank)
        return self._peers[rank]

    def _reach(self, peer: Peer) -> None:
        """Do what is our part for a connection, if one is needed."""
        if peer.link is not None or self._deadline is not None or not (peer.busy or peer.untold):
            return
        if (reason := self._lost.get(peer.rank, self._no_mail)) is not None:
            self._lose(peer, reason)
            return
        try:
            if peer.rank != 0:
                self._star.watch(peer.rank)
            if self.rank < peer.rank:
                self._invite(peer)
            elif peer.address is not None and peer.dialling is None:
                self._dial(peer, *peer.address)
        except CheckpointError as error:
            for job in self._with(peer):
                self._fail(job, error)

    def _invite(self, peer: Peer) -> None:
        if self._port is None:
            try:
                listener = listen(128)
            except OSError as error:
                raise CheckpointError(f"rank {self.rank}: cannot listen for other ranks: {error}") from error
            self._port = listener.getsockname()[1]
            self._accept_from(listener)
        if not peer.told:
            peer.told = True
            address = {"address": self._star.address_for(peer.rank), "port": self._port}
            self._star.send(peer.rank, _ADDRESS, json.dumps(address).encode())

    def _learn(self, source: int, payload: bytes) -> None:
        told = json.loads(payload)
        assert isinstance(self._star, Spoke)  # who is told has the higher rank
        # Who has reached rank 0 over a loopback address is on the machine of rank 0.
        host = self._star.hub_address if is_loopback(told["address"]) else told["address"]
        peer = self._peer(source)
        peer.address = (host, told["port"])
        self._reach(peer)

    def _learn_of_loss(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        if (peer := self._peers.get(rank)) is None:
            return
        if peer.link is None:
            self._lose(peer, reason)
        else:
            # What it has sent may still be under way, and then the connection ends by itself: unless its machine is gone.
            self._after(self.linger, partial(self._cut, peer, peer.link))

    def _learn_of_silence(self, reason: str) -> None:
        self._no_mail = reason
        self._learn_of_loss(0, reason)
        for peer in list(self._peers.values()):
            if peer.link is None:
                self._lose(peer, reason)

    def _cut(self, peer: Peer, link: PeerLink) -> None:
        if peer.link is link:
            self._drop(link)
            self._on_gone(link)

    def _dial(self, peer: Peer, host: str, port: int) -> None:
        sock: socket.socket | None = None
        try:
            numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, kind, protocol, _, address = numeric[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            if sock is not None:
                sock.close()
            self._retry(peer, str(error))
            return
        peer.dialling = sock
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._on_dialled, peer, sock))

    def _on_dialled(self, peer: Peer, sock: socket.socket, _mask: int) -> None:
        self._selector.unregister(sock)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
            self._retry(peer, os.strerror(code))
            return
        peer.dialling = link = PeerLink(sock, peer.rank)
        self._add(link)
        self._post(link, Kind.HELLO, self.rank, peer.rank, b"", self.secret)

    def _retry(self, peer: Peer, trouble: str) -> None:
        peer.dialling = None
        assert peer.address is not None
        peer.trouble = f"{peer.address[0]} port {peer.address[1]}: {trouble}"
        if peer.busy:
            self._after(_REDIAL, partial(self._reach, peer))

    def _link_of(self, sock: socket.socket) -> PeerLink:
        return PeerLink(sock)

    def _on_linked(self, peer: Peer, link: PeerLink) -> None:
        link.rank = peer.rank
        if (old := peer.link) is not None:
            self._drop(old)  # they have noticed before us that it broke
        peer.link, peer.dialling, peer.trouble = link, None, ""
        if old is not None:
            self._lose(peer, "its connection broke and was made anew")
        self._tell(peer)
        waiting = list(peer.waiting)
        peer.waiting.clear()
        for transfer in waiting:
            self._request(peer, transfer)

    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> None:
        assert isinstance(link, PeerLink)
        if link.rank < 0:
            self._on_greeting(link, kind, source, to, payload)
            return
        peer = self._peer(link.rank)
        if kind is Kind.DATA:
            link.filled(len(payload))
        elif kind is Kind.WANT:
            number, size = _WANT.unpack(payload)
            transfer = take(peer.offers, tag.decode())
            if transfer is not None:
                self._answer(link, transfer, number, size)
            else:
                link.wanted.setdefault(tag.decode(), deque()).append((number, size))
        elif kind is Kind.FAILED:
            self._on_failed(peer, link, tag.decode(), json.loads(bytes(payload)))

    def _on_greeting(self, link: PeerLink, kind: Kind, source: int, to: int, payload: Payload) -> None:
        if self._is_ours(payload) and kind is Kind.HELLO and link.dialled is None:
            if to == self.rank < source < self.world_size:
                self._post(link, Kind.WELCOME, self.rank, source, b"", self.secret)
                self._on_linked(self._peer(source), link)
                return
        elif self._is_ours(payload) and kind is Kind.WELCOME and link.dialled is not None:
            self._on_linked(self._peer(link.dialled), link)
            return
        raise OSError("not a rank of this world")

    def _on_failed(self, peer: Peer, link: PeerLink, tag: str, report: Report) -> None:
        link.wanted.pop(tag, None)
        jobs = [job for job in self._with(peer) if job.tag == tag]
        for job in jobs:
            self._fail_with(job, peer, report)
        if not jobs:
            peer.hear(tag, report)

    def _on_gone(self, link: Link) -> None:
        assert isinstance(link, PeerLink)
        if link.rank >= 0:
            peer = self._peer(link.rank)
            if peer.link is link:
                peer.link = None
                self._lose(peer, self._lost.get(peer.rank, _GONE))
                self._reach(peer)  # it may live, and wait for an exchange that was given up here
        elif link.dialled is not None:
            self._retry(self._peer(link.dialled), "the connection closed before the ranks had greeted each other")

    # Leaving.

    def _on_leave(self) -> None:
        for job in list(self._jobs):
            self._fail(job, PeerLostError(f"rank {self.rank}: exchange {job.tag!r}: this world was closed"))
        self._stop_accepting()
        for peer in self._peers.values():
            if isinstance(peer.dialling, socket.socket):
                self._selector.unregister(peer.dialling)
                peer.dialling.close()
        for link in self._open:
            self._hang_up(link)

    def _on_end(self, reason: str) -> None:
        self._ended = reason
        for job in list(self._jobs):
            job.end(PeerLostError(f"rank {self.rank}: exchange {job.tag!r}: {reason}"))
        while self._asked:
            self._asked.popleft()()
