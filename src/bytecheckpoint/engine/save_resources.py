"""What saves keep from one to the next: the staging pool, the helper process, cached plans."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.pool import StagingPool, available_memory
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.settings import Settings

__all__ = ["PlanCache", "SaveResources"]

_Key = TypeVar("_Key")
_Plan = TypeVar("_Plan")

_log = logging.getLogger("bytecheckpoint")
_RANK_PLANS = 4
_GLOBAL_PLANS = 16


class PlanCache(Generic[_Key, _Plan]):
    """The plans that were used last.

    Args:
        limit: how many.
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
    """The staging pool, the helper process and the cached plans of one rank in one world.

    Attributes:
        pool: the staging pool that all saves share.
        plans: this rank's plans, by the signature of its table.
        global_plans: on rank 0, the coordinator's plans, by name.
        running_helper: the helper process that was started last, None before the first.
    """

    def __init__(self) -> None:
        self.pool = StagingPool()
        self.plans: PlanCache[bytes, Any] = PlanCache(_RANK_PLANS)
        self.global_plans: PlanCache[str, Any] = PlanCache(_GLOBAL_PLANS)
        self.running_helper: HelperProcess | None = None

    def helper(self) -> HelperProcess:
        """Return the helper process, started if it does not run."""
        if self.running_helper is None or not self.running_helper.alive:
            self.running_helper = HelperProcess()
            weakref.finalize(self, self.running_helper.stop)
        return self.running_helper

    def start_helper(self, settings: Settings) -> None:
        """Start the helper process if the settings say that it writes, and do not wait for it to come up."""
        if settings.writer == "process":
            self.helper()

    def reserve(
        self, nbytes: int, settings: Settings, *, touch: bool = False, device: torch.device | None = None
    ) -> None:
        """Grow the shared pool to hold an image of `nbytes`, or as far as it may grow.

        Args:
            nbytes: length of the image in bytes.
            settings: `staging_bytes` and `chunk_bytes`.
            touch: write to every new page now.
            device: an accelerator that copies into the pool.
        """
        limit = self._pool_limit(settings)
        if nbytes > limit:
            nbytes = max(limit // settings.chunk_bytes, 2) * settings.chunk_bytes
        if nbytes:
            self.pool.reserve(nbytes, touch=touch, device=device)

    def staging_pool(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool:
        """Return a pool for an image of `nbytes`: the shared one if it is ready, else a private one for this save only.

        Args:
            nbytes: length of the image in bytes.
            settings: `staging_bytes` and `chunk_bytes`.
            device: an accelerator that copies into the pool; None where there is none. With one the shared pool is used
                at once: its pages must be locked, which touches them anyway.
        """
        affordable = 2 * nbytes <= self._pool_limit(settings)
        if nbytes > self.pool.capacity and affordable and device is None:
            pool = StagingPool(shared=False)
            pool.reserve(nbytes, touch=False)
            return pool
        self.reserve(nbytes, settings, device=device)
        return self.pool

    def whole_pool(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool | None:
        """Return a pool as `staging_pool` does, if it may hold the whole image of `nbytes`; else None."""
        affordable = nbytes <= max(self.pool.capacity, self._pool_limit(settings))
        return self.staging_pool(nbytes, settings, device) if affordable else None

    def give_back(self, pool: StagingPool) -> bool:
        """Free `pool` if it was made for one save only; returns whether it was."""
        if pool is self.pool:
            return False
        pool.release()
        return True

    @contextlib.contextmanager
    def warming_up(self, nbytes: int, settings: Settings) -> Iterator[None]:
        """Start the helper and touch the shared pool on a thread while the body runs, for later saves.

        Args:
            nbytes: length of an image in bytes.
            settings: of the save.
        """
        thread = threading.Thread(
            target=self._warm_up, args=(nbytes, settings), name="bytecheckpoint-ready", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # the interpreter ends: there will be no later saves
            thread.start()
        try:
            yield
        finally:
            if thread.ident is not None:
                # A new process first closes what this one has open, for which a file system that hangs lets it wait.
                thread.join(settings.timeout)

    def _warm_up(self, nbytes: int, settings: Settings) -> None:
        try:
            self.start_helper(settings)
            self.reserve(nbytes, settings, touch=True)
        except (CheckpointError, OSError) as error:
            _log.warning("the staging pool could not be made ready, the next save tries again: %s", error)

    def close(self) -> None:
        """End the helper process and give the staging memory back."""
        if self.running_helper is not None:
            self.running_helper.stop()
        self.pool.release()

    def _pool_limit(self, settings: Settings) -> int:
        return settings.staging_bytes or (self.pool.capacity + available_memory()) // 2
