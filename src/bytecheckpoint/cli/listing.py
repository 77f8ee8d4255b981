"""`bytecheckpoint ls`: a folder of checkpoints, or one. Torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.catalogs import read_catalog
from ..errors import CheckpointError, CheckpointNotFoundError
from ..representation.catalog import VALUES_SLOT, Catalog
from ..representation.names import CATALOG_NAME, generation_of
from ..storage import Storage, resolve
from ..storage.tier import TierStorage
from .show import counted, moment, print_json, print_table, shown, size

__all__ = ["ls", "open_catalog", "summary"]


def open_catalog(path: str) -> tuple[Storage, Catalog]:
    """The catalog at `path`.

    Raises:
        CheckpointNotFoundError: there is none; the message says what is there instead.
    """
    storage = resolve(path)
    try:
        return storage, read_catalog(storage)[0]
    except CheckpointNotFoundError as error:
        # A tier's own words say which files of a hot step are missing; and what is hot there is nothing to repair.
        if not isinstance(storage, TierStorage) and any(generation_of(name) for name, _ in storage.list()):
            raise CheckpointNotFoundError(
                f"{storage.url} holds storage files without a catalog: a save that did not commit, or a lost "
                f"{CATALOG_NAME}, which `bytecheckpoint repair` rebuilds"
            ) from error
        raise


def ls(path: str, *, json: bool) -> int:
    """List; returns 1 when a checkpoint of a folder is damaged."""
    storage = resolve(path)
    try:
        catalog = open_catalog(path)[1]
    except CheckpointNotFoundError as error:
        steps = _steps(storage)
        if not steps:
            raise error from None
        return _show_steps(storage, steps, json)
    _show_one(storage, catalog, json)
    return 0


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts step_9 before step_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name)]


def _steps(storage: Storage) -> list[dict[str, Any]]:
    """What stands in the folders of a folder: checkpoints, and files of saves that did not commit."""
    found = []
    for name in sorted(storage.folders(), key=_natural):
        step = resolve(f"{storage.url}/{name}")
        try:
            catalog, _ = read_catalog(step)
        except CheckpointNotFoundError:
            own = [nbytes for file, nbytes in step.list() if generation_of(file)]
            if own:
                found.append({"name": name, "state": "uncommitted", "bytes": sum(own), "files": len(own)})
            continue
        except CheckpointError as error:
            found.append({"name": name, "state": "damaged", "error": str(error)})
            continue
        found.append({"name": name, "state": "committed", **summary(catalog)})
    return found


def summary(catalog: Catalog) -> dict[str, Any]:
    """What one line about a checkpoint says."""
    info: Mapping[str, Any] = catalog.info
    values = catalog.slot.codes == catalog.slot.codes_of([VALUES_SLOT])[0]
    return {
        "created": moment(info.get("created")),
        "bytes": sum(file.size for file in catalog.files),
        "files": len(catalog.files),
        "tensors": int((~values).sum()),
        "kinds": catalog.kinds(),
        "world_size": info.get("world_size"),
        "framework": info.get("framework"),
    }


def _show_steps(storage: Storage, steps: list[dict[str, Any]], json: bool) -> int:
    damaged = any(step["state"] == "damaged" for step in steps)
    if json:
        print_json({"path": storage.url, "type": "folder", "checkpoints": steps})
        return int(damaged)
    print_table(
        ["name", "state", "created", "size>", "tensors>", "files>", "ranks>", "kinds"],
        [
            [
                step["name"],
                step["state"],
                step.get("created", ""),
                size(step["bytes"]) if "bytes" in step else "",
                str(step.get("tensors", "")),
                str(step.get("files", "")),
                str(step.get("world_size", "")),
                ", ".join(step.get("kinds", ())) or shown(step.get("error", "")),
            ]
            for step in steps
        ],
    )
    return int(damaged)


def _show_one(storage: Storage, catalog: Catalog, json: bool) -> None:
    states: list[dict[str, Any]] = []
    values = catalog.slot.codes == catalog.slot.codes_of([VALUES_SLOT])[0]
    kind_of_row = catalog.kind.codes[catalog.boxes.tensor]
    for kind in catalog.kinds():
        chosen = catalog.of_kind(kind)
        rows = kind_of_row == catalog.kind.codes_of([kind])[0]
        files = [catalog.files[i] for i in np.unique(catalog.file[rows]).tolist()]
        states.append(
            {
                "kind": kind,
                "tensors": int((~values[chosen]).sum()),
                "bytes": int(catalog.byte_length[rows].sum()),
                "files": len(files),
                "ranks": len({file.rank for file in files}),
                "plain_values": bool(values[chosen].any()),
            }
        )
    about = {"path": storage.url, "type": "checkpoint", "state": "committed", **summary(catalog), "states": states}
    if json:
        print_json(about)
        return
    print(shown(storage.url))
    print(
        shown(
            f"saved {about['created']} by {counted(about['world_size'], 'rank')} ({about['framework']}), "
            f"{size(about['bytes'])} in {counted(about['files'], 'file')}"
        )
    )
    print_table(
        ["kind", "tensors>", "size>", "files>", "ranks>", "plain values"],
        [
            [k["kind"], str(k["tensors"]), size(k["bytes"]), str(k["files"]), str(k["ranks"]), _yes(k["plain_values"])]
            for k in states
        ],
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
