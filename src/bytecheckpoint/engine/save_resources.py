"""What saves keep from one to the next: the staging pool, the helper process, cached plans."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.memory import free_memory
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.settings import Settings
from bytecheckpoint.threads import try_start

__all__ = ["PlanCache", "SaveResources"]

_Key = TypeVar("_Key")
_Plan = TypeVar("_Plan")

_log = logging.getLogger("bytecheckpoint")
_RANK_PLANS = 4
_GLOBAL_PLANS = 16
#: The pool shrinks when this many saves in a row needed less than half of it.
_SHRINK_AFTER = 8


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
        local_ranks: ranks of the world on this machine; 0 until a plan has told.
    """

    def __init__(self) -> None:
        self.pool = StagingPool()
        self.plans: PlanCache[bytes, Any] = PlanCache(_RANK_PLANS)
        self.global_plans: PlanCache[str, Any] = PlanCache(_GLOBAL_PLANS)
        self.running_helper: HelperProcess | None = None
        self.local_ranks = 0
        self._needs: deque[int] = deque(maxlen=_SHRINK_AFTER)
        self._warned_of_threads = self._warned_of_pool = False

    def helper(self) -> HelperProcess:
        """Return the helper process, started if it does not run.

        Raises:
            CheckpointError: this process may not start another one.
        """
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
            Whether it writes. Otherwise threads do, also where a sandbox denies the start; that is logged once.
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
            nbytes = max(limit // settings.storage.chunk_bytes, 2) * settings.storage.chunk_bytes
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
        if nbytes <= self.pool.capacity:
            self.pool.reserve(nbytes, touch=False, device=device)  # locks its pages for the first save of a device
            return self.pool
        affordable = 2 * nbytes <= self._pool_limit(settings)
        if affordable and device is None:
            pool = StagingPool(shared=False)
            pool.reserve(nbytes, touch=False)
            return pool
        self.reserve(nbytes, settings, device=device)
        return self.pool

    def whole_pool(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool | None:
        """Return a pool as `staging_pool` does, if it may hold the whole image of `nbytes`; else None."""
        affordable = nbytes <= self.pool.capacity or nbytes <= self._pool_limit(settings)
        return self.staging_pool(nbytes, settings, device) if affordable else None

    def note_need(self, nbytes: int) -> None:
        """Remember that a save needs `nbytes` of staging memory."""
        self._needs.append(nbytes)

    def fit_pool(self) -> None:
        """Shrink the shared pool if the last saves needed much less. Must not be called while a save uses the pool."""
        if len(self._needs) == _SHRINK_AFTER and 2 * max(self._needs) <= self.pool.capacity:
            self.pool.shrink(max(self._needs))

    def warn_of_small_pool(self, nbytes: int, settings: Settings) -> None:
        """Log, once, why an image of `nbytes` does not fit in the pool, which makes an asynchronous save wait."""
        if self._warned_of_pool:
            return
        self._warned_of_pool = True
        if settings.staging.bytes:
            why = f"setting staging_bytes is {settings.staging.bytes}; raise it"
        else:
            ranks = self._sharing_ranks()
            free = free_memory()
            why = (
                f"it may take half of the memory that is free, {free.nbytes >> 20} MiB of {free.source} shared by "
                f"{ranks} rank{'s' * (ranks > 1)}; set staging_bytes to take more, or give the job more memory"
            )
        _log.warning(
            "an asynchronous save of %.1f MiB passes through a staging pool of %.1f MiB, so its caller waits while most of "
            "it is written. The pool is that small because %s",
            nbytes / 2**20,
            self.pool.capacity / 2**20,
            why,
        )

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
        started = try_start(thread)  # a later save makes ready what it needs
        try:
            yield
        finally:
            if started:
                # A new process first closes what this one has open, for which a file system that hangs lets it wait.
                thread.join(settings.timeout)

    def _warm_up(self, nbytes: int, settings: Settings) -> None:
        try:
            self.start_helper(settings)
            self.reserve(nbytes, settings, touch=True)
        except (CheckpointError, OSError) as error:
            _log.warning("the staging pool could not be made ready, the next save tries again: %s", error)

    def release(self) -> None:
        """End the helper process and give the staging memory back. The next save starts and reserves them anew."""
        if self.running_helper is not None:
            self.running_helper.stop()
        for plan in self.plans.newest_first():
            plan.targets.forget()
        self._needs.clear()
        self.pool.release()

    def _pool_limit(self, settings: Settings) -> int:
        if settings.staging.bytes:
            return settings.staging.bytes
        # The other ranks of the machine ask at the same time.
        return (self.pool.capacity + free_memory().nbytes // self._sharing_ranks()) // 2

    def _sharing_ranks(self) -> int:
        """Count the ranks that share this machine's memory: those of the world, or of the job as its launcher says."""
        return max(self.local_ranks, _launched_ranks())


def _launched_ranks() -> int:
    """Count the ranks of the job on this machine, as far as its launcher says. They may be in several worlds."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        with contextlib.suppress(ValueError):
            return max(int(os.environ.get(name, "")), 1)
    return 1
