"""Any layout to any layout, judged by coordinates: ranks are threads, boxes are drawn at random."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.layouts import Leaf, coded, grid_boxes
from tests.support.modes import MODES
from tests.support.settings import using
from tests.support.variants import crossed

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int16]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    ndim = draw(st.integers(0, 4))
    return tuple(draw(st.integers(0 if i == 0 else 1, 9)) for i in range(ndim))


@st.composite
def layouts(draw: st.DrawFn, tensors: list[tuple[int, ...]], world: int) -> list[dict[str, list[Any]]]:
    """For each rank, the boxes that it holds of each tensor: a random grid, dealt out at random, with replicas."""
    held: list[dict[str, list[Any]]] = [{} for _ in range(world)]
    for number, shape in enumerate(tensors):
        cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
        for box in grid_boxes(shape, cuts):
            if 0 in box[1] and 0 not in shape:
                continue
            holders = draw(st.sets(st.integers(0, world - 1), min_size=1))
            for rank in holders:
                held[rank].setdefault(f"t{number}", []).append(box)
    return held


@st.composite
def cases(draw: st.DrawFn) -> Any:
    tensors = draw(st.lists(shapes(), min_size=1, max_size=5))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in tensors]
    before, after = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return (
        tensors,
        dtypes,
        draw(layouts(tensors, before)),
        draw(layouts(tensors, after)),
        draw(st.booleans()),
        draw(st.sampled_from(list(MODES))),
    )


def leaves(held: dict[str, list[Any]], tensors: list[tuple[int, ...]]) -> dict[str, Leaf]:
    return {name: Leaf(tensors[int(name[1:])], boxes) for name, boxes in held.items()}


@given(cases())
def test_any_layout_loads_at_any_other(case: Any) -> None:
    tensors, dtypes, before, after, strided, mode = case
    full = {f"t{i}": coded(s, d, i) for i, (s, d) in enumerate(zip(tensors, dtypes, strict=True))}
    bytecheckpoint.configure(writer="thread")
    with tempfile.TemporaryDirectory() as folder:

        def save(collective: Collective) -> None:
            state = {n: leaf.fill(full[n], strided) for n, leaf in leaves(before[collective.rank], tensors).items()}
            bytecheckpoint.save(f"{folder}/step", {"model": state}, timeout=20, **MODES[mode]).result(60)

        def load(collective: Collective) -> None:
            wanted = leaves(after[collective.rank], tensors)
            # An empty dict would ask for everything.
            state: dict[str, Any] = {"nothing": 0} if not wanted else {}
            for name, leaf in wanted.items():
                state[name] = leaf.fill(torch.zeros_like(full[name]), strided)
            bytecheckpoint.load(f"{folder}/step", {"model": state}, timeout=20)
            for name, leaf in wanted.items():
                leaf.check(full[name])

        ThreadWorld(len(before)).run(save, timeout=60)
        ThreadWorld(len(after)).run(load, timeout=60)


def big_state(rank: int, world: int, columns: bool) -> tuple[dict[str, Leaf], dict[str, torch.Tensor]]:
    """Tensors of several chunks, cut by rows or by columns."""
    full = {"a": coded((1000, 4096), torch.float32), "b": coded((3, 5_000_001), torch.int16, 1)}
    state = {}
    for name, tensor in full.items():
        size = tensor.shape[1] if columns else tensor.shape[0]
        low, high = size * rank // world, size * (rank + 1) // world
        box = ((0, low), (tensor.shape[0], high - low)) if columns else ((low, 0), (high - low, tensor.shape[1]))
        state[name] = Leaf(tuple(tensor.shape), [box])
    return state, full


@pytest.mark.parametrize(
    ("columns", "overlap"), crossed([(False, True), (True, False), (True, True)], [True, False], every=2)
)
def test_tensors_of_many_chunks(tmp_path: Any, columns: tuple[bool, bool], overlap: bool) -> None:
    columns_before, columns_after = columns

    def save(collective: Collective) -> None:
        state, full = big_state(collective.rank, 2, columns_before)
        bytecheckpoint.save(
            tmp_path / "s", {"model": {n: x.fill(full[n], False) for n, x in state.items()}}, timeout=20
        )

    def load(collective: Collective) -> bytecheckpoint.LoadReport:
        state, full = big_state(collective.rank, 3, columns_after)
        wanted = {n: x.fill(torch.zeros_like(full[n]), False) for n, x in state.items()}
        report = bytecheckpoint.load(tmp_path / "s", {"model": wanted}, overlap_loading=overlap, timeout=20)
        for name, leaf in wanted.items():
            leaf.check(full[name])
        return report

    ThreadWorld(2).run(save, timeout=60)
    reports = ThreadWorld(3).run(load, timeout=60)
    total = 1000 * 4096 * 4 + 3 * 5_000_001 * 2
    assert not overlap or sum(r.bytes_read for r in reports) <= 1.05 * total


def test_a_pool_smaller_than_the_state(tmp_path: Any) -> None:
    with using(staging_bytes=4 << 20, chunk_bytes=1 << 20):
        state = {
            "w": coded((3000, 1111), torch.float32),
            "v": coded((5,), torch.float64),
            "z": coded((700, 999), torch.bfloat16).t(),
        }
        for writer in ("thread", "process"):
            bytecheckpoint.configure(writer=writer)
            saved = {"model": dict(state)}
            ThreadWorld(1).run(
                lambda _, saved=saved: bytecheckpoint.save(tmp_path / "s", saved, async_checkpoint=True).result(60)
            )
            destination = {name: torch.zeros_like(t) for name, t in state.items()}
            bytecheckpoint.load(tmp_path / "s", {"model": destination})
            assert all(torch.equal(destination[n], state[n]) for n in state)
