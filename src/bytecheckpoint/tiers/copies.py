"""A reader of a file with several copies: each read takes the nearest copy that answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.base import FileReader

__all__ = ["AnyCopy"]

_log = logging.getLogger("bytecheckpoint")


class AnyCopy(FileReader):
    """A reader that takes the nearest copy that answers. Copies are opened when they are first needed.

    Args:
        label: address of the file, for messages.
        openers: functions that open the copies, the nearest first.

    Raises:
        FileNotFoundError: there is no copy.
        StorageError: there may be one, but its storage does not answer.
    """

    def __init__(self, label: str, openers: Sequence[Callable[[], FileReader]]) -> None:
        self._label = label
        self._unopened = list(openers)
        self._copies: list[FileReader] = []
        self._lock = threading.Lock()
        self._first = 0  # copies before this one have a wrong length
        nearest = self._copy(0)
        if nearest is None:
            raise FileNotFoundError(2, "no copy", label)
        self.size, self.preferred_bytes = nearest.size, nearest.preferred_bytes

    def _copy(self, number: int) -> FileReader | None:
        """Return copy `number`, opened if need be; None when there are not so many."""
        unavailable: StorageError | None = None
        with self._lock:
            while len(self._copies) <= number and self._unopened:
                try:
                    self._copies.append(self._unopened.pop(0)())
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
                _log.warning("%s: %s; another copy is read", self._label, error)
                failed = failed or error
            number += 1
        assert failed is not None
        raise failed

    def match_size(self, size: int) -> bool:
        while (copy := self._copy(self._first)) is not None:
            if copy.size == size:
                self.size, self.preferred_bytes = copy.size, copy.preferred_bytes
                return True
            _log.warning("%s: a copy has %d bytes instead of %d; another is read", self._label, copy.size, size)
            self._first += 1
        return False

    def other_copies(self) -> Iterator[FileReader]:
        number = self._first + 1
        while (copy := self._copy(number)) is not None:
            if copy.size == self.size:
                yield copy
            number += 1

    def close(self) -> None:
        with self._lock:
            for copy in self._copies:
                copy.close()
            self._copies, self._unopened = [], []
