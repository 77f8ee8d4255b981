"""Removal in two phases: a checkpoint that other machines may be reading loses its catalog first, and its files later.

A tombstone beside the files names them. Whoever finds one that is old enough ends the removal, so a kill between the
phases leaves nothing behind for ever.
"""

from __future__ import annotations

import json
import re
import secrets

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.file_set import other_folders
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage, resolve

__all__ = ["TOMBSTONE", "finish_retirement", "retire", "tombstones"]

#: Names of tombstones.
TOMBSTONE = re.compile(r"\.bytecheckpoint-retired-[0-9a-f]{16}\.json")


def retire(storage: Storage, created: float) -> str:
    """Begin the removal of a checkpoint: from now on nobody finds it. Readers that have its catalog read on.

    Args:
        storage: of the checkpoint; no tier.
        created: when it was saved. What was saved there since stays.

    Returns:
        "", or why it stays: it has files in other folders, or was replaced.

    Raises:
        CheckpointNotFoundError: there is none.
        StorageError: the storage fails.
    """
    version = storage.version(CATALOG_NAME)
    catalog, _ = read_catalog(storage)
    if elsewhere := other_folders(catalog):
        return f"it names files in {', '.join(sorted(elsewhere))}"
    stone = f".bytecheckpoint-retired-{secrets.token_hex(8)}.json"
    storage.publish(stone, json.dumps({"files": [file.name for file in catalog.files]}).encode())
    if float(catalog.info.get("created", 0.0)) != created or storage.version(CATALOG_NAME) != version:
        storage.delete([stone])
        return "it was saved anew meanwhile"
    storage.delete([CATALOG_NAME])
    return ""


def tombstones(storage: Storage) -> list[str]:
    """Return the names of the tombstones in a folder."""
    return [name for name, _ in storage.list() if TOMBSTONE.fullmatch(name)]


def finish_retirement(storage: Storage, stone: str) -> dict[str, int]:
    """End the removal that a tombstone stands for.

    A catalog that names the files all the same (`repair` made it) keeps them.

    Args:
        storage: of the checkpoint.
        stone: name of the tombstone.

    Returns:
        The files that are gone, with their sizes.

    Raises:
        StorageError: the storage fails.
    """
    try:
        named = {*json.loads(storage.read(stone))["files"]}
    except FileNotFoundError:  # somebody else was quicker
        return {}
    try:
        named -= {file.name for file in read_catalog(storage)[0].files}
    except CheckpointNotFoundError:
        pass
    except CheckpointError:  # damaged, or of a newer version: nobody knows what it names
        return {}
    gone = {name: size for name, size in storage.list() if name in named}
    storage.delete([*gone])
    storage.delete([stone])
    run, _, name = storage.url.rpartition("/")
    if run and not run.endswith(":/"):
        resolve(run).delete([f"{name}/{stone}"])  # the folder above also removes a folder that is empty now
    return gone
