"""From the hot tier to the durable storage: the steps that all ranks take together, and one machine alone."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engine.catalogs import read_catalog
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
)
from ..representation.catalog import Catalog
from ..representation.names import CATALOG_NAME
from ..storage import Storage, resolve
from ..storage.parallel import at_the_same_time
from ..storage.tier import LOCK, UNKNOWN, Record, TierStorage
from .copying import commit, copy_unless_there, own_files, sound
from .party import Machines, Party

__all__ = ["FlushReport", "flush", "flush_together", "unflushed"]

_log = logging.getLogger("bytecheckpoint")


@contextlib.contextmanager
def _held(storage: TierStorage, *, alone: bool, patience: float) -> Iterator[None]:
    """Keep a job's flush and that of the command line apart on this machine: the ranks of a job hold it together."""
    path = os.path.join(storage.hot.root, LOCK)
    os.makedirs(storage.hot.root, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageConflictError(
                        f"{storage.url} is being flushed by another process of this machine; let that one finish"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def expected_version(durable: Storage, record: Record) -> str:
    """The version of the durable catalog that the step may replace."""
    # Nobody could look when the save began: then it may create, but not replace.
    return "" if record.replaces == UNKNOWN else record.replaces


# --- a whole job --------------------------------------------------------------------------------------------------


def flush_together(
    party: Party, machines: Machines, storage: TierStorage, catalog: Catalog, data: bytes, record: Record, threads: int
) -> None:
    """Bring a hot step to the durable storage; every rank of the job calls it.

    Each file is copied by a rank whose machine has it, if possible by the one that wrote it; where its copy proves
    damaged, by another machine. Rank 0 commits when all are there.

    Args:
        party: the ranks.
        machines: who stands where.
        storage: the step.
        catalog: its catalog.
        data: the catalog's bytes.
        record: what is known of it.
        threads: files that a rank copies at the same time.

    Raises:
        CheckpointError: on every rank, what went wrong on any.
    """
    hot, durable = storage.hot, storage.durable
    holders: dict[int, list[int]] = {}
    present: dict[str, int] = {}

    def here() -> list[int]:
        if not machines.leads(party.rank):
            return []
        found = dict(hot.list())
        return [n for n in own_files(catalog) if found.get(catalog.files[n].name) == catalog.files[n].size]

    def plan(words: list[list[int]]) -> Any:
        for rank, numbers in enumerate(words):
            for number in numbers:
                holders.setdefault(number, []).append(machines.of[rank])
        named = {catalog.files[n].name: n for n in own_files(catalog)}
        present.update({name: size for name, size in durable.list() if name in named})
        return assign(sorted(named.values()))

    def assign(numbers: list[int]) -> Any:
        orders: list[list[int]] = [[] for _ in machines.of]
        for number in numbers:
            if not holders.get(number):
                raise CorruptCheckpointError(
                    f"{storage.url}: no machine has a sound copy of {catalog.files[number].name}; use another step",
                    file=catalog.files[number].name,
                )
            writer = catalog.files[number].rank
            group = machines.groups[holders[number][0]]
            own = writer < len(machines.of) and machines.of[writer] in holders[number]
            orders[writer if own else group[number % len(group)]].append(number)
        return [orders, present]

    def copy(orders: list[list[int]], there: dict[str, int]) -> list[int]:
        """Copy what this rank is to copy; the files whose copy here is damaged."""
        damaged: list[int] = []

        def one(number: int) -> None:
            try:
                copy_unless_there(hot, durable, catalog, number, there.get(catalog.files[number].name))
            except (CorruptCheckpointError, FileNotFoundError) as error:
                _log.warning("%s: %s; it is taken from another machine, if one has it", storage.url, error)
                damaged.append(number)

        if orders[party.rank]:
            at_the_same_time(one, orders[party.rank], threads, "bytecheckpoint-flush")
        return damaged

    def next_round(words: list[list[int]]) -> Any:
        again = []
        for rank, numbers in enumerate(words):
            for number in numbers:
                holders[number].remove(machines.of[rank])
                again.append(number)
        if again:
            return assign(sorted(again))
        commit(durable, catalog, data, expected_version(durable, record))
        return None

    with _held(storage, alone=False, patience=party.timeout):
        order = party.agree("plan", here, plan)
        for attempt in range(len(machines.groups) + 1):
            orders, there = order
            order = party.agree(f"copy-{attempt}", partial(copy, orders, there), next_round)
            if order is None:
                break


# --- one machine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush` did.

    Attributes:
        path: of the durable checkpoint.
        state: "committed", "already there", or "incomplete": files are on other machines, where it is to be run too.
        files: number of files that were copied.
        nbytes: bytes that were copied.
        lacking: names of files that neither this machine nor the durable storage has.
    """

    path: str
    state: str
    files: int = 0
    nbytes: int = 0
    lacking: tuple[str, ...] = ()


def unflushed(path: str) -> list[TierStorage]:
    """The hot steps of this machine at `path`, or in the folder `path`, that the durable storage lacks, oldest first.

    Raises:
        CheckpointNotFoundError: this machine's hot tier has nothing there.
    """
    storage = resolve(path if path.startswith("tier+") else _tiered(path))
    assert isinstance(storage, TierStorage)
    one = storage.hot_catalog()
    if one is not None:
        record = storage.record(one)
        return [storage] if record is None or not record.flushed else []
    steps = list(TierStorage(f"{storage.url}/-").neighbours())
    if not steps:
        raise CheckpointNotFoundError(
            f"{storage.url}: the hot tier of this machine ({storage.hot.url}) holds no step there"
        )
    steps.sort(key=lambda step: step[2].saved)
    return [step for step, _, record in steps if not record.flushed]


def _tiered(path: str) -> str:
    url = resolve(path).url
    return f"tier+{url}" if "://" in url else f"tier+file://{url}"


def flush(storage: TierStorage, *, replicas: bool = False) -> FlushReport:
    """Copy what this machine has of a hot step to the durable storage, and commit it when nothing is lacking.

    For steps of jobs that are gone. With several machines it is run on each; the last one commits.

    Args:
        storage: the step.
        replicas: copy also what other machines wrote and this one keeps for them: when they are lost.

    Raises:
        CheckpointNotFoundError: there is no hot step.
        CorruptCheckpointError: a file's hot copy is damaged, and the durable storage lacks it.
        StorageConflictError: the durable checkpoint was replaced since, or another process flushes this step.
        StorageError: the durable storage fails.
    """
    hot, durable = storage.hot, storage.durable
    catalog, data = read_catalog(hot)
    record = storage.record(data) or Record(durable.url, UNKNOWN, 0.0)
    with _held(storage, alone=True, patience=0.0):
        with contextlib.suppress(FileNotFoundError):
            if durable.read(CATALOG_NAME) == data:
                storage.remember(data, _flushed(record))
                return FlushReport(durable.url, "already there")
        if durable.version(CATALOG_NAME) not in ("", expected_version(durable, record)):
            raise StorageConflictError(
                f"{durable.url} was replaced since {storage.url} was saved, so that is not flushed; remove the hot copy"
            )
        here, there = dict(hot.list()), dict(durable.list())
        files = nbytes = 0
        lacking = []
        for number in own_files(catalog):
            file = catalog.files[number]
            mine = replicas or not record.ranks or file.rank in record.ranks
            if mine and here.get(file.name) == file.size:
                copied = copy_unless_there(hot, durable, catalog, number, there.get(file.name))
                files, nbytes = files + bool(copied), nbytes + copied
            elif there.get(file.name) != file.size or not sound(durable, catalog, number):
                lacking.append(file.name)
        if lacking:
            return FlushReport(durable.url, "incomplete", files, nbytes, tuple(lacking))
        commit(durable, catalog, data, expected_version(durable, record))
        storage.remember(data, _flushed(record))
    return FlushReport(durable.url, "committed", files, nbytes)


def _flushed(record: Record) -> Record:
    return Record(record.url, record.replaces, record.saved, record.ranks, True)
