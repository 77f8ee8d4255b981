"""Copies of one box on several ranks: only one is written, so they must not differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.copies import full_digests, sample
from bytecheckpoint.saving.drift import relative_drift
from bytecheckpoint.tuning import tuned
from tests.support.metrics import collecting, wait_for_operations
from tests.support.modes import MODES
from tests.support.ranks import outcomes, succeeded
from tests.support.seeds import seeded
from tests.support.settings import writer_threads  # noqa: F401  for all tests here
from tests.support.variants import crossed

Change = Callable[[torch.nn.Module], object]


def model(seed: int = 0) -> torch.nn.Sequential:
    with seeded(seed):
        return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 10))


def save(world: ThreadWorld, path: Path, change: Change = lambda _: None, rank: int = 2, **options: Any) -> list[Any]:
    """Save a replicated model that `change` changes on one rank; return each rank's result or error."""

    def one(collective: Collective) -> Any:
        own = model()
        if collective.rank == rank:
            with torch.no_grad():
                change(own)
        return bytecheckpoint.save(path, {"model": own}, timeout=20, **options).result(60)

    return outcomes(world, one)


def refused(got: list[Any], says: str) -> None:
    for error in got:
        assert isinstance(error, IncompatibleCheckpointError), error
        assert says in str(error)


def other_shard(own: torch.nn.Module) -> None:
    """Give the rank another one's shard, by the name of the whole tensor."""
    own.get_parameter("0.weight").copy_(model(seed=1)[0].weight)


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_that_is_saved_as_a_whole_tensor_is_refused(tmp_path: Path, mode: str) -> None:
    world = ThreadWorld(3)
    says = "model/0.weight is replicated, but its copies differ between "
    for _ in range(2):  # a failed comparison is no comparison
        refused(save(world, tmp_path / "s", other_shard, **MODES[mode]), says)
    assert not (tmp_path / "s" / "metadata.parquet").exists()
    succeeded(save(world, tmp_path / "s", **MODES[mode]))
    succeeded(save(world, tmp_path / "s", other_shard, **MODES[mode]))  # compared before: no rank sends anything
    refused(save(world, tmp_path / "s", other_shard, check_replicas=True, **MODES[mode]), says)


def test_a_prepared_plan_is_compared_at_its_first_save(tmp_path: Path) -> None:
    world = ThreadWorld(2)

    def prepare(_: Collective) -> None:
        bytecheckpoint.prepare({"model": model()}).result(60)

    world.run(prepare)
    refused(save(world, tmp_path / "s", other_shard, rank=1), "between rank 0 and rank 1. ")


def test_statistics_of_batches_may_differ(tmp_path: Path) -> None:
    def change(own: torch.nn.Module) -> None:
        own.get_buffer("1.running_mean").add_(1)

    world = ThreadWorld(3)
    succeeded(save(world, tmp_path / "s", change))
    refused(save(world, tmp_path / "s", change, check_replicas=True), "model/1.running_mean is replicated")


def test_frozen_parameters_must_be_equal(tmp_path: Path) -> None:
    """A frozen base under adapters, whose layers are sharded by hand."""

    def change(own: torch.nn.Module) -> None:
        own.requires_grad_(False)
        other_shard(own)

    refused(
        save(ThreadWorld(3), tmp_path / "s", change), "model/0.weight is replicated, but its copies differ between "
    )


class OwnPart(torch.optim.Optimizer):
    """Keeps the state of one of two equal parts of each parameter, as optimizers that shard by themselves do."""

    def __init__(self, own: torch.nn.Module, rank: int) -> None:
        super().__init__(own.parameters(), {"lr": 0.1})
        for parameter in own.parameters():
            part = torch.arange(float(parameter.numel())).chunk(2)[rank]
            self.state[parameter] = {"step": torch.tensor(1.0), "moment": part}


