"""View tensors as bytes, and copy between tensors at the speed of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _unflatten_dense_tensors

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.device_copies import copy_to_host
from bytecheckpoint.engine.pieces import PIECE_BYTES, SharedCopy, pieces_of

__all__ = [
    "copy_all",
    "dense",
    "dense_bytes",
    "flat_bytes",
    "gather",
    "movable",
    "same_bits",
    "transpose",
    "views_at",
]

#: From this length on memcpy takes 0.6 of the time of torch's copy loop, which reads the target before it writes.
_MEMCPY_BYTES = 64 << 10
_COPY_THREADS = 4
#: Bytes that are transposed at once. Loads take up to 1.2 times as long with half or twice of it (L2 of 1 MiB a core).
_CACHED_BYTES = 2 << 20
#: Rows of a block, at least: they become runs of the target, which should not be short.
_BLOCK_ROWS = 64
#: Boxes of fewer elements are transposed by torch as they are.
_FEW = 1 << 12
#: Torch implements copies of these dtypes on every device. Others are copied as integers of the same width.
_COPYABLE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """View `tensor` under a dtype that torch copies on every device."""
    return tensor if tensor.dtype in _COPYABLE else tensor.view(_INTEGER[tensor.element_size()])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if its elements are in row-major order, else a copy in that order."""
    return movable(tensor).contiguous().view(tensor.dtype)


