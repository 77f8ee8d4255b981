"""A storage whose calls time out, for work outside the engine. The engine waits for its own threads with a timeout.

A call to a mount whose server is gone may never return. Without a timeout it would block a flush or verification for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.storage.base import Storage, call_timeout
from bytecheckpoint.storage.optional import CacheProbe, is_cached
from bytecheckpoint.storage.wrappers import Call, WrappedStorage

__all__ = ["TimeLimitedStorage", "with_time_limits"]

_T = TypeVar("_T")
#: Verbs for messages, of operations whose name is not the verb.
_VERBS = {
    "read_into": "read",
    "stat": "look at",
    "version": "look at",
    "exists": "look at",
    "folders": "list",
    "unfinished_uploads": "list the uploads to",
    "abort_uploads": "abort the uploads to",
}


class TimeLimitedStorage(WrappedStorage, CacheProbe):
    """A wrapper whose calls, also of writers and readers, raise `StorageUnavailableError` after `call_timeout`.

    A call that timed out continues and still uses its buffers, so the caller must not reuse them. Until it returns, other
    calls are refused at once, because each would wait as long and occupy a thread.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._hanging = 0
        self._lock = threading.Lock()

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        where = f"{self.url}/{call.names[0]}" if len(call.names) == 1 else self.url
        what = f"cannot {_VERBS.get(call.operation, call.operation)} {where}"
        if self._hanging:
            raise StorageUnavailableError(f"{what}: an earlier call has had no answer; check the device or mount")
        timed_out = returned = False

        def counted() -> _T:
            nonlocal returned
            try:
                return function()
            finally:
                with self._lock:
                    returned = True
                    self._hanging -= timed_out

        try:
            return call_with_timeout(call_timeout(self, call.nbytes), counted, what)
        except StorageUnavailableError:
            with self._lock:
                timed_out = not returned
                self._hanging += timed_out
            raise

    def is_cached(self, name: str, offsets: Sequence[int]) -> bool:
        return self.around(Call("open", (name,)), lambda: is_cached(self.inner, name, offsets))

    def wrap(self, inner: Storage) -> Storage:
        return TimeLimitedStorage(inner)  # counts its own hanging calls: the other storage may answer

    def around_close(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(StorageUnavailableError):
            call_with_timeout(0.0 if self._hanging else call_timeout(self), function)


def with_time_limits(storage: Storage) -> Storage:
    """Wrap `storage` in timeouts, unless it is in memory or has them already."""
    if storage.capabilities.in_memory or isinstance(storage, TimeLimitedStorage):
        return storage
    return TimeLimitedStorage(storage)
