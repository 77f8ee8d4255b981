"""Run `bytecheckpoint inspect`: show the content of a checkpoint, tensor by tensor. Torch is imported for --values only."""

from __future__ import annotations

import fnmatch
import json as json_text
from collections.abc import Sequence
from typing import Any

import numpy as np

from bytecheckpoint.cli.format import as_json, print_json, print_table, printable, size_text, typed_value
from bytecheckpoint.cli.ls import open_catalog, origin, summary, tensor_bytes
from bytecheckpoint.engine.catalogs import check_rank
from bytecheckpoint.errors import UsageError, shown
from bytecheckpoint.layouts.layout import find_all
from bytecheckpoint.planning.chained_layouts import lay_out_through
from bytecheckpoint.planning.part_space import layout_of_model
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.names import VALUES_NAME

__all__ = ["inspect"]


def inspect(
    path: str,
    patterns: Sequence[str],
    *,
    values: bool,
    boxes: bool,
    rank: int | None,
    layout: str | None,
    json: bool,
) -> int:
    """Print the tensors, the layout and the writers of a checkpoint."""
    if boxes and layout is not None:
        raise UsageError("--boxes shows stored boxes, which have the names of the checkpoint: leave --layout out")
    storage, catalog = open_catalog(path)
    check_rank(storage.url, catalog, rank)
    writers = _writers(catalog)
    if layout is not None:
        layouts = layout_of_model(catalog) if layout == "auto" else find_all(layout)
        catalog = lay_out_through(catalog, layouts).catalog
    tensors = _tensors(catalog, patterns, boxes)
    info = catalog.info
    about = {
        "path": storage.url,
        **summary(catalog.summary()),
        "layout": info.get("layout"),
        "versions": info.get("versions"),
        "metadata": info.get("metadata"),
    }
    plain = _values(path, patterns, rank, layout) if values else []
    if json:
        about |= {"tensors": tensors, "writers": writers}
        if values:
            about["values"] = [
                {"key": key, **(typed_value(value) if not error else {"error": error})} for key, value, error in plain
            ]
        print_json(about)
        return 0
    print(printable(storage.url))
    print(printable(origin(about)))
    for name in ("layout", "versions", "metadata"):
        if about[name]:
            print(printable(f"{name}: {_in_words(about[name])}"))
    print()
    _print_tensors(tensors)
    if boxes:
        print()
        _print_boxes(tensors)
    if plain:
        print()
        print_table(["value", "key"], [[error or _truncate(shown(value)), key] for key, value, error in plain])
    print()
    print_table(
        ["rank>", "files>", "wrote>"], [[str(w["rank"]), str(w["files"]), size_text(w["bytes"])] for w in writers]
    )
    return 0


def _in_words(facts: Any) -> str:
    """Format the facts of a save on one line: the layout by state, other mappings as they are."""
    states = facts.get("kinds") if isinstance(facts, dict) else None
    if isinstance(states, dict) and all(isinstance(about, dict) for about in states.values()):
        return "; ".join(f"{state} {_layout(about)}" for state, about in states.items())
    if isinstance(facts, dict) and all(isinstance(value, str | int | float) for value in facts.values()):
        return ", ".join(f"{name} {value}" for name, value in facts.items())
    return json_text.dumps(as_json(facts), sort_keys=True)


def _layout(about: dict[str, Any]) -> str:
    layouts = about.get("layouts")
    tensors = ", ".join(f"{count} {words}" for words, count in layouts.items()) if isinstance(layouts, dict) else ""
    return f"({about.get('type', '')})" + (f" {tensors}" if tensors else "")


