"""Versions that are copied or moved serve followers as the original does, and nothing goes on which others build."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.cli.main import run
from bytecheckpoint.publishing import Follower
from bytecheckpoint.tiers.cooldown import CoolStep, cool, plan_cooldown
from bytecheckpoint.tools import collect_garbage
from bytecheckpoint.world import world_of
from tests.support.damage import damage
from tests.support.memory import hot_tier
from tests.support.ranks import outcomes
from tests.support.versions import Engine, Trainer, check, cut_by, fine


def differences(folder: Path) -> int:
    return len([*folder.rglob("*.delta")])


def published(root: Path | str, versions: int, full_every: int) -> Trainer:
    trainer = Trainer(root, 2, full_every=full_every)
    for _ in range(versions):
        fine(trainer.publish())
    trainer.end()
    return trainer


def cooled(root: Path, cold: Path) -> list[CoolStep]:
    return [cool(step) for step in plan_cooldown(str(root), str(cold), older_than=0, now=time.time() + 86400)]


@pytest.fixture
def copied(tmp_path: Path) -> tuple[Trainer, Path]:
    """A folder with copies of two whole versions, of which the second has its differences beside it."""
    trainer = published(tmp_path / "run", 2, 1)
    for name in ("step_00000001", "step_00000002"):
        assert run(["cp", str(tmp_path / "run" / name), str(tmp_path / "copy" / name)]) == 0
    return trainer, tmp_path / "copy"


def followed(trainer: Trainer, root: Path) -> set[tuple[int, bool]]:
    """Follow two versions; return the versions of the second update, and whether it read little."""
    engine = Engine(trainer.model, root, 3, 1)
    first = sum(report.bytes_read for report in fine(engine.update(step=1)))
    reports = fine(engine.update())
    engine.check()
    return {(report.versions, sum(each.bytes_read for each in reports) < first) for report in reports}


def test_a_copied_store_serves_followers_as_the_original(copied: tuple[Trainer, Path]) -> None:
    trainer, copy = copied
    for name, count in (("step_00000001", 0), ("step_00000002", 2)):
        assert differences(copy / name) == count
        assert run(["verify", str(copy / name)]) == 0
    assert followed(trainer, copy) == {(1, True)}


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_differences_that_cannot_be_copied_cost_time_only(tmp_path: Path, how: str) -> None:
    trainer = published(tmp_path / "run", 2, 1)
    damage(next((tmp_path / "run" / "step_00000002").rglob("*.delta")), how, -20)
    for name in ("step_00000001", "step_00000002"):
        assert run(["cp", str(tmp_path / "run" / name), str(tmp_path / "copy" / name)]) == 0
    assert differences(tmp_path / "copy") == 1
    assert followed(trainer, tmp_path / "copy") == {(0, False)}


def test_a_copy_goes_on_after_a_kill_with_its_differences(copied: tuple[Trainer, Path]) -> None:
    trainer, copy = copied
    step = copy / "step_00000002"
    (step / "metadata.parquet").unlink()
    file = next(step.rglob("*.delta"))
    file.with_suffix(".safetensors").unlink()
    file.write_bytes(b"half of it")
    assert run(["cp", f"{copy.parent}/run/step_00000002", str(step)]) == 0
    assert followed(trainer, copy) == {(1, True)}


def test_differences_move_to_a_cold_storage(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run", 2, full_every=1)
    engine = Engine(trainer.model, tmp_path / "run", 3, 1)
    for _ in range(2):
        fine(trainer.publish())
    fine(engine.update(step=1))
    model = {name: tensor.clone() for name, tensor in trainer.model.whole.items()}
    fine(trainer.publish())
    trainer.end()
    plan = [(step.action, step.error) for step in cooled(tmp_path / "run", tmp_path / "cold")]
    assert plan == [("move", ""), ("keep", "")]  # the publisher has removed the first one
    assert differences(tmp_path / "run" / "step_00000002") == 0
    assert differences(tmp_path / "cold" / "step_00000002") == 2
    assert {report.versions for report in fine(engine.update(step=2))} == {1}
    trainer.model.whole = model
    engine.check()
    assert collect_garbage(tmp_path / "cold", older_than=-60) == []


def test_flushed_versions_have_their_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hot_tier(monkeypatch):
        trainer = Trainer(f"tier+file://{tmp_path}/run", 2, full_every=1)
        fine(trainer.publish())
        fine(trainer.publish())
        trainer.end()
        outcomes(trainer.world, lambda collective: world_of(collective).flusher.drain())
    assert followed(trainer, tmp_path / "run") == {(1, True)}


def test_nothing_goes_on_which_others_build(tmp_path: Path) -> None:
    trainer = published(tmp_path / "run", 5, 3)
    folder = tmp_path / "run" / "step_00000004"
    plan = cooled(tmp_path / "run", tmp_path / "cold")
    assert [step.action for step in plan] == ["skip"] * 4 + ["keep"]
    assert "step_00000005 builds on it" in plan[3].reason
    with pytest.raises(UsageError, match=r"step_00000005.*step_00000004"):
        bytecheckpoint.tools.remove(folder)
    states = trainer.model.held(cut_by(1, 0), 0, blank=True)
    report = Follower(tmp_path / "run").update(states)
    assert report is not None
    assert report.step == 5
    check(states, trainer.model)
    assert run(["rm", f"{tmp_path}/run/step_00000005"]) == run(["rm", str(folder)]) == 0
