"""Removal in two phases: a checkpoint that other machines may be reading loses its catalog first, and its files later.

A tombstone beside the files names them. A process that finds an old tombstone ends the removal, so a kill between the
phases leaves nothing behind for ever.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Collection

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.engine.catalogs import read_outline
from bytecheckpoint.engine.file_set import other_folders
from bytecheckpoint.engine.view_files import VIEW_INDEX, VIEW_KEY, view_names
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.representation.names import CATALOG_NAME, METRICS_FOLDER, companions, is_uri
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.storage.posix.storage import PosixStorage

__all__ = [
    "TOMBSTONE", "finish_retirement", "is_folder", "is_link", "links_in", "remove_if_empty", "retire", "tombstones",
    "users_in",
]  # fmt: skip

#: Names of tombstones.
TOMBSTONE = re.compile(r"\.bytecheckpoint-retired-[0-9a-f]{16}\.json")


def retire(storage: Storage, created: float) -> str:
    """Begin the removal of a checkpoint: from now on nobody finds it. Readers that have its catalog read on.

    Args:
        storage: storage of the checkpoint, no tier.
        created: time of the save. A later save to the same path stays.

    Returns:
        "", or why it stays: it has files in other folders, is elsewhere itself, or was replaced.

    Raises:
        CheckpointNotFoundError: there is none.
        StorageError: the storage fails.
    """
    if is_link(storage):
        return "it is a symbolic link"
    version = storage.version(CATALOG_NAME)
    catalog = read_outline(storage)
    if elsewhere := other_folders(catalog, own=True):
        return f"it names files in {', '.join(sorted(elsewhere))}"
    stone = f".bytecheckpoint-retired-{secrets.token_hex(8)}.json"
    files = [file.name for file in catalog.files if not is_uri(file.name)]
    view = {key: value for key, value in catalog.info.items() if key == VIEW_KEY}
    storage.publish(stone, json.dumps({"files": files, "info": view}).encode())
    if float(catalog.info.get("created", 0.0)) != created or storage.version(CATALOG_NAME) != version:
        storage.delete([stone])
        return "it was saved anew meanwhile"
    storage.delete([CATALOG_NAME])
    storage.delete([VIEW_INDEX] if view else ())
    return ""


def is_link(storage: Storage) -> bool:
    """Return whether a folder is a symbolic link: what it leads to belongs to somebody else."""
    folder = resolve(storage.url)
    if not isinstance(folder, PosixStorage):
        return False
    return call_with_timeout(call_timeout(folder), lambda: os.path.islink(folder.root))


def is_folder(storage: Storage) -> bool:
    """Return whether a folder is there for sure, although nothing may be in it: not all storages have folders."""
    folder = resolve(storage.url)
    return isinstance(folder, PosixStorage) and call_with_timeout(
        call_timeout(folder), lambda: os.path.isdir(folder.root)
    )


def links_in(run: Storage) -> dict[str, str]:
    """Find the symbolic links in a run's folder that lead to its own checkpoints, or into them.

    Returns:
        The address of one of these links by the name of the checkpoint's folder.
    """
    folder = resolve(run.url)
    if not isinstance(folder, PosixStorage):
        return {}

    def look() -> dict[str, str]:
        root = os.path.realpath(folder.root)
        links = {entry.name: os.path.realpath(entry.path) for entry in os.scandir(root) if entry.is_symlink()}
        return {
            os.path.relpath(target, root).split(os.sep)[0]: f"{run.url}/{name}"
            for name, target in links.items()
            if target.startswith(os.path.join(root, ""))
        }

    return call_with_timeout(call_timeout(folder), look)


def tombstones(storage: Storage) -> list[str]:
    """Return the names of the tombstones in a folder."""
    return [name for name, _ in storage.list() if TOMBSTONE.fullmatch(name)]


def finish_retirement(storage: Storage, stone: str, *, dry_run: bool = False) -> dict[str, int]:
    """End the removal that a tombstone stands for.

    A catalog that names the files all the same (`repair` made it) keeps them.

    Args:
        storage: storage of the checkpoint.
        stone: name of the tombstone.
        dry_run: only look.

    Returns:
        The files that are gone, or would go, with their sizes.

    Raises:
        StorageError: the storage fails.
    """
    try:
        found = json.loads(storage.read(stone))
        named, present = {*found["files"]}, dict(storage.list())
        named |= {*view_names(found.get("info", {}), present), *companions(named)}
    except FileNotFoundError:  # somebody else was quicker
        return {}
    try:
        catalog = read_outline(storage)
        kept = {file.name for file in catalog.files}
        named -= {*view_names(catalog.info, present), *kept, *companions(kept)}
    except CheckpointNotFoundError:
        named |= {name for name in present if name.startswith(f"{METRICS_FOLDER}/")}  # its own
    except CheckpointError:  # damaged, or of a newer version: nobody knows what it names
        return {}
    gone = {name: size for name, size in present.items() if name in named}
    if not dry_run:
        storage.delete([*gone])
        storage.delete([stone])
        remove_if_empty(storage)
    return gone


def remove_if_empty(storage: Storage, *, dry_run: bool = False) -> bool:
    """Remove the folder of a step if nothing is in it but empty folders.

    Args:
        storage: the folder.
        dry_run: only look.

    Returns:
        Whether it was there, and is gone or would go.
    """
    run_url, _, name = storage.url.rpartition("/")
    if not run_url or run_url.endswith(":/") or storage.list():
        return False
    run, folders, absent = resolve(run_url), storage.folders(), ".bytecheckpoint-absent"
    if name not in run.folders() or any(resolve(f"{storage.url}/{folder}").folders() for folder in folders):
        return False
    if not dry_run:
        storage.delete([f"{folder}/{absent}" for folder in folders])  # this also removes an empty folder
        run.delete([f"{name}/{absent}"])
    return True


def users_in(run: Storage, other_folders_of: Callable[[str], Collection[str]]) -> dict[str, str]:
    """Find the checkpoints of a run that need files in other folders.

    Args:
        run: its folder.
        other_folders_of: returns the other folders that hold files of a checkpoint, given the name of its folder.

    Returns:
        The URL of one of these checkpoints for each of the other folders.
    """
    names = run.folders()
    found = parallel_map(other_folders_of, names, run.capabilities.parallel_reads, "bytecheckpoint-steps")
    return {folder: f"{run.url}/{name}" for name, folders in zip(names, found, strict=True) for folder in folders}
