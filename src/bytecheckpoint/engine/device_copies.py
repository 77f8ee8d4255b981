"""Order copies between devices and the host after the caller's work, on streams of their own.

The threads that copy have other current streams than the caller, and the current stream of the caller belongs to its
computations. So every device has one stream for copies to the host and one for copies from it. Copies wait for what the
caller had queued, and the host waits for the copies alone. Nothing waits for a whole device, which would stop the
caller's computations and is not allowed while a graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch

from bytecheckpoint.concurrency import CallTimeoutError, wait_for_call
from bytecheckpoint.errors import CheckpointTimeoutError, UsageError

__all__ = ["DeviceCopies", "capturing"]


class DeviceCopies:
    """The copies of one save or load, from or to devices. Construct it in the caller's thread, use it in any thread.

    Copies start after the work that the current streams of the constructing thread have by then.

    Args:
        devices: devices of the tensors that are copied; the host may be among them.
        to_host: True for copies to the host, False for copies from it.
        timeout: seconds that the caller's work may take from the first copy on: a kernel or collective that hangs never
            ends. None: without limit.

    Attributes:
        devices: accelerators among the devices.

    Raises:
        UsageError: a graph is being captured on the current stream.
    """

    def __init__(self, devices: Iterable[torch.device], *, to_host: bool, timeout: float | None = None) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else None
        self.devices = sorted({d for d in devices if d.type == kind}, key=lambda device: device.index)
        self._to_host = to_host
        self._timeout = timeout
        self._caller_events: list[torch.Event] = []
        if self.devices and capturing():
            raise UsageError(
                "a graph is being captured on the current stream: save and load before or after the capture"
            )
        for device in self.devices:
            event = torch.Event(device, blocking=True)
            event.record(torch.accelerator.current_stream(device))
            self._caller_events.append(event)

    @property
    def any_device(self) -> torch.device | None:
        """One of the accelerators, for which memory is registered; None without any."""
        return self.devices[0] if self.devices else None

    def wait_for_caller(self) -> None:
        """Wait for the work that the caller had queued, if there is a time limit. Raises as `queued`."""
        if self._timeout is not None:
            for device, event in zip(self.devices, self._caller_events, strict=True):
                _wait(device, event, self._timeout)

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Make the streams for copies current in a `with` block; at its end, wait until the copies are done.

        The block copies with `non_blocking=True`, and keeps both sides of every copy alive until its end. Computations of
        the block on a device run on these streams too.

        Raises:
            CheckpointTimeoutError: the work that the caller had queued does not end in time. No copy was queued.
        """
        if not self.devices:
            yield
            return
        # Before any copy is queued, so that a device that hangs uses no memory of this save later.
        self.wait_for_caller()
        streams = [_copy_stream(device, self._to_host) for device in self.devices]
        with contextlib.ExitStack() as stack:
            for stream, event in zip(streams, self._caller_events, strict=True):
                # First the device: a stream alone would make a context on device 0 when a new thread leaves it.
                stack.enter_context(torch.accelerator.device_index(stream.device.index))
                stack.enter_context(stream)
                stream.wait_event(event)
            try:
                yield
            finally:  # also after a failure: the copies that were queued still use the memory of both sides
                for stream in streams:
                    done = torch.Event(stream.device, blocking=True)
                    done.record(stream)
                    done.synchronize()


def _wait(device: torch.device, event: torch.Event, timeout: float) -> None:
    """Wait for the caller's work on a device."""

    def wait() -> None:
        with torch.accelerator.device_index(device.index):
            event.synchronize()

    if event.query():
        return
    try:
        wait_for_call(wait, timeout)
    except CallTimeoutError:
        raise CheckpointTimeoutError(
            f"the work that was queued on {device} before the call has not ended within {timeout:g} s; look for a kernel "
            "or a collective that hangs, or raise the time-out"
        ) from None


@functools.cache
def _copy_stream(device: torch.device, to_host: bool) -> torch.Stream:
    """Return the stream for all copies of one direction: torch caches memory by stream, so a new one costs memory."""
    return torch.Stream(device)


def capturing() -> bool:
    """Return whether a graph is being captured on the current stream. Not all types of devices have graphs."""
    if not torch.accelerator.is_available():
        return False
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    found = getattr(module, "is_current_stream_capturing", None)
    return found is not None and bool(found())
