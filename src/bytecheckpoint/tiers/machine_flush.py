"""From the hot tier to the durable storage: what one machine has of the steps of jobs that are gone."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..engine.catalogs import read_catalog
from ..errors import CheckpointNotFoundError, StorageConflictError
from ..representation.names import CATALOG_NAME
from ..storage import resolve
from ..storage.tier import UNKNOWN, Record, TierStorage
from .copying import commit, copy_unless_there, own_files, sound
from .hold import expected_version, held

__all__ = ["FlushReport", "flush", "unflushed"]


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
    with held(storage, alone=True, patience=0.0):
        with contextlib.suppress(FileNotFoundError):
            if durable.read(CATALOG_NAME) == data:
                storage.note(data, record, record.ranks, flushed=True)
                return FlushReport(durable.url, "already there")
        if durable.version(CATALOG_NAME) not in ("", expected_version(record)):
            raise StorageConflictError(
                f"{durable.url} was replaced since {storage.url} was saved, so that is not flushed; remove the hot copy"
            )
        here, there = dict(hot.list()), dict(durable.list())
        files = nbytes = 0
        others = []
        for number in own_files(catalog):
            file = catalog.files[number]
            mine = replicas or not record.ranks or file.rank in record.ranks
            if mine and here.get(file.name) == file.size:
                copied = copy_unless_there(hot, durable, catalog, number, there.get(file.name))
                files, nbytes = files + bool(copied), nbytes + copied
            else:
                others.append(number)
        # Looked for when all is copied here: of machines that do this at the same time, the last one commits.
        there = dict(durable.list()) if others else {}
        lacking = [
            catalog.files[number].name
            for number in others
            if there.get(catalog.files[number].name) != catalog.files[number].size
            or not sound(durable, catalog, number)
        ]
        if lacking:
            return FlushReport(durable.url, "incomplete", files, nbytes, tuple(lacking))
        commit(durable, catalog, data, expected_version(record))
        storage.note(data, record, record.ranks, flushed=True)
    return FlushReport(durable.url, "committed", files, nbytes)
