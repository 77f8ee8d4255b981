"""Compare fp32 elements with the elements of another dtype to which a program has rounded them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.formats.files import RangedFile
from bytecheckpoint.representation.dtypes import itemsize

__all__ = ["BLOCK_BYTES", "is_rounded", "rounded"]

BLOCK_BYTES: Final = 8 << 20
"""Bytes of fp32 elements that are read at a time."""


def is_rounded(
    masters: tuple[RangedFile, int], weights: tuple[RangedFile, int], dtype: str, elements: tuple[int, int]
) -> bool:
    """Return whether fp32 elements round to elements of a weight.

    Args:
        masters: file and first byte of the fp32 elements.
        weights: file and first byte of the weight.
        dtype: dtype of the weight.
        elements: first and last element of the range in the weight.
    """
    item, (start, stop), (high, first), (low, begin) = itemsize(dtype), elements, masters, weights
    for at in range(start, stop, BLOCK_BYTES // 4):
        count = min(stop - at, BLOCK_BYTES // 4)
        values = np.frombuffer(high.read(first + 4 * (at - start), 4 * count), "<f4")
        if rounded(values, dtype) != low.read(begin + item * at, item * count):
            return False
    return True


def rounded(values: NDArray[np.float32], dtype: str) -> bytes:
    """Return fp32 values in another dtype, rounded to the nearest, of two as near to the even one."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return (
            ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16))
            .astype("<u2")
            .tobytes()
        )
    with np.errstate(over="ignore"):
        return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
