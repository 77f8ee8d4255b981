"""The flush by one machine alone, for steps that jobs left in its hot tier when they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.errors import CheckpointNotFoundError, StorageConflictError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tiers.copying import commit, copy_if_missing, is_sound, own_files
from bytecheckpoint.tiers.flush.lock import expected_version, flush_lock
from bytecheckpoint.tiers.hot_folder import UNKNOWN, HotStep, StepRecord
from bytecheckpoint.tiers.run import steps_of_run
from bytecheckpoint.tiers.storage import PREFIX, TierStorage

__all__ = ["FlushReport", "flush", "unflushed"]


@dataclass(frozen=True, slots=True)
class FlushReport:
    """The result of a flush.

    Attributes:
        path: address of the durable checkpoint.
        state: "committed", "already there", or "incomplete": files are on other machines, where `flush` must run too.
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
    """Find the steps in this machine's hot tier that the durable storage lacks.

    Args:
        path: a step, or a run; with or without the prefix `tier+`.

    Returns:
        The steps, oldest first.

    Raises:
        CheckpointNotFoundError: this machine's hot tier has nothing there.
    """
    storage = resolve(path if path.startswith(PREFIX) else _tier_url(path))
    assert isinstance(storage, TierStorage)
    catalog = storage.hot_folder.catalog()
    if catalog is not None:
        record = storage.hot_folder.record(catalog)
        return [storage] if record is None or not record.flushed else []
    steps = sorted(steps_of_run(storage.url), key=lambda found: found[1].record.saved)
    if not steps:
        raise CheckpointNotFoundError(
            f"{storage.url}: the hot tier of this machine ({storage.hot.url}) holds no step there"
        )
    return [storage for storage, step in steps if not step.record.flushed]


def _tier_url(path: str) -> str:
    url = resolve(path).url
    return f"{PREFIX}{url}" if "://" in url else f"{PREFIX}file://{url}"


def flush(storage: TierStorage, *, replicas: bool = False) -> FlushReport:
    """Copy this machine's files of a hot step to the durable storage, and commit the step when it is complete there.

    This is for steps of jobs that have ended. If several machines have files of the step, each runs it, and the last one
    commits.

    Args:
        storage: the step.
        replicas: also copy the replicas that this machine holds for other machines, because those are lost.

    Raises:
        CheckpointNotFoundError: there is no hot step.
        CorruptCheckpointError: a file's hot copy is damaged, and the durable storage lacks it.
        StorageConflictError: the durable checkpoint was replaced since, or another process flushes this step.
        StorageError: the durable storage fails.
    """
    hot, durable = storage.hot, storage.durable
    catalog, data = read_catalog(hot)
    record = storage.hot_folder.record(data) or StepRecord(durable.url, UNKNOWN, 0.0)
    step = HotStep(data, record)
    with flush_lock(storage, exclusive=True, timeout=0.0):
        with contextlib.suppress(FileNotFoundError):
            if durable.read(CATALOG_NAME) == data:
                storage.hot_folder.update_record(step, record.ranks, flushed=True)
                return FlushReport(durable.url, "already there")
        if durable.version(CATALOG_NAME) not in ("", expected_version(record)):
            raise StorageConflictError(
                f"{durable.url} was replaced since {storage.url} was saved, so that is not flushed; remove the hot copy"
            )
        hot_sizes, durable_sizes = dict(hot.list()), dict(durable.list())
        copied: list[int] = []  # bytes of each file
        others: list[int] = []  # numbers of the files that other machines flush
        for number in own_files(catalog):
            file = catalog.files[number]
            wanted = replicas or not record.ranks or file.rank in record.ranks
            if wanted and hot_sizes.get(file.name) == file.stored_bytes:
                copied.append(copy_if_missing(hot, durable, catalog, number, durable_sizes.get(file.name)))
            else:
                others.append(number)
        files, nbytes = sum(map(bool, copied)), sum(copied)
        # Only after the copies: if several machines flush at once, the last one must see all files and commit.
        if lacking := _not_sound(durable, catalog, others):
            return FlushReport(durable.url, "incomplete", files, nbytes, lacking)
        commit(hot, durable, catalog, data, expected_version(record))
        storage.hot_folder.update_record(step, record.ranks, flushed=True)
    return FlushReport(durable.url, "committed", files, nbytes)


def _not_sound(durable: Storage, catalog: Catalog, numbers: Sequence[int]) -> tuple[str, ...]:
    """Return the names of those files that are missing or damaged in the durable storage."""
    sizes = dict(durable.list()) if numbers else {}
    files = [(number, catalog.files[number]) for number in numbers]
    return tuple(
        file.name
        for number, file in files
        if sizes.get(file.name) != file.stored_bytes or not is_sound(durable, catalog, number)
    )
