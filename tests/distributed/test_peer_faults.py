"""Faults of other checkpointing systems that only real ranks can show, each by name. docs/comparison has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import peer_jobs as jobs
from tests.distributed.layouts import WORLD_SIZE
from tests.support.worlds import Worlds

MIB = 1 << 20


def test_fsdp1_cannot_save_asynchronously_on_cpu_but_fsdp2_here_can(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.async_on_cpu, "fsdp2", str(tmp_path / "step")) == [[]] * 2


def test_dcp_fails_to_load_nested_extra_states_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.nested_extra_states, str(tmp_path / "step")) == [[]] * 2


def test_dcp_fails_to_load_parameters_without_optimizer_state(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.without_state, str(tmp_path / "step")) == [[]] * 2


def test_dcp_saves_shards_that_leave_a_hole(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(2, jobs.a_hole, str(tmp_path / "step")):
        assert "model/w" in message
        assert "24 elements for a tensor of 32" in message
    assert not list(tmp_path.rglob("*.*"))


def test_dcp_casts_silently(worlds: Worlds, tmp_path: Path) -> None:
    for message, *cast in worlds.run(2, jobs.no_silent_cast, str(tmp_path / "step")):
        assert "float32 in the checkpoint and float16 here" in message
        assert cast == ["model/w"]


def test_dcp_reads_64_times_what_a_64th_needs(worlds: Worlds, tmp_path: Path) -> None:
    for read, shape in worlds.run(2, jobs.a_64th, str(tmp_path / "step")):
        assert shape == [1, 256 * 1024]
        assert MIB <= read <= 3 * MIB, "the row and the rest of its checksum blocks, of 64 MiB"


@pytest.mark.parametrize("layout", ["ddp2", "ddp4"])
def test_torch_checkpointing_has_every_ddp_rank_write_everything(worlds: Worlds, layout: str, tmp_path: Path) -> None:
    written = worlds.run(WORLD_SIZE[layout], jobs.everyone_writes, str(tmp_path / "step"))
    assert 4 * MIB <= sum(written) < 4.2 * MIB


def test_the_public_bytecheckpoint_lets_ddp_rank_1_write_nothing(worlds: Worlds, tmp_path: Path) -> None:
    written = worlds.run(2, jobs.everyone_writes, str(tmp_path / "step"))
    assert min(written) > 0.45 * sum(written)


def test_no_other_system_notices_replicas_that_differ(worlds: Worlds, tmp_path: Path) -> None:
    for differences in worlds.run(2, jobs.replicas_that_differ, str(tmp_path / "step")):
        assert differences == ["model/drifted"]


@pytest.mark.parametrize(("source", "destination"), [("tp2", "pp2"), ("pp2", "tp2"), ("ep2-fsdp2", "one")])
def test_megatron_aliases_one_step_and_cannot_change_tp_pp_or_ep(
    worlds: Worlds, source: str, destination: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    worlds.run(WORLD_SIZE[source], jobs.save_steps, source, path)
    for wrong in worlds.run(WORLD_SIZE[destination], jobs.load_steps, destination, path):
        assert wrong == []


def test_deepspeed_gives_every_group_the_settings_of_group_0(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    worlds.run(3, jobs.save_steps, "fsdp3", path)
    for wrong in worlds.run(2, jobs.load_steps, "fsdp2", path):
        assert wrong == []
