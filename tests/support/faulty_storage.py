"""Storages that fail by rules on chosen ranks, and a record of their calls.

faults = Faults()
faults.add("write", StorageFullError("no space"), rank=1, skip=2)
bytecheckpoint.save(faults.at(path), states)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from bytecheckpoint.collectives import current
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
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
        rules: rules of the calls that fail; a call meets all that match it.
        calls: rank, operation and name of every call.
        bytes_read: bytes by rank, without catalogs.
        bytes_written: bytes by rank.
    """

    rules: list[FaultRule] = field(default_factory=list)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    bytes_read: dict[int, int] = field(default_factory=dict)
    bytes_written: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: str | Callable[[str], bool], error: BaseException | None = None, **options: Any) -> FaultRule:
        """Add a rule; see `FaultRule` for the options."""
        self.rules.append(FaultRule(call, error, **options))
        return self.rules[-1]

    def clear(self) -> None:
        """Remove all rules."""
        self.rules.clear()

    def at(self, path: str | Path | Storage) -> Storage:
        """Return the storage of `path` with these faults, as the rank of the calling thread uses it."""
        return _RecordedStorage(resolve(path), self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Faults:
        """Let every save, load and open of this process have these faults: for runs that make their paths themselves.

        The helper process writes the files of asynchronous saves, out of reach of the rules: set writer="thread".
        """
        for name in _USERS:
            monkeypatch.setattr(f"bytecheckpoint.{name}", self.at)
        return self

    def install_in_folders(self, monkeypatch: pytest.MonkeyPatch) -> Faults:
        """Let all local folders, but not memory, have these faults: for tiers and cooldown, which find their folders.

        Rules see the whole path of a file, and no ranks, bytes or single writes.
        """
        for name in ("create", "open", "read", "stat", "version", "publish", "check_publish", "list", "folders"):
            monkeypatch.setattr(LocalStorage, name, self._failing(name))
        return self

    def _failing(self, name: str) -> Callable[..., Any]:
        real = getattr(LocalStorage, name)

        def call(storage: LocalStorage, *args: Any, **options: Any) -> Any:
            file = getattr(args[0], "name", args[0]) if args else ""
            for rule in [rule for rule in self.rules if rule.hit(name, f"{storage.url}/{file}")]:
                rule.wait()
                if rule.error is not None:
                    raise rule.error
            return real(storage, *args, **options)

        return call

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
