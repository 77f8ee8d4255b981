"""A file of which there are several copies: read from the nearest that is sound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from ..errors import StorageError
from .base import FileReader

__all__ = ["AnyCopy"]

_log = logging.getLogger("bytecheckpoint")


class AnyCopy(FileReader):
    """A file of which there may be several copies; reads from the nearest that answers.

    Args:
        shown: what it is called in messages.
        openers: what opens the copies, the nearest first.
    """

    def __init__(self, shown: str, openers: Sequence[Callable[[], FileReader]]) -> None:
        self._shown = shown
        self._left = list(openers)
        self._copies: list[FileReader] = []
        self._lock = threading.Lock()
        self._first = 0
        first = self._copy(0)
        if first is None:
            raise FileNotFoundError(2, "no copy", shown)
        self.size, self.step_bytes = first.size, first.step_bytes

    def _copy(self, number: int) -> FileReader | None:
        """Copy `number`, opened when it is first wanted; None when there are not so many."""
        unavailable: StorageError | None = None
        with self._lock:
            while len(self._copies) <= number and self._left:
                try:
                    self._copies.append(self._left.pop(0)())
                except FileNotFoundError:
                    continue
                except StorageError as error:
                    unavailable = error
            if len(self._copies) > number:
                return self._copies[number]
        if unavailable is not None and not self._copies:
            raise unavailable
        return None

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        failed: StorageError | None = None
        number = self._first
        while (copy := self._copy(number)) is not None:
            try:
                return copy.read_into(offset, buffers)
            except StorageError as error:
                _log.warning("%s: %s; another copy is read", self._shown, error)
                failed = failed or error
            number += 1
        assert failed is not None
        raise failed

    def fits(self, size: int) -> bool:
        while (copy := self._copy(self._first)) is not None:
            if copy.size == size:
                self.size, self.step_bytes = copy.size, copy.step_bytes
                return True
            _log.warning("%s: a copy has %d bytes instead of %d; another is read", self._shown, copy.size, size)
            self._first += 1
        return False

    def others(self) -> Iterator[FileReader]:
        number = self._first + 1
        while (copy := self._copy(number)) is not None:
            if copy.size == self.size:
                yield copy
            number += 1

    def close(self) -> None:
        with self._lock:
            for copy in self._copies:
                copy.close()
            self._copies, self._left = [], []
