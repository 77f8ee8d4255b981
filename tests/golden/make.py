"""Writes the golden checkpoint of this version: `python -m tests.golden.make`. Run once per format version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.publishing import Publisher
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.names import CATALOG_NAME, METRICS_FOLDER, is_uri
from bytecheckpoint.storage import COLD_FOLDERS, resolve
from bytecheckpoint.tools import adopt
from bytecheckpoint.tuning import tuned
from tests.support.layouts import Box, Leaf, coded, grid_boxes
from tests.support.pretrained import Own, view_of_own
from tests.support.settings import using
from tests.support.streams import Loader

FOLDER = Path(__file__).parent / "v1"
STREAMS = Path(__file__).parent / "v1-streams"  # added later to the format, beside what was there
GROUPS = Path(__file__).parent / "v2-groups"  # the same as v1, with a catalog in groups, as large ones are
TILES = Path(__file__).parent / "v3-tiles"  # a world of eight ranks, whose boxes a catalog of version 3 lists together
FOREIGN = Path(__file__).parent / "v4-foreign"  # files of other programs, which lie beside a catalog of version 4
VERSIONS = Path(__file__).parent / "v5-differences"  # a run of two versions, the second of which is kept as differences
FINGERPRINTS = Path(__file__).parent / "v1-fingerprints"  # the same as v1, with fingerprints in the catalog
ARRAYS = Path(__file__).parent / "v1-arrays"  # plain values in version 2: large numpy arrays are tensors
NAMES = Path(__file__).parent / "v6-names"  # files with the names of another program
WORLD = 3
TILE_WORLD = 8
SHAPES = {"cut": ((7, 5), torch.float32), "cut3d": ((3, 4, 2), torch.bfloat16), "whole": ((6,), torch.int64)}
EVERY_DTYPE = [
    torch.float64, torch.float16, torch.complex64, torch.int8, torch.uint16, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
VALUES = {
    "none": None,
    "big": 2**200,
    "nan": float("nan"),
    "bytes": b"\x00\xff",
    "tuple": (1, (2.5, "x")),
    3: {"set": {1, 2}},
    "dtype": torch.bfloat16,
    "complex": 1 + 2j,
}


def full(name: str) -> torch.Tensor:
    """The whole tensor behind a name."""
    shape, dtype = SHAPES[name]
    return coded(shape, dtype, sorted(SHAPES).index(name))


def published(step: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a version: some elements change, most, or none."""
    found = {name: full(name).clone() for name in SHAPES}
    if step > 1:
        found["cut"][::3, 1] += 1
        found["cut3d"] *= 3
    return found


def version(rank: int, step: int) -> dict[str, Any]:
    """Return the part of a version that one of three ranks holds."""
    model: dict[str, Any] = {"whole": published(step)["whole"]}
    for name, cuts in (("cut", [[2, 5], [3]]), ("cut3d", [[1], [2], []])):
        boxes = [b for i, b in enumerate(grid_boxes(SHAPES[name][0], cuts)) if i % WORLD == rank]
        model[name] = Leaf(SHAPES[name][0], boxes).fill(published(step)[name], False)
    return model


def odd(dtype: torch.dtype) -> torch.Tensor:
    """Five elements of any dtype."""
    return torch.arange(5).to(dtype)


def states(rank: int) -> dict[str, Any]:
    """Return the states of rank `rank` of three."""
    model: dict[str, Any] = {"whole": full("whole")}
    for name, cuts in (("cut", [[2, 5], [3]]), ("cut3d", [[1], [2], []])):
        boxes = [b for i, b in enumerate(grid_boxes(SHAPES[name][0], cuts)) if i % WORLD == rank]
        model[name] = Leaf(SHAPES[name][0], boxes).fill(full(name), False)
    model.update({str(dtype): odd(dtype) for dtype in EVERY_DTYPE})
    layer = torch.nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(coded((3, 3), torch.float32))
        layer.bias.copy_(coded((3,), torch.float32))
    tied = torch.nn.ModuleDict({"a": layer, "b": layer})
    optimizer = torch.optim.AdamW(tied.parameters(), lr=0.125)
    for parameter in tied.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "tied": tied,
        "optimizer": optimizer,
        "extra_states": {"values": VALUES, "rank": rank, "noise": torch.full((4,), rank)},
    }


def tiled_shape(name: str) -> tuple[int, ...]:
    """Return the shape of a tensor of the checkpoint with tiles."""
    return {"rows": (16, 3), "columns": (5, 8), "both": (8, 6), "uneven": (11,), "whole": (3, 2), "step": ()}[name]


def tiled_box(name: str, rank: int) -> Box:
    """Return the box of a tensor that a rank holds: ranks lie in a mesh of 4 x 2."""
    shape, f, t = tiled_shape(name), rank // 2, rank % 2
    return {
        "rows": ((4 * f + 2 * t, 0), (2, 3)),
        "columns": ((0, 4 * t), (5, 4)),
        "both": ((2 * f, 3 * t), (2, 3)),
        "uneven": ((3 * f,), (3 if f < 3 else 2,)),
    }.get(name, ((0,) * len(shape), shape))


