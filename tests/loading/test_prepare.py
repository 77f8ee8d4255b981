"""A load prepares the next save on all ranks or on none: a preparation takes a save's number on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.variants import crossed

RANKS = 2


def state(rank: int, *optimizers: int) -> dict[str, Any]:
    """A model on every rank, an optimizer's state on some."""
    states: dict[str, Any] = {"model": {f"w{rank}": torch.ones(4)}}
    if rank in optimizers:
        states["optimizer"] = {f"momentum{rank}": torch.ones(4)}
    return states


def run(world: ThreadWorld, path: Path, *optimizers: int, prepare_on: int | None = None) -> None:
    """Load on every rank, then save twice."""

    def one(collective: Collective) -> None:
        states = state(collective.rank, *optimizers)
        options = {} if prepare_on is None else {"prepare_save": collective.rank == prepare_on}
        bytecheckpoint.load(path, states, **options)
        for number in range(2):
            report = bytecheckpoint.save(path.parent / f"next-{number}", states, timeout=20).result(60)
            assert report.bytes_written

    world.run(one, timeout=100)


@pytest.mark.parametrize(("optimizers", "prepare_on"), crossed([(0,), (1,), (0, 1), ()], [None, 0, 1]))
def test_ranks_that_want_different_preparations(
    tmp_path: Path, optimizers: tuple[int, ...], prepare_on: int | None
) -> None:
    """A frozen reference model has an optimizer on some ranks only."""
    world, path = ThreadWorld(RANKS), tmp_path / "saved"
    world.run(lambda c: bytecheckpoint.save(path, state(c.rank, *optimizers)).result(60), timeout=100)
    run(ThreadWorld(RANKS), path, *optimizers, prepare_on=prepare_on)


class Refusing:
    """An object that refuses what it is given."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"no {state}")


def test_an_object_of_one_rank_refuses_its_state(tmp_path: Path) -> None:
    path = tmp_path / "saved"

    def states(rank: int) -> dict[str, Any]:
        refusing = {"extra_states": {"own": Refusing()}} if rank == 1 else {}
        return state(rank, 0, 1) | refusing

    def one(collective: Collective) -> bool:
        own = states(collective.rank)
        refused = False
        try:
            bytecheckpoint.load(path, own)
        except bytecheckpoint.IncompatibleCheckpointError:
            refused = True
        bytecheckpoint.save(tmp_path / "next", state(collective.rank, 0, 1), timeout=20).result(60)
        return refused

    ThreadWorld(RANKS).run(lambda c: bytecheckpoint.save(path, states(c.rank)).result(60), timeout=100)
    assert ThreadWorld(RANKS).run(one, timeout=100) == [False, True]
