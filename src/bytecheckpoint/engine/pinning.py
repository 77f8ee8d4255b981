"""Lock pages of host memory, so that a device copies from and to them without the processor, beside its computations."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["host_buffer", "lock_pages", "unlock_pages"]

_log = logging.getLogger("bytecheckpoint")
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


def host_buffer(nbytes: int, devices: Sequence[torch.device]) -> torch.Tensor:
    """Allocate a uint8 buffer that is aligned to 4096 bytes.

    Args:
        nbytes: length of the buffer.
        devices: devices that it is copied to or from. It is pinned if there are any, and if torch can pin it.
    """
    buffer = None
    if devices:
        try:
            # With the device: a new thread's current device is 0, where pinning would make a context.
            with torch.accelerator.device_index(devices[0].index):
                buffer = torch.empty(nbytes + 4096, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # no such allocator, or no memory that may be locked
            _warn_once(f"cannot pin host memory for {devices[0].type}, copies are slower: {error}")
    if buffer is None:
        # numpy asks for huge pages, whose first touch takes a third of the time.
        buffer = torch.from_numpy(np.empty(nbytes + 4096, np.uint8))
    shift = -buffer.data_ptr() % 4096
    return buffer[shift : shift + nbytes]


def lock_pages(address: int, nbytes: int, device: torch.device) -> bool:
    """Lock pages that are mapped already, which touches them; return whether they are locked.

    CUDA and ROCm can do that. Torch offers no such call for other devices.
    """
    if device.type != "cuda":
        _warn_once(f"the staging pool is not page-locked: torch cannot do that for {device.type}; copies are slower")
        return False
    with torch.accelerator.device_index(device.index):
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code == 0:
            return True
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # the runtime keeps the error for the next kernel launch: have it here
    _warn_once(f"the staging pool is not page-locked, copies are slower: cudaHostRegister returned error {code}")
    return False


def unlock_pages(address: int, device: torch.device) -> None:
    """Unlock the pages that `lock_pages` has locked."""
    with torch.accelerator.device_index(device.index):
        torch.cuda.cudart().cudaHostUnregister(address)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
