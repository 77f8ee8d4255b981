"""The data plane: arrays that move over direct connections between pairs of ranks.

The receiver decides. It asks for an array once it has memory for it (WANT in an exchange, FETCH for served data), and
the sender answers with pieces (DATA) that are read straight into that memory. So nothing is buffered, nothing is sent
that nobody takes, any number of operations share one connection without waiting for each other, and two ranks that send
to each other at once cannot block (decision 0007).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, names_of_ranks
from bytecheckpoint.collectives.transport.connections import REDIAL_SECONDS, DirectConnections
from bytecheckpoint.collectives.transport.peers import Peer
from bytecheckpoint.collectives.transport.serving import Request, Service
from bytecheckpoint.collectives.transport.star import Star
from bytecheckpoint.collectives.transport.transfers import (
    NUMBER,
    Answer,
    ArrayExchange,
    DataOperation,
    Fetch,
    PeerLink,
    Transfer,
    pop_first,
)
from bytecheckpoint.collectives.transport.wire import Kind, Payload
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
)
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.liveness import busy
from bytecheckpoint.tracing.operation import count_retries

__all__ = ["Mesh"]

_WANT = struct.Struct("<QQ")  # number of the request, bytes expected
_MISSING = "FileNotFoundError"  # name of the error in a failure whose message is the name of the missing file


class Mesh(DirectConnections):
    """One rank's part in the data plane.

    Args:
        star: the messages of this world, which also report lost ranks.
        linger: most seconds that `leave` spends on delivering the last messages.
    """

    def __init__(self, star: Star, linger: float) -> None:
        super().__init__(star, linger)
        self._operations: set[DataOperation] = set()
        self._services: dict[str, Service] = {}
        self._request_numbers = itertools.count()
        self._start()

    # Called from any thread.

    def exchange(
        self,
        tag: str,
        outgoing: Mapping[int, NDArray[np.uint8]],
        incoming: Mapping[int, NDArray[np.uint8]],
        *,
        timeout: float,
        cancel: Cancellation | None = None,
    ) -> None:
        """Exchange arrays with other ranks, as `Collective.exchange`. None of the arrays is empty."""
        self._run(ArrayExchange(tag, outgoing, incoming, self._operations.discard), timeout, cancel)

    def fetch(self, rank: int, tag: str, request: bytes, destination: NDArray[np.uint8], *, timeout: float) -> None:
        """Fill an array with data that another rank serves, as `Collective.fetch`."""
        assert destination.nbytes and destination.flags.c_contiguous and destination.flags.writeable
        self._run(Fetch(tag, rank, request, destination, self._operations.discard), timeout)

    @contextlib.contextmanager
    def serve(self, tag: str, provider: DataProvider) -> Iterator[None]:
        """Serve data to other ranks, as `Collective.serve`."""
        self.check_process()
        service = self._services[tag] = Service(provider, partial(self._answer, tag), partial(self._refuse, tag))
        try:
            yield
        finally:
            del self._services[tag]
            # On the thread: it may have found the service already for a request that it has not submitted yet.
            end = partial(self._end_service, tag, service)
            if not self._call_soon(end):
                end()

    def _answer(self, tag: str, request: Request, data: NDArray[np.uint8]) -> None:
        """Send the data that a rank fetches; return when they are sent or cannot be sent."""
        answer = Answer(tag, request.link, request.number, data, self._operations.discard)
        if self._call_soon(partial(self._begin_answer, answer)):
            answer.over.wait()

    def _refuse(self, tag: str, request: Request, error: BaseException) -> None:
        """Send a rank the failure of its fetch."""
        if isinstance(error, FileNotFoundError):
            failure = Failure(_MISSING, str(error.filename or error))
        else:
            failure = Failure.of(error, rank=self.rank, stage=f"serve {tag!r}")
        self._send_refusal(request.link, request.number, failure)

    def _end(self, known: weakref.ref[DataOperation], failure: Failure) -> None:
        if (operation := known()) is not None:
            self._call_soon(partial(self._fail, operation, failure.as_error()))

    def _run(self, operation: DataOperation, timeout: float, cancel: Cancellation | None = None) -> None:
        self.check_process()
        self._reserve({transfer.rank for transfer in operation.left})
        if not self._call_soon(partial(self._begin, operation)):
            raise self._closed_error(operation, "this world was closed")
        if cancel is not None:
            # The token may live longer than the operation, and must not keep its arrays.
            cancel.on_set(partial(self._end, weakref.ref(operation)))
        try:
            with busy(timeout):
                over = operation.over.wait(timeout)
            if not over:
                self._call_soon(partial(self._expire, operation, timeout))
        except BaseException:
            interrupted = CheckpointError(f"rank {self.rank}: {operation.title} was interrupted")
            self._call_soon(partial(self._fail, operation, interrupted))
            raise
        finally:
            # The thread uses the caller's arrays until the operation is over. It never waits, so that is soon.
            while not operation.over.wait(1.0) and self._thread.is_alive():
                pass
            count_retries(operation.redials, operation.redials * REDIAL_SECONDS)
        if operation.error is not None:
            raise operation.error
        if not operation.over.is_set():
            raise self._closed_error(operation, self._ended or "this world was closed")

    def _closed_error(self, operation: DataOperation, reason: str) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: {operation.title}: {reason}")

    def _not_served(self, tag: str) -> CheckpointError:
        return CheckpointError(f"rank {self.rank}: {tag!r} is not served now")

    def _send_refusal(self, link: PeerLink, number: int, failure: Failure) -> None:
        self._post(link, Kind.REFUSED, self.rank, link.rank, NUMBER.pack(number), failure.encode())

    # Below: on the thread only.

    def _begin(self, operation: DataOperation) -> None:
        if self._ended is not None or self._deadline is not None:
            operation.fail(self._closed_error(operation, self._ended or "this world was closed"))
            return
        self._operations.add(operation)
        peers = [self._peer(rank) for rank in sorted({transfer.rank for transfer in operation.left})]
        if isinstance(operation, ArrayExchange):
            for peer in peers:
                peer.given_up_here.pop(operation.tag, None)
                if (failure := peer.given_up_there.pop(operation.tag, None)) is not None:
                    self._fail(operation, failure.as_error())
                    return
        for transfer in list(operation.left):
            peer = self._peer(transfer.rank)
            if not transfer.outgoing:
                self._request(peer, transfer)
            elif (link := peer.caller) and (early := pop_first(link.early_requests, operation.tag)) is not None:
                self._send_array(link, transfer, *early)
                if operation.over.is_set():
                    return
            else:
                peer.offers.setdefault(operation.tag, deque()).append(transfer)
        for peer in peers:
            self._connect_if_needed(peer)

    def _request(self, peer: Peer, transfer: Transfer) -> None:
        if peer.called is None:
            peer.to_request.add(transfer)
            return
        transfer.number = next(self._request_numbers)
        peer.called.arrays.expect(transfer)
        kind = Kind.WANT if transfer.request is None else Kind.FETCH
        payload = _WANT.pack(transfer.number, len(transfer.view)) + (transfer.request or b"")
        self._post(peer.called, kind, self.rank, peer.rank, transfer.operation.tag.encode(), payload)

    def _send_array(self, link: PeerLink, transfer: Transfer, number: int, size: int) -> None:
        """Answer request `number` for an array of `size` bytes."""
        if size != len(transfer.view):
            message = f"has {len(transfer.view)} bytes for rank {link.rank}, which expects {size}"
            operation = transfer.operation
            self._fail(operation, CheckpointError(f"rank {self.rank}: {operation.title}: {message}"))
            return
        transfer.number = number
        link.send(transfer)
        self._flush(link)

    def _flush(self, link: PeerLink) -> None:
        if not link.flush():
            self._unsent.append(link)

    def _expire(self, operation: DataOperation, timeout: float) -> None:
        if operation.over.is_set():
            return
        sources, targets = operation.missing(outgoing=False), operation.missing(outgoing=True)
        parts = [f"not all bytes came from {names_of_ranks(sources)}"] if sources else []
        parts += [f"not all bytes went to {names_of_ranks(targets)}"] if targets else []
        unlinked = [peer for rank in sorted(sources) if (peer := self._peer(rank)).called is None]
        unlinked += [peer for rank in sorted(targets) if (peer := self._peer(rank)).caller is None]
        for peer in unlinked[:1]:
            failure = f" ({peer.dialling.failure})" if peer.dialling.failure else ""
            parts.append(f"not connected with {names_of_ranks({p.rank for p in unlinked})}{failure}")
        self._fail(
            operation,
            CheckpointTimeoutError(
                f"rank {self.rank}: {operation.title}: {', '.join(parts)} within {timeout:g} s; look for a hung rank"
                f"{' or a firewall' if unlinked else ''}, or raise the time-out"
            ),
        )

    def _fail(self, operation: DataOperation, error: Exception) -> None:
        """Give up `operation` here, and send the failure to the ranks that wait for this one."""
        if operation.over.is_set():
            return
        failure = Failure.of(error, rank=self.rank)
        for transfer in operation.left:
            self._peer(transfer.rank).withdraw(transfer)
        if isinstance(operation, Answer) and self._peer(operation.link.rank).caller is operation.link:
            self._send_refusal(operation.link, operation.number, failure)
        if isinstance(operation, ArrayExchange):
            for rank in {transfer.rank for transfer in operation.left}:
                peer = self._peer(rank)
                peer.give_up(operation.tag, failure)
                self._send_failures(peer)
        operation.fail(error)

    def _send_failures(self, peer: Peer) -> None:
        """Send `peer` the failures of exchanges that were given up here; without a connection, do nothing yet."""
        for link in peer.links[:1]:
            for tag, failure in peer.unsent_failures.items():
                self._post(link, Kind.FAILED, self.rank, peer.rank, tag.encode(), failure.encode())
                peer.given_up_here[tag] = None

    def _operations_with(self, peer: Peer) -> list[DataOperation]:
        return [each for each in self._operations if any(transfer.rank == peer.rank for transfer in each.left)]

    def _fail_all(self, peer: Peer, error: CheckpointError) -> None:
        for operation in self._operations_with(peer):
            self._fail(operation, error)

    def _lose(self, peer: Peer, reason: str) -> None:
        for operation in self._operations_with(peer):
            self._fail(
                operation,
                PeerLostError(
                    f"rank {self.rank}: {operation.title}: lost rank {peer.rank}: {reason}; "
                    "restart the job from its last committed checkpoint"
                ),
            )

    # Connections and frames.

    def _on_connected(self, peer: Peer) -> None:
        self._send_failures(peer)
        if peer.called is not None:
            transfers = list(peer.to_request)
            peer.to_request.clear()
            for transfer in transfers:
                self._request(peer, transfer)

    def _on_data_frame(self, peer: Peer, link: PeerLink, kind: Kind, tag: bytes, payload: Payload) -> None:
        if kind is Kind.DATA:
            link.arrays.on_data(len(payload))
        elif kind is Kind.WANT:
            number, size = _WANT.unpack(payload)
            transfer = pop_first(peer.offers, tag.decode())
            if transfer is not None:
                self._send_array(link, transfer, number, size)
            else:
                link.early_requests.setdefault(tag.decode(), deque()).append((number, size))
        elif kind is Kind.FAILED:
            self._on_failed(peer, tag.decode(), Failure.decode(payload))
        elif kind is Kind.FETCH:
            number, size = _WANT.unpack_from(payload)
            self._on_fetch(tag.decode(), Request(link, number, size, bytes(payload[_WANT.size :])))
        elif kind is Kind.REFUSED:
            self._on_refused(link, NUMBER.unpack(tag)[0], Failure.decode(payload))

    def _on_failed(self, peer: Peer, tag: str, failure: Failure) -> None:
        if peer.caller is not None:
            peer.caller.early_requests.pop(tag, None)
        exchanges = [
            each for each in self._operations_with(peer) if isinstance(each, ArrayExchange) and each.tag == tag
        ]
        for exchange in exchanges:
            self._fail(exchange, failure.as_error())
        if not exchanges:
            peer.on_given_up(tag, failure)

    def _on_fetch(self, tag: str, request: Request) -> None:
        if (service := self._services.get(tag)) is None:
            self._refuse(tag, request, self._not_served(tag))
        else:
            service.submit(request)

    def _on_refused(self, link: PeerLink, number: int, failure: Failure) -> None:
        if (transfer := link.arrays.requested(number)) is None:
            return
        missing = failure.error == _MISSING
        error = FileNotFoundError(2, "no such file", failure.message) if missing else failure.as_error()
        self._fail(transfer.operation, error)

    def _begin_answer(self, answer: Answer) -> None:
        gone = self._peer(answer.link.rank).caller is not answer.link
        if self._ended is not None or self._deadline is not None or gone:
            answer.fail(self._closed_error(answer, self._ended or "the connection is gone"))
        elif answer.tag not in self._services:
            self._fail(answer, self._not_served(answer.tag))
        else:
            self._operations.add(answer)
            for transfer in answer.left:
                answer.link.send(transfer)
            self._flush(answer.link)

    def _end_service(self, tag: str, service: Service) -> None:
        for request in service.close():
            self._refuse(tag, request, self._not_served(tag))
        for operation in list(self._operations):
            if isinstance(operation, Answer) and operation.tag == tag:
                self._fail(operation, self._not_served(tag))

    # Leaving.

    def _on_leave(self) -> None:
        for operation in list(self._operations):
            self._fail(operation, self._closed_error(operation, "this world was closed"))
        super()._on_leave()

    def _on_end(self, reason: str) -> None:
        for operation in list(self._operations):
            operation.fail(self._closed_error(operation, reason))
        while self._calls:
            self._calls.popleft()()
