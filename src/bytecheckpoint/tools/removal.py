"""Remove checkpoints, and what killed saves and finished runs have left behind."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bytecheckpoint.engine.catalogs import is_sealed, read_outline
from bytecheckpoint.engine.file_set import other_folders
from bytecheckpoint.engine.view_files import VIEW_INDEX, committed_view
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import (
    CATALOG_NAME,
    METRICS_FOLDER,
    STEP_FOLDER,
    companions,
    generation_of,
    natural_order,
    view_generation_of,
)
from bytecheckpoint.saving.commit import stale_uploads
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.optional import abort_uploads, unfinished_uploads
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.cooldown import file_uri
from bytecheckpoint.tiers.flush.lock import flush_lock
from bytecheckpoint.tiers.lease import LEASE_FILE
from bytecheckpoint.tiers.names import INTERNAL_FILES
from bytecheckpoint.tiers.room import hot_steps
from bytecheckpoint.tiers.storage import PREFIX, TierStorage, hot_tier
from bytecheckpoint.tools.catalog_repair import generations_of_whole_saves
from bytecheckpoint.tools.retirement import (
    TOMBSTONE,
    finish_retirement,
    is_folder,
    remove_if_empty,
    tombstones,
    users_in,
)
from bytecheckpoint.tools.subject import Subject, refuse_other_programs, storage_of

__all__ = ["Removal", "collect_garbage", "collect_hot_garbage", "remove"]

#: Temporary files of publishes and probes. A process that ends removes its own.
_TEMPORARY = re.compile(r"\.(publishing|bytecheckpoint-publishing|bytecheckpoint-probe)-[0-9a-f]{16}(-[^/]+)?")
_NO_SEAL = f"{CATALOG_NAME} has no catalog's seal: it is another program's, or its end is damaged"


@dataclass(frozen=True, slots=True)
class Removal:
    """Files that were removed, would be removed, or stay although one might expect otherwise.

    Attributes:
        path: their folder.
        what: "checkpoint", "retired" (a removal that was begun), "uncommitted", "temporary", "empty folder", "upload" or
            "hot copy".
        files: number of files; of "upload", of uploads that were not completed, whose size no store reports.
        nbytes: their size.
        kept: why they stay; "" if they go.
    """

    path: str
    what: str
    files: int
    nbytes: int
    kept: str = ""


def remove(checkpoint: Subject, *, cold: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove a checkpoint, committed or not, and what other saves have left at its path.

    The catalog goes first, so a kill leaves uncommitted files and no damaged checkpoint. Files that are not a
    checkpoint's stay, among them a `metadata.parquet` without a catalog's seal. At a `tier+` path both copies go, of the
    hot ones that on this machine.

    Args:
        checkpoint: path, storage or open checkpoint.
        cold: also remove the files in other folders that its catalog names (those of a cooled step).
        dry_run: only look.

    Raises:
        CheckpointNotFoundError: there is none.
        UsageError: files are in other folders, and `cold` is False; or another step of the run uses this one's files, or
            builds on it.
        StorageConflictError: the step is being flushed.
        StorageError: the storage fails, perhaps for a catalog beside, which may name files of this one.
    """
    storage = storage_of(checkpoint)
    places = [storage.hot, storage.durable] if isinstance(storage, TierStorage) else [storage]
    places = [with_time_limits(place) for place in places]
    elsewhere = {folder for place in places for folder in _other_folders(place)}
    if elsewhere and not cold:
        raise UsageError(f"{storage.url} names files in {', '.join(sorted(elsewhere))}: --cold removes these too")
    if user := next(filter(None, map(_user, places)), ""):
        raise UsageError(f"{user} uses files of {storage.url}: remove that first")
    places += [with_time_limits(resolve(folder)) for folder in sorted(elsewhere)]
    foreign = [place for place in places if _has_foreign_catalog(place)]
    hot = places[0] if isinstance(storage, TierStorage) else None
    found = [(place, names) for place in places if (names := _own_names(place, hot=place is hot))]
    for place, names in found:
        if place in foreign:
            del names[CATALOG_NAME]
    if not any(name == CATALOG_NAME or generation_of(name) is not None for _, names in found for name in names):
        steps = [name for name in storage.folders() if CATALOG_NAME in dict(resolve(f"{storage.url}/{name}").list())]
        if not steps:
            refuse_other_programs(storage, "rm")
        no_seal = f": {_NO_SEAL}" if foreign else ""
        hint = f"; it is a folder of {len(steps)} steps: name those" if steps else no_seal
        raise CheckpointNotFoundError(f"{storage.url} holds no checkpoint{hint}")
    removed = [_removal(place, "checkpoint", names) for place, names in found]
    removed += [Removal(place.url, "checkpoint", 1, place.stat(CATALOG_NAME).size, kept=_NO_SEAL) for place in foreign]
    if dry_run:
        return removed
    with contextlib.ExitStack() as stack:
        if isinstance(storage, TierStorage):
            stack.enter_context(flush_lock(storage, exclusive=True, timeout=0.0))
        for place, names in found:
            if CATALOG_NAME in names:
                place.delete([CATALOG_NAME])
        for place, names in found:
            place.delete([name for name in names if name != CATALOG_NAME])
        for place in places:
            with contextlib.suppress(StorageError):  # many clients may not list them
                abort_uploads(place, stale_uploads(place))
    if isinstance(storage, TierStorage):
        storage.hot_folder.remove_if_empty()
    return removed