def test_optimizer_state_must_be_equal(tmp_path: Path) -> None:
    def one(collective: Collective) -> None:
        own = torch.nn.Linear(6, 4)
        torch.nn.init.ones_(own.weight), torch.nn.init.ones_(own.bias)
        states = {"model": own, "optimizer": OwnPart(own, collective.rank)}
        bytecheckpoint.save(tmp_path / "s", states, timeout=20)

    refused(outcomes(ThreadWorld(2), one), "optimizer/state/weight/moment is replicated, but its copies differ ")


def test_flat_state_in_a_state_dict_is_refused(tmp_path: Path) -> None:
    """FSDP1's optimizers have it, here on ranks whose parts are of one size."""

    def one(collective: Collective) -> None:
        part = torch.arange(6.0) + 6 * collective.rank
        state_dict = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": part}}, "param_groups": [{"params": [0]}]}
        bytecheckpoint.save(tmp_path / "s", {"optimizer": state_dict}, timeout=20)

    refused(outcomes(ThreadWorld(2), one), "optimizer/state.0.exp_avg is replicated, but its copies differ ")


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]


def drifted(values: torch.Tensor, units: int) -> torch.Tensor:
    """Move each element by up to so many units in the last place; those of 8 bits by fewer."""
    real = torch.view_as_real(values) if values.is_complex() else values
    bits = real.clone().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()])
    most = min(units, 30 if bits.dtype == torch.int8 else units)
    size = (torch.arange(bits.numel()) % (most + 1)).to(bits.dtype).view(bits.shape)
    moved = torch.where((bits & torch.iinfo(bits.dtype).max) > size, bits - size, bits).view(real.dtype)
    return torch.view_as_complex(moved) if values.is_complex() else moved.view(values.dtype)


@pytest.mark.parametrize("units", [1, 30, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drift_by_rounding_is_saved_and_reported(
    tmp_path: Path, dtype: torch.dtype, units: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms that all ranks hold; rank 0's copy, or another one, is stored, and every report has the drift."""
    with seeded(0):
        base = {"ones": torch.ones(300), "random": torch.randn(7, 40), "few": torch.randn(3)}
    base = {k: torch.complex(v, v) if dtype.is_complex else v for k, v in base.items()}

    def one(collective: Collective, **options: Any) -> Any:
        own = {k: drifted(v.to(dtype), collective.rank * units // 2) for k, v in base.items()}
        parameters = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in own.items()})
        return bytecheckpoint.save(tmp_path / "s", {"model": parameters}, timeout=20, **options).result()

    reports = outcomes(ThreadWorld(3), one)
    succeeded(reports)
    assert all(report.replica_drift.keys() >= {"model/ones", "model/random"} for report in reports)
    assert len([record for record in caplog.records if "differ by rounding" in record.message]) == 1
    eps = torch.finfo(dtype).eps
    assert 0 < reports[1].replica_drift["model/ones"] <= units * eps
    refused(outcomes(ThreadWorld(3), partial(one, check_replicas=True)), "copies differ")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("values", ["random", "numbered"])
def test_a_shard_in_place_of_the_whole_is_never_drift(
    tmp_path: Path, dtype: torch.dtype, dim: int, values: str
) -> None:
    with seeded(1):
        whole = torch.randn(64, 48) if values == "random" else torch.arange(64.0 * 48).view(64, 48) / 8

    def one(collective: Collective) -> None:
        own = torch.nn.Linear(4, 4, bias=False)
        own.weight = torch.nn.Parameter(whole.to(dtype).chunk(2, dim)[collective.rank].clone())
        bytecheckpoint.save(tmp_path / "s", {"model": own}, timeout=20)

    refused(
        outcomes(ThreadWorld(2), one), "model/weight is replicated, but its copies differ between rank 0 and rank 1"
    )


def test_the_metrics_name_the_tensors_that_drifted(tmp_path: Path) -> None:
    with collecting():
        succeeded(save(ThreadWorld(2), tmp_path / "step_1", lambda own: own[0].weight.mul_(1 + 1e-6), rank=1))
        (table,) = wait_for_operations(tmp_path, 1)
    (row,) = [row for row in table.to_pylist() if row["level"] == "drift"]
    assert (row["rank"], row["name"], row["subject"]) == (0, "replica drift", "model/0.weight")
    assert 500 < row["count"] < 2000  # billionths


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "uint4", "int64", "bool"])
def test_elements_that_are_no_numbers_do_not_drift(name: str) -> None:
    elements = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
    assert relative_drift(elements, elements) == 0
    assert relative_drift(elements, torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))) == math.inf


