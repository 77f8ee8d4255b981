"""Data that one rank serves: others fetch arrays from it without a call on this side for each."""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import DataProvider, provide
from bytecheckpoint.collectives.transport.transfers import PeerLink

__all__ = ["Request", "Service"]

#: Answers that are made and sent at the same time: they bound the memory that a service takes.
_THREADS = 4


class Request(NamedTuple):
    """What another rank wants of a service.

    Attributes:
        link: the connection to that rank.
        number: of the request, for the answer.
        size: bytes that the rank expects.
        content: what it wants.
    """

    link: PeerLink
    number: int
    size: int
    content: bytes


class Answerer(Protocol):
    """What sends the answers of a service."""

    def answer(self, tag: str, request: Request, data: NDArray[np.uint8]) -> None:
        """Send the data; returns when they are sent or cannot be sent."""

    def refuse(self, request: Request, error: BaseException) -> None:
        """Report that there is no answer."""


class Service:
    """What is served under one tag: a few threads that get the data and have them sent.

    Args:
        tag: names the service.
        provider: makes the answers; called from several threads.
        answerer: sends them.
    """

    def __init__(self, tag: str, provider: DataProvider, answerer: Answerer) -> None:
        self.tag = tag
        self._provider = provider
        self._answerer = answerer
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(target=self._work, name="bytecheckpoint-serve", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Have a request answered."""
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
                self._answerer.refuse(request, error)
            else:
                self._answerer.answer(self.tag, request, data)
                del data  # not needed while the thread waits
