"""Split and checksum lists of buffers that together hold one sequence of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bytecheckpoint.representation.checksums import RunningSum, block_sum

__all__ = ["block_sums", "split_buffers"]


def split_buffers(nbytes: int, step: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Split buffers of `nbytes` in total into parts of `step` bytes; the last may be shorter.

    Yields:
        The position of each part and its buffers.
    """
    rest = list(buffers)
    for position in range(0, nbytes, step):
        need = min(step, nbytes - position)
        part: list[memoryview] = []
        while need:
            head = rest[0]
            if len(head) <= need:
                part.append(head)
                need -= len(head)
                del rest[0]
            else:
                part.append(head[:need])
                rest[0] = head[need:]
                need = 0
        yield position, part


def block_sums(buffers: Sequence[memoryview], size: int) -> Iterator[int]:
    """Yield the checksum of each block of `size` bytes; the last may be shorter."""
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