@pytest.mark.parametrize("size", [4, 33, 500])
def test_moments_that_drift_by_the_rounding_of_gradients_are_replicas(size: int) -> None:
    """Adam's moments in float32, made of gradients in bfloat16."""
    with seeded(size):
        moment = torch.randn(size) * 1e-3
        other = moment + torch.randn(size) * 1e-3 * 2**-8
        assert 0 < relative_drift(moment, other) < 0.05
        assert all(relative_drift(moment, torch.randn(size) * 1e-3) == math.inf for _ in range(100))


def test_one_rank_with_other_data_among_drifted_ones_is_named(tmp_path: Path) -> None:
    def one(collective: Collective) -> None:
        own = model()
        with torch.no_grad():
            own[0].weight.mul_(1 + 1e-6 * collective.rank)
            if collective.rank == 3:
                other_shard(own)
        bytecheckpoint.save(tmp_path / "s", {"model": own}, timeout=20)

    refused(
        outcomes(ThreadWorld(5), one),
        "model/0.weight is replicated, but its copies differ between ranks 0, 1, 2, 4 and rank 3",
    )


def test_one_changed_element(tmp_path: Path) -> None:
    def change(own: torch.nn.Module) -> None:
        own.get_parameter("2.weight").view(-1)[7] += 1e-6

    refused(
        save(ThreadWorld(3), tmp_path / "s", change, rank=0, check_replicas=True), "between rank 0 and ranks 1, 2. "
    )


def test_nothing_is_compared_when_the_caller_says_so(tmp_path: Path) -> None:
    succeeded(save(ThreadWorld(3), tmp_path / "s", other_shard, check_replicas=False))


def test_ranks_compare_alike(tmp_path: Path) -> None:
    def one(collective: Collective) -> None:
        bytecheckpoint.save(
            tmp_path / "s", {"model": model()}, check_replicas=["sampled", "full"][collective.rank], timeout=20
        )

    for error in outcomes(ThreadWorld(2), one):
        assert isinstance(error, UsageError) and "check_replicas differs between ranks" in str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (16, 16), (3, 40, 2)])
def test_strides_do_not_matter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    first = torch.rand(shape).to(dtype)
    turned = first.movedim(0, -1).contiguous().movedim(-1, 0) if shape else first.clone()

    def shard(data: torch.Tensor) -> LiveShard:
        return LiveShard(TensorKey("m", "a"), "any", shape, (0,) * len(shape), shape, data, requires_grad=True)

    shards = [shard(data) for data in (first, turned, (first.to(torch.complex128) + 1).to(dtype))]
    for digests in (sample(shards, np.arange(3)).digests(), full_digests(shards)):
        assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("mode", "tiled"), crossed(list(MODES), [False, True]))
def test_buffers_are_those_of_the_lowest_rank(tmp_path: Path, mode: str, tiled: bool) -> None:
    """Statistics of batches differ between ranks. A mean of one rank and a variance of another one would be of none."""

    def one(collective: Collective) -> None:
        with seeded(0):
            own = torch.nn.Sequential(*(torch.nn.BatchNorm1d(8 + i) for i in range(6)))
        with torch.no_grad():
            for buffer in own.buffers():
                buffer.fill_(collective.rank + 1)
        bytecheckpoint.save(tmp_path / "s", {"model": own}, **MODES[mode]).result(60)  # type: ignore[call-overload]

    with tuned(tiled_rows=0 if tiled else 1 << 40):
        ThreadWorld(4).run(one)
    with bytecheckpoint.open(tmp_path / "s") as checkpoint:
        buffers = [checkpoint[key][...] for key in checkpoint if "running" in key or "batches" in key]
    assert len(buffers) == 18 and all((buffer == 1).all() for buffer in buffers)
