"""A real Ray of this machine: a killed worker, a restart, another number of workers, and Ray's own deletion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray.jobs import train
from tests.support.ray_cluster import ray_cluster
from tests.support.runs import steps_in

CLOSE = 1e-5  # of losses whose additions were in another order


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(2):
        yield


def fit(folder: Path, workers: int, **config: Any) -> Any:
    """Run the training function; return Ray's result."""
    import ray.train
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        train,
        train_loop_config={"notes": str(folder), **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()  # fmt: skip


def notes(folder: Path, workers: int, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{workers}-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_worker_and_another_number_of_workers(cluster: None, tmp_path: Path) -> None:
    result = fit(tmp_path, 2, steps=12, kill=7)
    assert Path(result.checkpoint.path).name == "step_00000012"
    assert [Path(c.path).name for c, _ in result.best_checkpoints] == ["step_00000008", "step_00000012"]
    assert steps_in(tmp_path / "run") == [8, 12], "Ray keeps two"
    for rank in (0, 1):
        found = notes(tmp_path, 2, rank)
        assert [note["step"] for note in found] == [*range(1, 8), *range(5, 13)]
        assert all(note["got"] == note["wanted"] for note in found), "losses and random numbers, bit for bit"
        assert found[-1]["begin"] == 5 and found[-1]["known"] == ["step_00000004"], (
            "reported before or after the restart"
        )
    wanted = {note["step"]: note["wanted"][0] for note in notes(tmp_path, 2, 0)}

    result = fit(tmp_path, 1, steps=20, kill=0)
    assert Path(result.checkpoint.path).name == "step_00000020"
    assert steps_in(tmp_path / "run") == [16, 20]
    found = notes(tmp_path, 1, 0)
    assert [note["step"] for note in found] == list(range(13, 21))
    assert [note["got"][0] for note in found] == pytest.approx([note["wanted"][0] for note in found], rel=CLOSE)
    assert wanted[12] < wanted[1] / 2 and result.metrics_dataframe is not None


@pytest.mark.timeout(600)
def test_the_demo(cluster: None, tmp_path: Path) -> None:
    """One of two workers is killed: losses that are written twice are the same. Then one worker goes on."""
    from demo.ray_train import main

    main(str(tmp_path), 2, 40)
    assert (tmp_path / "killed").exists() and steps_in(tmp_path / "run") == [30, 40]
    found = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    steps = [note["step"] for note in found]
    assert steps[-1] == 40 and len(steps) > 40
    losses: dict[int, float] = {}
    for note in found:
        assert losses.setdefault(note["step"], note["loss"]) == note["loss"], "the same after the restart, bit for bit"
    assert losses.keys() == set(range(1, 41))

    main(str(tmp_path), 1, 50)
    assert steps_in(tmp_path / "run") == [40, 50], "Ray keeps two"
    later = [json.loads(line)["step"] for line in (tmp_path / "losses.jsonl").read_text().splitlines()[len(found) :]]
    assert later == list(range(41, 51))
