"""The data plane: arrays that move over direct connections between pairs of ranks.

The receiver decides. It asks for an array once it has memory for it (WANT in an exchange, FETCH for served data), and
the sender answers with pieces (DATA) that are read straight into that memory. So nothing is buffered, nothing is sent
that nobody takes, any number of operations share one connection without waiting for each other, and two ranks that send
to each other at once cannot block (decision 0007).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, names_of_ranks
from bytecheckpoint.collectives.transport.connections import Connections
from bytecheckpoint.collectives.transport.serving import Request, Service
from bytecheckpoint.collectives.transport.star import Star
from bytecheckpoint.collectives.transport.transfers import (
    NUMBER,
    Answer,
    Exchange,
    Fetch,
    Operation,
    Peer,
    PeerLink,
    Report,
    Transfer,
    pop_first,
)
from bytecheckpoint.collectives.transport.wire import Kind, Payload
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    error_from_report,
    error_report,
)

__all__ = ["Mesh"]

_WANT = struct.Struct("<QQ")  # number of the request, bytes expected


class Mesh(Connections):
    """One rank's part in the data plane.

    Args:
        star: the messages of this world, which also report lost ranks.
        linger: as of `Loop`.
    """

    def __init__(self, star: Star, linger: float) -> None:
        super().__init__(star, linger)
        self._operations: set[Operation] = set()
        self._services: dict[str, Service] = {}
        self._request_numbers = itertools.count()
        self._ended: str | None = None
        self._start()

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
        self._run(Exchange(tag, outgoing, incoming, self._operations.discard), timeout)

    def fetch(self, rank: int, tag: str, request: bytes, into: NDArray[np.uint8], *, timeout: float) -> None:
        """As `Collective.fetch`, from another rank."""
        assert into.nbytes and into.flags.c_contiguous and into.flags.writeable
        self._run(Fetch(tag, rank, request, into, self._operations.discard), timeout)

    @contextlib.contextmanager
    def serve(self, tag: str, provider: DataProvider) -> Iterator[None]:
        """As `Collective.serve`, for other ranks."""
        self.check_process()
        service = self._services[tag] = Service(tag, provider, self)
        self._call_soon(self._reach_askers)
        try:
            yield
        finally:
            del self._services[tag]
            for request in service.close():
                self.refuse(request, self._not_served(tag))
            self._call_soon(partial(self._end_answers, tag))

    def answer(self, tag: str, request: Request, data: NDArray[np.uint8]) -> None:
        """Send what a rank has fetched; returns when it is sent or cannot be sent."""
        answer = Answer(tag, request.link, request.number, data, self._operations.discard)
        if self._call_soon(partial(self._begin_answer, answer)):
            answer.over.wait()

    def refuse(self, request: Request, error: BaseException) -> None:
        """Report to a rank that its fetch has failed."""
        report = {"missing": str(error.filename or error)} if isinstance(error, FileNotFoundError) else None
        self._refuse(request.link, request.number, report or error_report(error))

    def _run(self, operation: Operation, timeout: float) -> None:
        self.check_process()
        self._reserve({transfer.peer for transfer in operation.left})
        if not self._call_soon(partial(self._begin, operation)):
            raise self._closed_error(operation, "this world was closed")
        try:
            if not operation.over.wait(timeout):
                self._call_soon(partial(self._expire, operation, timeout))
        except BaseException:
            interrupted = CheckpointError(f"rank {self.rank}: {operation.title} was interrupted")
            self._call_soon(partial(self._fail, operation, interrupted))
            raise
        finally:
            # The arrays are the caller's again only when the thread, which never waits, has let go of them.
            while not operation.over.wait(1.0) and self._thread.is_alive():
                pass
        if operation.error is not None:
            raise operation.error

    def _closed_error(self, operation: Operation, reason: str) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: {operation.title}: {reason}")

    def _not_served(self, tag: str) -> CheckpointError:
        return CheckpointError(f"rank {self.rank} does not serve {tag!r} now")

    def _refuse(self, link: PeerLink, number: int, report: Report) -> None:
        self._post(link, Kind.REFUSED, self.rank, link.rank, NUMBER.pack(number), json.dumps(report).encode())

    # Below: on the thread only.

    def _begin(self, operation: Operation) -> None:
        if self._ended is not None or self._deadline is not None:
            operation.fail(self._closed_error(operation, self._ended or "this world was closed"))
            return
        self._operations.add(operation)
        peers = [self._peer(rank) for rank in sorted({transfer.peer for transfer in operation.left})]
        if isinstance(operation, Exchange):
            for peer in peers:
                peer.given_up.pop(operation.tag, None)
                if (report := peer.failed.pop(operation.tag, None)) is not None:
                    self._fail_with(operation, peer, report)
                    return
        for transfer in list(operation.left):
            peer = self._peer(transfer.peer)
            if not transfer.outgoing:
                self._request(peer, transfer)
            elif peer.link is not None and (wanted := pop_first(peer.link.wanted, operation.tag)) is not None:
                self._offer(peer.link, transfer, *wanted)
                if operation.over.is_set():
                    return
            else:
                peer.offers.setdefault(operation.tag, deque()).append(transfer)
        for peer in peers:
            self._reach(peer)

    def _request(self, peer: Peer, transfer: Transfer) -> None:
        if peer.link is None:
            peer.waiting.add(transfer)
            return
        transfer.number = next(self._request_numbers)
        peer.link.expect(transfer)
        kind = Kind.WANT if transfer.request is None else Kind.FETCH
        payload = _WANT.pack(transfer.number, len(transfer.view)) + (transfer.request or b"")
        self._post(peer.link, kind, self.rank, peer.rank, transfer.operation.tag.encode(), payload)

    def _offer(self, link: PeerLink, transfer: Transfer, number: int, size: int) -> None:
        if size != len(transfer.view):
            message = f"has {len(transfer.view)} bytes for rank {link.rank}, which expects {size}"
            operation = transfer.operation
            self._fail(operation, CheckpointError(f"rank {self.rank}: {operation.title}: {message}"))
            return
        transfer.number = number
        link.offer(transfer)
        self._flush(link)

    def _flush(self, link: PeerLink) -> None:
        if not link.flush():
            self._unsent.append(link)

    def _expire(self, operation: Operation, timeout: float) -> None:
        if operation.over.is_set():
            return
        sources, targets = operation.missing(outgoing=False), operation.missing(outgoing=True)
        parts = [f"not all bytes came from {names_of_ranks(sources)}"] if sources else []
        parts += [f"not all bytes went to {names_of_ranks(targets)}"] if targets else []
        unlinked = [peer for rank in sorted(sources | targets) if (peer := self._peer(rank)).link is None]
        for peer in unlinked[:1]:
            failure = f" ({peer.failure})" if peer.failure else ""
            parts.append(f"not connected with {names_of_ranks([p.rank for p in unlinked])}{failure}")
        self._fail(
            operation,
            CheckpointTimeoutError(
                f"rank {self.rank}: {operation.title}: {', '.join(parts)} within {timeout:g} s; look for a hung rank"
                f"{' or a firewall' if unlinked else ''}, or raise the time-out"
            ),
        )

    def _fail(self, operation: Operation, error: Exception, report: Report | None = None) -> None:
        """Give up `operation` here, and report that to the ranks that wait for this one."""
        if operation.over.is_set():
            return
        report = report or error_report(error)
        for transfer in operation.left:
            self._peer(transfer.peer).withdraw(transfer)
        if isinstance(operation, Answer) and self._peer(operation.link.rank).link is operation.link:
            self._refuse(operation.link, operation.number, report)
        if isinstance(operation, Exchange):
            for rank in {transfer.peer for transfer in operation.left}:
                peer = self._peer(rank)
                peer.give_up(operation.tag, report)
                self._report_failures(peer)
        operation.fail(error)

    def _report_failures(self, peer: Peer) -> None:
        """Tell another rank what was given up here, as soon as there is a connection."""
        if peer.link is not None:
            for tag, report in peer.unreported.items():
                self._post(peer.link, Kind.FAILED, self.rank, peer.rank, tag.encode(), json.dumps(report).encode())
                peer.given_up[tag] = None

    def _fail_with(self, exchange: Operation, peer: Peer, report: Report) -> None:
        """Give up what `peer` has given up. The report that is passed on is of the first cause."""
        prefix = f"rank {self.rank}: {exchange.title} was given up by rank {peer.rank}: "
        self._fail(exchange, error_from_report(report, prefix=prefix), report)

    def _with(self, peer: Peer) -> list[Operation]:
        return [each for each in self._operations if any(transfer.peer == peer.rank for transfer in each.left)]

    def _fail_all(self, peer: Peer, error: CheckpointError) -> None:
        for operation in self._with(peer):
            self._fail(operation, error)

    def _lose(self, peer: Peer, how: str) -> None:
        for operation in self._with(peer):
            self._fail(
                operation,
                PeerLostError(
                    f"rank {self.rank}: {operation.title}: lost rank {peer.rank}: {how}; "
                    "restart the job from its last committed checkpoint"
                ),
            )

    # Connections and frames.

    def _serves(self) -> bool:
        return bool(self._services)

    def _reach_askers(self) -> None:
        for peer in self._peers.values():
            if peer.asks_for_link:
                self._reach(peer)

    def _on_connected(self, peer: Peer) -> None:
        self._report_failures(peer)
        waiting = list(peer.waiting)
        peer.waiting.clear()
        for transfer in waiting:
            self._request(peer, transfer)

    def _on_data_frame(self, peer: Peer, link: PeerLink, kind: Kind, tag: bytes, payload: Payload) -> None:
        if kind is Kind.DATA:
            link.filled(len(payload))
        elif kind is Kind.WANT:
            number, size = _WANT.unpack(payload)
            transfer = pop_first(peer.offers, tag.decode())
            if transfer is not None:
                self._offer(link, transfer, number, size)
            else:
                link.wanted.setdefault(tag.decode(), deque()).append((number, size))
        elif kind is Kind.FAILED:
            self._on_failed(peer, link, tag.decode(), json.loads(bytes(payload)))
        elif kind is Kind.FETCH:
            number, size = _WANT.unpack_from(payload)
            self._on_fetch(tag.decode(), Request(link, number, size, bytes(payload[_WANT.size :])))
        elif kind is Kind.REFUSED:
            self._on_refused(link, NUMBER.unpack(tag)[0], json.loads(bytes(payload)))

    def _on_failed(self, peer: Peer, link: PeerLink, tag: str, report: Report) -> None:
        link.wanted.pop(tag, None)
        exchanges = [each for each in self._with(peer) if isinstance(each, Exchange) and each.tag == tag]
        for exchange in exchanges:
            self._fail_with(exchange, peer, report)
        if not exchanges:
            peer.on_given_up(tag, report)

    def _on_fetch(self, tag: str, request: Request) -> None:
        if (service := self._services.get(tag)) is None:
            self.refuse(request, self._not_served(tag))
        else:
            service.submit(request)

    def _on_refused(self, link: PeerLink, number: int, report: Report) -> None:
        if (transfer := link.requested(number)) is None:
            return
        error: Exception
        if "missing" in report:
            error = FileNotFoundError(2, "no such file", report["missing"])
        else:
            prefix = f"rank {self.rank}: {transfer.operation.title} was refused by rank {link.rank}: "
            error = error_from_report(report, prefix=prefix)
        self._fail(transfer.operation, error)

    def _begin_answer(self, answer: Answer) -> None:
        gone = self._peer(answer.link.rank).link is not answer.link
        if self._ended is not None or self._deadline is not None or gone:
            answer.fail(self._closed_error(answer, self._ended or "the connection is gone"))
        elif answer.tag not in self._services:
            self._fail(answer, self._not_served(answer.tag))
        else:
            self._operations.add(answer)
            for transfer in answer.left:
                answer.link.offer(transfer)
            self._flush(answer.link)

    def _end_answers(self, tag: str) -> None:
        for operation in list(self._operations):
            if isinstance(operation, Answer) and operation.tag == tag:
                self._fail(operation, self._not_served(tag))

    # Leaving.

    def _on_leave(self) -> None:
        for operation in list(self._operations):
            self._fail(operation, self._closed_error(operation, "this world was closed"))
        super()._on_leave()

    def _on_end(self, reason: str) -> None:
        self._ended = reason
        for operation in list(self._operations):
            operation.fail(self._closed_error(operation, reason))
        while self._calls:
            self._calls.popleft()()
