"""Run `bytecheckpoint ls`: list the checkpoints of a folder, or the states of one checkpoint. Torch is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from bytecheckpoint.cli.format import (
    format_time,
    plural,
    print_errors,
    print_json,
    print_notes,
    print_table,
    printable,
    progress_bar,
    size_text,
)
from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.engine.catalogs import read_catalog, read_outline, read_summary
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageUnavailableError
from bytecheckpoint.formats.detect import find_instead
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, CatalogSummary
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import CATALOG_NAME, VALUES_NAME, generation_of, natural_order
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tiers.storage import hot_part
from bytecheckpoint.tuning import tuning

__all__ = ["explain_missing_catalog", "ls", "open_catalog", "origin", "summary", "tensor_bytes"]

#: Catalogs to read at the same time from a storage far away: small files, each of which it answers late.
_READS = 16


def open_catalog(path: str) -> tuple[Storage, Catalog]:
    """Open the catalog at `path`, or that of a checkpoint of another program, about which notes are printed.

    Raises:
        CheckpointNotFoundError: there is no catalog; the message says what is there instead.
    """
    storage = resolve(path)
    try:
        return storage, read_catalog(storage)[0]
    except CheckpointNotFoundError as error:
        return _open_foreign(storage, error)


def _open_foreign(storage: Storage, error: CheckpointNotFoundError) -> tuple[Storage, Catalog]:
    """Open the catalog of another program's checkpoint. Raises `error`, or a better one, if there is none."""
    try:
        foreign = find_instead(storage, error)
    except CheckpointNotFoundError as reason:
        raise explain_missing_catalog(storage, reason) from None
    print_notes(foreign.notes())
    return foreign, read_catalog(foreign)[0]


def explain_missing_catalog(storage: Storage, error: CheckpointNotFoundError) -> CheckpointNotFoundError:
    """Return an error about the files that `storage` holds instead of a checkpoint, or `error` if none are known."""
    # Where machines see different files, the files of this machine prove nothing.
    if not storage.capabilities.machine_only and any(generation_of(name) for name, _ in storage.list()):
        return CheckpointNotFoundError(
            f"{storage.url} holds storage files without a catalog: a save that did not commit, or a lost "
            f"{CATALOG_NAME}, which `bytecheckpoint repair` rebuilds"
        )
    return error


def ls(path: str, *, json: bool) -> int:
    """List checkpoints. Return 1 if one is damaged or a storage did not answer."""
    storage = resolve(path)
    hot_tier, unreachable = hot_part(storage), ""
    if hot_tier is not storage:
        try:  # without an answer only this machine's hot tier is listed
            call_with_timeout(tuning().tier_load_timeout, storage.folders)
        except StorageUnavailableError as error:
            unreachable = f"{storage.url}: {error}"
    listed = hot_tier if unreachable else storage
    damaged = False
    try:
        catalog = read_outline(listed)
    except CheckpointNotFoundError as error:
        steps = _steps(listed)
        if steps:
            damaged = _show_steps(listed, steps, json, unreachable)
        elif unreachable:
            raise StorageUnavailableError(unreachable) from None
        else:
            _show_one(*_open_foreign(storage, error), json, unreachable)
    else:
        if catalog.is_foreign:  # its files hold several states, so the rows count
            catalog = read_catalog(listed)[0]
        _show_one(listed, catalog, json, unreachable)
    if unreachable and not json:
        print_notes([f"only this machine's hot tier is listed, as the durable storage does not answer: {unreachable}"])
    return int(damaged or bool(unreachable))


def _steps(storage: Storage) -> list[dict[str, Any]]:
    """Describe the folders of a folder: checkpoints, and the files of saves that did not commit."""
    only_first_tier = hot_part(storage) is storage

    def describe(name: str) -> dict[str, Any] | None:
        step = resolve(f"{storage.url}/{name}")
        step = hot_part(step) if only_first_tier else step
        try:
            found = read_summary(step)
        except CheckpointNotFoundError:
            sizes = [nbytes for file, nbytes in step.list() if generation_of(file)]
            return {"name": name, "status": "uncommitted", "bytes": sum(sizes), "files": len(sizes)} if sizes else None
        except StorageUnavailableError:  # the step may be sound, and the other steps would time out too
            raise
        except CheckpointError as error:
            return {"name": name, "status": "damaged", "error": str(error)}
        return {"name": name, "status": "committed", **summary(found)}

    names = sorted(storage.folders(), key=natural_order)
    with progress_bar("reading checkpoints", unit="checkpoints") as progress:
        reads = storage.capabilities.parallel_reads
        threads = reads if storage.capabilities.page_cache else max(reads, _READS)
        found = parallel_map(describe, names, threads, "bytecheckpoint-ls", progress)
    return [step for step in found if step is not None]


