"""Serve data of one rank: other ranks fetch arrays, without a call on this side for each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, provide
from bytecheckpoint.collectives.transport.transfers import PeerLink
from bytecheckpoint.threads import start, try_start
from bytecheckpoint.tracing.operation import bind_operation

__all__ = ["Request", "Service"]

#: Answers that are made and sent at the same time. More would take more memory.
_THREADS = 4


class Request(NamedTuple):
    """One request of another rank for served data.

    Attributes:
        link: connection to that rank.
        number: number of the request, which the answer carries.
        size: bytes that the rank expects.
        content: request to the provider.
    """

    link: PeerLink
    number: int
    size: int
    content: bytes


class Service:
    """The threads that answer requests for the data that a rank serves under one tag.

    Args:
        provider: function that makes the answers; several threads call it.
        answer: function that sends the data, and returns when they are sent or cannot be sent.
        refuse: function that sends the error of a request.

    Raises:
        CheckpointError: this process may start no thread.
    """

    def __init__(
        self,
        provider: DataProvider,
        answer: Callable[[Request, NDArray[np.uint8]], None],
        refuse: Callable[[Request, BaseException], None],
    ) -> None:
        self._provider = bind_operation(provider)
        self._answer = answer
        self._refuse = refuse
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        for number in range(_THREADS):
            thread = threading.Thread(target=self._work, name="bytecheckpoint-serve", daemon=True)
            if number == 0:
                start(thread)
            elif not try_start(thread):
                break

    def submit(self, request: Request) -> None:
        """Queue a request for the threads."""
        self._requests.put(request)

    def close(self) -> list[Request]:
        """End the threads, and return the requests that nobody has begun to answer."""
        left = []
        try:
            while True:
                if (request := self._requests.get_nowait()) is not None:
                    left.append(request)
        except queue.Empty:
            pass
        for _ in range(_THREADS):
            self._requests.put(None)
        return left

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                data = provide(self._provider, request.content, request.size)
            except BaseException as error:  # noqa: BLE001  raised on the rank that asked
                self._refuse(request, error)
            else:
                self._answer(request, data)
                del data  # not needed while the thread waits
