"""Saves and loads by torch.distributed.checkpoint, through `Writer` and `Reader`, beside those of this package."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, UsageError
from bytecheckpoint.integrations.dcp import Reader, Writer
from bytecheckpoint.tools import verify
from tests.support.damage import flip_bit, storage_file
from tests.support.fsdp1_layouts import WORLD_SIZE, Trainer, build
from tests.support.tiny_model import source_values, target_values, train_rows
from tests.support.torch_layouts import mesh
from tests.support.variants import quick
from tests.support.worlds import Worlds, on_ranks

NEXT = 3


def states_of(trainer: Trainer, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, slots = get_state_dict(trainer.unwrapped, trainer.optimizer, options=options)
    return {"model": weights, "optimizer": slots, "step": trainer.extra["step"]}


def take(trainer: Trainer, states: dict[str, Any], flat: bool) -> None:
    set_state_dict(
        trainer.unwrapped,
        trainer.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flat),
    )
    trainer.extra["step"] = states["step"]


def save_by_dcp(layout: str, path: str, flat: bool) -> list[float]:
    """Train, save by DCP, train on; return the last losses."""
    trainer = build(layout, source_values)
    trainer.train(2)
    writer = Writer(path)
    dcp.save(states_of(trainer, flat), storage_writer=writer)
    assert writer.report is not None and writer.report.bytes_written
    return trainer.train(NEXT)


def load_by_dcp(layout: str, path: str, flat: bool) -> list[float]:
    """Load by DCP into another training, and train on."""
    trainer = build(layout, target_values)
    trainer.train(1)
    states = states_of(trainer, flat)
    dcp.load(states, checkpoint_id=path, storage_reader=Reader())
    take(trainer, states, flat)
    return trainer.train(NEXT)


def save_by_ours(layout: str, path: str, flat: bool) -> list[float]:
    trainer = build(layout, source_values)
    trainer.train(2)
    bytecheckpoint.save(path, {"model": trainer.model, "optimizer": trainer.optimizer, "extra_states": trainer.extra})
    return trainer.train(NEXT)


def load_by_ours(layout: str, path: str, flat: bool) -> list[float]:
    trainer = build(layout, target_values)
    bytecheckpoint.load(path, {"model": trainer.model, "optimizer": trainer.optimizer, "extra_states": trainer.extra})
    return trainer.train(NEXT)


WAYS = [
    (save_by_dcp, "fsdp2", load_by_dcp, "fsdp2"),
    (save_by_dcp, "tp2-fsdp2", load_by_ours, "one"),
    (save_by_dcp, "fsdp3", load_by_ours, "tp2"),
    (save_by_dcp, "pp2-fsdp2", load_by_ours, "fsdp2"),
    (save_by_ours, "fsdp3", load_by_dcp, "tp2-fsdp2"),
    (save_by_dcp, "one", load_by_ours, "fsdp3"),
    (save_by_ours, "fsdp2", load_by_dcp, "one"),
    (save_by_dcp, "hsdp2x2", load_by_dcp, "ddp2"),
    (save_by_ours, "tp2", load_by_dcp, "fsdp2"),
]


@pytest.mark.parametrize(
    ("way", "flat"),
    quick(product(WAYS, [False, True]), every=3),
)
def test_a_training_continues(worlds: Worlds, tmp_path: Path, way: tuple[Any, ...], flat: bool) -> None:
    saving, saved, loading, loaded = way
    path = str(tmp_path / "step")
    expected = worlds.run(WORLD_SIZE[saved], saving, saved, path, flat)[0]
    assert verify(path).ok
    losses = worlds.run(WORLD_SIZE[loaded], loading, loaded, path, flat)[0]
    assert losses == pytest.approx(expected, rel=1e-9)


@on_ranks(2)
def test_sharded_state_dicts_of_fsdp1(path: str) -> None:
    """Their tensors are ShardedTensors."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def wrapped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = FullyShardedDataParallel(make(seed)[0], device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train_rows(model, optimizer, 1 + seed)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        slots = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return model, optimizer, {"model": model.state_dict(), "optimizer": slots}

    model, optimizer, states = wrapped(0)
    assert isinstance(states["model"]["0.weight"], ShardedTensor)
    dcp.save(states, storage_writer=Writer(path))
    expected = train_rows(model, optimizer, NEXT)
    whole, its_optimizer = make(1)
    bytecheckpoint.load(path, {"model": whole, "optimizer": its_optimizer})
    assert train_rows(whole, its_optimizer, NEXT) == pytest.approx(expected)
    other, its_optimizer, states = wrapped(1)
    load_of(states, path)
    other.load_state_dict(states["model"])
    its_optimizer.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(other, its_optimizer, states["optimizer"])
    )
    assert train_rows(other, its_optimizer, NEXT) == pytest.approx(expected)


