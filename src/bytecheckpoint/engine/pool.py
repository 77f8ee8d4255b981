"""Keep a staging pool: shared memory that saves copy into.

First use of a page costs ten times what copying into a touched one does. So the pool grows once, ahead of need where
possible (`StagingPool.reserve` from a background thread), and every save reuses it. It is anonymous shared memory (memfd):
the helper process that writes files maps the same pages, so no byte is copied between the processes.

A save that comes before the pool is ready uses a private pool instead. Its huge pages are touched in a third of the time,
but only this process can write them to files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.engine.pinning import lock_pages, unlock_pages
from bytecheckpoint.errors import CheckpointError

__all__ = ["StagingPool"]

_log = logging.getLogger("bytecheckpoint")
_PAGE = 4096
_TOUCH_STEP = 64 << 20
_MADV_POPULATE_WRITE = 23
_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_libc = ctypes.CDLL(None, use_errno=True)


class StagingPool:
    """One contiguous buffer of memory that can grow while no save uses it.

    Args:
        shared: True if the helper process can map it.

    Attributes:
        shared: True if the helper process can map it. It becomes False when a sandbox denies shared memory; that is logged.
        capacity: bytes now reserved.
        fd: file descriptor of the shared memory, for the helper process; -1 before the first `reserve`.
        generation: counts the growths, so that the helper process knows when to map the memory again.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self.capacity = 0
        self.fd = -1
        self.generation = 0
        self._locked_for: torch.device | None = None  # the pages are locked, for this device's copies
        self._tried_to_lock = False
        self._lock = threading.Lock()
        self._array: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def reserve(self, nbytes: int, *, touch: bool, device: torch.device | None = None) -> None:
        """Grow the pool to at least `nbytes`. Must not be called while a save uses the pool.

        Args:
            nbytes: bytes wanted.
            touch: True to write to every new page now (about 0.8 s per GiB), instead of at the first copy into it.
            device: an accelerator that copies into the pool, whose pages are locked then; None where there is none.
        """
        with self._lock:
            if nbytes > self.capacity:
                self._grow(-(-nbytes // _PAGE) * _PAGE)
            if device is not None and self.capacity and not self._tried_to_lock:
                self._tried_to_lock = True
                locked = lock_pages(self._array.ctypes.data, self.capacity, device)
                self._locked_for = device if locked else None
            if touch:
                self._touch()

    def shrink(self, nbytes: int) -> None:
        """Free the memory beyond the first `nbytes`, which stay as they are. Must not be called while a save uses the pool.

        Mappings keep their length, so a stale view of the freed part reads zeros.
        """
        with self._lock:
            keep = max(-(-nbytes // _PAGE), 1) * _PAGE
            if keep >= self.capacity:
                return
            self._unlock()  # the next save locks what is left
            rest = self._array[keep:]
            address, size = ctypes.c_void_p(rest.ctypes.data), ctypes.c_size_t(rest.nbytes)
            if _libc.madvise(address, size, _MADV_REMOVE if self.shared else _MADV_DONTNEED) == 0:
                self._array = self._array[:keep]
                self.capacity = keep

    def _grow(self, nbytes: int) -> None:
        self._unmap()
        try:
            if self.shared and self.fd < 0:
                self._create_file()
            if self.shared:
                os.ftruncate(self.fd, nbytes)
                memory = mmap.mmap(self.fd, nbytes)
            else:
                memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise CheckpointError(f"cannot reserve {nbytes} bytes for staging: {error}; set staging_bytes") from error
        self.capacity = nbytes
        self.generation += 1
        self._array = np.frombuffer(memory, np.uint8)

    def _create_file(self) -> None:
        try:
            self.fd = os.memfd_create("bytecheckpoint-staging", os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            self.shared = False
            _log.warning("threads of this process write asynchronous saves: memfd_create fails: %s", error)
            return
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False

    def _touch(self) -> None:
        # The C call releases the interpreter lock. Short steps let a growing pool be interrupted.
        if self._locked_for is not None:
            return
        base = self._array.ctypes.data
        for start in range(0, self.capacity, _TOUCH_STEP):
            size = min(_TOUCH_STEP, self.capacity - start)
            if _libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                self._array[start : start + size : _PAGE] = 0

    def tensor(self) -> torch.Tensor:
        """Return the pool as a uint8 tensor of shape [capacity]."""
        assert self.capacity, "the pool was not reserved"
        return torch.from_numpy(self._array)

    def view(self) -> memoryview:
        """Return the bytes of the pool."""
        return memoryview(self._array)

    def _unlock(self) -> None:
        if self._locked_for is not None:
            unlock_pages(self._array.ctypes.data, self._locked_for)
            self._locked_for = None
        self._tried_to_lock = False

    def _unmap(self) -> None:
        self._unlock()
        # A finished save may still hold views; the mapping is freed with the last of them.
        self._array = np.zeros(0, np.uint8)
        self.capacity = 0

    def release(self) -> None:
        """Free the memory; the next save reserves it anew."""
        with self._lock:
            self._unmap()
            if self.fd >= 0:
                self._close()
                self.fd = -1
