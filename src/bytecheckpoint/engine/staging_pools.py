"""Keep the staging memory of one rank: one pool that saves share, and a quick private one for a first save."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable

import torch

from bytecheckpoint.engine.memory import FreeMemory, free_memory
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.settings import Settings

__all__ = ["StagingPools"]

_log = logging.getLogger("bytecheckpoint")
#: The shared pool shrinks when this many saves in a row needed less than half of it.
_SHRINK_AFTER = 8


class StagingPools:
    """The staging memory of one rank in one world.

    Args:
        free: function that returns the memory that this process may still take.

    Attributes:
        shared: pool that all saves share.
        joining: pool in which synchronous saves join cut tensors, None before the first; new pages of the shared one take
            longer to touch.
        private: pools that were made for one save each, until they are released.
        local_ranks: ranks of the world on this machine; 0 until a plan says so.
    """

    def __init__(self, free: Callable[[], FreeMemory] = free_memory) -> None:
        self.shared = StagingPool()
        self.joining: StagingPool | None = None
        self.private: list[StagingPool] = []
        self.local_ranks = 0
        self._free = free
        self._needs: deque[int] = deque(maxlen=_SHRINK_AFTER)
        self._warned = False

    def acquire_whole(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool | None:
        """Return a pool that holds a whole image, or None where that is too large.

        Args:
            nbytes: length of the image.
            settings: settings of the save: `staging_bytes` and `chunk_bytes`.
            device: an accelerator that copies into the pool; None where there is none. With one, the shared pool is used
                at once: its pages must be locked, which touches them anyway.
        """
        shared = self.shared
        if nbytes <= shared.capacity:
            shared.reserve(nbytes, touch=False, device=device)  # locks its pages for the first save of a device
            return shared
        limit = self._limit(settings)
        if nbytes > limit:
            return None
        if 2 * nbytes <= limit and device is None:
            pool = StagingPool(shared=False)
            pool.reserve(nbytes, touch=False)
            self.private.append(pool)
            return pool
        self.prewarm(nbytes, settings, device=device)
        return shared

    def acquire_joining(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool | None:
        """Return the pool `joining`, grown to `nbytes`, or None where that is too large. It stays for later saves."""
        pool = self.joining or StagingPool(shared=False)
        if nbytes > pool.capacity and nbytes > self._limit(settings):
            return None
        pool.reserve(max(nbytes, 1), touch=False, device=device)  # a rank may hold nothing
        self.joining = pool
        return pool

    def acquire(self, nbytes: int, settings: Settings, device: torch.device | None) -> StagingPool:
        """Return a pool for an image that is too large for any pool: the shared one, as large as it may be."""
        self.prewarm(nbytes, settings, device=device)
        if self.shared.capacity < nbytes:
            self._warn_of_small_pool(nbytes, settings)
        return self.shared

    def prewarm(
        self, nbytes: int, settings: Settings, *, touch: bool = False, device: torch.device | None = None
    ) -> None:
        """Grow the shared pool to hold an image of `nbytes`, or as far as it may grow.

        Args:
            nbytes: length of the image.
            settings: settings of the save.
            touch: True to write to every new page now.
            device: an accelerator that copies into the pool.
        """
        limit = self._limit(settings)
        if nbytes > limit:
            nbytes = max(limit // settings.storage.chunk_bytes, 2) * settings.storage.chunk_bytes
        if nbytes:
            self.shared.reserve(nbytes, touch=touch, device=device)

    def release(self, pool: StagingPool) -> None:
        """Free a private pool. The shared one stays."""
        if pool in self.private:
            self.private.remove(pool)
            pool.release()

    def note_need(self, nbytes: int) -> None:
        """Remember how much staging memory a save needs, for `resize`."""
        self._needs.append(nbytes)

    def resize(self) -> None:
        """Shrink the shared pool if the last saves needed much less. Must not be called while a save uses the pool."""
        if len(self._needs) == _SHRINK_AFTER and 2 * max(self._needs) <= self.shared.capacity:
            self.shared.shrink(max(self._needs))

    def clear(self) -> None:
        """Free the pools that stay. The next save reserves them anew."""
        self._needs.clear()
        self.shared.release()
        if self.joining is not None:
            self.joining.release()
            self.joining = None

    def _warn_of_small_pool(self, nbytes: int, settings: Settings) -> None:
        """Log, once, why an image of `nbytes` does not fit in the pool, so its caller waits for the storage."""
        if self._warned:
            return
        self._warned = True
        if settings.staging.bytes:
            why = f"setting staging_bytes is {settings.staging.bytes}; raise it"
        else:
            ranks = self._sharing_ranks()
            free = self._free()
            why = (
                f"it may take half of the memory that is free, {free.nbytes >> 20} MiB of {free.source} shared by "
                f"{ranks} {'rank' if ranks == 1 else 'ranks'}; set staging_bytes to take more, or give the job "
                f"more memory"
            )
        _log.warning(
            "an asynchronous save of %.1f MiB passes through a staging pool of %.1f MiB, so its caller waits while most of "
            "it is written. The pool is that small because %s",
            nbytes / 2**20,
            self.shared.capacity / 2**20,
            why,
        )

    def _limit(self, settings: Settings) -> int:
        """Return how many bytes the shared pool may have."""
        if settings.staging.bytes:
            return settings.staging.bytes
        # The other ranks of the machine ask at the same time.
        return (self.shared.capacity + self._free().nbytes // self._sharing_ranks()) // 2

    def _sharing_ranks(self) -> int:
        """Count the ranks that share this machine's memory: those of the world, or of the job according to its launcher."""
        return max(self.local_ranks, _launched_ranks())


def _launched_ranks() -> int:
    """Count the ranks of the job on this machine according to its launcher. They may be in several worlds."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        with contextlib.suppress(ValueError):
            return max(int(os.environ.get(name, "")), 1)
    return 1
