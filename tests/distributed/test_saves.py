"""Saves and loads of several real ranks: asynchronous, overwriting, cached plans, exchange, groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.saving.messages import SaveStep
from tests.distributed import save_jobs as jobs
from tests.distributed.layouts import WORLD_SIZE
from tests.support.worlds import Worlds

MIB = 1 << 20


@pytest.mark.parametrize("layout", ["ddp2", "fsdp3", "pp2-fsdp2", "ep2-fsdp2"])
def test_the_last_of_several_asynchronous_saves_is_there(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "step"
    found = worlds.run(WORLD_SIZE[layout], jobs.overwrite_while_training, layout, str(path))
    for rank in found:
        assert rank["wrong"] == []
        assert all(rank["cached"][1:])
    # No file of the three earlier saves is left.
    left = sum(f.stat().st_size for f in path.rglob("*.safetensors"))
    assert left == sum(rank["written"][-1] for rank in found)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2-fsdp2"])
def test_staging_behind_the_caller(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    for wrong in worlds.run(WORLD_SIZE[layout], jobs.background_staging, layout, str(tmp_path / "step")):
        assert wrong == []


def test_the_second_save_sends_no_planning_messages(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds.fresh(3)  # a world of the pool may have the plan cached
    ranks = world.run(jobs.plan_messages, "fsdp3", str(tmp_path))
    world.close()
    miss = [SaveStep.FIRST, SaveStep.REPORT]
    replies = [f"{step}/reply" for step in miss]
    assert ranks[0] == [sorted(miss + replies), *[sorted([miss[0], replies[0]])] * 2]
    for rank in ranks[1:]:
        assert rank == [miss, [SaveStep.FIRST], [SaveStep.FIRST]]


def test_a_rank_that_saves_something_else_makes_the_plan_anew(worlds: Worlds, tmp_path: Path) -> None:
    for keys in worlds.run(3, jobs.ranks_that_disagree, str(tmp_path)):
        assert keys == ["model/a", "model/b", "model/c"]


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_read_the_checkpoint_once(worlds: Worlds, overlap: bool, tmp_path: Path) -> None:
    ranks = worlds.run(4, jobs.large_replicated, str(tmp_path / "step"), overlap)
    read, received = (sum(r[i] for r in ranks) for i in (0, 1))
    state = 16 * MIB
    if overlap:
        assert state <= read < 1.05 * state, "storage is read once"
        assert 3 * state <= received < 3.05 * state, "the others get it from their peers"
        assert max(r[0] for r in ranks) < 0.6 * state, "and reading is shared out"
    else:
        assert 4 * state <= read < 4.05 * state
        assert received == 0


def test_replicas_share_out_the_writing(worlds: Worlds, tmp_path: Path) -> None:
    written = worlds.run(4, jobs.each_writes_its_part, str(tmp_path / "step"))
    assert 16 * MIB <= sum(written) < 16.3 * MIB
    assert max(written) < 4.3 * MIB


def test_the_group_may_end_before_the_save_does(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds.fresh(2)
    found = world.run(jobs.ended_group_before_commit, "fsdp2", str(tmp_path / "step"))
    assert found == [["metadata.parquet"]] * 2
    assert world.close() == [0, 0]


def test_groups_save_by_themselves(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(4, jobs.subgroups, str(tmp_path)) == [[]] * 4


def test_open_reads_other_layouts_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(4, jobs.open_on_every_rank, "tp2-fsdp2", str(tmp_path / "step")) == [[]] * 4
