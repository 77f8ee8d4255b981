"""The news that a rank has failed, for ranks that are still at work: they need not finish what will not be used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.errors import CheckpointError, error_from_report
from bytecheckpoint.threads import try_start

__all__ = ["RankFailure", "StopSignal"]


class RankFailure(msgspec.Struct, frozen=True, array_like=True):
    """The failure of one rank.

    Attributes:
        error: `error_report` of it.
        rank: the rank that failed.
    """

    error: dict[str, str]
    rank: int

    def as_error(self) -> CheckpointError:
        """Make the error that other ranks raise."""
        return error_from_report(self.error, prefix=f"rank {self.rank}: ")


_decoder = msgspec.msgpack.Decoder(RankFailure)


class StopSignal:
    """One rank's part in the news of a conversation. Use as a context manager, around the work of the ranks.

    A rank that fails tells rank 0, which tells all others once.

    Args:
        collective: the ranks.
        tag: of the conversation.
        on_stop: called with the failure of another rank, once, on the transport's thread; must return at once.

    Attributes:
        failure: the first failure of another rank that this rank has heard of.
    """

    def __init__(self, collective: Collective, tag: str, on_stop: Callable[[CheckpointError], None]) -> None:
        self.failure: RankFailure | None = None
        self._collective = collective
        self._failed_tag, self._stop_tag = f"{tag}/failed", f"{tag}/stop"
        self._on_stop = on_stop
        self._told = threading.Lock()  # held once rank 0 has told the others

    def __enter__(self) -> StopSignal:
        if self._collective.rank == 0:
            self._end_watch = self._collective.watch(self._failed_tag, self._hear)
        else:
            self._end_watch = self._collective.watch(self._stop_tag, self._hear)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._end_watch()
        if error is not None:  # of any rank, so others may still tell of theirs
            self._collective.forget(self._failed_tag)
            self._collective.forget(self._stop_tag)

    def fail(self, failure: RankFailure) -> None:
        """Tell the others that this rank has failed, unless they know of another failure. Never raises."""
        if self.failure is not None:
            return
        if self._collective.rank == 0:
            self._tell_all(failure)
            return
        with contextlib.suppress(CheckpointError):  # then the next agreement says so
            self._collective.send(0, self._failed_tag, msgspec.msgpack.encode(failure))

    def _hear(self, payload: bytes) -> None:
        failure = _decoder.decode(payload)
        if self.failure is not None:
            return
        self.failure = failure
        self._on_stop(failure.as_error())
        if self._collective.rank == 0:
            # The transport's thread must not wait for locks of other ranks' messages. Without a thread, the next agreement
            # tells the others.
            try_start(threading.Thread(target=self._tell_all, args=(failure,), name="bytecheckpoint-stop", daemon=True))

    def _tell_all(self, failure: RankFailure) -> None:
        if not self._told.acquire(blocking=False):
            return
        message = msgspec.msgpack.encode(failure)
        others = [rank for rank in range(1, self._collective.world_size) if rank != failure.rank]
        with contextlib.suppress(CheckpointError):
            self._collective.send_each(self._stop_tag, dict.fromkeys(others, message))
