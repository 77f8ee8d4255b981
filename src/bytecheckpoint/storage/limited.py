"""Calls that end: for work outside the engine, which waits for its own threads with a limit.

A mount whose server is gone may keep a call for ever, and whoever made it: a flush in the background, a verification.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from ..errors import StorageUnavailableError
from .base import Storage
from .parallel import within
from .wrappers import Call, WrappedStorage

__all__ = ["LimitedStorage", "limited"]

_T = TypeVar("_T")
_WORDS = {"read_into": "read", "stat": "look at", "version": "look at", "folders": "list"}


class LimitedStorage(WrappedStorage):
    """Every call, also of writers and readers, returns within `limit`, or raises `StorageUnavailableError`.

    A call that was given up goes on, with the buffers that it was given: nobody may use these again. Until it returns all
    others are refused at once, since each would wait as long, and keep a thread.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._hanging = 0
        self._counting = threading.Lock()

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        one = call.name and " " not in call.name  # and not the names of many files
        where = f"{self.url}/{call.name}" if one else self.url
        what = f"cannot {_WORDS.get(call.operation, call.operation)} {where}"
        if self._hanging:
            raise StorageUnavailableError(f"{what}: an earlier call has had no answer; check the device or mount")
        given_up = returned = False

        def counted() -> _T:
            nonlocal returned
            try:
                return do()
            finally:
                with self._counting:
                    returned = True
                    self._hanging -= given_up

        try:
            return within(self.limit(call.nbytes), counted, what)
        except StorageUnavailableError:
            with self._counting:
                given_up = not returned
                self._hanging += given_up
            raise

    def _again_around(self, inner: Storage) -> Storage:
        return LimitedStorage(inner)  # which does not hang because this one does

    def ending(self, do: Callable[[], None]) -> None:
        with contextlib.suppress(StorageUnavailableError):
            within(0.0 if self._hanging else self.limit(), do)


def limited(storage: Storage) -> Storage:
    """`storage`, with limits for its calls where they have none of their own."""
    if storage.in_memory or isinstance(storage, LimitedStorage):
        return storage
    return LimitedStorage(storage)
