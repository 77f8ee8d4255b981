"""Many asynchronous saves and loads in a row: nothing grows.

`make soak` runs 200 saves per writer; SOAK_SHORT=1 runs 40.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from tests.soak.growth import check_growth, measure
from tests.support.coded import files_of, load_step, states, step_of

pytestmark = pytest.mark.soak

SAVES = 40 if os.environ.get("SOAK_SHORT") else 200
ROWS = 2000  # some 2 MB in all


def varying(step: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """States whose extra part grows and shrinks from step to step."""
    mine = states(rank, world, step, ROWS)
    mine["extra_states"]["history"] = list(range(step * 37 % 500))
    mine["extra_states"]["buffer"] = torch.full((step * 101 % 3000,), float(step))
    return mine


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_saves_in_a_loop_do_not_grow(tmp_path: Path, writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    process, path = psutil.Process(), tmp_path / "s"
    first: dict[str, int] = {}
    first_files = 0
    for step in range(1, SAVES + 1):
        handle = bytecheckpoint.save(
            path, varying(step), async_checkpoint=True, staging="background" if step % 3 == 0 else "blocking"
        )
        if step % 7 == 0:
            handle.result(60)
            assert load_step(path, rows=ROWS) == step
        if step % 11 == 0:
            handle.result(60)
            with bytecheckpoint.open(path) as checkpoint:
                assert checkpoint["model/bias"][0] == 2e6 + 1e9 * step
        if step == SAVES // 4:  # everything has reached its size by now
            handle.result(60)
            first, first_files = measure(process), len(files_of(path))
    handle.result(60)
    assert load_step(path, rows=ROWS) == SAVES
    last = measure(process)
    print(f"\n{writer}: {SAVES} saves; resident {first['resident'] >> 20} -> {last['resident'] >> 20} MiB")
    assert len(files_of(path)) == first_files
    # Allocators keep some slack; a leak of one state per save would be 2 MB x 150.
    check_growth(first, last, 24 << 20)


def test_saves_of_several_ranks_do_not_grow(tmp_path: Path) -> None:
    bytecheckpoint.configure(writer="thread")
    process, path, world = psutil.Process(), tmp_path / "s", ThreadWorld(3)
    first: dict[str, int] = {}

    def one(collective: Collective, step: int) -> None:
        bytecheckpoint.save(path, varying(step, collective.rank, 3), async_checkpoint=True).result(60)
        if step % 10 == 0:
            blank = states(collective.rank, 3, None, ROWS)
            bytecheckpoint.load(path, blank)
            assert step_of(blank) == step

    for step in range(1, SAVES // 2 + 1):
        world.run(one, step)
        if step == SAVES // 8:
            first = measure(process)
    check_growth(first, measure(process), 32 << 20)


def test_worlds_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    """A new world per save, as jobs that rebuild their process groups have: its threads, pool and helper end with it."""
    process = psutil.Process()
    first: dict[str, int] = {}
    bytecheckpoint.save(tmp_path / "alone", varying(1, 0, 1), async_checkpoint=True).result(
        60
    )  # this process's own helper
    for step in range(1, SAVES // 4 + 1):
        world = ThreadWorld(2)
        world.run(
            lambda c, step=step: bytecheckpoint.save(
                tmp_path / "s", varying(step, c.rank, 2), async_checkpoint=step % 2 == 0
            ).result(60)
        )
        del world
        gc.collect()
        if step == 4:
            first = measure(process)
    assert load_step(tmp_path / "s", rows=ROWS) == SAVES // 4
    check_growth(first, measure(process), 48 << 20)
    assert threading.active_count() < 40