TILED = ("rows", "columns", "both", "uneven", "whole", "step")


def tiled_states(rank: int, *, fresh: bool = False) -> dict[str, Any]:
    """Return the states of a rank of eight."""
    model = {}
    for number, name in enumerate(TILED):
        full = coded(tiled_shape(name), torch.float32, number)
        model[name] = Leaf(tiled_shape(name), [tiled_box(name, rank)]).fill(full * (not fresh), False)
    return {"model": model, "extra_states": {} if fresh else {"rank": rank}}


def arrays(rank: int) -> dict[str, Any]:
    """Return states with numpy arrays, of which those of 16 bytes and more become tensors."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    flags = np.arange(16) % 3 == 0
    return {
        "extra_states": {"rows": rows, "of rank": [rows.astype(np.int32) + rank], "small": rows[0, :3], "flags": flags}
    }


def foreign_state() -> dict[str, Any]:
    """Return what the file of torch.save in the checkpoint with files of other programs holds."""
    rows = coded((40, 30), torch.float32)
    model = {"turned": rows.t(), "rows": rows[::3, 2:], "odd": torch.arange(5, dtype=torch.uint8)}
    return {"model": model, "step": 3, "lr": 0.125}


def make_foreign(folder: Path) -> None:
    """Adopt a file of torch.save beside the catalog. Names in the folder stand for the URIs, so that it can be moved."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        torch.save(foreign_state(), f"{place}/old.pt", _use_new_zipfile_serialization=False)
        adopt(f"{place}/old.pt", str(folder))
        (folder.parent / COLD_FOLDERS).unlink()
        catalog, _ = read_catalog(resolve(folder))
        files = [
            replace(file, name=file.name.rpartition("/")[2] if is_uri(file.name) else file.name)
            for file in catalog.files
        ]
        shutil.copy(f"{place}/old.pt", folder)
    (folder / CATALOG_NAME).write_bytes(encode(replace(catalog, files=tuple(files))))


def make_names(folder: Path) -> None:
    """Save a fused tensor, whose file holds the two parts under the names that a layout leads to."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        view = view_of_own(Path(place), turned=False)
        bytecheckpoint.save(folder, {"model": Own(turned=False)}, view=view, metadata={"golden": 6})
    shutil.rmtree(folder / METRICS_FOLDER, ignore_errors=True)


def main() -> None:
    """Replace the golden checkpoints of the present version."""

    def save(collective: Collective) -> None:
        bytecheckpoint.save(FOLDER, states(collective.rank), metadata={"golden": 1})

    def save_streams(collective: Collective) -> None:
        bytecheckpoint.save(STREAMS, {"dataloader": Loader(5, collective.rank, WORLD, fed=3)}, metadata={"golden": 1})

    def save_arrays(collective: Collective) -> None:
        bytecheckpoint.save(ARRAYS, arrays(collective.rank), metadata={"golden": 1})

    def save_groups(collective: Collective) -> None:
        bytecheckpoint.save(GROUPS, states(collective.rank), metadata={"golden": 2})

    def save_tiles(collective: Collective) -> None:
        bytecheckpoint.save(TILES, tiled_states(collective.rank), metadata={"golden": 3})

    def save_fingerprints(collective: Collective) -> None:
        bytecheckpoint.save(FINGERPRINTS, states(collective.rank), metadata={"golden": 1})

    write_anew(VERSIONS, publish_versions)
    (VERSIONS / ".bytecheckpoint-manager").unlink()
    shutil.rmtree(VERSIONS / METRICS_FOLDER, ignore_errors=True)
    with using(fingerprint=True):
        write_anew(FINGERPRINTS, save_fingerprints)
    with tuned(tiled_rows=0, tile_ranks=2, catalog_group_bytes=1):
        write_anew(TILES, save_tiles, TILE_WORLD)
    with tuned(catalog_group_bytes=1):
        write_anew(GROUPS, save_groups)
    make_foreign(FOREIGN)
    make_names(NAMES)
    write_anew(FOLDER, save)
    write_anew(STREAMS, save_streams)
    with tuned(array_tensor_bytes=16):
        write_anew(ARRAYS, save_arrays)


def publish_versions(collective: Collective) -> None:
    """Publish two versions."""
    with Publisher(VERSIONS) as publisher:
        for step in (1, 2):
            publisher.publish({"model": version(collective.rank, step)}, step, metadata={"golden": 5}).result()


def write_anew(folder: Path, save: Callable[[Collective], None], world: int = WORLD) -> None:
    """Replace a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    ThreadWorld(world).run(save)


if __name__ == "__main__":
    main()
