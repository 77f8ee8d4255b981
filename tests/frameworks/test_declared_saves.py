"""Shards that all ranks list: they must make whole tensors, or the save is refused before it writes anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.layouts import Declared
from tests.support.settings import using

SHAPE = (4, 4)
WHOLE = torch.arange(16.0).reshape(SHAPE)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with using(writer="thread"):
        yield


def rows(first: int, stop: int, *, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = SHAPE) -> Any:
    return shape, (first, 0), WHOLE[first:stop].to(dtype)


def run(first: int, stop: int) -> Any:
    return SHAPE, first, WHOLE.flatten()[first:stop].clone()


#: The shards that each of two ranks lists, and the error of the save.
REFUSED: dict[str, tuple[list[list[Any]], str]] = {
    "hole": ([[rows(0, 2)], [rows(2, 3)]], "leave a hole: 12 elements for a tensor of 16; 1 tensors are affected$"),
    "overlap": ([[rows(0, 3)], [rows(2, 4)]], "overlap without being equal: 20 elements"),
    "both": (
        [[rows(0, 2)], [rows(1, 3)]],
        r"overlap without being equal and leave a hole elsewhere.*\(\(3, 0\), \(1, 4\)\)",
    ),
    "both on one rank": ([[rows(0, 2), rows(1, 3)], []], "overlap without being equal and leave a hole elsewhere"),
    "both of runs": ([[run(0, 9)], [run(7, 14)]], "overlap without being equal and leave a hole elsewhere"),
    "dtype": ([[rows(0, 2)], [rows(2, 4, dtype=torch.float64)]], "one tensor has one dtype"),
    "shape": ([[rows(0, 2)], [rows(2, 4, shape=(5, 4))]], "has global shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shards_with_holes_or_overlaps_are_refused_on_every_rank(case: str, tmp_path: Path) -> None:
    listed, match = REFUSED[case]

    def save(collective: Collective) -> None:
        states = {"model": {"w": Declared(*listed[collective.rank]), "other": torch.ones(2)}}
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match=match):
            bytecheckpoint.save(tmp_path / "step", states, timeout=20)

    ThreadWorld(2).run(save, timeout=60)
    assert [p for p in (tmp_path / "step").rglob("*") if p.is_file()] == []


def test_ranks_that_were_given_other_states_are_named(tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        states = {"model": {"w": Declared(rows(0, 2))}} if collective.rank == 0 else {"extra_states": {"step": 1}}
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="without anything of 'model': rank 1 "):
            bytecheckpoint.save(tmp_path / "step", states, timeout=20)

    ThreadWorld(2).run(save, timeout=60)


@pytest.mark.parametrize(
    "listed",
    [
        [[rows(0, 4)], [], []],
        [[], [rows(0, 1), rows(3, 4)], [rows(1, 3)]],
        [[run(0, 5), run(9, 16)], [run(5, 9)], []],
        [[rows(0, 2)], [rows(0, 2)], [run(8, 16)]],
    ],
)
def test_ranks_may_hold_no_shards_or_equal_ones(listed: list[list[Any]], tmp_path: Path) -> None:
    def save(collective: Collective) -> None:
        bytecheckpoint.save(tmp_path / "step", {"model": {"w": Declared(*listed[collective.rank])}}, timeout=20)

    def load(collective: Collective) -> torch.Tensor:
        destination = torch.zeros(SHAPE)
        parts = [(SHAPE, 5, destination.view(-1)[5:16])] if collective.rank == 1 else []
        if collective.rank == 2:
            parts = [(SHAPE, (0, 1), destination[:, 1:2])]
        bytecheckpoint.load(tmp_path / "step", {"model": {"w": Declared(*parts)}}, timeout=20)
        return destination

    ThreadWorld(3).run(save, timeout=60)
    nothing, tail, column = ThreadWorld(3).run(load, timeout=60)
    assert not nothing.any()
    assert tail.flatten().tolist() == [0.0] * 5 + list(map(float, range(5, 16)))
    assert torch.equal(column[:, 1], WHOLE[:, 1]) and int(column.count_nonzero()) == 4
