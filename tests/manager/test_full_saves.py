"""Each n-th incremental save of a manager shares no file with earlier steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointManager, StorageError, UsageError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.tools import verify
from tests.support.damage import flip_bit
from tests.support.faulty_storage import Faults
from tests.support.frozen import Training, check_alone, frozen_file
from tests.support.ranks import outcomes


def saved(run: Path, steps: range, *, ranks: int = 1, **options: Any) -> list[bool]:
    """Save steps of a new training; return for each whether it shares files with earlier ones."""

    def train(_: Any) -> list[bool]:
        training, shared = Training(), []
        with CheckpointManager(run, training.states(), save_options=SaveOptions(**options)) as manager:
            manager.restore_latest()
            for step in steps:
                training.step()
                handle = manager.save(step)
                assert handle is not None
                shared.append(handle.result(60).bytes_adopted > 0)
        return shared

    return [any(ranks) for ranks in zip(*outcomes(ThreadWorld(ranks), train), strict=True)]


@pytest.mark.parametrize("staging", ["auto", "blocking", "background"])
def test_each_nth_save_is_whole(staging: str, tmp_path: Path) -> None:
    options = {"incremental": True, "full_every": 3, "staging": staging}
    assert saved(tmp_path, range(1, 9), ranks=2, **options) == [
        False, True, False, True, True, False, True, True,
    ]  # fmt: skip
    names = {
        n: {os.stat(file).st_nlink for file in tmp_path.glob(f"step_{n:08d}/model/*-p001.*")} for n in (1, 3, 5, 6)
    }
    assert names == {1: {2}, 3: {3}, 5: {3}, 6: {3}}


def test_saves_are_counted_across_jobs(tmp_path: Path) -> None:
    options = {"incremental": True, "full_every": 3}
    found = [saved(tmp_path, range(step, step + 2), ranks=2, **options) for step in (1, 3, 5, 7)]
    assert found == [[False, True], [False, True], [True, False], [True, True]]


def test_damage_stays_on_its_side(tmp_path: Path) -> None:
    assert saved(tmp_path, range(1, 5), incremental=True, full_every=4) == [False, True, True, False]
    steps = {n: tmp_path / f"step_{n:08d}" for n in range(1, 5)}
    flip_bit(frozen_file(steps[2]), -900)
    assert [verify(step).ok for step in steps.values()] == [False, False, False, True]
    check_alone(steps[4], 4)


def test_a_restore_falls_back_across_a_whole_save(tmp_path: Path) -> None:
    assert saved(tmp_path, range(1, 6), incremental=True, full_every=3) == [False, True, False, True, True]
    flip_bit(frozen_file(tmp_path / "step_00000004"), -900)

    def restore(_: Any) -> tuple[int, list[int], float]:
        training = Training(seed=1)
        with CheckpointManager(tmp_path, training.states()) as manager:
            restored = manager.restore_latest()
            assert restored is not None
            return restored.step, sorted(restored.skipped), training.model.steps.item()

    assert outcomes(ThreadWorld(1), restore) == [(2, [3, 4, 5], 2.0)]


def test_a_whole_save_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults().install(monkeypatch)

    def train(_: Any) -> None:
        training, shared = Training(), []
        options = SaveOptions(incremental=True, full_every=2, staging="blocking")
        with CheckpointManager(tmp_path, training.states(), save_options=options) as manager:
            for step in (1, 2, 3, 4):
                training.step()
                if step == 2:
                    faults.add("publish", StorageError("broken"), name=CATALOG_NAME, times=1)
                    with pytest.raises(CheckpointError, match="broken"):
                        manager.save(step).result(60)
                    continue
                shared.append(manager.save(step).result(60).bytes_adopted > 0)
        assert shared == [False, False, True]

    outcomes(ThreadWorld(1), train)


def test_without_a_number_all_share(tmp_path: Path) -> None:
    assert saved(tmp_path, range(1, 4), incremental=True, full_every=None) == [False, True, True]
    assert saved(tmp_path / "other", range(1, 22), incremental=True) == [False, *[True] * 18, False, True]


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "3"])
def test_wrong_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="full_every="):
        SaveOptions(full_every=wrong)


def test_a_save_can_be_whole_by_itself(tmp_path: Path) -> None:
    def train(_: Any) -> list[bool]:
        training = Training()
        modes: list[Any] = [True, "full", True, "full"]
        paths = ["a", "b", "c", "c"]
        handles = [
            bytecheckpoint.save(tmp_path / path, training.states(), incremental=mode)
            for path, mode in zip(paths, modes, strict=True)
        ]
        with pytest.raises(UsageError, match="incremental='True'"):
            bytecheckpoint.save(tmp_path / "d", training.states(), incremental="True")  # type: ignore[arg-type]
        return [handle.result(60).bytes_adopted > 0 for handle in handles]

    assert outcomes(ThreadWorld(1), train) == [[False, False, True, False]]
    assert verify(tmp_path / "c").ok
    assert os.stat(frozen_file(tmp_path / "b")).st_nlink == 1
