"""Catalogs whose boxes are listed together: what they say, in whole and in parts, and what a reader refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import assert_same, resealed
from tests.support.meshes import Cut, catalog_of_plan, mesh_tables


def tiled(fsdp: int = 8, tp: int = 2) -> Catalog:
    tensors = [Cut(("model", f"w{i}", ""), "float32", (16 * fsdp, 4 * tp), ((0,), (1,))) for i in range(4)]
    tensors += [Cut(("optimizer", f"w{i}", "exp_avg"), "bfloat16", (16 * fsdp,), ((0,),)) for i in range(2)]
    tensors += [Cut(("optimizer", f"w{i}", "step"), "float32", (), ()) for i in range(2)]
    with tuned(tiled_rows=0):
        return catalog_of_plan(plan_save(mesh_tables((fsdp, tp), tensors)))


def groups_of(data: bytes) -> CatalogGroups:
    """The groups of a catalog's file, loaded."""

    def read_into(offset: int, memory: memoryview) -> None:
        memory[:] = data[offset : offset + len(memory)]

    groups = CatalogGroups.open(len(data), read_into)
    assert groups is not None
    for number in np.union1d(groups.group, groups.head_groups).tolist():
        groups.load(number, read_into)
    return groups


def test_the_file_says_what_the_catalog_says() -> None:
    catalog = tiled()
    assert catalog.tilings is not None and len(catalog.tilings.file) == 16
    for size in (1, 300, 1 << 22):
        with tuned(catalog_group_bytes=size):
            data = encode(catalog)
        assert_same(decode(data), catalog.expanded())


@given(st.data())
def test_parts_hold_what_a_load_wants(data: st.DataObject) -> None:
    catalog = tiled()
    with tuned(catalog_group_bytes=data.draw(st.sampled_from([1, 300, 1000]))):
        groups = groups_of(encode(catalog))
    every = catalog.expanded()
    tensor = data.draw(st.integers(0, catalog.count - 1))
    shape = catalog.shapes[tensor]
    begin = [data.draw(st.integers(0, extent - 1)) for extent in shape.tolist()]
    length = [data.draw(st.integers(1, extent - low)) for extent, low in zip(shape.tolist(), begin, strict=True)]
    wanted = BoxTable.build([tensor], [begin], [length])
    found = np.union1d(groups.group[intersect(groups.hulls, wanted).left], groups.head_groups)
    part = groups.catalog(found, wanted)

    def near(catalog: Catalog) -> list[tuple[int, ...]]:
        rows = intersect(catalog.boxes, wanted).left
        boxes = catalog.boxes.take(rows)
        columns = (
            boxes.offsets,
            boxes.lengths,
            catalog.file[rows],
            catalog.byte_offset[rows],
            catalog.byte_length[rows],
        )
        return sorted(map(tuple, np.column_stack(columns).tolist()))

    assert near(part) == near(every)
    whole = groups.catalog(found)
    assert part.files_read is not None and whole.files_read is not None
    np.testing.assert_array_equal(part.files_read, whole.files_read)
    rows = np.flatnonzero(whole.files_read[every.file])
    assert len(whole.boxes) == len(rows)
    for file in np.flatnonzero(part.files_read).tolist():
        np.testing.assert_array_equal(part.sums(file), every.sums(file))


VIEW = """
with rows as (from '{path}'),
     boxes as (from rows where tiling >= 0 and file < 0),
     tiles as (from rows where tiling >= 0 and file >= 0)
select kind, fqn, slot, offsets, lengths, file, byte_offset, byte_length from rows where tiling < 0
union all
select b.kind, b.fqn, b.slot,
       [b.offsets[i] + case when b.axes[i] < 0 then 0 else t.place[b.axes[i] + 1] * b.lengths[i] end
        for i in range(1, len(b.offsets) + 1)],
       b.lengths, t.file, t.byte_offset + b.byte_offset, b.byte_length
from boxes b join tiles t using (tiling)
"""


def test_duckdb_reads_it_by_the_documented_view(tmp_path: Path) -> None:
    import duckdb

    path = tmp_path / "metadata.parquet"
    catalog = tiled()
    path.write_bytes(encode(catalog))
    every = catalog.expanded()
    expected = sorted(
        (*every.key(t), offsets[: (n := every.ndims[t])], lengths[:n], *place)
        for t, offsets, lengths, *place in zip(
            every.boxes.tensor.tolist(), every.boxes.offsets.tolist(), every.boxes.lengths.tolist(),
            every.file.tolist(), every.byte_offset.tolist(), every.byte_length.tolist(), strict=True,
        )
    )  # fmt: skip
    assert sorted(duckdb.sql(VIEW.format(path=path)).fetchall()) == expected
    documented = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    assert " ".join(VIEW.format(path="metadata.parquet").split()) in " ".join(documented.split())


