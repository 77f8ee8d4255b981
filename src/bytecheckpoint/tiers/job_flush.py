"""From the hot tier to the durable storage: the steps that all ranks of a job take together."""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any

import msgspec

from ..errors import CorruptCheckpointError, StorageError
from ..representation.catalog import Catalog
from ..representation.catalog_file import decode
from ..storage import Storage
from ..storage.parallel import at_the_same_time
from ..storage.tier import Record, TierStorage
from .copying import commit, copy_unless_there, own_files, sound
from .hold import expected_version, held
from .party import Machines, Party

__all__ = ["SLOWEST", "HotStep", "flush_together"]

_log = logging.getLogger("bytecheckpoint")
#: A flush slower than this is taken for hanging, bytes per second.
SLOWEST = 4 << 20


class HotStep(msgspec.Struct, frozen=True):
    """What all machines must know of a hot step.

    Attributes:
        catalog: its bytes.
        record: what is known of it.
    """

    catalog: bytes
    record: Record


def flush_together(party: Party, machines: Machines, storage: TierStorage, step: HotStep, threads: int) -> None:
    """Bring a hot step to the durable storage, and note that on every machine; every rank of the job calls it.

    Each file is copied by a rank whose machine has it, if possible by the one that wrote it; where its copy proves
    damaged, by another machine. Rank 0 commits when all are there.

    Args:
        party: the ranks.
        machines: who stands where.
        storage: where the step is.
        step: its catalog and record.
        threads: files that a rank copies at the same time.

    Raises:
        CheckpointError: on every rank, what went wrong on any.
    """
    hot, durable, catalog = storage.hot, storage.durable, decode(step.catalog)
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
            file = catalog.files[number]
            if not holders.get(number):
                if present.get(file.name) != file.size:
                    raise CorruptCheckpointError(
                        f"{storage.url}: no machine has a sound copy of {file.name}; use another step", file=file.name
                    )
                # An earlier flush has brought it there from a machine that is lost: somebody has to look at it.
                orders[number % len(orders)].append(number)
                continue
            writer = file.rank
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
            except (CorruptCheckpointError, FileNotFoundError, StorageError) as error:
                if isinstance(error, StorageError) and _readable(hot, catalog, number):
                    raise  # it is the durable storage that fails
                _log.warning("%s: %s; it is taken from another machine, if one has it", storage.url, error)
                damaged.append(number)

        if orders[party.rank]:
            at_the_same_time(one, orders[party.rank], threads, "bytecheckpoint-flush")
        return damaged

    def next_round(words: list[list[int]]) -> Any:
        again = []
        for rank, numbers in enumerate(words):
            for number in numbers:
                if holders.get(number):
                    holders[number].remove(machines.of[rank])
                else:
                    present.pop(catalog.files[number].name, None)
                again.append(number)
        if again:
            return assign(sorted(again))
        commit(durable, catalog, step.catalog, expected_version(step.record))
        return None

    with held(storage, alone=False, patience=party.timeout):
        order = party.agree("plan", here, plan)
        for attempt in itertools.count():  # each round there are fewer copies to try
            orders, there = order
            order = party.agree(f"copy-{attempt}", partial(copy, orders, there), next_round)
            if order is None:
                break
    if machines.leads(party.rank):
        storage.note(step.catalog, step.record, machines.groups[machines.of[party.rank]], flushed=True)


def _readable(storage: Storage, catalog: Catalog, number: int) -> bool:
    try:
        return sound(storage, catalog, number)
    except StorageError:
        return False
