"""The extension codes of the value encoding. Torch is not imported."""

from __future__ import annotations

import enum

__all__ = ["Code"]


class Code(enum.IntEnum):
    """MessagePack extension codes (docs/format-values.md). A code never gets a second meaning."""

    TUPLE = 1
    DICT = 2
    ORDERED_DICT = 3
    DEFAULT_DICT = 4
    COUNTER = 5
    SET = 6
    FROZENSET = 7
    DEQUE = 8
    BIG_INT = 9
    COMPLEX = 10
    BYTEARRAY = 11
    SURROGATE_STR = 12
    RANGE = 13
    SLICE = 14
    SIMPLE_NAMESPACE = 15
    ARGPARSE_NAMESPACE = 16
    DATETIME = 20
    DATE = 21
    TIME = 22
    TIMEDELTA = 23
    TIMEZONE = 24
    ZONEINFO = 25
    PATH = 26
    UUID = 27
    DECIMAL = 28
    FRACTION = 29
    NUMPY_DTYPE = 40
    NUMPY_SCALAR = 41
    NUMPY_STR = 42
    NUMPY_BYTES = 43
    NUMPY_ARRAY = 44
    TORCH_DTYPE = 50
    TORCH_DEVICE = 51
    TORCH_SIZE = 52
    TENSOR = 60
    REGISTERED = 61
    ARRAY_TENSOR = 62
