"""The rows of one operation as columns of numpy, without functions of Arrow that import pandas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bytecheckpoint.representation.arrow_columns import as_numpy

__all__ = ["Rows"]


class Rows:
    """The columns of a table of metrics; those with text as numbers of strings.

    Args:
        table: of `table.SCHEMA`, of one operation.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._texts: dict[str, tuple[NDArray[np.int64], list[str]]] = {}

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a column of numbers; null is 0."""
        column = self._table.column(name)
        return as_numpy((column.fill_null(0) if column.null_count else column).combine_chunks())

    def known(self, name: str) -> NDArray[np.bool_]:
        """Return which rows of a column are not null."""
        values: NDArray[np.bool_] = self._table.column(name).is_valid().to_numpy()
        return values

    def texts(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """Return a column of text as numbers (-1: null), and the strings that they stand for."""
        if name not in self._texts:
            column = self._table.column(name)
            if not pa.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            joined = column.unify_dictionaries().combine_chunks()
            numbers = joined.indices.fill_null(-1) if joined.indices.null_count else joined.indices
            codes = as_numpy(numbers).astype(np.int64)
            self._texts[name] = codes, joined.dictionary.to_pylist()
        return self._texts[name]

    def where(self, name: str, text: str) -> NDArray[np.bool_]:
        """Return which rows have `text` in the column `name`."""
        codes, strings = self.texts(name)
        found: NDArray[np.bool_] = codes == (strings.index(text) if text in strings else -2)
        return found