def changed(**columns: Callable[[Any], Any]) -> Catalog:
    """A catalog with one entry of a column of its tilings changed."""
    catalog = tiled()
    tilings = catalog.tilings
    assert tilings is not None
    new = {name: change(getattr(tilings, name)) for name, change in columns.items()}
    return replace(catalog, tilings=replace(tilings, **new))


def at(place: Any, value: int) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column = column.copy()
        column[place] = value
        return column

    return change


def first(**change: int) -> Callable[[BoxTable], BoxTable]:
    def of(boxes: BoxTable) -> BoxTable:
        offsets, lengths = boxes.offsets.copy(), boxes.lengths.copy()
        offsets[0, 0] += change.get("offset", 0)
        lengths[0, 0] += change.get("length", 0)
        return BoxTable(boxes.tensor, offsets, lengths)

    return of


WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "a place before the first": {"places": at((3, 0), -1)},
    "a place behind the last": {"places": at((3, 0), 8)},
    "a place without end": {"places": at((3, 0), (1 << 62) + 1)},
    "a product without end": {"places": at((3, 0), 1 << 52)},
    "an axis that is none": {"axes": at((0, 0), 63)},
    "an axis below none": {"axes": at((0, 0), -2)},
    "a box outside": {"boxes": first(offset=8)},
    "a negative box": {"boxes": first(offset=-1)},
    "a larger box": {"boxes": first(length=1)},
    "a hole in a tile": {"box_offset": at(1, 4)},
    "a box of other bytes": {"box_bytes": at(0, 12)},
    "bytes without end": {"box_bytes": at(0, 1 << 61)},
    "a tile of other bytes": {"byte_length": at(2, 8)},
    "a tile of no tiling": {"of_tile": at(0, 99)},
    "a tile of another tiling": {"of_tile": at(0, 1)},
    "tilings with a gap": {"tiling": lambda column: column + 1},
    "a tile of no file": {"file": at(0, 99)},
    "a tile of another file": {"file": at(0, 3)},
    "a tile at another byte": {"byte_offset": lambda column: at(0, int(column[0]) + 4)(column)},
    "a tile before the file": {"byte_offset": at(0, -8)},
}


@pytest.mark.parametrize("what", WRONG)
def test_tilings_that_contradict_themselves_are_refused(what: str) -> None:
    wrong = changed(**WRONG[what])
    assert catalog_problem(wrong) is not None
    try:
        data = encode(wrong, check=False)
    except (IndexError, ValueError, OverflowError):
        return  # it cannot even be written
    with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
        decode(data)


def test_tiles_that_stand_for_rows_without_number_are_refused() -> None:
    """Empty boxes take no bytes: a file of some ten thousand can list any number of them, at any number of places."""
    catalog = tiled()
    tilings = catalog.tilings
    assert tilings is not None
    boxes, tiles, new = 20_000, 2_000, int(tilings.tiling[-1]) + 1
    nothing = BoxTable(np.full(boxes, tilings.boxes.tensor[-1]), *np.zeros((2, boxes, tilings.boxes.ndim), np.int64))

    def longer(column: Any, count: int, value: Any = 0) -> Any:
        return np.concatenate([column, np.full((count, *column.shape[1:]), value, column.dtype)])

    wrong = replace(
        tilings,
        tiling=longer(tilings.tiling, boxes, new),
        boxes=BoxTable.concat([tilings.boxes, nothing]),
        axes=longer(tilings.axes, boxes, -1),
        box_offset=longer(tilings.box_offset, boxes),
        box_bytes=longer(tilings.box_bytes, boxes),
        of_tile=longer(tilings.of_tile, tiles, new),
        file=longer(tilings.file, tiles),
        byte_offset=longer(tilings.byte_offset, tiles, catalog.files[0].data_offset),
        byte_length=longer(tilings.byte_length, tiles),
        places=longer(tilings.places, tiles),
    )
    data = encode(replace(catalog, tilings=wrong))
    with pytest.raises(CorruptCheckpointError, match=r"it stands for 40\d{6} rows"):
        decode(data)


def test_every_changed_byte_is_noticed() -> None:
    data = encode(tiled())
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError):
            decode(bytes(damaged))


def test_a_file_of_version_1_that_calls_itself_3() -> None:
    data = resealed(encode(tiled().expanded()), b"bytecheckpoint03")
    with pytest.raises(CorruptCheckpointError):
        decode(data)
