"""Somebody removes the files that an incremental save uses again, at any of its calls to the storage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytecheckpoint import StorageError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.tools import verify
from bytecheckpoint.tuning import tuned
from tests.support.faulty_storage import Faults
from tests.support.frozen import Training, check_alone
from tests.support.modes import MODES
from tests.support.ranks import attempt
from tests.support.settings import using

#: Calls to the storage, and how many of the name come before, in order.
COMPARING = [("open", 0), ("read_into", 0), ("read_into", 1), ("stat", 0)]
WRITING = [("version", 0), ("check_publish", 0), ("create", 0), ("write", 0), ("finish", 0), ("sync", 0)]
COMMITTING = [("unfinished_uploads", 0), ("list", 0)]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with tuned(frozen_look_bytes=100_000, stale_pauses=()), using(writer="thread"):
        yield


def remove_frozen(step: Path) -> None:
    for file in step.glob("model/rank-00000-p001.*"):
        file.unlink()


@pytest.mark.parametrize("mode", ["background", pytest.param("sync", marks=pytest.mark.slow)])
def test_the_step_that_is_shared_may_go_at_any_call(mode: str, tmp_path: Path) -> None:
    for call in [("adopt", 0), *COMPARING, *WRITING, *COMMITTING, ("publish", 0)]:
        run, faults = tmp_path / "{}_{}".format(*call), Faults()
        rule = faults.add(call[0], before=lambda run=run: shutil.rmtree(run / "step_1"), skip=call[1])  # type: ignore[misc]

        def save(training: Training, run: Path = run, faults: Faults = faults) -> None:
            training.save(run / "step_1", **MODES[mode])
            training.save(faults.at(run / "step_2"), **MODES[mode])

        ThreadWorld(1).run(lambda _, save=save: save(Training()), timeout=60)
        assert rule.hits == 1, call
        check_alone(run / "step_2", 2)


@pytest.mark.parametrize("again", [False, True], ids=["another path", "the same path"])
@pytest.mark.parametrize("mode", ["sync", "background"])
def test_a_removed_file_is_written_or_fails_the_save(mode: str, again: bool, tmp_path: Path) -> None:
    """While the tensors are those of the call it is written. Then the save fails, and commits nothing."""

    def save(call: tuple[str, int]) -> str:
        run, faults, training = tmp_path / "{}_{}".format(*call), Faults(), Training()
        step = run / ("step_1" if again else "step_2")
        training.save(run / "step_1", **MODES[mode])
        catalog = step / "metadata.parquet"
        before = catalog.read_bytes() if again else b""
        rule = faults.add(call[0], before=lambda: remove_frozen(step), skip=call[1])
        error = attempt(training.save, faults.at(step), **MODES[mode])
        assert rule.hits == 1, call
        if isinstance(error, Exception):
            assert isinstance(error, StorageError) and "model/rank-00000-p001." in str(error)
            assert catalog.exists() == again and (not again or catalog.read_bytes() == before)
            return "failed"
        assert verify(step).ok
        return "saved"

    def outcomes(calls: list[tuple[str, int]]) -> set[str]:
        return {ThreadWorld(1).run(lambda _, call=call: save(call), timeout=60)[0] for call in calls}

    assert outcomes(COMPARING) == {"saved"}
    assert outcomes(WRITING) == {"saved" if mode == "sync" else "failed"}
    assert outcomes(COMMITTING) == {"failed"}
