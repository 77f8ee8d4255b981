"""Actions behind a commit: functions of the program, a link to the newest step, and the wait of other jobs for a step."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.concurrency import Workers
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.rules import StepInfo, is_real
from bytecheckpoint.manager.run_folder import RunFolder
from bytecheckpoint.saving.steps import check_step
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.threads import wait_for_any
from bytecheckpoint.tiers.storage import TierStorage

__all__ = ["CommitActions", "LatestLink", "wait_for_new_step"]

_log = logging.getLogger("bytecheckpoint")


class CommitActions:
    """Calls functions of the program with each committed step, one call after the other, on a thread of its own.

    Args:
        functions: functions of a `StepInfo`.
    """

    def __init__(self, functions: Sequence[Callable[[StepInfo], object]]) -> None:
        self._functions = functions
        self._lock, self._waiting = threading.Lock(), list[int]()
        self._workers: Workers | None = None

    @property
    def held(self) -> set[int]:
        """Steps whose functions have not ended, and which must stay until then."""
        with self._lock:
            return {*self._waiting}

    def begin(
        self,
        step: int,
        find: Callable[[], StepInfo | None],
        done: Callable[[], object],
        viewed: Future[None] | None = None,
    ) -> None:
        """Call the functions with a committed step, behind those of earlier steps. Return at once.

        Args:
            step: step number.
            find: function that describes the step.
            done: function to call behind the others.
            viewed: future to wait for first, during which the step must stay.
        """
        if not self._functions and (viewed is None or viewed.done()):
            return
        self._workers = self._workers or Workers(1, "bytecheckpoint-on-commit")
        with self._lock:
            self._waiting.append(step)
        self._workers.submit(self._call, step, find, done, viewed)

    def _call(
        self,
        step: int,
        find: Callable[[], StepInfo | None],
        done: Callable[[], object],
        viewed: Future[None] | None,
    ) -> None:
        try:
            if viewed is not None:
                wait_for_any([viewed])
            if self._functions and (info := find()) is not None:
                for function in self._functions:
                    _call_with(function, info)
        except Exception as error:  # noqa: BLE001  the training continues
            _log.warning("step %d cannot be read, so no function of on_commit is called: %s", step, error)
        finally:
            with self._lock:
                self._waiting.remove(step)
            done()

    def close(self, timeout: float) -> None:
        """Wait until all functions have ended.

        Args:
            timeout: seconds to wait.
        """
        if self._workers is not None and not self._workers.shutdown(seconds=timeout):
            _log.warning("functions of on_commit run still, for steps %s", ", ".join(map(str, sorted(self.held))))


def _call_with(function: Callable[[Any], object], info: Any) -> None:
    try:
        function(info)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the training continues, and the step is committed
        _log.warning("on_commit: %r failed for step %d", function, info.step, exc_info=error)


@dataclass(frozen=True)
class LatestLink:
    """Function for `on_commit`: keep a symbolic link beside the steps that leads to the newest one.

    Attributes:
        name: name of the link.
    """

    name: str = "latest"

    def __post_init__(self) -> None:
        if os.path.basename(self.name) != self.name or self.name.startswith(("step_", ".")) or not self.name:
            raise UsageError(f"LatestLink({self.name!r}): give the name of a file beside the steps")

    def __call__(self, info: StepInfo) -> None:
        """Let the link lead to a step.

        Raises:
            UsageError: the storage has no links, or something else has the name.
        """
        storage = resolve(info.path)
        storage = storage.durable if isinstance(storage, TierStorage) else storage
        if not isinstance(storage, PosixStorage):
            raise UsageError(f"{storage.url} is on a storage without symbolic links")
        root, step = os.path.split(storage.root)
        link, new = os.path.join(root, self.name), os.path.join(root, f".{self.name}.new")
        if os.path.lexists(link) and not os.path.islink(link):
            raise UsageError(f"{link} is no symbolic link: it stays as it is")
        with contextlib.suppress(FileNotFoundError):  # a call that was killed, or failed, has left it
            os.unlink(new)
        os.symlink(step, new)
        os.replace(new, link)


def wait_for_new_step(
    root: str | os.PathLike[str],
    after: StepInfo | int | None = None,
    *,
    timeout: float | None = None,
    interval: float = 5.0,
) -> StepInfo | None:
    """Wait until a run that another job trains has a new committed step; return its newest one.

    One process calls it, for example of a job that evaluates. It takes the folder over from nobody. On several ranks, one
    calls it and sends the others the result.

    Args:
        root: folder or URL of the run. It may not be there yet.
        after: the step that was returned last, or a step number; None for any step. A step that is saved anew is a new one.
        timeout: seconds to wait; None for no limit.
        interval: seconds between two looks, above 0.

    Returns:
        The newest step, or None if there is no new one in time.

    Raises:
        UsageError: an argument is out of its range.
        StorageError: the storage fails.
    """
    if not is_real(interval) or not interval > 0:
        raise UsageError(f"interval={interval!r}: give a number of seconds above 0")
    if not isinstance(after, StepInfo | None):
        after = check_step(after)
    folder, end = RunFolder(root), time.monotonic() + timeout if timeout is not None else None
    while True:
        newest = folder.newest()
        if newest is not None and _is_new(newest, after):
            return newest
        left = interval if end is None else min(interval, end - time.monotonic())
        if left <= 0:
            return None
        time.sleep(left)


def _is_new(newest: StepInfo, after: StepInfo | int | None) -> bool:
    if isinstance(after, StepInfo):
        # A run that goes back has an older step as its newest, until it saves.
        older = 0 < newest.committed < after.committed
        return not older and (newest.step, newest.created) != (after.step, after.created)
    return after is None or newest.step > after
