"""Run `bytecheckpoint layout`: check a layout, alone or on the headers of checkpoints; show those that are built in."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path

from bytecheckpoint.cli.format import plural, print_json, print_table, printable
from bytecheckpoint.engine.catalogs import open_catalog
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.layouts.binding import Binding, BoundSide, bind
from bytecheckpoint.layouts.config import flattened
from bytecheckpoint.layouts.layout import builtin_names, find, find_or_read
from bytecheckpoint.layouts.matching import Side
from bytecheckpoint.storage import Storage, resolve

__all__ = ["check", "show"]

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
            storage, reader = open_catalog(resolve(path))  # of this package or of another program
            reader.close()
            catalog = reader.catalog
            keys = [(i, key.fqn) for i, key in enumerate(catalog.keys()) if key.state == state and not key.slot]
            if not keys:
                raise UsageError(f"{storage.url} has no tensors in the state '{state}'")
            sides.append(Side([fqn for _, fqn in keys], [catalog.shape(i) for i, _ in keys]))
            config |= flattened(naming, _read_config(storage))
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
