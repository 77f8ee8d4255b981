"""The one broadcast of a failure: it cancels a save or load on all ranks, because no rank needs to finish unused work."""

from __future__ import annotations

import contextlib
import threading

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.threads import try_start

__all__ = ["StopSignal"]


class StopSignal:
    """Cancel one save or load on all ranks with the first failure of any rank. Use it as a context manager around the work.

    A rank that fails sends its failure to rank 0. Rank 0 sends the first failure to all other ranks, once.

    Args:
        collective: ranks of the save or load.
        tag: name of the save or load, the same on all ranks, never used twice in one world.
        cancel: this rank's token of the save or load. A failure of another rank sets it on the transport's thread.
    """

    def __init__(self, collective: Collective, tag: str, cancel: Cancellation) -> None:
        self.cancel = cancel
        self._collective = collective
        self._failed_tag, self._stop_tag = f"{tag}/failed", f"{tag}/stop"
        self._sent = threading.Lock()  # held once rank 0 has sent a failure to the others

    def __enter__(self) -> StopSignal:
        own_tag = self._failed_tag if self._collective.rank == 0 else self._stop_tag
        self._end_watch = self._collective.watch(own_tag, self._receive)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._end_watch()
        if error is not None:  # of any rank, so other ranks may still send theirs
            self._forget()

    def settle(self) -> None:
        """End the time in which other ranks can cancel, as rank 0 does before it commits.

        Raises:
            CheckpointError: a failure came before.
        """
        self._end_watch()
        self._forget()
        self.cancel.raise_if_set()

    def fail(self, failure: Failure) -> None:
        """Cancel on all ranks, with `failure` unless another one came first. Never raises."""
        first = self.cancel.set(failure)
        if self._collective.rank == 0:
            assert self.cancel.failure is not None
            self._send_to_all(self.cancel.failure)
        elif first:
            with contextlib.suppress(CheckpointError):  # then the next agreement says so
                self._collective.send(0, self._failed_tag, failure.encode())

    def _receive(self, payload: bytes) -> None:
        failure = Failure.decode(payload)
        if self.cancel.set(failure) and self._collective.rank == 0:
            # The transport's thread must not wait for locks of other ranks' messages. Without a thread, the next agreement
            # fails the others.
            sender = threading.Thread(
                target=self._send_to_all, args=(failure,), name="bytecheckpoint-stop", daemon=True
            )
            try_start(sender)

    def _send_to_all(self, failure: Failure) -> None:
        if not self._sent.acquire(blocking=False):
            return
        # Also the rank of the failure: it may have failed to serve another one, and not know.
        others = range(1, self._collective.world_size)
        with contextlib.suppress(CheckpointError):
            self._collective.send_each(self._stop_tag, dict.fromkeys(others, failure.encode()))

    def _forget(self) -> None:
        self._collective.forget(self._failed_tag)
        self._collective.forget(self._stop_tag)
