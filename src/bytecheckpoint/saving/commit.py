"""The steps around the publish of a catalog: check that all files are there, judge a failed publish, remove old files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.errors import StorageConflictError, StorageError, StorageUnavailableError
from bytecheckpoint.representation.names import CATALOG_NAME, generation_of
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.optional import UnfinishedUpload, abort_uploads, unfinished_uploads
from bytecheckpoint.tracing.operation import pause
from bytecheckpoint.tuning import tuning

__all__ = ["may_have_committed", "remove_stale_files", "stale_files", "stale_uploads"]

_log = logging.getLogger("bytecheckpoint")


def stale_files(storage: Storage, named: Mapping[str, int], replaces: str) -> list[str]:
    """Check that the new files are there, and return the storage files that the new catalog does not name.

    Args:
        storage: as rank 0 sees it.
        named: the new files and their sizes.
        replaces: version of the catalog that the new one replaces.

    Returns:
        Files of the replaced checkpoint and of killed saves; none if the storage cannot be listed.

    Raises:
        StorageConflictError: another save has committed meanwhile, and has removed new files as a killed save's.
        StorageError: a new file is not there, or has another size: ranks do not share the path.
    """
    present: dict[str, int] = {}
    try:
        present = dict(storage.list())
    except Exception as error:  # noqa: BLE001  a storage that cannot be listed can be saved to
        _log.warning("%s: old files could not be removed: %s", storage.url, error)
    unseen = [name for name, size in named.items() if present.get(name) != size]
    if unseen and not storage.capabilities.machine_only:
        if storage.version(CATALOG_NAME) != replaces:
            raise StorageConflictError(
                f"cannot publish {storage.url}/{CATALOG_NAME}: another save replaced it meanwhile; let one job at "
                f"a time save to a path"
            )
        parallel_map(
            lambda n: _refuse_unseen(storage, n, named[n]),
            unseen,
            storage.capabilities.parallel_reads,
            "bytecheckpoint-stat",
        )
    return [name for name in present if generation_of(name) is not None and name not in named]


def stale_uploads(storage: Storage) -> Sequence[UnfinishedUpload]:
    """Return the uploads to storage files that are not completed, when all files of this save are.

    A save to this path that began one of them has read the catalog's version before. So if this save commits now, the other
    one cannot, whether it lives or not.
    """
    try:
        return [upload for upload in unfinished_uploads(storage) if generation_of(upload.name) is not None]
    except Exception as error:  # noqa: BLE001  a storage that cannot list them can be saved to
        _log.info("uploads of killed saves are left to the storage: %s", error)
        return ()


def may_have_committed(storage: Storage, catalog: bytes, error: BaseException) -> bool:
    """Return whether a publish that raised `error` may have taken effect: a lost answer, an fsync after the rename."""
    if isinstance(error, StorageUnavailableError) and error.undecided:
        return True
    try:
        return storage.read(CATALOG_NAME) == catalog
    except FileNotFoundError:
        return False
    except (StorageError, OSError):
        return True


def remove_stale_files(storage: Storage, stale: Sequence[str], uploads: Sequence[UnfinishedUpload]) -> None:
    """Remove files after the commit, and abort uploads. Never raises: nothing may report a committed save as failed."""
    try:
        storage.delete(stale)
        if uploads:
            abort_uploads(storage, uploads)
    except Exception as error:  # noqa: BLE001  the save is committed
        _log.warning("%s: old files could not be removed: %s", storage.url, error)


def _refuse_unseen(storage: Storage, name: str, size: int) -> None:
    """Refuse a file that `stat` does not see either: network file systems may take listings and sizes from a cache."""
    present = -1
    for seconds in (None, *tuning().stale_pauses):
        if seconds is not None:
            pause(seconds)
        try:
            present = storage.stat(name).size
        except FileNotFoundError:
            break
        if present == size:
            break
    if present != size:
        found = f"{present} bytes of it" if present >= 0 else "nothing of it"
        raise StorageError(
            f"{storage.url}: {name} was written with {size} bytes, but rank 0 sees {found}; the path must be on storage "
            f"that all ranks share, and nobody else may remove its files"
        )
