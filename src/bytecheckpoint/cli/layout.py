"""Run `bytecheckpoint layout`: check a layout, alone or on the headers of checkpoints; show those that are built in."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bytecheckpoint.cli.format import plural, print_json, print_table, printable
from bytecheckpoint.engine.catalogs import open_catalog
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.layouts.axes import affine, dims_of
from bytecheckpoint.layouts.binding import Binding, BoundSide, bind
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import builtin_names, find, find_or_read
from bytecheckpoint.layouts.matching import Side
from bytecheckpoint.planning.part_space import stored_side
from bytecheckpoint.representation.similar_names import SimilarNames
from bytecheckpoint.storage import Storage, resolve

__all__ = ["check", "explain", "show"]

_CONFIG = "config.json"


def show(name: str | None, *, json: bool) -> int:
    """Print the text of a layout, or the list of those that are built in."""
    if name is not None:
        layout = find_or_read(name)
        print(Path(layout.file).read_text("utf-8"), end="")
        return 0
    layouts = [find(name) for name in builtin_names()]
    rows = [{"name": x.name, "left": x.left, "right": x.right, "for": x.fits} for x in layouts]
    if json:
        print_json({"layouts": rows})
    else:
        print_table(["layout", "sides", "for"], [[x.name, f"{x.left} <-> {x.right}", x.fits] for x in layouts])
    return 0


def check(
    name: str, *, left: str | None, right: str | None, states: tuple[str, str], settings: Sequence[str], json: bool
) -> int:
    """Check a layout, and that it fits the tensors of checkpoints, of which only headers are read."""
    layout = find_or_read(name)
    rules = len(layout.parsed)
    about: dict[str, object] = {
        "ok": True,
        "layout": layout.name,
        "left": layout.left,
        "right": layout.right,
        "rules": rules,
    }
    lines = [f"{layout.label}: {plural(rules, 'rule')}, fine"]
    if left is not None or right is not None:
        config: dict[str, object] = {}
        sides: list[Side | None] = []
        for path, naming, state in zip((left, right), layout.sides, states, strict=True):
            if path is None:
                sides.append(None)
                continue
            stored = _Stored(path, state, naming)
            sides.append(stored.side)
            config |= stored.config
        config |= dict(map(_setting, settings))
        if layout.fits and not layout.is_for(config):
            lines.append(f"the layout is for {layout.fits}")
        binding = bind(layout, sides[0], sides[1], config)
        about |= _about(binding, sides)
        for naming, bound, given in zip(layout.sides, (binding.left, binding.right), sides, strict=True):
            lines.append(
                f"{naming}: {plural(len(bound.names), 'tensor')}{', as they would be written' if given is None else ''}"
            )
            lines += [f"  not used: {fqn}" for fqn in _unused(bound)]
        lines += [f"not decided, for want of a configuration: {text}" for text in binding.undecided]
    if json:
        print_json(about)
    else:
        print("\n".join(map(printable, lines)))
    return 0


def explain(name: str, path: str, tensor: str, *, state: str, settings: Sequence[str], json: bool) -> int:
    """Print of which parts a tensor consists, and where the bytes of each part lie. Only headers are read."""
    layout = find_or_read(name)
    stored = _Stored(path, state)
    number = stored_side(layout, stored.side.names)
    if number is None:
        raise UsageError(f"{layout.label}: no name of {stored.url} fits a rule")
    config = flattened(layout.sides[number], stored.plain_config) | dict(map(_setting, settings))
    sides: list[Side | None] = [None, None]
    sides[number] = stored.side
    bound = bind(layout, sides[0], sides[1], config)
    ends = (bound.left, bound.right) if number == 0 else (bound.right, bound.left)
    shown = ends[1] if tensor in ends[1].names else ends[0]
    if tensor not in shown.names:
        near = SimilarNames([*ends[1].names, *ends[0].names]).of(tensor)
        raise UsageError(f"neither side has a tensor {tensor}{f': did you mean {near[0]}?' if near else ''}")
    chosen = list(shown.names).index(tensor)
    places = np.flatnonzero(shown.places.tensor == chosen).tolist()
    parts = [found for place in places if (found := _part_of(bound, shown, place, ends[0], stored))]
    shape = [size for size in shown.shapes[chosen].tolist() if size >= 0]
    if json:
        print_json({"tensor": tensor, "shape": shape, "parts": parts})
        return 0
    print(printable(f"{tensor} {shape}"))
    for part in parts:
        where = ", ".join(part["coordinates"])
        print(printable(f"  {part['part']} {part['sizes']} at ({where}){part['rule'] and ', ' + part['rule']}"))
        for source in part["stored"]:
            print(printable(f"    {source['tensor']} {source['shape']}"))
            for row in source["rows"]:
                print(printable(f"      {row['file']} from byte {row['offset']}: {row['bytes']} bytes"))
    return 0


class _Stored:
    """The tensors of a checkpoint's state.

    Attributes:
        side: their names and shapes.
        url: URL of the checkpoint.
        plain_config: configuration of a folder of Hugging Face, {} if there is none.
        config: configuration under the name of its side.
    """

    def __init__(self, path: str, state: str, naming: str = "") -> None:
        storage, reader = open_catalog(resolve(path))  # of this package or of another program
        reader.close()
        self._catalog, self.url = reader.catalog, storage.url
        keys = [(i, key.fqn) for i, key in enumerate(self._catalog.keys()) if key.state == state and not key.slot]
        if not keys:
            raise UsageError(f"{storage.url} has no tensors in the state '{state}'")
        self._numbers = [i for i, _ in keys]
        self.side = Side([fqn for _, fqn in keys], [self._catalog.shape(i) for i in self._numbers])
        self.plain_config = _read_config(storage)
        self.config = flattened(naming, self.plain_config)

    def rows(self, tensor: int) -> list[dict[str, object]]:
        """Return where the bytes of a tensor lie."""
        catalog = self._catalog
        rows = np.flatnonzero(catalog.boxes.tensor == self._numbers[tensor]).tolist()
        return [
            {
                "file": catalog.files[int(catalog.file[row])].name,
                "offset": int(catalog.byte_offset[row]),
                "bytes": int(catalog.byte_length[row]),
            }
            for row in rows
        ]


def _part_of(bound: Binding, shown: BoundSide, place: int, own: BoundSide, stored: _Stored) -> dict[str, Any]:
    """Return a part of a tensor: its dims, its coordinates in the tensor, the stored tensors with it; {} if it is empty."""
    places = shown.places
    low, part = places.lowerings[int(places.lowering[place])], int(places.part[place])
    if not all(low.sizes[dim] for axis in low.axes for dim in dims_of(axis)):
        return {}
    coordinates = []
    for axis in low.axes:
        base, weights = affine(axis, low.sizes)
        terms = [f"{weight} {dim}" if weight > 1 else dim for dim, weight in weights.items()]
        coordinates.append(" + ".join([*([str(base)] if base or not terms else []), *terms]))
    fixed = dict(zip(low.dims, places.fixed[place].tolist(), strict=False))
    known = {str(dim) for axis in low.axes for dim in dims_of(axis)}
    sizes = ", ".join(f"{dim} = {fixed[dim]}" if dim not in known else f"{dim} of {low.sizes[dim]}" for dim in low.dims)
    tensors = np.unique(own.places.tensor[(own.places.part == part) & ~own.places.copy]).tolist() if part >= 0 else []
    return {
        "part": "padding" if part < 0 else " ".join(bound.group(part).part.labels) or "whole",
        "rule": "" if part < 0 else str(bound.group(part).place),
        "sizes": f"({sizes})",
        "coordinates": coordinates,
        "stored": [
            {"tensor": own.names[t], "shape": [n for n in own.shapes[t].tolist() if n >= 0], "rows": stored.rows(t)}
            for t in tensors
        ],
    }


def _about(binding: Binding, sides: Sequence[Side | None]) -> dict[str, object]:
    result: dict[str, object] = {"parts": len(binding.sizes), "undecided": list(binding.undecided), "tensors": {}}
    tensors: dict[str, object] = {}
    for naming, bound, given in zip(binding.layout.sides, (binding.left, binding.right), sides, strict=True):
        shapes = [[size for size in shape if size >= 0] for shape in bound.shapes.tolist()]
        tensors[naming] = {
            "derived": given is None,
            "shapes": dict(zip(bound.names, shapes, strict=True)),
            "unused": _unused(bound),
        }
    return result | {"tensors": tensors}


def _unused(bound: BoundSide) -> list[str]:
    return [bound.names[number] for number in bound.unbound.tolist()]


def _read_config(storage: Storage) -> dict[str, object]:
    """Return the configuration of a folder of Hugging Face, {} if there is none."""
    try:
        config = json_text.loads(storage.read(_CONFIG))
    except (CheckpointError, FileNotFoundError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _setting(text: str) -> tuple[str, object]:
    key, equal, value = text.partition("=")
    if not equal or "." not in key:
        raise UsageError(f"--set {text}: write SIDE.KEY=VALUE, as --set megatron.num_query_groups=8")
    try:
        return key, json_text.loads(value)
    except ValueError:
        return key, value
