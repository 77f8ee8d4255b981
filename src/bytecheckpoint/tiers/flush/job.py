"""The flush of one step by all ranks of a job."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from functools import partial

import msgspec

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import CorruptCheckpointError, StorageError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.storage import Storage
from bytecheckpoint.tiers.copying import commit, copy_if_missing, is_sound, own_files
from bytecheckpoint.tiers.flush.lock import expected_version, flush_lock
from bytecheckpoint.tiers.hot_folder import HotStep
from bytecheckpoint.tiers.machines import Machines
from bytecheckpoint.tiers.storage import TierStorage

__all__ = ["flush_together", "transfer_limit"]

_log = logging.getLogger("bytecheckpoint")
_SLOWEST = 4 << 20  # bytes per second: a slower flush counts as hung


def transfer_limit(catalog: Catalog) -> float:
    """Return the seconds that copying the files of a step may take, on top of the timeout of one agreement."""
    return sum(file.stored_bytes for file in catalog.files) / _SLOWEST


def flush_together(agreement: Agreement, machines: Machines, storage: TierStorage, step: HotStep, threads: int) -> None:
    """Copy a hot step to the durable storage, commit it there, and record that on every machine. Every rank calls it.

    Each file is copied by a rank whose machine has it, if possible by the rank that wrote it. A file whose copy is
    damaged is copied by another machine. Rank 0 commits when all files are there.

    Args:
        agreement: the ranks.
        machines: machines of the ranks.
        storage: tier that holds the step.
        step: the step.
        threads: files that a rank copies at the same time.

    Raises:
        CheckpointError: failure of any rank; raised on every rank.
    """
    rank, catalog = agreement.rank, decode(step.catalog)
    plan = _FlushPlan(machines, storage, catalog)  # used on rank 0

    def list_files() -> list[int]:
        if not machines.leads(rank):
            return []
        present = dict(storage.hot.list())
        return [n for n in own_files(catalog) if present.get(catalog.files[n].name) == catalog.files[n].stored_bytes]

    def copy(orders: _Orders) -> list[int]:
        return _copy_files(storage, catalog, orders.files[rank], orders.present, threads)

    def assign_again_or_commit(damaged: list[list[int]]) -> _Orders | None:
        orders = plan.assign_again(damaged)
        if orders is None:
            commit(storage.hot, storage.durable, catalog, step.catalog, expected_version(step.record))
        return orders

    with flush_lock(storage, exclusive=False, timeout=agreement.timeout):
        orders = agreement.agree("plan", list_files, plan.assign_first, decisions=_Orders | None)
        for attempt in itertools.count():  # this ends: each round leaves fewer copies to try
            assert orders is not None
            orders = agreement.agree(
                f"copy-{attempt}", partial(copy, orders), assign_again_or_commit, decisions=_Orders | None
            )
            if orders is None:
                break
    if machines.leads(rank):
        storage.hot_folder.update_record(step, machines.ranks_beside(rank), flushed=True)


class _Orders(msgspec.Struct, frozen=True, array_like=True):
    """The files that all ranks copy in one round.

    Attributes:
        files: numbers of the files to copy, for each rank.
        present: sizes by name of the files that the durable storage has already.
    """

    files: list[list[int]]
    present: dict[str, int]


class _FlushPlan:
    """Assigns files to the ranks that copy them. Used on rank 0.

    Args:
        machines: machines of the ranks.
        storage: tier that holds the step.
        catalog: catalog of the step.
    """

    def __init__(self, machines: Machines, storage: TierStorage, catalog: Catalog) -> None:
        self._machines = machines
        self._storage = storage
        self._catalog = catalog
        self._holders: dict[int, list[int]] = {}  # machines that have a file, by its number
        self._present: dict[str, int] = {}

    def assign_first(self, listed: list[list[int]]) -> _Orders | None:
        """Assign all files. `listed` holds, for each rank, the numbers of the files on its machine."""
        for rank, numbers in enumerate(listed):
            for number in numbers:
                self._holders.setdefault(number, []).append(self._machines.machine_of[rank])
        named = {self._catalog.files[n].name: n for n in own_files(self._catalog)}
        self._present = {name: size for name, size in self._storage.durable.list() if name in named}
        return self._assign(sorted(named.values()))

    def assign_again(self, damaged: list[list[int]]) -> _Orders | None:
        """Assign the files again whose copies the ranks found damaged. Return None when there are none."""
        numbers = []
        for rank, its_damaged in enumerate(damaged):
            for number in its_damaged:
                if self._holders.get(number):
                    self._holders[number].remove(self._machines.machine_of[rank])
                else:
                    self._present.pop(self._catalog.files[number].name, None)
                numbers.append(number)
        return self._assign(sorted(numbers)) if numbers else None

    def _assign(self, numbers: Iterable[int]) -> _Orders:
        machines = self._machines
        files: list[list[int]] = [[] for _ in machines.machine_of]
        for number in numbers:
            file, holders = self._catalog.files[number], self._holders.get(number)
            if not holders:
                if self._present.get(file.name) != file.stored_bytes:
                    raise CorruptCheckpointError(
                        f"{self._storage.url}: no machine has a sound copy of {file.name}; use another step",
                        file=file.name,
                    )
                # An earlier flush copied it from a machine that is lost. Some rank has to verify that copy.
                files[number % len(files)].append(number)
                continue
            writer, group = file.rank, machines.groups[holders[0]]
            writer_has_it = writer < len(machines.machine_of) and machines.machine_of[writer] in holders
            files[writer if writer_has_it else group[number % len(group)]].append(number)
        return _Orders(files, self._present)


def _copy_files(
    storage: TierStorage, catalog: Catalog, numbers: list[int], present: dict[str, int], threads: int
) -> list[int]:
    """Copy files to the durable storage. Return the numbers of the files whose hot copy is damaged."""
    damaged: list[int] = []

    def copy_file(number: int) -> None:
        try:
            name = catalog.files[number].name
            copy_if_missing(storage.hot, storage.durable, catalog, number, present.get(name))
        except (CorruptCheckpointError, FileNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and _is_readable(storage.hot, catalog, number):
                raise  # the durable storage fails
            _log.warning("%s: %s; it is taken from another machine, if one has it", storage.url, error)
            damaged.append(number)

    if numbers:
        parallel_map(copy_file, numbers, threads, "bytecheckpoint-flush")
    return damaged


def _is_readable(storage: Storage, catalog: Catalog, number: int) -> bool:
    try:
        return is_sound(storage, catalog, number)
    except StorageError:
        return False