def _user(storage: Storage) -> str:
    """Return a checkpoint beside a folder whose catalog names files in it, or that builds on its version, or ""."""
    run = with_time_limits(resolve(storage.url.rpartition("/")[0] or "/"))

    def needs(name: str) -> set[str]:
        catalog = _outline(with_time_limits(resolve(f"{run.url}/{name}")))
        return set() if catalog is None else {*other_folders(catalog, own=True), catalog.published.get("base", "")}

    users, catalog = users_in(run, needs), _outline(storage)
    version = "none" if catalog is None else catalog.published.get("id", "none")  # "" is the base of whole versions
    return users.get(file_uri(storage, "").removesuffix("/")) or users.get(version, "")


def _has_foreign_catalog(storage: Storage) -> bool:
    """Return whether the file with the name of a catalog has no seal of one."""
    try:
        return not is_sealed(storage)
    except FileNotFoundError:
        return False


def _own_names(storage: Storage, *, hot: bool) -> dict[str, int]:
    """Return the files of a folder that belong to checkpoints, with their sizes; `hot` for a folder of the hot tier."""
    present = dict(storage.list())
    view = committed_view(storage, present)
    return {
        name: size
        for name, size in present.items()
        if name in (CATALOG_NAME, LEASE_FILE)
        or generation_of(name) is not None
        or name in view
        or name.startswith(f"{METRICS_FOLDER}/")
        or _TEMPORARY.fullmatch(name) is not None
        or TOMBSTONE.fullmatch(name) is not None
        or (hot and INTERNAL_FILES.fullmatch(name) is not None)
    }


def _other_folders(storage: Storage) -> set[str]:
    catalog = _outline(storage)
    return set() if catalog is None else other_folders(catalog, own=True)


def _outline(storage: Storage) -> Catalog | None:
    try:
        return read_outline(storage)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


def collect_garbage(checkpoint: Subject, *, older_than: float, dry_run: bool = False) -> list[Removal]:
    """Remove what killed saves left in a checkpoint's folder, or in all folders of a run.

    These are storage files that no catalog names, temporary files, and uploads that were not completed. What is younger
    stays: a save may be writing it.
    Files that would make a whole checkpoint if they had a catalog stay too.

    Args:
        checkpoint: path, storage or open checkpoint; or a folder of checkpoints.
        older_than: seconds since the newest file of a save was written.
        dry_run: only look.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: the storage fails.
    """
    storage = storage_of(checkpoint)
    if isinstance(storage, TierStorage):
        storage = storage.durable
    names = sorted(storage.folders(), key=natural_order)
    if not names and not storage.list() and not is_folder(storage) and not _has_uploads(storage):
        raise CheckpointNotFoundError(f"{storage.url}: there is nothing")
    folders = [storage, *(resolve(f"{storage.url}/{name}") for name in names)]
    before = functools.cache(lambda: _now(with_time_limits(storage), dry_run) - older_than)
    found = [removal for folder in folders for removal in _collect(with_time_limits(folder), before, dry_run)]
    return [*found, *_collect_uploads(with_time_limits(storage), older_than, dry_run)]


def _now(storage: Storage, dry_run: bool) -> float:
    """Return the present by the clock of the storage, if that is behind this machine's; a dry run does not ask.

    A file that a save is writing would look old to a machine whose clock is ahead.
    """
    probe, now = f".bytecheckpoint-probe-{secrets.token_hex(8)}", time.time()
    if dry_run:
        return now
    try:
        storage.publish(probe, b"")
        modified = storage.stat(probe).modified
        storage.delete([probe])
    except (StorageError, FileNotFoundError):  # then nothing can be removed here either
        return now
    return min(now, modified or now)