def summary(found: CatalogSummary) -> dict[str, Any]:
    """Return the facts of a checkpoint that fit on one line."""
    files = [file for file in found.files if not file.name.startswith(VALUES_NAME)]  # those lie in memory
    return {
        "created": format_time(found.info.get("created")),
        "format": found.info.get("format"),
        "bytes": sum(file.stored_bytes for file in files),
        "files": len(files),
        "tensors": found.tensors,
        "state_names": found.states,
        "world_size": found.info.get("world_size"),
        "framework": found.info.get("framework"),
    }


def origin(about: dict[str, Any]) -> str:
    """Return who wrote a checkpoint, and when, in words."""
    if about["format"]:
        return f"{about['format']}, of another program" + (f", adopted {about['created']}" if about["created"] else "")
    return f"saved {about['created']} by {plural(about['world_size'], 'rank')} ({about['framework']})"


def _show_steps(storage: Storage, steps: list[dict[str, Any]], json: bool, unreachable: str) -> bool:
    """Print the steps. Return whether one of them is damaged."""
    bad = any(step["status"] == "damaged" for step in steps)
    if json:
        print_json({"path": storage.url, "type": "folder", "checkpoints": steps, "unreachable": unreachable})
        return bad
    print_table(
        ["name", "status", "created", "size>", "tensors>", "files>", "ranks>", "states"],
        [
            [
                step["name"],
                step["status"],
                step.get("created", ""),
                size_text(step["bytes"]) if "bytes" in step else "",
                str(step.get("tensors", "")),
                str(step.get("files", "")),
                str(step.get("world_size", "")),
                ", ".join(step.get("state_names", ())),
            ]
            for step in steps
        ],
    )
    print_errors({step["name"]: step["error"] for step in steps if "error" in step})
    return bad


def tensor_bytes(catalog: Catalog) -> Int64s:
    """Return the number of bytes of the elements of each tensor, int64 [t]."""
    element = np.array([itemsize(name) for name in catalog.dtype.values], np.int64)[catalog.dtype.codes]
    nbytes: Int64s = catalog.shapes.prod(axis=1) * element
    return nbytes


def _show_one(storage: Storage, catalog: Catalog, json: bool, unreachable: str) -> None:
    states: list[dict[str, Any]] = []
    values = catalog.slot.codes == catalog.slot.codes_of([VALUES_SLOT])[0]
    nbytes = tensor_bytes(catalog)
    for state in catalog.states():
        chosen = catalog.of_state(state)
        files = [file for file in catalog.files if file.state == state]  # of a large catalog the rows are not here
        if catalog.is_foreign:
            of_state = catalog.file[np.isin(catalog.boxes.tensor, chosen[~values[chosen]])]
            files = [catalog.files[number] for number in np.unique(of_state).tolist()]
        states.append(
            {
                "state": state,
                "tensors": int((~values[chosen]).sum()),
                "bytes": int(nbytes[chosen].sum()),
                "files": len(files),
                "ranks": len({file.rank for file in files}),
                "plain_values": bool(values[chosen].any()),
            }
        )
    about = {
        "path": storage.url,
        "type": "checkpoint",
        "status": "committed",
        **summary(catalog.summary()),
        "states": states,
    }
    if json:
        print_json({**about, "unreachable": unreachable})
        return
    print(printable(storage.url))
    print(printable(f"{origin(about)}, {size_text(about['bytes'])} in {plural(about['files'], 'file')}"))
    print_table(
        ["state", "tensors>", "size>", "files>", "ranks>", "plain values"],
        [
            [
                k["state"],
                str(k["tensors"]),
                size_text(k["bytes"]),
                str(k["files"]),
                str(k["ranks"]),
                "yes" if k["plain_values"] else "no",
            ]
            for k in states
        ],
    )