def _truncate(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _tensors(catalog: Catalog, patterns: Sequence[str], boxes: bool) -> list[dict[str, Any]]:
    count = catalog.count
    row_tensor = catalog.boxes.tensor
    number = np.bincount(row_tensor, minlength=count)
    first = np.cumsum(number) - number
    nbytes = tensor_bytes(catalog)
    writer = np.array([file.rank for file in catalog.files], np.int64)[catalog.file]
    pairs = np.unique(np.stack([row_tensor, writer], axis=1), axis=0)
    ranks = np.split(pairs[:, 1], np.searchsorted(pairs[:, 0], np.arange(1, count)))
    names: dict[tuple[str, str], list[str]] = {}
    for state, aliases in catalog.aliases.items():
        for alias, fqn in aliases.items():
            names.setdefault((state, fqn), []).append(alias)
    found = []
    for i, key in enumerate(catalog.keys()):
        if key.slot == VALUES_SLOT or not _matches(str(key), patterns):
            continue
        owner = int(catalog.owner[i])
        tensor = {
            "key": str(key),
            "state": key.state,
            "fqn": key.fqn,
            "slot": key.slot,
            "dtype": catalog.dtype[i],
            "shape": list(catalog.shape(i)),
            "bytes": int(nbytes[i]),
            "requires_grad": bool(catalog.requires_grad[i]),
            "device": catalog.device[i],
            "owner": None if owner == SHARED else owner,
            "aliases": names.get((key.state, key.fqn), []),
            "boxes": int(number[i]),
            "written_by": ranks[i].tolist(),
        }
        if boxes:
            tensor["stored"] = _stored(catalog, i, range(int(first[i]), int(first[i] + number[i])))
        found.append(tensor)
    return found


def _stored(catalog: Catalog, tensor: int, rows: range) -> list[dict[str, Any]]:
    dims = int(catalog.ndims[tensor])
    return [
        {
            "offsets": catalog.boxes.offsets[row, :dims].tolist(),
            "lengths": catalog.boxes.lengths[row, :dims].tolist(),
            "file": catalog.files[int(catalog.file[row])].name,
            "byte_offset": int(catalog.byte_offset[row]),
            "byte_length": int(catalog.byte_length[row]),
        }
        for row in rows
    ]


def _print_tensors(tensors: Sequence[dict[str, Any]]) -> None:
    print_table(
        ["dtype", "shape", "size>", "boxes>", "written by", "key"],
        [
            [
                t["dtype"],
                str(t["shape"]),
                size_text(t["bytes"]),
                str(t["boxes"]),
                _ranges(t["written_by"]),
                t["key"]
                + (f" (of rank {t['owner']})" if t["owner"] is not None else "")
                + (f" = {', '.join(t['aliases'])}" if t["aliases"] else ""),
            ]
            for t in tensors
        ],
    )


def _print_boxes(tensors: Sequence[dict[str, Any]]) -> None:
    rows = []
    for tensor in tensors:
        for box in tensor["stored"]:
            spans = ", ".join(f"{o}:{o + n}" for o, n in zip(box["offsets"], box["lengths"], strict=True))
            place = f"{box['byte_offset']}+{box['byte_length']}"
            rows.append([f"[{spans}]", place, box["file"], tensor["key"]])
    print_table(["box", "bytes", "file", "key"], rows)


def _ranges(ranks: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts[:4])
    return text + (", ..." if len(parts) > 4 else "")


def _writers(catalog: Catalog) -> list[dict[str, Any]]:
    total: dict[int, list[int]] = {}
    for file in catalog.files:
        if file.name.startswith(VALUES_NAME):
            continue
        entry = total.setdefault(file.rank, [0, 0])
        entry[0] += 1
        entry[1] += file.stored_bytes
    return [{"rank": rank, "files": files, "bytes": nbytes} for rank, (files, nbytes) in sorted(total.items())]


def _values(path: str, patterns: Sequence[str], rank: int | None, layout: str | None) -> list[tuple[str, Any, str]]:
    """Return (key, value, error) of each plain value."""
    from bytecheckpoint.errors import IncompatibleCheckpointError
    from bytecheckpoint.opening import open as open_checkpoint
    from bytecheckpoint.opening.view import CheckpointView

    found: list[tuple[str, Any, str]] = []
    with open_checkpoint(path, rank=rank, layout=layout) as checkpoint:
        view = CheckpointView.of(checkpoint)
        for key in checkpoint:
            if view.stored_under(key) is not None or not _matches(key, patterns):
                continue
            try:
                found.append((key, checkpoint[key], ""))
            except IncompatibleCheckpointError as error:
                found.append((key, None, str(error)))
    return found