def _has_uploads(storage: Storage) -> bool:
    try:
        return bool(unfinished_uploads(with_time_limits(storage)))
    except StorageError:  # some servers refuse to list them
        return False


def _collect_uploads(storage: Storage, older_than: float, dry_run: bool) -> Iterator[Removal]:
    """Abort uploads to storage files, also of steps that have no other file."""
    try:
        uploads = [u for u in unfinished_uploads(storage) if u.age > older_than and _is_in_step(u.name)]
    except StorageError as error:
        yield _removal(storage, "upload", {}, str(error))
        return
    if uploads:
        if not dry_run:
            abort_uploads(storage, uploads)
        yield Removal(storage.url, "upload", len(uploads), 0)


def _is_in_step(name: str) -> bool:
    """Return whether a name is that of a storage file, in a checkpoint or in a folder of checkpoints."""
    return any(generation_of(inside) is not None for inside in (name, name.partition("/")[2]))


def _collect(storage: Storage, before: Callable[[], float], dry_run: bool) -> Iterator[Removal]:
    present = dict(storage.list())
    temporary = [
        name for name in present if _TEMPORARY.fullmatch(name) is not None and _is_older(storage, name, before())
    ]
    yield from _remove(storage, "temporary", {name: present[name] for name in temporary}, dry_run)
    for stone in tombstones(storage):
        young = not _is_older(storage, stone, before())
        if gone := finish_retirement(storage, stone, dry_run=dry_run or young):
            yield _removal(storage, "retired", gone, "begun a short while ago: others may be reading" if young else "")
            present = {name: size for name, size in present.items() if name not in gone}
    saves: dict[str, dict[str, int]] = {}
    for name, size in present.items():
        if (generation := generation_of(name) or view_generation_of(name)) is not None:
            saves.setdefault(generation, {})[name] = size
    whole: set[str] = set()
    try:
        named = read_outline(storage).files if saves else ()
        needed, made = {file.name for file in named}, {file.generation for file in named}
        needed |= companions(needed)
        if VIEW_INDEX in present:  # else they are parts of a view that was not completed
            needed |= {name for name in present if view_generation_of(name) in made}
    except CheckpointNotFoundError:
        needed = set()
        whole = generations_of_whole_saves(storage)
    except CheckpointError as error:
        files = {name: size for names in saves.values() for name, size in names.items()}
        yield _removal(storage, "uncommitted", files, f"the catalog cannot be read: {error}")
        return
    unnamed = {g: {name: files[name] for name in files.keys() - needed} for g, files in saves.items()}
    uncommitted = {generation: files for generation, files in unnamed.items() if files}
    # All or none: a save that runs may have adopted files that are old.
    if all(_is_older(storage, name, before()) for files in uncommitted.values() for name in files):
        for generation, files in uncommitted.items():
            if generation in whole:
                yield _removal(storage, "uncommitted", files, "only the catalog is missing: run `repair` or `rm`")
            else:
                yield from _remove(storage, "uncommitted", files, dry_run)
    is_step = STEP_FOLDER.fullmatch(storage.url.rpartition("/")[2]) is not None
    if is_step and remove_if_empty(storage, dry_run=dry_run) and not present:
        yield _removal(storage, "empty folder", {})


def _is_older(storage: Storage, name: str, before: float) -> bool:
    try:
        return 0.0 < storage.stat(name).modified < before  # 0.0: nobody knows
    except FileNotFoundError:
        return False


def _remove(storage: Storage, what: str, files: dict[str, int], dry_run: bool) -> Iterator[Removal]:
    if files:
        if not dry_run:
            storage.delete(list(files))
        yield _removal(storage, what, files)


def _removal(storage: Storage, what: str, files: dict[str, int], kept: str = "") -> Removal:
    return Removal(storage.url, what, len(files), sum(files.values()), kept)


def collect_hot_garbage(*, older_than: float, dry_run: bool = False) -> list[Removal]:
    """Remove the flushed steps of all runs from this machine's hot tier. Steps that are not flushed stay.

    Args:
        older_than: seconds since the step was saved.
        dry_run: only look.
    """
    found = []
    before = time.time() - older_than
    for folder, step in sorted(hot_steps(hot_tier()), key=lambda item: item[1].record.saved):
        files = folder.files()
        removal = Removal(f"{PREFIX}{step.record.url}", "hot copy", len(files), sum(files.values()))
        if not step.record.flushed:
            found.append(replace(removal, kept="not durable yet: `flush` copies it, `rm` removes it"))
        elif step.record.saved < before:
            if not dry_run:
                folder.remove_step(step.catalog)
            found.append(removal)
    return found
