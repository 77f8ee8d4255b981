"""Tensors of which a rank holds very many pieces in one memory: saved, loaded and compared as any other tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.tuning import tuned
from tests.support.layouts import Declared, bits, coded
from tests.support.modes import MODES
from tests.support.saves import check_folder
from tests.support.settings import using
from tests.support.variants import crossed

SHAPE = (53, 31, 7)
COUNT = 53 * 31 * 7


class Held(NamedTuple):
    """The flat ranges of a tensor that one rank holds, and their memory."""

    value: Declared
    memory: torch.Tensor
    table: Any  # first element in the tensor, place in the memory, number of elements


def held(rank: int, world: int, dtype: torch.dtype, seed: int, *, filled: bool, table: bool) -> Held:
    """Cut the tensor anywhere; ranks hold some pieces alone and some alike, in memory in any order, with gaps."""
    random = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate([[0, COUNT], random.integers(0, COUNT, 400), np.arange(5000, 5040)]))
    first, count = cuts[:-1], np.diff(cuts)
    holder = random.integers(0, world + 1, len(first))
    mine = np.flatnonzero((holder == rank) | (holder == world))
    order = random.permutation(mine)
    places = np.zeros(len(first), np.int64)
    places[order] = np.cumsum(count[order] + 1) - count[order]
    memory = torch.zeros(int((places + count)[mine].max()) + 3, dtype=dtype)
    whole = coded((COUNT,), dtype)
    rows = np.stack([first, places, count], axis=1)[mine]
    if filled:
        for at, place, length in rows.tolist():
            memory[place : place + length] = whole[at : at + length]
    if table:
        return Held(Declared((SHAPE, rows, memory)), memory, rows)
    return Held(Declared(*((SHAPE, at, memory[p : p + n]) for at, p, n in rows.tolist())), memory, rows)


def check(found: Held) -> None:
    """Fail unless the memory holds what belongs there, and zeros everywhere else."""
    wanted = torch.zeros_like(found.memory)
    whole = coded((COUNT,), wanted.dtype)
    for at, place, length in found.table.tolist():
        wanted[place : place + length] = whole[at : at + length]
    assert torch.equal(bits(found.memory), bits(wanted))


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e8m0fnu]


@pytest.mark.parametrize(("dtype", "mode", "staging_bytes"), crossed(DTYPES, list(MODES), [0, 2 << 20]))
def test_pieces_load_as_a_tensor_and_as_other_pieces(
    dtype: torch.dtype, mode: str, staging_bytes: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    table = mode != "async"

    def save(collective: Collective) -> None:
        mine = held(collective.rank, 2, dtype, 1, filled=True, table=table)
        states = {"model": {"b": torch.ones(3, dtype=dtype), "w": mine.value, "z[": torch.ones(2)}}
        for _ in range(2):  # the second time by the cached plan
            bytecheckpoint.save(path, states, **MODES[mode]).result(60)

    def load(collective: Collective) -> None:
        mine = held(collective.rank, collective.world_size, dtype, 2, filled=False, table=not table)
        bytecheckpoint.load(path, {"model": {"b": torch.zeros(3, dtype=dtype), "w": mine.value, "z[": torch.ones(2)}})
        check(mine)

    with using(writer="thread", staging_bytes=staging_bytes, chunk_bytes=1 << 20), tuned(max_entries_per_file=150):
        ThreadWorld(2).run(save, timeout=120)
    check_folder(path)
    with bytecheckpoint.open(path) as checkpoint:
        assert torch.equal(bits(checkpoint["model/w"][...]), bits(coded(SHAPE, dtype)))
    for world in (1, 3):
        ThreadWorld(world).run(load, timeout=120)


@pytest.mark.parametrize("direct", [True, False])
def test_a_tensor_loads_as_pieces(direct: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    with using(writer="thread"):
        bytecheckpoint.save(path, {"model": {"w": coded(SHAPE, torch.float32)}})
    mine = held(0, 1, torch.float32 if direct else torch.bfloat16, 3, filled=False, table=True)
    bytecheckpoint.load(path, {"model": {"w": mine.value}}, cast=not direct)
    if direct:
        check(mine)
        return
    whole = coded((COUNT,), torch.float32)
    assert all(torch.equal(mine.memory[p : p + n], whole[a : a + n].bfloat16()) for a, p, n in mine.table.tolist())


def test_pieces_of_columns_load_as_pieces_of_rows(tmp_path: Path) -> None:
    """Boxes of the checkpoint cut the wanted boxes in ways that are no runs of their memory."""
    path, whole = str(tmp_path / "step"), coded((90, 40), torch.float32)
    columns = [((90, 40), (0, k), whole[:, k : k + 8].contiguous()) for k in range(0, 40, 8)]
    with using(writer="thread"):
        bytecheckpoint.save(path, {"model": {"w": Declared(*columns)}})
    memory = torch.zeros(90 * 40)
    table = np.array([(40 * row, 40 * (89 - row), 40) for row in range(90)])
    bytecheckpoint.load(path, {"model": {"w": Declared(((90, 40), table, memory))}})
    assert torch.equal(memory.view(90, 40).flip(0), whole)


@pytest.mark.parametrize("check_replicas", ["sampled", "full"])
@pytest.mark.parametrize("differ", [False, True])
def test_pieces_that_ranks_hold_alike_are_compared(
    differ: bool, check_replicas: Literal["sampled", "full"], tmp_path: Path
) -> None:
    def save(collective: Collective) -> None:
        memory = torch.arange(400.0)
        if collective.rank == 1 and differ:
            memory[4 * 77] = -1.0
        rows = np.stack([np.arange(100) * 4, np.arange(100) * 4, np.full(100, 4)], axis=1)
        value = Declared(((100, 4), rows, memory)) if collective.rank else memory.view(100, 4)
        if not collective.rank:
            value = Declared(*(((100, 4), (k, 0), memory[4 * k : 4 * k + 4].view(1, 4)) for k in range(100)))
        states = {"optimizer": {"state": {"w": {"exp_avg": value}}}}
        if not differ:
            bytecheckpoint.save(tmp_path / "step", states, check_replicas=check_replicas)
            return
        with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="copies differ between rank 0 and rank 1"):
            bytecheckpoint.save(tmp_path / "step", states, check_replicas=check_replicas)

    with using(writer="thread"):
        ThreadWorld(2).run(save, timeout=60)


def test_a_table_of_ranges_holds_three_integers_a_row() -> None:
    for table, message in ((np.zeros((100, 2), int), "three columns"), (np.zeros((100, 3)), "holds integers")):
        with pytest.raises(bytecheckpoint.UsageError, match=message):
            bytecheckpoint.save("unused", {"model": {"w": Declared(((100, 4), table, torch.zeros(400)))}})
