"""A column of strings of which many are equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from bytecheckpoint.representation.boxes import Int64s

__all__ = ["StringColumn"]


class StringColumn:
    """A column of strings as codes into a list of distinct strings.

    Attributes:
        codes: position of each row's string in `values`, int64 [t].
        values: the distinct strings.
    """

    __slots__ = ("_index", "codes", "values")

    def __init__(self, codes: Int64s, values: list[str]) -> None:
        self.codes = codes
        self.values = values
        self._index: dict[str, int] | None = None

    @staticmethod
    def of(column: Sequence[str]) -> StringColumn:
        """Return the column with these strings, in order."""
        result = StringColumn(np.zeros(len(column), np.int64), list(dict.fromkeys(column)))
        result.codes = result.codes_of(column)
        return result

    def codes_of(self, wanted: Sequence[str]) -> Int64s:
        """Return the code of each string of `wanted`, -1 for strings that the column lacks."""
        return np.fromiter(map(self._codes().get, wanted, repeat(-1)), np.int64, len(wanted))

    def code_of(self, wanted: str) -> int:
        """Return the code of `wanted`, -1 when the column lacks it."""
        return self._codes().get(wanted, -1)

    def _codes(self) -> dict[str, int]:
        if self._index is None:
            self._index = {value: code for code, value in enumerate(self.values)}
        return self._index

    def __getitem__(self, i: int) -> str:
        return self.values[int(self.codes[i])]

    def to_list(self) -> list[str]:
        """Return the strings, in order."""
        return [self.values[code] for code in self.codes.tolist()]
