"""Copy a checkpoint from one storage to another. Torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass

from bytecheckpoint.engine.catalogs import read_catalog, read_catalog_file
from bytecheckpoint.engine.file_set import other_folders
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import CATALOG_NAME, generation_of
from bytecheckpoint.storage import Storage, other_folder, resolve
from bytecheckpoint.storage.optional import check_room
from bytecheckpoint.tiers.copying import commit, copy_files, own_files
from bytecheckpoint.tiers.lease import LEASE_FILE, leased
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.progress import Counted, Progress
from bytecheckpoint.tools.subject import Subject, refuse_other_programs, storage_of

__all__ = ["CopyReport", "check_apart", "copy"]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a copy.

    Attributes:
        path: the checkpoint.
        target: folder of its copy.
        state: "copied", or "already there": the folder has the same checkpoint.
        files: number of its storage files.
        nbytes: bytes that were copied now, without those that an interrupted copy had left.
    """

    path: str
    target: str
    state: str
    files: int
    nbytes: int


def copy(checkpoint: Subject, target: str, progress: Progress | None = None) -> CopyReport:
    """Copy a checkpoint to a folder that holds none, and check every byte against its checksum on the way.

    The copy is committed last, as a save is. The next call with the same arguments continues one that was interrupted.
    Of a checkpoint that was moved to a cold storage, the files there are copied.

    Args:
        checkpoint: path, storage or open checkpoint.
        target: folder or URL of the copy.
        progress: function of (bytes copied, bytes in all), called by one thread at a time.

    Raises:
        UsageError: `target` holds something else, or is or contains the checkpoint; the checkpoint is of another program.
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the checkpoint is damaged; `target` has no checkpoint then.
        StorageConflictError: another process fills `target`, or has saved to it.
        StorageError: a storage fails.
    """
    source, destination = storage_of(checkpoint), resolve(target)
    check_apart(source, destination)
    path = source.url
    try:
        catalog, data = read_catalog(source)
    except CheckpointNotFoundError:
        refuse_other_programs(source, "cp")
        raise
    if others := other_folders(catalog):
        if catalog.is_foreign:
            raise UsageError(f"{path} names files of another program: copy those, and adopt them there")
        if own_files(catalog) or len(others) > 1:
            raise UsageError(
                f"{path} uses files of other folders ({', '.join(sorted(others))}): load it and save it again"
            )
        source = other_folder(source, others.pop())
        catalog, data = read_catalog(source)
    if catalog.has_differences:
        raise UsageError(
            f"{path} is kept as differences from the versions beside it: copy the folder of all versions with the tools of "
            "its storage, or load this one and save it"
        )
    report = CopyReport(path, destination.url, "already there", len(catalog.files), 0)
    if _is_there(destination, catalog, data):
        return report
    nbytes = [catalog.files[number].size for number in own_files(catalog)]
    check_room(destination, sum(nbytes))
    with leased(destination) as lease:
        if lease.is_in(source):
            raise UsageError(f"{source.url} and {destination.url} are the same folder")
        counted = Counted(sum(nbytes), progress)
        copied = copy_files(source, destination, catalog, check=lease.check, progress=counted.add)
        lease.check()
        commit(source, destination, catalog, data, "")
    return CopyReport(path, destination.url, "copied", len(catalog.files), copied)


def check_apart(source: Storage, destination: Storage) -> None:
    """Refuse a destination that does not last, and two folders of which one lies in the other.

    Raises:
        UsageError: the destination is a tier, or the source, or in it, or around it.
    """
    if destination.capabilities.machine_only:
        raise UsageError(f"{destination.url}: copies go to a storage that lasts: leave tier+ out of the path")
    tier = tier_of(source)
    origin = source if tier is None else tier.durable
    first, second = f"{origin.url.rstrip('/')}/", f"{destination.url.rstrip('/')}/"
    if first.startswith(second) or second.startswith(first):
        raise UsageError(f"a copy of {source.url} to {destination.url}: neither may lie in the other")


def _is_there(target: Storage, catalog: Catalog, data: bytes) -> bool:
    """Return whether a folder has the same checkpoint already. Refuse a folder that holds something else.

    Storage files without a catalog are of a copy or a save that did not end.
    """
    try:
        if read_catalog_file(target) == data:
            return True
    except FileNotFoundError:
        pass
    except CorruptCheckpointError as error:
        raise UsageError(f"{target.url} holds a damaged checkpoint ({error}): choose another folder") from error
    else:
        raise UsageError(f"{target.url} holds another checkpoint: choose another folder, or remove it before")
    expected = {LEASE_FILE, *(file.name for file in catalog.files)}
    for name, _ in target.list():
        if name not in expected and generation_of(name) is None and not name.rpartition("/")[2].startswith("."):
            raise UsageError(f"{target.url} is not empty (it holds {name}): choose a new folder")
    target.check_publish(CATALOG_NAME, "")
    return False
