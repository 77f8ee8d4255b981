"""A storage that fails, dawdles or lies at chosen calls; what the fault tests put in the place of a real one.

    faults = Faults()
    faults.install(monkeypatch)                       # every save and load of this process now goes through it
    faults.add("write", StorageFullError("no space"), rank=1, skip=2)

Writes are done by the helper process in asynchronous saves, which this cannot reach: use settings writer="thread".
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from bytecheckpoint.collectives import current
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage import resolve as real_resolve
from bytecheckpoint.storage.wrappers import Call, WrappedStorage

__all__ = ["Faults", "FaultyStorage", "Rule"]

_T = TypeVar("_T")

#: Modules that name a storage by calling `resolve`, and the name that they gave it.
_USERS = (
    ("bytecheckpoint.saving", "resolve_storage"),
    ("bytecheckpoint.loading", "resolve_storage"),
    ("bytecheckpoint.opening", "resolve_storage"),
    ("bytecheckpoint.opening", "resolve"),
)


@dataclass
class Rule:
    """What happens at some calls.

    Attributes:
        call: "create", "write", "finish", "sync", "publish", "open", "read_into", "read", "list", "delete", "stat".
        error: what is raised; None: only `delay`.
        rank: of the caller; None: any.
        name: part of the file's name; "" fits all.
        skip: how many calls that fit go through first.
        times: how many calls are then hit; -1: all.
        delay: seconds before the call does anything.
        partial: for "write": half of the bytes reach the file before the error.
        hold: an event that the call waits for before it does anything.
        hits: how many calls were hit.
    """

    call: str
    error: BaseException | None = None
    rank: int | None = None
    name: str = ""
    skip: int = 0
    times: int = 1
    delay: float = 0.0
    partial: bool = False
    hold: threading.Event | None = None
    hits: int = 0


@dataclass
class Faults:
    """The rules in force, and a record of the calls.

    Attributes:
        rules: in order; each call meets all that fit.
        calls: (rank, call, name) of every call so far.
        bytes_read: by rank.
        bytes_written: by rank.
    """

    rules: list[Rule] = field(default_factory=list)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    bytes_read: dict[int, int] = field(default_factory=dict)
    bytes_written: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: str, error: BaseException | None = None, **options: Any) -> Rule:
        """A new rule; see `Rule` for the options."""
        rule = Rule(call, error, **options)
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Everything works again."""
        self.rules.clear()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Faults:
        """Let every save and load of this process use this storage."""

        def resolve(path: Any) -> Storage:
            return FaultyStorage(real_resolve(path), self, current().rank)

        for module, name in _USERS:
            try:
                user = importlib.import_module(module)
            except ImportError:
                continue
            if hasattr(user, name):
                monkeypatch.setattr(user, name, resolve)
        return self

    def meet(self, rank: int, call: str, name: str) -> Rule | None:
        """Apply the rules to one call: wait, raise; or the rule whose partial write the caller must carry out."""
        hit: list[Rule] = []
        with self._lock:
            self.calls.append((rank, call, name))
            for rule in self.rules:
                if rule.call != call or rule.rank not in (None, rank) or rule.name not in name:
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                elif rule.times:
                    rule.times -= 1
                    rule.hits += 1
                    hit.append(rule)
        for rule in hit:
            if rule.hold is not None:
                assert rule.hold.wait(60), "nobody released the held call"
            if rule.delay:
                time.sleep(rule.delay)
            if rule.error is not None:
                if rule.partial:
                    return rule
                raise rule.error
        return None

    def count(self, table: dict[int, int], rank: int, nbytes: int) -> None:
        """Add to one of the byte counters."""
        with self._lock:
            table[rank] = table.get(rank, 0) + nbytes


class FaultyStorage(WrappedStorage):
    """A storage behind the rules of `Faults`, as one rank sees it."""

    def __init__(self, inner: Storage, faults: Faults, rank: int) -> None:
        super().__init__(inner)
        self._faults, self._rank = faults, rank

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        rule = self._faults.meet(self._rank, call.operation, call.name)
        if rule is not None:
            assert call.tear is not None and rule.error is not None
            call.tear()
            raise rule.error
        result = do()
        if call.operation == "write":
            self._faults.count(self._faults.bytes_written, self._rank, call.nbytes)
        elif call.operation == "read_into":
            self._faults.count(self._faults.bytes_read, self._rank, cast(int, result))
        return result
