"""Report on saves and loads, and follow a save that is still running."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from bytecheckpoint.calls import refuse_calls
from bytecheckpoint.errors import CheckpointTimeoutError
from bytecheckpoint.threads import try_start, wait_for_any
from bytecheckpoint.tuning import tuning

__all__ = ["LoadReport", "SaveFuture", "SaveHandle", "SaveReport", "fail_handle", "failing_handle"]

_T = TypeVar("_T")

_log = logging.getLogger("bytecheckpoint")
#: The call that a thread is in while it runs done-callbacks, for `UsageError` messages.
_CALLBACK = "a done-callback of a save"


class SaveFuture(Future[_T]):
    """A future that cannot be cancelled, because the work behind it continues and sets the result.

    asyncio, for example, cancels a wrapped future when `wait_for` times out. The thread that sets the result runs the
    done-callbacks: public calls fail in them, and their exceptions do not reach the work.

    Attributes:
        failure_retrieved: True if a caller has received the failure, so the next save does not raise it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure_retrieved = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> _T:
        """Return the result, as `Future.result` does, and note a retrieved failure."""
        wait_for_any([self], timeout)
        try:
            return super().result(0)
        except BaseException as error:
            self.failure_retrieved = self.failure_retrieved or (self.done() and super().exception() is error)
            raise

    def set_result(self, result: _T) -> None:
        """Set the result, as `Future.set_result` does, and run the done-callbacks."""
        with refuse_calls(_CALLBACK):
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the failure, as `Future.set_exception` does, and run the done-callbacks."""
        with refuse_calls(_CALLBACK):
            super().set_exception(exception)

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Add a callback, as `Future.add_done_callback` does. Its exceptions are logged."""
        super().add_done_callback(partial(_call_back, fn))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure or None, as `Future.exception` does, and note a retrieved failure."""
        wait_for_any([self], timeout)
        error = super().exception(0)
        self.failure_retrieved = self.failure_retrieved or error is not None
        return error


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The work of one rank in one save.

    Attributes:
        path: URL of the checkpoint.
        bytes_written: bytes that this rank wrote, headers included.
        bytes_adopted: bytes in files of earlier checkpoints that this rank's part uses again (`incremental=True`).
        blocking_seconds: seconds for which the caller waited, in the call and at the fence.
        fence_seconds: seconds for which steps of optimizers, and other fences, waited for a copy in the background.
        total_seconds: seconds from the call to the commit.
        phases: seconds by phase ("capture", "plan", "wait", "stage", "write", "finish", "commit").
        plan_cached: True if the plan of an earlier save was used, without any planning communication.
        generation: the part of this save's file names that no other save has.
        staging: way of copying the state: "synchronous" for none, "blocking" or "background", as for `save`; "blocking: "
            and the reason where a save with staging="background" copied in the call.
        replica_drift: largest difference between the copies of a replicated tensor over its largest element, by name of
            the tensors that drifted apart by rounding. One copy of each is stored. The first save of a layout compares
            some elements of the copies.
        fingerprint: fingerprint of each state, with the setting `fingerprint` (docs/how-to/prove-equality.md).
        view: form of the view that `view=` asks for: "index" where it names the step's own files, "files" where ranks
            write files for it behind the commit; "" for none.
        retries: attempts after the first, of all requests to storages and of connections to other ranks, as far as their
            clients report them (docs/how-to/when-things-fail.md).
        retry_seconds: seconds waited before these attempts, summed over threads.
    """

    path: str
    bytes_written: int = 0
    blocking_seconds: float = 0.0
    fence_seconds: float = 0.0
    total_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    plan_cached: bool = False
    generation: str = ""
    staging: str = ""
    replica_drift: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0
    retry_seconds: float = 0.0
    bytes_adopted: int = 0
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    view: Literal["", "index", "files"] = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The work of one rank in one load.

    Attributes:
        path: URL of the checkpoint.
        bytes_read: bytes that this rank read from storage, checksum blocks counted whole.
        bytes_received: bytes that came from other ranks instead of storage.
        total_seconds: length of the load, for which the caller waits.
        phases: seconds by phase ("catalog", "destination", "plan", "agree", "read", "apply").
        missing: names that the program wants and the checkpoint lacks, of states that the load is not strict about.
        unexpected: names that the checkpoint holds and no rank wants, of the same states.
        cast: keys of tensors that were converted to the destination's dtype. Without cast=True, only optimizer state that
            its optimizer holds in higher precision than it was saved in.
        notes: further facts for a person, e.g. values that came from rank 0 because this rank has no copy of its own.
        retries: attempts after the first, as in `SaveReport`.
        retry_seconds: seconds waited before these attempts, summed over threads.
    """

    path: str
    bytes_read: int = 0
    bytes_received: int = 0
    total_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    retries: int = 0
    retry_seconds: float = 0.0


@dataclass(slots=True)
class SaveHandle:
    """A save in flight, or done. Its futures cannot be cancelled.

    Attributes:
        path: URL of the checkpoint.
        staged: future, done when the caller may change its state again: a full copy exists, and nothing else is read.
        restorable: future, done when a load from `path` finds the checkpoint even if this process dies. For `tier+...`
            paths the checkpoint is then in the memory of `tier_replicas` + 1 machines and not yet in the durable storage;
            for all others it is done together with `committed`.
        committed: future of the `SaveReport`, done when the checkpoint is durable and visible: for `tier+...` paths, in
            the durable storage.
        viewed: future, done when the view that `view=` asks for is there too: together with `committed`, or later if ranks
            write files for it. A failure is logged, and leaves the checkpoint as it is.
    """

    path: str
    staged: SaveFuture[None] = field(default_factory=SaveFuture)
    restorable: SaveFuture[None] = field(default_factory=SaveFuture)
    committed: SaveFuture[SaveReport] = field(default_factory=SaveFuture)
    viewed: SaveFuture[None] = field(default_factory=SaveFuture)

    @property
    def failure_retrieved(self) -> bool:
        """True if a caller has received the failure of this save. Otherwise the next save raises it, once."""
        return any(future.failure_retrieved for future in (self.staged, self.restorable, self.committed))

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self.committed.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the commit.

        Args:
            timeout: seconds to wait at most; None waits until the save's own time limits end it.

        Raises:
            CheckpointTimeoutError: not done in time; the save continues.
            CheckpointError: the save failed, here or on another rank.
        """
        try:
            return self.committed.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.committed.done():
                raise
            raise CheckpointTimeoutError(f"the save to {self.path} is still running after {timeout:g} s") from error


def _call_back(fn: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    """Run a done-callback. `Future` logs exceptions, but not `SystemExit`, which would end the save's thread."""
    try:
        fn(future)
    except Exception:
        raise
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a done-callback of a save failed")


def fail_handle(handle: SaveHandle, error: BaseException) -> None:
    """Set `error` on those futures of `handle` that are not done."""
    for future in (handle.staged, handle.restorable, handle.committed):
        if not future.done():
            future.set_exception(error)


@contextlib.contextmanager
def failing_handle(handle: SaveHandle, error: BaseException) -> Iterator[None]:
    """Fail a handle when the body, which cleans up, has ended, or soon if that takes long."""
    cleaned = threading.Event()

    def fail() -> None:
        cleaned.wait(tuning().stopped_calls)
        fail_handle(handle, error)

    thread = threading.Thread(target=fail, name="bytecheckpoint-fail", daemon=True)
    if not try_start(thread):
        fail_handle(handle, error)
        yield
        return
    try:
        yield
    finally:
        cleaned.set()
        thread.join()
