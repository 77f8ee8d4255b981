"""Lists of buffers that stand for one run of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..representation.checksums import RunningSum, block_sum

__all__ = ["steps", "sums_of"]


def steps(nbytes: int, step: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut buffers of `nbytes` in all into steps.

    Yields:
        The position of each step and its buffers, together `step` bytes long but for the last.
    """
    left = list(buffers)
    for position in range(0, nbytes, step):
        need = min(step, nbytes - position)
        part: list[memoryview] = []
        while need:
            head = left[0]
            if len(head) <= need:
                part.append(head)
                need -= len(head)
                del left[0]
            else:
                part.append(head[:need])
                left[0] = head[need:]
                need = 0
        yield position, part


def sums_of(buffers: Sequence[memoryview], size: int) -> Iterator[int]:
    """The sum of each block of `size` bytes; the last may be shorter."""
    running, filled = RunningSum(), 0
    for buffer in buffers:
        position, length = 0, len(buffer)
        while position < length:
            if filled == 0 and length - position >= size:
                yield block_sum(buffer[position : position + size])
                position += size
                continue
            take = min(size - filled, length - position)
            running.update(buffer[position : position + take])
            position += take
            filled += take
            if filled == size:
                yield running.value()
                running.reset()
                filled = 0
    if filled:
        yield running.value()
