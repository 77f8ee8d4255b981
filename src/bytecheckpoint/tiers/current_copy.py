"""Decide which copy of a step counts: the hot one of this machine, or the durable one.

The hot copy counts while the durable catalog is the same, or is the one that the hot save was to replace. If somebody
replaces the durable checkpoint without the tier, the hot copy no longer counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError, StorageUnavailableError
from bytecheckpoint.representation.catalog_file import decode_outline
from bytecheckpoint.representation.names import CATALOG_NAME, is_uri
from bytecheckpoint.storage.base import FileReader, Storage
from bytecheckpoint.tiers.hot_folder import UNKNOWN, StepRecord, list_own_files
from bytecheckpoint.tuning import tuning

__all__ = ["ask_durable", "hot_copy_counts", "missing_files", "open_durable_catalog"]

_log = logging.getLogger("bytecheckpoint")
_T = TypeVar("_T")
#: Folders of steps whose durable storage has answered this process.
_answered: set[str] = set()


def ask_durable(url: str, call: Callable[[], _T], seconds: float) -> _T:
    """Ask the durable storage behind a step within a time limit, and return the answer.

    Args:
        url: address of the step's tier.
        call: function that asks.
        seconds: time limit.

    Raises:
        FileNotFoundError: from `call`.
        StorageUnavailableError: there is no answer, or a refusal (expired credentials, a wrong clock) by a storage that has
            answered this process before. The hot tier then works alone.
        StorageError: a refusal by a storage that never answered: it may be a wrong one.
    """
    run = url.rpartition("/")[0]
    try:
        found = call_with_timeout(seconds, call)
    except (FileNotFoundError, StorageError) as error:
        if isinstance(error, FileNotFoundError):
            _answered.add(run)
        elif run in _answered and not isinstance(error, StorageUnavailableError):
            raise StorageUnavailableError(str(error)) from error
        raise
    _answered.add(run)
    return found


def hot_copy_counts(url: str, durable: Storage, catalog: bytes, record: StepRecord | None) -> bool:
    """Return whether a hot step equals or is newer than the durable one.

    Args:
        url: display name of the tier.
        durable: the storage behind it.
        catalog: catalog of the hot step.
        record: record of the hot step, if there is one.
    """
    try:
        version = ask_durable(url, lambda: durable.version(CATALOG_NAME), tuning().tier_load_timeout)
        if not version or (record is not None and version == record.replaces):
            return True
        durable_catalog = durable.read(CATALOG_NAME)
    except FileNotFoundError:
        return True
    except StorageUnavailableError as error:
        _log.warning("%s: the durable storage cannot be asked, so the hot copy counts: %s", url, error)
        return True
    if durable_catalog == catalog:
        return True
    if record is None or record.replaces != UNKNOWN:
        return False
    # The durable storage did not answer at the time of the save: the later save counts.
    try:
        hot, stored = (decode_outline(data)[1]["created"] for data in (catalog, durable_catalog))
        return float(hot) > float(stored)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return True


def missing_files(catalog: bytes, places: Sequence[Storage]) -> list[str]:
    """Return the files of a catalog that no place lists with the right size."""
    try:
        missing = {file.name: file.stored_bytes for file in decode_outline(catalog)[0] if not is_uri(file.name)}
    except CheckpointError:
        return [CATALOG_NAME]
    for place in places:
        if missing:
            present = dict(list_own_files(place))
            missing = {name: size for name, size in missing.items() if present.get(name) != size}
    return sorted(missing)


def open_durable_catalog(url: str, durable: Storage, missing: Sequence[str], where: str) -> FileReader:
    """Open the durable catalog, because no hot step counts or the one that counts is incomplete.

    Args:
        url: display name of the tier.
        durable: the storage behind it.
        missing: files that an otherwise valid hot step lacks.
        where: the machines that may have them, for messages.

    Raises:
        FileNotFoundError: there is no durable checkpoint.
        CheckpointNotFoundError: there is none, and a hot step is incomplete.
    """
    first = next(iter(missing), "")
    incomplete = f"{url}: of the step in memory {len(missing)} files are on {where} (the first: {first})"
    try:
        reader = durable.open(CATALOG_NAME)
    except FileNotFoundError:
        if not missing:
            raise
        raise CheckpointNotFoundError(
            f"{incomplete}, and {durable.url} holds no committed checkpoint; load on the machines that saved it, or "
            "use another step"
        ) from None
    if missing:
        _log.warning("%s; the durable checkpoint is read instead", incomplete)
    return reader
