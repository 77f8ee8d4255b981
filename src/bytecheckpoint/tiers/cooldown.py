"""Cooldown: older steps move to a cheaper storage, and their paths stay valid (ByteCheckpoint, section 5.1).

A moved step keeps a catalog at its path, which names the cold files by URI. The cold folder has a catalog too, so it is a
checkpoint of its own. A kill at any moment leaves the step loadable at its path: the catalog names either the hot files,
which are still there, or the cold files, which were verified before. The next run continues where a killed one ended
(decision 0017).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.view_files import view_names
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.names import CATALOG_NAME, companions, generation_of, is_uri, natural_order
from bytecheckpoint.storage import COLD_FOLDERS, Storage, resolve
from bytecheckpoint.tiers.copying import commit, copy_files, own_files
from bytecheckpoint.tiers.lease import LEASE_FILE, Lease, leased

__all__ = ["CoolStep", "cool", "file_uri", "plan_cooldown"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, slots=True)
class CoolStep:
    """One step of a run, with the action that cooldown plans or has carried out.

    Attributes:
        name: name of the step's folder.
        path: address that the step is loaded from, before and after the move.
        target: the cold folder of the step.
        action: "move"; "finish" (moved, but some hot files are left); "keep" (too young, or one of the newest); "cold"
            (moved already); "skip" (cannot be moved).
        reason: reason for the action.
        created: time of the save, seconds since 1970.
        files: number of files that the action moves or removes.
        nbytes: size of these files in bytes.
        done: True once the action was carried out.
        error: text of the failure.
    """

    name: str
    path: str
    target: str
    action: str
    reason: str
    created: float = 0.0
    files: int = 0
    nbytes: int = 0
    done: bool = False
    error: str = ""


def plan_cooldown(
    root: str, cold: str, *, older_than: float | datetime.timedelta, keep: int = 1, now: float | None = None
) -> list[CoolStep]:
    """Decide which steps of a run move to a cold storage. Nothing is changed.

    Args:
        root: folder of the steps.
        cold: folder that older steps move to; any scheme.
        older_than: age from which on a step moves; a number means seconds.
        keep: number of the newest steps that stay in any case; at least 1.
        now: seconds since 1970.

    Returns:
        The action for each step, oldest first.

    Raises:
        UsageError: the folders are the same, or one lies in the other; another argument is wrong.
        CheckpointNotFoundError: there are no checkpoints.
        StorageError: `root` cannot be read.
    """
    hot_root, cold_root = _resolve_roots(root, cold)
    age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if not _is_number(age) or age < 0:
        raise UsageError(f"older_than is {older_than!r}: give seconds, or a timedelta, not below 0")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise UsageError(f"keep is {keep!r}: cooldown never moves the newest step, so it is at least 1")
    now = time.time() if now is None else now
    if not _is_number(now):
        raise UsageError(f"now is {now!r}: give seconds since 1970")
    steps, unreadable = _read_steps(hot_root, cold_root)
    if not steps and not unreadable:
        raise CheckpointNotFoundError(f"{hot_root.url} holds no checkpoints; give the folder that has the steps in it")
    kept = {step.name: "too young" for step in steps if now - step.created < age}
    kept.update(dict.fromkeys(_newest_names(steps, keep), "one of the newest"))
    users = {file.name: step.name for step in steps for file in step.catalog.files if is_uri(file.name)}
    users |= {base: step.name for step in steps if (base := step.catalog.published.get("base"))}
    plan = unreadable + [_plan_step(step, kept, users) for step in steps]
    return sorted(plan, key=lambda step: (step.created, natural_order(step.name)))


@dataclass(frozen=True, slots=True)
class _ReadStep:
    """A step whose catalog was read; `name`, `target` and `created` are those of its `CoolStep`."""

    name: str
    target: str
    created: float
    storage: Storage
    catalog: Catalog

    def planned(self, action: str, reason: str, sizes: Sequence[int] = ()) -> CoolStep:
        """Return the step with an action, which moves or removes files of these sizes."""
        url, created = self.storage.url, self.created
        return CoolStep(self.name, url, self.target, action, reason, created, len(sizes), sum(sizes))


def _resolve_roots(root: str, cold: str) -> tuple[Storage, Storage]:
    hot_root, cold_root = resolve(root), resolve(cold)
    if hot_root.capabilities.machine_only or cold_root.capabilities.machine_only:
        raise UsageError("cooldown moves files between storages that last: leave tier+ out of both paths")
    first, second = f"{hot_root.url}/", f"{cold_root.url}/"
    if first.startswith(second) or second.startswith(first):
        raise UsageError(f"cooldown from {hot_root.url} to {cold_root.url}: neither may lie in the other")
    return hot_root, cold_root


def _read_steps(hot_root: Storage, cold_root: Storage) -> tuple[list[_ReadStep], list[CoolStep]]:
    """Read the catalogs of all steps. The second list has the steps whose catalog cannot be read, with action "skip"."""
    steps: list[_ReadStep] = []
    unreadable: list[CoolStep] = []
    for name in sorted(hot_root.folders(), key=natural_order):
        storage, target = resolve(f"{hot_root.url}/{name}"), f"{cold_root.url}/{name}"
        try:
            catalog, _ = read_catalog(storage)
        except CheckpointNotFoundError:
            continue
        except CheckpointError as error:
            unreadable.append(CoolStep(name, storage.url, target, "skip", str(error)))
        else:
            steps.append(_ReadStep(name, target, _created(storage, catalog), storage, catalog))
    return steps, unreadable


def _created(storage: Storage, catalog: Catalog) -> float:
    created = catalog.info.get("created")
    if _is_number(created):
        return float(created)
    return storage.stat(CATALOG_NAME).modified


def _newest_names(steps: Sequence[_ReadStep], keep: int) -> set[str]:
    """Return the steps saved last and those of the highest numbers, `keep` of each; they differ if one was saved again."""
    by_number = sorted((step.name for step in steps), key=natural_order)
    created = {step.name: step.created for step in steps}
    by_time = sorted(by_number, key=lambda name: created[name])
    return {*by_time[-keep:], *by_number[-keep:]}


def _plan_step(step: _ReadStep, kept: Mapping[str, str], users: Mapping[str, str]) -> CoolStep:
    """Plan the action for one step.

    Args:
        step: the step.
        kept: reason by name of the steps to stay.
        users: a step that names a file by the file's URI, and one that builds on a version by the version's id.
    """
    files = step.catalog.files
    if step.catalog.is_foreign:
        return step.planned("keep", "it names files of another program")
    own = [files[number] for number in own_files(step.catalog)]
    if files and not own:
        moved = {name for _, name, _ in _moved_files(step.catalog)}
        if left := [size for name, size in step.storage.list() if name in moved]:
            return step.planned("finish", "its files were moved, and are still here", left)
        return step.planned("cold", "moved")
    if step.name in kept:
        return step.planned("keep", kept[step.name])
    if step.catalog.has_differences:
        return step.planned("skip", "it is kept as differences from the versions beside it")
    if user := users.get(step.catalog.published.get("id", ""), ""):
        return step.planned("skip", f"{user} builds on it")
    for file in own:
        user = users.get(file_uri(step.storage, file.name), step.name)
        if user != step.name:
            return step.planned("skip", f"{user} uses its files")
    if not all(file.block_bytes for file in own):
        return step.planned("skip", "a file has no checksums, so a copy cannot be proved")
    return step.planned("move", "older than the threshold", [file.stored_bytes for file in own])


def _moved_files(catalog: Catalog) -> list[tuple[str, str, int]]:
    """Return (cold folder, name there and in the hot folder, size) of the files that were moved."""
    moved: list[tuple[str, str, int]] = []
    for file in catalog.files:
        if is_uri(file.name):
            folder, kind, base = file.name.rsplit("/", 2)
            moved.append((folder, f"{kind}/{base}", file.stored_bytes))
    return moved


def file_uri(storage: Storage, name: str) -> str:
    """Return the URI by which catalogs of other folders name a file of `storage`."""
    return f"{storage.url}/{name}" if "://" in storage.url else f"file://{storage.url}/{name}"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def cool(step: CoolStep, progress: Callable[[int], None] = lambda _: None) -> CoolStep:
    """Carry out the action that was planned for one step.

    A move copies the files, reads the copies back, publishes a catalog that names them at the step's path, and then removes
    the hot files.

    Args:
        step: planned by `plan_cooldown`; other actions than "move" and "finish" do nothing.
        progress: function of the bytes of each piece that was moved.

    Returns:
        The step, with `done` or `error` set. Errors are not raised, so that the other steps can continue.
    """
    try:
        if step.action == "move":
            _move(resolve(step.path), resolve(step.target), progress)
        elif step.action == "finish":
            _remove_moved(resolve(step.path))
        else:
            return step
    except CheckpointError as error:
        return replace(step, error=str(error))
    return replace(step, done=True)


def _move(hot: Storage, cold: Storage, progress: Callable[[int], None]) -> None:
    cold.check_publish(CATALOG_NAME, "")
    with leased(cold) as lease:
        if lease.is_in(hot):
            raise _same_folder_error(hot, cold)
        version = hot.version(CATALOG_NAME)
        catalog, data = read_catalog(hot)
        own = own_files(catalog)
        if not own:
            return  # another cooldown moved the step after this plan was made
        _copy_and_verify(hot, cold, catalog, data, version, lease, progress)
        _publish_catalogs(hot, cold, catalog, data, version, lease)
    try:
        view = view_names(catalog.info, dict(hot.list()))
        hot.delete(view[:1])  # the index
        names = [catalog.files[number].name for number in own]
        hot.delete([*view[1:], *names, *companions(names)])
    except StorageError as error:  # the step is moved; the next run removes the files
        _log.warning("%s: moved files could not be removed: %s", hot.url, error)


def note_folder(step: Storage, place: str) -> None:
    """Note beside a step where its catalog leads, a folder or file: a step alone is not trusted to lead others there."""
    run = resolve(step.url.rpartition("/")[0])
    while True:
        version = run.version(COLD_FOLDERS)
        known = run.read(COLD_FOLDERS).decode().splitlines() if version else []
        if place in known:
            return
        try:
            run.publish(COLD_FOLDERS, "".join(f"{line}\n" for line in [*known, place]).encode(), expected=version)
        except StorageConflictError:
            continue  # another cooldown has noted its own
        return


def _copy_and_verify(
    hot: Storage,
    cold: Storage,
    catalog: Catalog,
    data: bytes,
    version: str,
    lease: Lease,
    progress: Callable[[int], None],
) -> None:
    """Copy the files of a checkpoint to the cold folder, and read them back there."""
    try:
        if cold.read(CATALOG_NAME) != data:
            raise StorageConflictError(f"{cold.url} holds another checkpoint: choose another cold folder, or remove it")
    except FileNotFoundError:
        pass
    if catalog.has_differences:
        raise UsageError(f"{hot.url} is kept as differences from the versions beside it, and cannot be moved alone")
    hot.check_publish(CATALOG_NAME, version)
    # The hot files are removed later, so their copies must be proved to be readable.
    copy_files(hot, cold, catalog, check=lease.check, progress=progress, read_back=True)


def _publish_catalogs(hot: Storage, cold: Storage, catalog: Catalog, data: bytes, version: str, lease: Lease) -> None:
    """Commit the cold checkpoint, and publish a catalog at the step's path that names the cold files."""
    lease.check()
    commit(hot, cold, catalog, data, "")
    note_folder(hot, cold.url.rpartition("/")[0])
    files = [file if is_uri(file.name) else replace(file, name=file_uri(cold, file.name)) for file in catalog.files]
    moved = encode(catalog.with_files(files, catalog.file_sums, {**catalog.info, "moved_to": cold.url}))
    try:
        hot.publish(CATALOG_NAME, moved, expected=version)
    except StorageUnavailableError:  # the answer may be lost, and the catalog there
        if hot.read(CATALOG_NAME) != moved:
            raise


