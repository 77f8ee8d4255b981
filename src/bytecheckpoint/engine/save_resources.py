"""Keep from one save to the next: the staging pools, the helper process, cached plans."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from bytecheckpoint.engine.earlier_files import EarlierFiles
from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.staging_pools import StagingPools
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.settings import Settings
from bytecheckpoint.threads import try_start

__all__ = ["PlanCache", "SaveResources"]

_Key = TypeVar("_Key")
_Plan = TypeVar("_Plan")

_log = logging.getLogger("bytecheckpoint")
_RANK_PLANS = 4
_GLOBAL_PLANS = 16


class PlanCache(Generic[_Key, _Plan]):
    """Keeps the plans that were used last.

    Args:
        limit: number of plans.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._plans: OrderedDict[_Key, _Plan] = OrderedDict()

    def __contains__(self, key: _Key) -> bool:
        return key in self._plans

    def get(self, key: _Key) -> _Plan | None:
        """Return a plan and count it as used; None where it is not cached."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def add(self, key: _Key, plan: _Plan) -> None:
        """Cache a plan, in place of the one that was not used for longest."""
        self._plans[key] = plan
        while len(self._plans) > self._limit:
            self._plans.popitem(last=False)

    def newest_first(self) -> Iterator[_Plan]:
        """Iterate over the plans, the last used one first."""
        return reversed(self._plans.values())

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


class SaveResources:
    """The staging memory, the helper process and the cached plans of one rank in one world.

    Attributes:
        pools: staging memory.
        plans: this rank's plans, by the signature of its table.
        captures: results of captures, by the identity of the states.
        global_plans: on rank 0, the coordinator's plans, by name.
        earlier: files of earlier checkpoints that a save may use again.
        running_helper: helper process that was started last, None before the first.
    """

    def __init__(self) -> None:
        self.pools = StagingPools()
        self.plans: PlanCache[bytes, Any] = PlanCache(_RANK_PLANS)
        self.captures: PlanCache[tuple[object, ...], Any] = PlanCache(_RANK_PLANS)
        self.global_plans: PlanCache[str, Any] = PlanCache(_GLOBAL_PLANS)
        self.earlier = EarlierFiles()
        self.running_helper: HelperProcess | None = None
        self._warned_of_threads = False

    def helper(self) -> HelperProcess:
        """Return the helper process, started if it does not run.

        Raises:
            CheckpointError: this process may not start another one.
        """
        if self.running_helper is not None and self.running_helper.alive and self.running_helper.outdated:
            self.running_helper.stop()
        if self.running_helper is None or not self.running_helper.alive:
            try:
                self.running_helper = HelperProcess()
            except OSError as error:
                raise CheckpointError(
                    f"cannot start the writer process: {error}; allow it, or set writer='thread'"
                ) from error
            weakref.finalize(self, self.running_helper.stop)
        return self.running_helper

    def start_helper(self, settings: Settings) -> bool:
        """Start the helper process if the settings say that it writes, and do not wait for it to come up.

        Returns:
            Whether the helper writes. Otherwise threads do, also where a sandbox denies the start; that is logged once.
        """
        if settings.staging.writer != "process":
            return False
        try:
            self.helper()
        except CheckpointError as error:
            if not self._warned_of_threads:
                _log.warning("threads of this process write asynchronous saves: %s", error)
            self._warned_of_threads = True
            return False
        return True

    @contextlib.contextmanager
    def starting_helper(self, settings: Settings) -> Iterator[None]:
        """Start the helper on a thread while the body runs, for later saves."""
        thread = threading.Thread(
            target=self.start_helper, args=(settings,), name="bytecheckpoint-helper-start", daemon=True
        )
        started = try_start(thread)  # otherwise a later save starts it
        try:
            yield
        finally:
            if started:
                # A new process first closes what this one has open, for which a file system that hangs lets it wait.
                thread.join(settings.timeout)

    def warm_up(self, nbytes: int, settings: Settings) -> None:
        """Reserve the shared pool for later saves and touch its pages on a thread. Do not wait for the thread.

        Args:
            nbytes: length of an image in bytes.
            settings: settings of the save.
        """
        try:
            self.pools.prewarm(nbytes, settings)
        except (CheckpointError, OSError) as error:
            _log.warning("the staging pool could not be made ready, the next save tries again: %s", error)
            return
        touch = partial(self.pools.prewarm, nbytes, settings, touch=True)
        try_start(threading.Thread(target=touch, name="bytecheckpoint-ready", daemon=True))

    def release(self) -> None:
        """End the helper process and free the staging memory. The next save starts and reserves them anew."""
        if self.running_helper is not None:
            self.running_helper.stop()
        for plan in self.plans.newest_first():
            plan.forget_targets()
        self.pools.clear()
