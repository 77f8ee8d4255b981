"""Faults for every save and load of this process, and a record of its storage calls.

    faults = Faults().install(monkeypatch)
    faults.add("write", StorageFullError("no space"), rank=1, skip=2)

The helper process writes the files of asynchronous saves, out of reach of the rules: set writer="thread".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from bytecheckpoint.collectives import current
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.storage.testing.wrappers import FaultyStorage
from bytecheckpoint.storage.wrappers import Call

__all__ = ["Faults"]

_T = TypeVar("_T")

#: The names under which modules call `resolve`.
_USERS = ("saving.request.resolve_storage", "loading.resolve_storage", "opening.resolve")


@dataclass
class Faults:
    """The rules in use, and the calls so far.

    Attributes:
        rules: each call is hit by all that match it.
        calls: (rank, operation, name) of every call.
        bytes_read: by rank, without catalogs.
        bytes_written: by rank.
    """

    rules: list[FaultRule] = field(default_factory=list)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    bytes_read: dict[int, int] = field(default_factory=dict)
    bytes_written: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: str, error: BaseException | None = None, **options: Any) -> FaultRule:
        """Add a rule; see `FaultRule` for the options."""
        self.rules.append(FaultRule(call, error, **options))
        return self.rules[-1]

    def clear(self) -> None:
        """Remove all rules."""
        self.rules.clear()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Faults:
        """Let every save, load and open of this process use a storage with these faults."""
        for name in _USERS:
            monkeypatch.setattr(f"bytecheckpoint.{name}", lambda path: _RecordedStorage(resolve(path), self))
        return self

    def count(self, table: dict[int, int], rank: int, nbytes: int) -> None:
        """Add to one of the byte counters."""
        with self._lock:
            table[rank] = table.get(rank, 0) + nbytes


class _RecordedStorage(FaultyStorage):
    """A storage with the faults of `Faults`, as the calling rank sees it."""

    def __init__(self, inner: Storage, faults: Faults) -> None:
        self._faults, self._caller = faults, current().rank
        super().__init__(inner, faults.rules, self._caller)

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        faults = self._faults
        faults.calls.append((self._caller, call.operation, call.name))
        result = super().around(call, do)
        if call.operation == "write":
            faults.count(faults.bytes_written, self._caller, call.nbytes)
        elif call.operation == "read_into" and CATALOG_NAME not in call.names:
            faults.count(faults.bytes_read, self._caller, cast(int, result))
        return result
