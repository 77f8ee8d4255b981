"""A plan with tiles is a plan without: the same boxes, each written by one holder, at the same places of its files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.planning.local_table import LocalTable, all_rows
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.tuning import tuned
from tests.support.catalogs import assert_same
from tests.support.meshes import Cut, catalog_of_plan, mesh_tables


def planned(tables: Sequence[LocalTable], *, tiled: bool, ranks: int = 8) -> SavePlan:
    with tuned(tiled_rows=0 if tiled else 1 << 40, tile_ranks=ranks):
        return plan_save(tables)


def rows_of(boxes: BoxTable) -> list[tuple[int, ...]]:
    return sorted(map(tuple, np.column_stack([boxes.tensor, boxes.offsets, boxes.lengths]).tolist()))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Cut]]:
    mesh = draw(st.sampled_from([(8,), (12, 2), (3, 8), (9, 4), (2, 8, 2), (4, 4), (8, 8), (5, 3, 2)]))
    tensors = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 8, 16, 24, 30, 64]), max_size=3)))
        free = list(range(len(mesh)))
        cuts = []
        for _ in shape:
            along = tuple(draw(st.lists(st.sampled_from(free), unique=True, max_size=2))) if free else ()
            free = [axis for axis in free if axis not in along]
            cuts.append(along)
        only = draw(st.sampled_from([-1, -1, 0])) if len(mesh) - 1 in free else -1
        key = draw(st.sampled_from([("model", ""), ("optimizer", "exp_avg")]))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
        tensors.append(Cut((key[0], f"w{number}", key[1]), dtype, shape, tuple(cuts), only, draw(st.booleans())))
    return mesh, tensors


@given(worlds(), st.sampled_from([1, 2, 8]))
def test_a_plan_with_tiles_is_one_without(world: tuple[tuple[int, ...], list[Cut]], ranks: int) -> None:
    tables = mesh_tables(*world)
    flat, plan = planned(tables, tiled=False), planned(tables, tiled=True, ranks=ranks)
    assert plan.total_bytes() == flat.total_bytes()
    catalog = catalog_of_plan(plan)
    every = catalog.expanded()
    by_name = {t.key: number for number, t in enumerate(plan.tensors)}
    numbers = np.array([by_name[t.key] for t in flat.tensors])
    assert rows_of(every.boxes) == rows_of(BoxTable(numbers[flat.boxes.tensor], flat.boxes.offsets, flat.boxes.lengths))
    # Ranks lay their files out by the shards that they write, in this order.
    for rank, table in enumerate(tables):
        tensors, boxes = all_rows([table])
        locals_ = plan.locals_of(rank)
        assert len(set(locals_.tolist())) == len(locals_)
        ends: dict[tuple[str, bool], int] = {}
        trained = {tensors[boxes.tensor[row]].state for row in locals_ if not tensors[boxes.tensor[row]].frozen}
        expected = []
        for row in locals_.tolist():
            record = tensors[boxes.tensor[row]]
            nbytes = int(np.prod(boxes.lengths[row])) * {"float32": 4, "bfloat16": 2, "int64": 8}[record.dtype]
            begin = ends.get((record.state, record.frozen), 0)
            ends[record.state, record.frozen] = begin + nbytes
            width = every.boxes.ndim - boxes.ndim
            box = (*boxes.offsets[row], *[0] * width, *boxes.lengths[row], *[1] * width)
            part = record.frozen and record.state in trained
            expected.append((record.state, part, by_name[record.key], *map(int, box), begin, nbytes))
        mine = [k for k, f in enumerate(every.files) if f.rank == rank]
        rows = np.flatnonzero(np.isin(every.file, mine))
        found = [
            (
                (f := every.files[every.file[row]]).state, "-p001." in f.name, int(every.boxes.tensor[row]),
                *every.boxes.offsets[row].tolist(), *every.boxes.lengths[row].tolist(),
                int(every.byte_offset[row]) - f.data_offset, int(every.byte_length[row]),
            )
            for row in rows.tolist()
        ]  # fmt: skip
        assert sorted(expected) == sorted(found)
    assert_same(every, decode(encode(catalog)))
    copied = [set(plan.copied_of(rank).tolist()) for rank in range(len(tables))]
    truly = [set(flat.copied_of(rank).tolist()) for rank in range(len(tables))]
    assert all(a >= b for a, b in zip(copied, truly, strict=True))


def test_fsdp_has_a_row_for_each_file() -> None:
    """And none for each of 50 x 40 boxes; the steps, which all ranks hold, are spread over them."""
    tensors = [Cut(("model", f"w{i}", ""), "float32", (80, 4), ((0,), ())) for i in range(50)]
    tensors += [Cut(("optimizer", f"w{i}", "step"), "float32", (), ()) for i in range(50)]
    plan = planned(mesh_tables((40,), tensors), tiled=True)
    assert plan.tiles is not None
    assert len(plan.boxes) == 50 and len(plan.tiles.rank) == 40 and len(plan.tiles.local) == 50
    assert np.bincount(plan.rank).max() <= 2
    assert plan.copied_of(3).tolist() == list(range(50, 100))
    data = encode(catalog_of_plan(plan))
    assert b"bytecheckpoint03" in data


@pytest.mark.parametrize("fault", ["hole", "overlap"])
def test_what_does_not_fit_is_found_row_by_row(fault: str) -> None:
    tensors = [Cut(("model", "w", ""), "float32", (64, 4), ((0,), ()))]
    tables = mesh_tables((16,), tensors)
    tables[5] = tables[6] if fault == "hole" else tables[5]
    if fault == "overlap":
        tables.append(mesh_tables((8,), tensors)[0])
    with pytest.raises(IncompatibleCheckpointError, match=r"model.*w"):
        planned(tables, tiled=True)