def _remove_moved(hot: Storage) -> None:
    """Remove the hot files of a step that was moved, if the cold files that its catalog names are there."""
    catalog, data = read_catalog(hot)
    present = {name for name, _ in hot.list()}
    moved: dict[str, dict[str, int]] = {}
    for folder, name, size in _moved_files(catalog):
        if name in present and generation_of(name) is not None:
            moved.setdefault(folder, {})[name] = size
    hot.delete(view_names(catalog.info, present))
    for folder, sizes in moved.items():
        cold = resolve(folder)
        with contextlib.suppress(FileNotFoundError):
            if cold.read(CATALOG_NAME) == data:  # the cold copy's own catalog names no URIs
                raise _same_folder_error(hot, cold)
        cold_sizes = dict(cold.list())
        # A process that left its lease there was killed before it could remove the hot files.
        with leased(cold) if LEASE_FILE in cold_sizes else contextlib.nullcontext():
            for name, size in sizes.items():
                if cold_sizes.get(name) != size:
                    raise CorruptCheckpointError(f"{folder}/{name} is not there with its {size} bytes", file=name)
            hot.delete([*sizes, *companions(sizes)])


def _same_folder_error(hot: Storage, cold: Storage) -> UsageError:
    """Make the error for one folder under two names (links, mounts, two schemes)."""
    return UsageError(f"{hot.url} and {cold.url} are the same folder: choose another cold folder")
