"""Cooldown: older steps move to a cheaper storage, and their paths go on working (ByteCheckpoint, section 5.1).

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

from bytecheckpoint.engine.catalogs import read_catalog
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
from bytecheckpoint.representation.names import CATALOG_NAME, generation_of, is_uri, natural_order
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.threads import parallel_map
from bytecheckpoint.tiers.copying import commit, copy_if_missing, is_sound, own_files
from bytecheckpoint.tiers.lease import LEASE_FILE, Lease, leased

__all__ = ["CoolStep", "cool", "plan_cooldown"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, slots=True)
class CoolStep:
    """One step of a run, with the action that cooldown plans or has carried out.

    Attributes:
        name: of the step's folder.
        path: where the step is loaded from, before and after the move.
        target: the cold folder of the step.
        action: "move"; "finish" (moved, but some hot files are left); "keep" (too young, or one of the newest); "cold"
            (moved already); "skip" (cannot be moved).
        reason: why this action.
        created: when the step was saved, seconds since 1970.
        files: number of files that the action moves or removes.
        nbytes: their size.
        done: whether the action was carried out.
        error: why it failed.
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


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _uri(storage: Storage, name: str) -> str:
    """Return the URI by which catalogs of other folders name a file of `storage`."""
    return f"{storage.url}/{name}" if "://" in storage.url else f"file://{storage.url}/{name}"


def _created(storage: Storage, catalog: Catalog) -> float:
    created = catalog.info.get("created")
    if _is_number(created):
        return float(created)
    return storage.stat(CATALOG_NAME).modified


def _names_before_move(catalog: Catalog) -> list[str]:
    """Return the names that the moved files of a catalog had before."""
    return ["/".join(file.name.rsplit("/", 2)[1:]) for file in catalog.files if is_uri(file.name)]


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
    hot_root, cold_root = resolve(root), resolve(cold)
    if hot_root.capabilities.machine_only or cold_root.capabilities.machine_only:
        raise UsageError("cooldown moves files between storages that last: leave tier+ out of both paths")
    first, second = f"{hot_root.url}/", f"{cold_root.url}/"
    if first.startswith(second) or second.startswith(first):
        raise UsageError(f"cooldown from {hot_root.url} to {cold_root.url}: neither may lie in the other")
    age = older_than.total_seconds() if isinstance(older_than, datetime.timedelta) else older_than
    if not _is_number(age) or age < 0:
        raise UsageError(f"older_than is {older_than!r}: give seconds, or a timedelta, not below 0")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise UsageError(f"keep is {keep!r}: cooldown never moves the newest step, so it is at least 1")
    now = time.time() if now is None else now
    if not _is_number(now):
        raise UsageError(f"now is {now!r}: give seconds since 1970")
    found: list[tuple[Storage, str, Catalog]] = []
    steps: list[CoolStep] = []
    for name in sorted(hot_root.folders(), key=natural_order):
        step = resolve(f"{hot_root.url}/{name}")
        target = f"{cold_root.url}/{name}"
        try:
            found.append((step, name, read_catalog(step)[0]))
        except CheckpointNotFoundError:
            continue
        except CheckpointError as error:
            steps.append(CoolStep(name, step.url, target, "skip", str(error)))
    if not found and not steps:
        raise CheckpointNotFoundError(f"{hot_root.url} holds no checkpoints; give the folder that has the steps in it")
    created = {name: _created(step, catalog) for step, name, catalog in found}
    by_age = sorted(created, key=lambda name: (created[name], natural_order(name)))
    newest = {*by_age[-keep:], *sorted(created, key=natural_order)[-keep:]}
    uses = {file.name: name for _, name, catalog in found for file in catalog.files if is_uri(file.name)}

    def decide(step: Storage, name: str, catalog: Catalog) -> tuple[str, str, list[int]]:
        """Return the action, its reason, and the sizes of the files that it moves or removes."""
        own = [catalog.files[number] for number in own_files(catalog)]
        if not own and catalog.files:
            moved = set(_names_before_move(catalog))
            left = [size for file, size in step.list() if file in moved]
            return ("finish", "its files were moved, and are still here", left) if left else ("cold", "moved", [])
        if name in newest:
            return "keep", "one of the newest", []
        if now - created[name] < age:
            return "keep", "too young", []
        user = next((user for file in own if (user := uses.get(_uri(step, file.name), name)) != name), None)
        if user is not None:
            return "skip", f"{user} uses its files", []
        if not all(file.block_bytes for file in own):
            return "skip", "a file has no checksums, so a copy cannot be proved", []
        return "move", "older than the threshold", [file.size for file in own]

    for step, name, catalog in found:
        action, reason, sizes = decide(step, name, catalog)
        steps.append(
            CoolStep(name, step.url, f"{cold_root.url}/{name}", action, reason, created[name], len(sizes), sum(sizes))
        )
    return sorted(steps, key=lambda step: (step.created, natural_order(step.name)))


def cool(step: CoolStep, progress: Callable[[int], None] = lambda _: None) -> CoolStep:
    """Carry out the action that was planned for one step.

    A move copies the files, reads the copies back, publishes a catalog that names them at the step's path, and then removes
    the hot files.

    Args:
        step: planned by `plan_cooldown`; other actions than "move" and "finish" do nothing.
        progress: called with the bytes of each file that was moved.

    Returns:
        The step, with `done` or `error` set. Errors are not raised, so that the other steps can go on.
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
        hot.delete([catalog.files[number].name for number in own])
    except StorageError as error:  # the step is moved; the next run removes the files
        _log.warning("%s: moved files could not be removed: %s", hot.url, error)


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
    hot.check_publish(CATALOG_NAME, version)
    present = dict(cold.list())

    def copy_file(number: int) -> None:
        file = catalog.files[number]
        copied = copy_if_missing(hot, cold, catalog, number, present.get(file.name), lease.check)
        # The hot file is removed later, so its copy must be proved to be readable.
        if copied and not is_sound(cold, catalog, number):
            raise CorruptCheckpointError(
                f"{cold.url}/{file.name} does not read back as it was written; check that storage", file=file.name
            )
        progress(file.size)

    try:
        parallel_map(copy_file, own_files(catalog), settings().write_threads, "bytecheckpoint-cool")
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{hot.url} lacks {error.filename}, so it cannot be moved") from error


def _publish_catalogs(hot: Storage, cold: Storage, catalog: Catalog, data: bytes, version: str, lease: Lease) -> None:
    """Commit the cold checkpoint, and publish a catalog at the step's path that names the cold files."""
    lease.check()
    commit(cold, catalog, data, "")
    files = [file if is_uri(file.name) else replace(file, name=_uri(cold, file.name)) for file in catalog.files]
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
    for file in catalog.files:
        if is_uri(file.name):
            folder, kind, base = file.name.rsplit("/", 2)
            name = f"{kind}/{base}"
            if name in present and generation_of(name) is not None:
                moved.setdefault(folder, {})[name] = file.size
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
            hot.delete(sizes)


def _same_folder_error(hot: Storage, cold: Storage) -> UsageError:
    """Make the error for one folder under two names (links, mounts, two schemes)."""
    return UsageError(f"{hot.url} and {cold.url} are the same folder: choose another cold folder")
