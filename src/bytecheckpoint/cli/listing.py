"""`bytecheckpoint ls`: a folder of checkpoints, or one. Torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.catalogs import read_catalog
from ..errors import CheckpointError, CheckpointNotFoundError, StorageUnavailableError
from ..representation.catalog import VALUES_SLOT, Catalog
from ..representation.names import CATALOG_NAME, generation_of
from ..storage import Storage, resolve
from ..storage.parallel import at_the_same_time, within
from .show import counted, moment, print_json, print_notes, print_table, shown, size

__all__ = ["explained", "ls", "open_catalog", "summary"]

#: Seconds for the first word of a storage behind another; without it only what is near is listed.
_PATIENCE = 15.0


def open_catalog(path: str) -> tuple[Storage, Catalog]:
    """The catalog at `path`.

    Raises:
        CheckpointNotFoundError: there is none; the message says what is there instead.
    """
    storage = resolve(path)
    try:
        return storage, read_catalog(storage)[0]
    except CheckpointNotFoundError as error:
        raise explained(storage, error) from None


def explained(storage: Storage, error: CheckpointNotFoundError) -> CheckpointNotFoundError:
    """`error`, or what says more about what is there instead of a checkpoint."""
    # Where machines see different files, those of this one prove nothing.
    if not storage.capabilities.machine_only and any(generation_of(name) for name, _ in storage.list()):
        return CheckpointNotFoundError(
            f"{storage.url} holds storage files without a catalog: a save that did not commit, or a lost "
            f"{CATALOG_NAME}, which `bytecheckpoint repair` rebuilds"
        )
    return error


def ls(path: str, *, json: bool) -> int:
    """List; returns 1 when a checkpoint of a folder is damaged, or not all could be asked."""
    storage = resolve(path)
    near, unreachable = storage.nearby(), ""
    if near is not storage:
        try:
            within(_PATIENCE, storage.folders)
        except StorageUnavailableError as error:
            unreachable = f"{storage.url}: {error}"
    looked = near if unreachable else storage
    damaged = False
    try:
        catalog, _ = read_catalog(looked)
    except CheckpointNotFoundError as error:
        steps = _steps(looked)
        if not steps:
            raise StorageUnavailableError(unreachable) if unreachable else explained(storage, error) from None
        damaged = _show_steps(looked, steps, json, unreachable)
    else:
        _show_one(looked, catalog, json, unreachable)
    if unreachable and not json:
        print_notes([f"only what is near is listed, since not all can be asked: {unreachable}"])
    return int(damaged or bool(unreachable))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts step_9 before step_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name)]


def _steps(storage: Storage) -> list[dict[str, Any]]:
    """What stands in the folders of a folder: checkpoints, and files of saves that did not commit."""
    near = storage.nearby() is storage  # then that is all that is wanted of the steps, too

    def look(name: str) -> dict[str, Any] | None:
        step = resolve(f"{storage.url}/{name}")
        step = step.nearby() if near else step
        try:
            catalog, _ = read_catalog(step)
        except CheckpointNotFoundError:
            own = [nbytes for file, nbytes in step.list() if generation_of(file)]
            return {"name": name, "state": "uncommitted", "bytes": sum(own), "files": len(own)} if own else None
        except StorageUnavailableError:  # that says nothing about the step, and the others would be waited for, too
            raise
        except CheckpointError as error:
            return {"name": name, "state": "damaged", "error": str(error)}
        return {"name": name, "state": "committed", **summary(catalog)}

    names = sorted(storage.folders(), key=_natural)
    return [step for step in at_the_same_time(look, names, storage.reads, "bytecheckpoint-ls") if step is not None]


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


def _show_steps(storage: Storage, steps: list[dict[str, Any]], json: bool, unreachable: str) -> bool:
    """Whether one of them is damaged."""
    bad = any(step["state"] == "damaged" for step in steps)
    if json:
        print_json({"path": storage.url, "type": "folder", "checkpoints": steps, "unreachable": unreachable})
        return bad
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
    return bad


def _show_one(storage: Storage, catalog: Catalog, json: bool, unreachable: str) -> None:
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
        print_json({**about, "unreachable": unreachable})
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
