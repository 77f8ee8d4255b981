"""Order copies between devices and the host after the caller's work, on streams of their own.

The threads that copy have other current streams than the caller, and the current stream of the caller belongs to its
computations. So every device has one stream for copies to the host and one for copies from it. Copies wait for what the
caller had queued, and the host waits for the copies alone. Nothing waits for a whole device, which would stop the
caller's computations and is not allowed while a graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from bytecheckpoint.concurrency import CallTimeoutError, wait_for_call
from bytecheckpoint.errors import CheckpointTimeoutError, UsageError

__all__ = ["DeviceCopies", "capturing", "copy_to_host"]

#: Bytes whose copy takes 0.7 ms on an H100.
_QUEUED_BYTES = 32 << 20
#: Tensors of so many bytes are joined before they are copied: queueing a copy takes as long as copying 512 KiB.
_SMALL_BYTES = 512 << 10
_JOINED_BYTES = 8 << 20


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
                _wait_for_queued(self.devices)


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


def copy_to_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, few: bool) -> None:
    """Queue copies from devices to the host on the current streams.

    Args:
        targets: contiguous tensors on the host.
        sources: tensors on devices, one per target, of its shape and dtype.
        few: True to queue at most `_QUEUED_BYTES` at a time. A device makes all copies of one stream that are queued before
            it turns to another: a training that reads its loss would wait for them, 78 ms for 4 GiB on an H100.
    """
    devices: set[torch.device] = set()
    nbytes = 0
    for target, source in _pieces(targets, sources):
        if few and nbytes and nbytes + source.nbytes > _QUEUED_BYTES:
            _wait_for_queued(devices)
            nbytes = 0
        target.copy_(source, non_blocking=True)
        devices.add(source.device)
        nbytes += source.nbytes


def _pieces(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut large tensors, and join small ones on their device whose targets follow each other."""
    first = 0
    while first < len(sources):
        target, source = targets[first], sources[first]
        last = _end_of_run(targets, sources, first)
        if last > first + 1:
            try:
                # Its memory may be used again at once: by the same stream, in order.
                joined = torch.cat([tensor.reshape(-1) for tensor in sources[first:last]])
            except torch.OutOfMemoryError:
                yield from zip(targets[first:last], sources[first:last], strict=True)
            else:
                yield target.as_strided((len(joined),), (1,)), joined
        elif source.nbytes > _QUEUED_BYTES and source.is_contiguous():
            elements = _QUEUED_BYTES // source.element_size()
            yield from zip(target.view(-1).split(elements), source.view(-1).split(elements), strict=True)
        else:
            yield target, source
        first = last


def _end_of_run(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], first: int) -> int:
    """Return the number behind the last tensor that can be joined with a first one."""
    source, end = sources[first], targets[first].data_ptr()
    stop, last = end + _JOINED_BYTES, first
    while (
        last < len(sources)
        and sources[last].nbytes <= _SMALL_BYTES
        and sources[last].dtype == source.dtype
        and sources[last].device == source.device
        and targets[last].data_ptr() == end <= stop
    ):
        end += sources[last].nbytes
        last += 1
    return max(last, first + 1)


def _wait_for_queued(devices: Iterable[torch.device]) -> None:
    """Wait for the work on the current streams of devices."""
    for device in devices:
        done = torch.Event(device, blocking=True)
        done.record(torch.accelerator.current_stream(device))
        done.synchronize()


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