@on_ranks(2)
def test_sharded_tensors_are_saved_and_filled(path: str) -> None:
    """FSDP1's own state_dicts, beside a Stateful that makes them anew for each save and load."""

    class App(Stateful):
        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            self.model = FullyShardedDataParallel(nn.Linear(6, 3), device_id=torch.device("cpu"), use_orig_params=True)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            train_rows(self.model, self.optimizer, 1 + seed)

        def state_dict(self) -> dict[str, Any]:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            model, optimizer = state_dict["model"], state_dict["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    app = App(0)
    assert isinstance(app.state_dict()["model"]["weight"], ShardedTensor)
    dcp.save({"app": app}, checkpoint_id=f"{path}/torch")
    bytecheckpoint.save(f"{path}/ours", {"app": app, **app.state_dict()})
    expected = train_rows(app.model, app.optimizer, NEXT)
    for name in ("torch", "ours"):
        other = App(1)
        bytecheckpoint.load(f"{path}/{name}", {"app": other}, include=["app/*"])
        assert train_rows(other.model, other.optimizer, NEXT) == expected
    with bytecheckpoint.open(f"{path}/ours") as found, bytecheckpoint.open(f"{path}/torch") as theirs:
        assert torch.equal(found["model/weight"][:], theirs["app/model.weight"][:])


def load_of(rank_states: dict[str, Any], path: str, **options: Any) -> dict[str, Any]:
    dcp.load(rank_states, storage_reader=Reader(path, **options))
    return rank_states


def halves(value: float, n: int = 5) -> DTensor:
    """Return a tensor of `n` rows over the two ranks, whose elements are `value` and their row."""
    whole = value + torch.arange(n, dtype=torch.float32)[:, None].expand(n, 3)
    return distribute_tensor(whole.contiguous(), mesh(dp=2), [Shard(0)])


@on_ranks(2)
def test_every_kind_of_value(path: str) -> None:
    values = {"none": None, "pair": (1, 2.5), "set": {3}, "bytes": b"ab", "list": [1, [2]], "rank": dist.get_rank()}
    slots = {"step": torch.tensor(2.0), "inner": {"a": halves(1), "count": 3}}
    groups = [{"params": ["w"], "lr": torch.tensor(0.25), "betas": (0.9, 0.99)}]
    pair = {"y": (torch.full((2,), 5.0), [1, (torch.zeros(0),)])}
    saved = {
        "model": {"w": halves(1)},
        "x": values,
        "pairs": pair,
        "optimizer": {"state": {"w": slots}, "param_groups": groups},
    }
    dcp.save(saved, storage_writer=Writer(path, metadata={"run": 7}, step=4))
    empty = {"step": torch.tensor(0.0), "inner": {"a": halves(0), "count": 0}}
    others = [{"params": ["w"], "lr": torch.tensor(0.0), "betas": ()}]
    found = {
        "model": {"w": halves(0)},
        "x": dict.fromkeys(values),
        "pairs": {"y": None},
        "optimizer": {"state": {"w": empty}, "param_groups": others},
    }
    load_of(found, path)
    assert found["x"] == values, "each rank gets its own values"
    first, (number, (empty_one,)) = found["pairs"]["y"]
    assert (first.tolist(), number, empty_one.tolist()) == ([5.0, 5.0], 1, [])
    assert torch.equal(found["model"]["w"].to_local(), saved["model"]["w"].to_local())
    assert torch.equal(empty["inner"]["a"].to_local(), slots["inner"]["a"].to_local())
    assert (empty["step"], empty["inner"]["count"], others[0]["lr"]) == (2.0, 3, 0.25)
    with bytecheckpoint.open(path) as checkpoint:
        assert checkpoint["optimizer/param_groups"][0]["betas"] == (0.9, 0.99)
        assert checkpoint.info["metadata"] == {"run": 7}


@on_ranks(2)
def test_buffers_that_differ_are_those_of_rank_0(path: str) -> None:
    buffers = {f"mean{number}": torch.full((4,), float(dist.get_rank())) for number in range(6)}
    dcp.save({"model": {"w": halves(1), **buffers}}, storage_writer=Writer(path))
    with bytecheckpoint.open(path) as checkpoint:
        assert all(checkpoint[f"model/{name}"][...].sum() == 0 for name in buffers)


@on_ranks(2)
def test_a_dict_of_tensors_without_states(path: str) -> None:
    dcp.save({"weight": halves(1), "bias": torch.ones(5), "step": 3}, storage_writer=Writer(path))
    module = nn.Linear(3, 5)
    bytecheckpoint.load(path, {"model": module})
    assert module.weight[4, 0] == 5
    found = load_of({"weight": halves(0), "bias": torch.zeros(5), "step": 0}, path)
    assert (found["step"], found["bias"].tolist()) == (3, [1.0] * 5)
    assert torch.equal(found["weight"].to_local(), halves(1).to_local())
    whole = _load_state_dict_from_keys(storage_reader=Reader(path))
    assert whole["model"]["weight"].shape == (5, 3)


@on_ranks(2)
def test_tied_parameters_are_read_under_each_name(path: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight = model[1].weight
    nn.init.constant_(model[0].weight, 4.0)
    bytecheckpoint.save(path, {"model": model})
    found = load_of({"model": {f"{n}.weight": torch.zeros(3, 3) for n in range(2)}}, path)
    assert all(torch.equal(value, model[0].weight) for value in found["model"].values())


@on_ranks(2)
def test_asynchronous_saves_are_of_their_moment(path: str) -> None:
    group = dist.new_group(backend="gloo")  # DCP's own messages must not mix with those of the training
    weight = halves(1)
    writer = Writer(process_group=group)
    for number in range(2):
        saving = dcp.async_save(
            {"model": {"w": weight}}, checkpoint_id=f"{path}/{number}", storage_writer=writer, process_group=group
        )
        weight.to_local().add_(1)
        saving.result()
    for number in range(2):
        found = load_of({"model": {"w": halves(0)}}, f"{path}/{number}")
        assert torch.equal(found["model"]["w"].to_local(), halves(1 + number).to_local())


@on_ranks(3)
def test_the_ranks_of_a_call(path: str) -> None:
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    states = {"model": {"w": torch.ones(3)}}
    if rank == 0:
        dcp.save(states, storage_writer=Writer(f"{path}/alone"), no_dist=True)
        found = {"model": {"w": torch.zeros(3)}}
        dcp.load(found, storage_reader=Reader(f"{path}/alone"), no_dist=True)
        assert found["model"]["w"].sum() == 3
    else:
        dcp.save(states, storage_writer=Writer(f"{path}/two", process_group=group), process_group=group)
        with pytest.raises(CheckpointException, match="DCP has 2 ranks, and Writer 3: give process_group= to both"):
            dcp.save(states, storage_writer=Writer(f"{path}/wrong"), process_group=group)
    dist.barrier()
    if rank == 0:
        with bytecheckpoint.open(f"{path}/two") as checkpoint:
            assert checkpoint.info["world_size"] == 2
    dcp.save(states, storage_writer=Writer(f"{path}/all"), use_collectives=False)
    assert load_of({"model": {"w": torch.zeros(3)}}, f"{path}/all")["model"]["w"].sum() == 3


class Doubling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


class Unknown:
    pass


@on_ranks(2)
def test_refusals_name_the_cause_on_all_ranks(path: str) -> None:
    dcp.save(
        {"model": {"w": halves(1)}}, storage_writer=Writer(path), planner=DefaultSavePlanner(flatten_state_dict=False)
    )
    for states, message in [
        ({"model": {"w": halves(0), "q": torch.ones(3)}}, "Missing key in checkpoint state_dict: model.q"),
        ({"model": {"w": halves(0, 6)}}, "Size mismatch"),
        ({"model": {"w": halves(0).bfloat16()}}, "float32 in the checkpoint and bfloat16 here"),
    ]:
        with pytest.raises(CheckpointException, match=message):
            load_of(states, path)
    assert load_of({"model": {"w": halves(0).bfloat16()}}, path, cast=True)["model"]["w"].to_local()[0, 0] > 0
    with pytest.raises(CheckpointException, match="holds no committed checkpoint"):
        load_of({"model": {"w": halves(0)}}, f"{path}/none")
    with pytest.raises(CheckpointException, match="no path: give it to Writer, or as checkpoint_id="):
        dcp.save({"model": {"w": halves(1)}}, storage_writer=Writer())
    with pytest.raises(CheckpointException, match="Doubling has a transform_object of its own"):
        dcp.save({"model": {"w": halves(1)}}, storage_writer=Writer(path), planner=Doubling())
    with pytest.raises(CheckpointException, match=r"an instance of .*Unknown cannot be stored"):
        dcp.save({"model": {"w": halves(1)}, "x": Unknown() if dist.get_rank() else 1}, storage_writer=Writer(path))
    if dist.get_rank() == 0:
        flip_bit(storage_file(Path(path), rank="00001"), -2)
    dist.barrier()
    with pytest.raises(CheckpointException, match="checksum mismatch in model/rank-00001") as failure:
        load_of({"model": {"w": halves(0)}}, path)
    assert all(isinstance(error[0], CorruptCheckpointError) for error in failure.value.failures.values())


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="Writer has no option 'framework'; it takes check_replicas"):
        Writer("x", framework="megatron")


@on_ranks(2)
def test_a_run_goes_on_from_the_checkpoints_of_dcp(path: str) -> None:
    module, found = nn.Linear(3, 5), nn.Linear(3, 5)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.5), 3)
    dcp.save({"m": module, "schedule": schedule}, checkpoint_id=path)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(found.parameters(), lr=0.5), 1)
    load_of({"m": found, "schedule": other}, path)
    dist.broadcast(module.weight.data, 0)
    assert other.step_size == 3
    assert torch.equal(module.weight, found.weight)