def dense_bytes(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return bytes [first, last) of a tensor in row-major order, uint8. At most the rows that hold them are copied."""
    if tensor.is_contiguous():
        return flat_bytes(tensor)[first:last]
    row = tensor[0].nbytes
    top, bottom = first // row, -(-last // row)
    if bottom - top == 1:
        return dense_bytes(tensor[top], first - top * row, last - top * row)
    return flat_bytes(dense(tensor[top:bottom]))[first - top * row : last - top * row]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a contiguous tensor as uint8 of shape [nbytes]."""
    flat = movable(tensor).reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element, or none, may have any stride


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits; their strides and devices may differ."""
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.device == second.device:
        return True
    if first.dtype == torch.complex128:
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    # As integers: nan equals nan, and 0.0 differs from -0.0.
    integer = _INTEGER[first.element_size()]
    return torch.equal(first.view(integer), second.view(integer).to(first.device))


def views_at(
    section: torch.Tensor, sources: Sequence[torch.Tensor], starts: Sequence[int] | NDArray[np.int64]
) -> list[torch.Tensor]:
    """Return views of `section` (uint8) at byte `starts`, with the shapes and dtypes of `sources`.

    Each start must be a multiple of its dtype's size. In storage files it is, since larger elements come first there.
    """
    views: list[torch.Tensor] = []
    begins = starts.tolist() if isinstance(starts, np.ndarray) else starts
    first = 0
    while first < len(sources):
        # One call makes the views of a run of one dtype without holes, in a third of the time of a call for each.
        dtype = sources[first].dtype
        end, last = begins[first], first
        while last < len(sources) and sources[last].dtype == dtype and begins[last] == end:
            end += sources[last].nbytes
            last += 1
        flat, run = section[begins[first] : end].view(dtype), sources[first:last]
        if all(source.ndim == 1 for source in run):  # as most small tensors are; takes a quarter of the time
            views += flat.split([source.numel() for source in run])
        else:
            views += _unflatten_dense_tensors(flat, run)
        first = last
    return views


def gather(section: torch.Tensor, sources: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
    """Copy `sources` into `section` (uint8) at byte `starts`, which are as for `views_at`.

    Copies from a device are only queued, for `DeviceCopies.queued`.
    """
    first = 0
    while first < len(sources):
        # One call joins a run of one dtype without holes, in a fifth of the time of a view and a copy for each.
        dtype, end, last = sources[first].dtype, starts[first], first
        while last < len(sources) and starts[last] == end and sources[last].dtype == dtype and sources[last].is_cpu:
            end += sources[last].nbytes
            last += 1
        if last == first:
            copy_all(views_at(section, sources[first : first + 1], starts[first : first + 1]), [sources[first]])
            first += 1
            continue
        flat = [source if source.ndim == 1 else source.reshape(-1) for source in sources[first:last]]
        with torch.no_grad():
            torch.cat(flat, out=section[starts[first] : end].view(dtype))
        first = last


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], shared: SharedCopy | None = None) -> None:
    """Copy each source to its target. Copies from or to a device are only queued, for `DeviceCopies.queued`.

    Args:
        targets: tensors to copy to.
        sources: tensors to copy, one per target.
        shared: copy behind the training, in which threads that wait for it take part; None if the caller waits for all.
    """
    if not targets:
        return
    with torch.no_grad():
        if not (all(t.is_cpu for t in targets) and all(s.is_cpu for s in sources)):
            on_host = [t.is_cpu and s.is_cpu for t, s in zip(targets, sources, strict=True)]
            queued = [i for i, host in enumerate(on_host) if not host]
            if targets[queued[0]].is_cpu:
                copy_to_host([targets[i] for i in queued], [sources[i] for i in queued], few=shared is not None)
            else:
                torch._foreach_copy_([targets[i] for i in queued], [sources[i] for i in queued], non_blocking=True)
            # The others are copied while the device works.
            targets = [t for t, host in zip(targets, on_host, strict=True) if host]
            sources = [s for s, host in zip(sources, on_host, strict=True) if host]
        large = [
            i
            for i, s in enumerate(sources)
            if s.nbytes >= _MEMCPY_BYTES
            and s.is_contiguous()
            and targets[i].is_contiguous()
            and targets[i].dtype == s.dtype
        ]
        if large:
            pairs = [(flat_bytes(targets[i]).numpy(), flat_bytes(sources[i]).numpy()) for i in large]
            if shared is not None:
                shared.begin(pairs)
            else:
                _copy_large(pairs)
            taken = set(large)
            targets = [t for i, t in enumerate(targets) if i not in taken]
            sources = [s for i, s in enumerate(sources) if i not in taken]
        if targets:
            torch._foreach_copy_(targets, sources)
        if large and shared is not None:
            shared.finish()


def _copy_large(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    """Copy each (target, source) pair by memcpy, on as many threads as torch itself would use, or on two.

    Launchers set torch to one thread per rank. A second one takes 0.8 of the time where a core is idle, and costs nothing
    where none is (512 MiB by 1, 2 and 4 ranks on two cores).
    """
    wanted = max(torch.get_num_threads(), min(2, len(os.sched_getaffinity(0))))
    threads = min(wanted, _COPY_THREADS, sum(t.nbytes for t, _ in pairs) // PIECE_BYTES)
    if threads < 2:
        for target, source in pairs:
            np.copyto(target, source)
        return
    parallel_map(lambda piece: np.copyto(*piece), pieces_of(pairs), threads=threads, name="bytecheckpoint-copy")


def transpose(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Transpose a box whose source and target are dense along different dimensions, through dense memory.

    Torch transposes dense matrices into dense memory three times as fast as anything with strides.

    Args:
        source: elements of the box, of any strides.
        target: their destination, of the same shape unless it shows pairs of elements.

    Returns:
        Views of equal elements, with dimensions in one order, which are left to copy; None if the box is copied.
    """
    if source.ndim != target.ndim or source.numel() < _FEW:
        return source, target
    dims = [dim for dim in range(target.ndim) if target.shape[dim] > 1]
    order = sorted(range(len(dims)), key=lambda k: -int(target.stride()[dims[k]]))
    if order == sorted(order) or target.stride()[dims[order[-1]]] != 1:
        return source, target
    shape = [source.shape[dim] for dim in dims]
    target, first = target.squeeze().permute(order), order[0]
    if order != [*range(first, len(dims)), *range(first)]:
        return movable(source).contiguous().view(shape).permute(order).contiguous().view(source.dtype), target
    matrix = movable(source).reshape(math.prod(shape[:first]), -1)
    if source.dtype == target.dtype and _transpose_by_vectors(matrix, movable(target)):
        return None
    return matrix.t().contiguous().view(target.shape).view(source.dtype), target


def _transpose_by_vectors(matrix: torch.Tensor, target: torch.Tensor) -> bool:
    """Copy a matrix to its transposed target with the vectors of the processor; return whether that was possible.

    Torch's shuffle of channels is a transposition by vectors, but of dense matrices of elements of 1 and 4 bytes alone.
    Its other copies move one element after the other. The matrix goes in blocks that stay in the processor's cache.
    """
    size, (rows, columns) = matrix.element_size(), matrix.shape
    if size > 4 or (size == 2 and columns % 2) or not (matrix.is_cpu and target.is_cpu):
        return False
    try:
        target = target.view(columns, rows)
    except RuntimeError:  # its rows do not follow each other at one distance
        return False
    high = max(_CACHED_BYTES // (columns * size), _BLOCK_ROWS)
    wide = _CACHED_BYTES // (_BLOCK_ROWS * size)
    with torch.no_grad():
        for band, places in zip(matrix.split(high), target.split(high, 1), strict=True):
            for block, place in zip(band.split(wide, 1), places.split(wide), strict=True):
                _transpose_block(block, place)
    return True


def _transpose_block(matrix: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a matrix to its transposed target. Elements of 2 bytes go in pairs, which are parted on their way."""
    size, rows = matrix.element_size(), len(matrix)
    elements = matrix.contiguous().reshape(-1)
    if size == 2 and elements.storage_offset() % 2:  # the pairs would not begin at a multiple of their size
        elements = elements.clone()
    vectors = elements.view(torch.uint8 if size == 1 else torch.float32).view(rows, -1)
    if size != 2:
        target.copy_(_shuffled(vectors).view(target.dtype))
        return
    pairs, target = _shuffled(vectors).view(torch.int32), target.view(torch.int16)
    target[::2].copy_(pairs)  # the low halves: torch cuts integers
    target[1::2].copy_(pairs.bitwise_right_shift_(16))


def _shuffled(matrix: torch.Tensor) -> torch.Tensor:
    """Transpose a dense matrix as the channels of one pixel, in as many groups as the matrix has rows."""
    rows, columns = matrix.shape
    count = rows * columns
    pixel = matrix.as_strided((1, count, 1, 1), (count, 1, count, count))  # channels_last
    return torch.native_channel_shuffle(pixel, rows).as_strided((columns, rows), (rows, 1))
