"""DeepSpeed's data efficiency: curriculum learning, and random layer-token dropping.

DeepSpeed 0.19.8 has no other curriculum: it refuses the legacy `curriculum_learning` at the root of its configuration.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.comparisons import assert_complete
from tests.support.deepspeed_engines import (
    EngineTrainer,
    build,
    full_state,
    in_engine_world,
    other,
    trained,
)
from tests.support.real_frameworks import AFTER, BEFORE, assert_restored, mean_over_ranks
from tests.support.tiny_model import BLOCKS, LENGTH, VOCABULARY, Block, loss_of

pytestmark = pytest.mark.timeout(300)

SAMPLES, DIFFICULTIES = 48, 6


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Sequences of tokens with their numbers; the first ones are the easiest."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(int(number)))
        return int(number), tokens


def analyse(folder: str) -> None:
    """Write the index that DeepSpeed's analysis of a data set leaves: the samples of each difficulty, and its value."""
    from deepspeed.runtime.data_pipeline.data_sampling.utils import (
        close_mmap_dataset_builder,
        create_mmap_dataset_builder,
    )

    numbers = np.arange(SAMPLES).reshape(DIFFICULTIES, -1)
    for name, rows in (("samples", numbers), ("metric", np.arange(1, DIFFICULTIES + 1)[:, None])):
        builder = create_mmap_dataset_builder(f"{folder}/{name}", np.int64)
        for row in rows:
            builder.add_item_numpy(row)
        close_mmap_dataset_builder(builder, f"{folder}/{name}")


def curriculum(folder: str, clusters: str) -> dict[str, Any]:
    """Return the configuration of a curriculum: more difficult samples after two steps, and after two more."""
    metric = {
        "index_to_sample_path": f"{folder}/samples",
        "index_to_metric_path": f"{folder}/metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 2,
        "max_difficulty": DIFFICULTIES,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [2, 4, DIFFICULTIES], "max_step": [2, 4]},
    }
    learning = {"enabled": True, "data_cluster_path": clusters, "curriculum_metrics": {"age": metric}}
    sampling = {"enabled": True, "num_epochs": 4, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "seed": 5, "data_sampling": sampling}}


class CurriculumRun(EngineTrainer):
    """A run whose engine chooses the samples of each step."""

    def __init__(self, name: str, values: Any, options: dict[str, Any]) -> None:
        super().__init__(build(name, values, **options).engine)
        self.engine.training_dataloader = self.engine.deepspeed_io(Samples())
        self._batches: Iterator[Any] | None = None

    def step(self) -> Any:
        """One training step; the samples of this rank, and the loss."""
        if self._batches is None:
            self._batches = iter(self.engine.training_dataloader)
        numbers, tokens = next(self._batches)
        loss = loss_of(self.engine(tokens[:, :-1]).float(), tokens[:, 1:])
        self.engine.backward(loss)
        self.engine.step()
        return numbers.tolist(), mean_over_ranks(loss)


@pytest.mark.parametrize("name", ["z2x2", "z3x2"])
@in_engine_world
def test_curriculum_learning(name: str, path: str) -> None:
    """The next steps have the same samples, into a new engine and into one that has trained."""
    rank = dist.get_rank()
    if rank == 0:
        Path(f"{path}-data").mkdir(parents=True)
        analyse(f"{path}-data")
    dist.barrier()

    def start(values: Any, clusters: str) -> CurriculumRun:
        return CurriculumRun(name, values, curriculum(f"{path}-data", f"{path}-{clusters}"))

    run = start(trained, "first")
    before = run.train(BEFORE)
    assert all(number < SAMPLES * 4 / DIFFICULTIES for numbers, _ in before for number in numbers)
    bytecheckpoint.save(path, run.states())
    dist.barrier()
    if rank == 0:
        shutil.copytree(f"{path}-first", f"{path}-saved")
    dist.barrier()
    after = run.train(AFTER)
    assert any(number >= SAMPLES * 4 / DIFFICULTIES for numbers, _ in after for number in numbers)
    for clusters in ("second", "third"):
        fresh = start(other, clusters)
        if clusters == "third":
            fresh.engine.training_dataloader.data_sampler.get_next_global_batch()
        if rank == 0:  # DeepSpeed keeps the shuffled samples of each difficulty in files of its own
            shutil.copytree(f"{path}-saved", f"{path}-{clusters}", dirs_exist_ok=True)
        dist.barrier()
        assert_complete(bytecheckpoint.load(path, fresh.states()))
        assert fresh.train(AFTER) == after


def token_dropping(shortest: int) -> dict[str, Any]:
    """Return the configuration of random layer-token dropping, in all blocks, of sequences longer than `shortest`."""
    schedule = {
        "min_value": shortest,
        "max_value": 4 * shortest,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 2},
    }
    dropping = {
        "enabled": True,
        "total_layer_num": BLOCKS + 1,
        "random_ltd_layer_num": BLOCKS,
        "random_ltd_layer_id": list(range(BLOCKS)),
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
    }
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": dropping}}}


def with_token_dropping(name: str, values: Any, shortest: int) -> EngineTrainer:
    from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

    run = build(name, values, **token_dropping(shortest))
    convert_to_random_ltd(run.engine, Block)
    return run


@pytest.mark.parametrize("name", ["z0x2", "b2x2", "z3x2"])
@in_engine_world
def test_random_layer_token_dropping(name: str, path: str) -> None:
    """The schedule continues, and the wrappers of the layers are not seen in names.

    Nothing is dropped, since these sequences are shorter than the shortest of the schedule: DeepSpeed's kernels that
    choose and gather tokens exist for CUDA only.
    """
    run = with_token_dropping(name, trained, LENGTH + 1)
    run.train(BEFORE)
    scheduler = run.engine.random_ltd_scheduler
    expected, weights = scheduler.state_dict(), full_state(run.engine)
    assert expected["current_steps"] == BEFORE - 1 and expected["consumed_layer_tokens"] > 0
    assert expected["current_value"] > LENGTH + 1
    bytecheckpoint.save(path, run.states())
    after = run.train(AFTER)
    for trains_first in (False, True):
        fresh = with_token_dropping(name, other, LENGTH + 1)
        if trains_first:
            fresh.train(1)
        assert_complete(bytecheckpoint.load(path, fresh.states()))
        assert fresh.engine.random_ltd_scheduler.state_dict() == expected
        assert_restored(weights, full_state(fresh.engine))
        assert fresh.train(AFTER) == after
        assert fresh.engine.random_ltd_scheduler.state_dict() == scheduler.state_dict()
    # An engine that drops nothing has the names of the bare model, and so has the checkpoint.
    plain = build(name, other)
    assert_complete(bytecheckpoint.load(path, plain.states()))
    assert plain.train(AFTER) == after
    with bytecheckpoint.open(path) as checkpoint:
        assert not any("random_ltd_layer" in key for key in checkpoint)


@pytest.mark.parametrize("name", ["z0x2"])
@in_engine_world
def test_tokens_cannot_be_dropped_on_the_cpu(name: str) -> None:
    """If this fails, the test above can drop tokens."""
    run = with_token_dropping(name, trained, 2)
    with pytest.raises(Exception, match=r"RandomLTD|random_ltd|implemented"):
        run.train(1)
