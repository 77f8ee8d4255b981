"""States with an engine: the ways to pass one, its counters, refusals, and that nothing is communicated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.deepspeed import state_jobs as jobs
from tests.frameworks.deepspeed.engines import ENGINES
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["b2x2", "b3x2", "b1x2-own"])
def test_every_way_to_pass_an_engine(worlds: Worlds, name: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.every_way_to_pass_an_engine, name, str(tmp_path), timeout=250) == [[], []]


@pytest.mark.parametrize("name", ["h2x2", "h3x2"])
def test_counters_and_loss_scale(worlds: Worlds, name: str, tmp_path: Path) -> None:
    for saved, loaded in worlds.run(2, jobs.counters, name, str(tmp_path)):
        assert saved == loaded
        assert saved[:2] == [3, 36] and saved[-1] == 1


@pytest.mark.parametrize("name", ["z1x3", "b2x3", "b3x4", "b1x3-own"])
def test_nothing_is_communicated_over_process_groups(worlds: Worlds, name: str, tmp_path: Path) -> None:
    for found in worlds.run(ENGINES[name].size, jobs.communication, name, str(tmp_path)):
        assert found.pop("own way"), "the counter counts"
        assert found == {"capture": [], "save": [], "async": [], "load": []}


@pytest.mark.parametrize("name", ["b2x2", "b3x2"])
def test_a_module_alone_takes_master_weights(worlds: Worlds, name: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.weights_only, name, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("name", ["z3x2", "b3x2", "b2x2"])
def test_gathered_parameters(worlds: Worlds, name: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.after_evaluation, name, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("name", "kind"), [("b2x2", "AdamW"), ("b3x2", "AdamW"), ("b2x2-cpu", "AdamW")])
def test_optimizers_that_deepspeed_makes(worlds: Worlds, name: str, kind: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.own_optimizers, name, str(tmp_path), kind) == [[], []]


def test_an_engine_without_optimizer(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.without_optimizer, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("name", ["z2x2", "z3x2"])
def test_parameters_of_one_flat_tensor(worlds: Worlds, name: str, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.joined_parameters, name, str(tmp_path)) == [[], []]


def test_refusals(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.refusals, str(tmp_path)) == [[], []]


def test_a_layout_can_be_described(worlds: Worlds) -> None:
    for found in worlds.run(2, jobs.layouts):
        assert found["framework"] == "deepspeed"
        assert found["kinds"]["model"]["layouts"].keys() == {"ZeRO-3", "plain"}


def test_a_frozen_parameter_in_a_group(worlds: Worlds, tmp_path: Path) -> None:
    for missing, engine, plain in worlds.run(2, jobs.frozen_in_group, str(tmp_path)):
        assert missing == []
        assert engine == plain
