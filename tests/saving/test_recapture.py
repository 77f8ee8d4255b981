"""A save of the same objects uses the capture of an earlier one, and any change of them is seen."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.world import world_of
from tests.support.modes import MODES
from tests.support.variants import crossed, quick
from tests.support.worlds import Worlds


class Job:
    """A model with a frozen layer, tied weights, buffers and a nested module; its optimizer, a counter and a queue."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        parts = {"a": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6), "inner": inner, "b": nn.Linear(6, 6)}
        self.model: Any = nn.Sequential(OrderedDict(parts))
        self.model.b.requires_grad_(False)
        self.model.inner[1].weight = self.model.a.weight
        self.optimizer = self.make([p for p in self.model.parameters() if p.requires_grad])
        self.more: dict[str, Any] = {"step": 3, "queue": torch.arange(5)}
        self.train()

    @staticmethod
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra_states": dict(self.more)}

    def parameter(self) -> nn.Parameter:
        return random.choice(list(self.model.parameters()))


def content(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, by name."""
    with bytecheckpoint.open(path) as checkpoint:
        return {
            key: (value[...].tolist(), str(value.dtype), value.requires_grad)
            if isinstance(value, bytecheckpoint.Entry)
            else repr(value)
            for key, value in ((key, checkpoint[key]) for key in checkpoint)
        }


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each capture that was not recaptured."""
    made: list[int] = []
    capture = NativeFramework.capture
    monkeypatch.setattr(NativeFramework, "capture", lambda *a, **o: (made.append(1), capture(*a, **o))[1])
    return made


def save(path: Path, job: Job, mode: str = "sync") -> None:
    bytecheckpoint.save(path, job.states(), **MODES[mode]).result(60)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_objects_are_captured_once(tmp_path: Path, captures: list[int], mode: str) -> None:
    job = Job()
    for number in range(4):
        save(tmp_path / str(number), job, mode)
        expected = job.model.state_dict()["a.weight"].tolist()
        found = content(tmp_path / str(number))
        assert found["model/a.weight"][0] == expected and found["optimizer/state/a.weight/step"][0] == number + 1
        job.train()
        job.optimizer.param_groups[0]["lr"] *= 0.5
        job.more["step"] += 1
    assert len(captures) == 1


def test_a_preparation_captures_for_the_first_save(tmp_path: Path, captures: list[int]) -> None:
    job = Job()
    bytecheckpoint.prepare(job.states()).result(60)
    save(tmp_path / "s", job)
    assert len(captures) == 1


def test_a_capture_keeps_nothing_alive(tmp_path: Path) -> None:
    job = Job()
    save(tmp_path / "s", job)
    save(tmp_path / "s", job, "background")
    watched = [weakref.ref(one) for one in (job.model, job.model.a.weight, job.optimizer, job.model.norm.running_mean)]
    del job
    world_of(current()).note_prepared({})
    gc.collect()
    assert [one() for one in watched] == [None] * 4


def replace_parameter(job: Job) -> None:
    job.model.a.bias = nn.Parameter(torch.randn(6))
    new_optimizer(job)


def replace_state(job: Job) -> None:
    parameter = random.choice(list(job.optimizer.state))
    state = job.optimizer.state[parameter]
    job.optimizer.state[parameter] = {k: v + 1 for k, v in state.items()}


def replace_state_tensor(job: Job) -> None:
    state = random.choice(list(job.optimizer.state.values()))
    state["exp_avg"] = torch.randn_like(state["exp_avg"])


def reload_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def exchange_memory(job: Job) -> None:
    parameter = job.parameter()
    parameter.data = torch.randn_like(parameter)


def turn_in_place(job: Job) -> None:
    job.model.inner[0].weight.data = job.model.inner[0].weight.data.t()


def widen(job: Job) -> None:
    job.model.b.requires_grad_(False)
    job.model.b.weight.data = job.model.b.weight.data.view(torch.int32)
    job.model.b.weight.data = job.model.b.weight.data.view(torch.float32)


def offload_and_back(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data = parameter.data.clone()


def thaw(job: Job) -> None:
    job.model.b.requires_grad_(not job.model.b.weight.requires_grad)


def untie_within_one_memory(job: Job) -> None:
    job.model.inner[1].weight = nn.Parameter(job.model.a.weight.data)


def tie(job: Job) -> None:
    inner = job.model.inner[1]
    inner.weight = nn.Parameter(torch.randn(6, 6)) if inner.weight is job.model.a.weight else job.model.a.weight
    new_optimizer(job)


def add_module(job: Job) -> None:
    job.model.inner.append(nn.Linear(6, 6))


def remove_module(job: Job) -> None:
    if len(job.model.inner) > 2:
        del job.model.inner[-1]
        new_optimizer(job)


def rename(job: Job) -> None:
    norm = job.model.norm
    norm.register_buffer(f"more{len(norm._buffers)}", torch.randn(3))


def make_transient(job: Job) -> None:
    job.model.norm.register_buffer("running_var", job.model.norm.running_var, persistent=False)


def make_persistent(job: Job) -> None:
    job.model.norm.register_buffer("running_var", job.model.norm.running_var, persistent=True)


def add_hook(job: Job) -> None:
    job.model.register_state_dict_post_hook(lambda module, entries, *_: entries.__setitem__("hooked", torch.ones(2)))


def own_state_dict(job: Job) -> None:
    ordinary = nn.Module.state_dict
    job.model.state_dict = lambda **o: {**ordinary(job.model, **o), "own": torch.ones(3)}  # type: ignore[method-assign]


def change_class(job: Job) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 4}

        def set_extra_state(self, state: Any) -> None:
            pass

    job.model.b.__class__ = Counting


def new_group(job: Job) -> None:
    extra = nn.Linear(6, 6)
    job.model.inner.append(extra)
    job.optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.7})


def plain_state(job: Job) -> None:
    state = random.choice(list(job.optimizer.state.values()))
    state["count"] = state.get("count", 0) + 1


def hyperparameters(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = random.random()
    job.optimizer.param_groups[0]["note"] = {"a": [1, random.random()]}


def tensor_hyperparameter(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] = torch.tensor(random.random())


def new_optimizer(job: Job) -> None:
    job.optimizer = job.make([p for p in job.model.parameters() if p.requires_grad])
    job.train()


def new_model(job: Job) -> None:
    old, job.model = job.model, Job().model
    del old
    new_optimizer(job)


def extra_states(job: Job) -> None:
    job.more = {
        "step": 9,
        "queue": torch.arange(7),
        "new": [1, "b", torch.randn(2), torch.randn(2, dtype=torch.complex64).conj()],
    }


EDITS: list[Callable[[Job], object]] = [
    replace_parameter, replace_state, replace_state_tensor, reload_optimizer, exchange_memory, turn_in_place, widen,
    offload_and_back, thaw, tie, untie_within_one_memory, add_module, remove_module, rename, make_transient,
    make_persistent, add_hook, own_state_dict, change_class, new_group, plain_state, hyperparameters,
    tensor_hyperparameter, new_optimizer, new_model, extra_states,
]  # fmt: skip


def check(tmp_path: Path, job: Job, mode: str = "sync") -> None:
    """Fail unless a save holds what one without any earlier capture holds."""
    save(tmp_path / "s", job, mode)
    found = content(tmp_path / "s")
    world_of(current()).resources.captures.clear()
    save(tmp_path / "s", job)
    assert found == content(tmp_path / "s")


@pytest.mark.parametrize(("edit", "modes"), crossed(EDITS, [("background",), ("sync",), ("background", "sync")]))
def test_an_edit_is_seen(tmp_path: Path, edit: Callable[[Job], object], modes: tuple[str, ...]) -> None:
    job = Job()
    for mode in modes:
        save(tmp_path / "s", job, "background")  # the next one may use all that this one has found
        edit(job)
        check(tmp_path, job, mode)


@pytest.mark.parametrize("seed", quick(range(3), every=2))
def test_many_edits_are_seen(tmp_path: Path, seed: int) -> None:
    random.seed(seed)
    job = Job()
    for _ in range(8):
        save(tmp_path / "s", job, random.choice(list(MODES)))
        for edit in random.choices(EDITS, k=random.randrange(3)):
            edit(job)
        check(tmp_path, job, random.choice(list(MODES)))


def test_two_jobs_in_turn(tmp_path: Path, captures: list[int]) -> None:
    jobs = Job(), Job()
    jobs[1].train()
    for number in range(6):
        job = jobs[number % 2]
        save(tmp_path / "s", job)
        assert content(tmp_path / "s")["model/a.weight"][0] == job.model.a.weight.tolist()
        job.train()
    assert len(captures) == 2


def test_a_selection_is_captured_each_time(tmp_path: Path, captures: list[int]) -> None:
    job = Job()
    for number in range(3):
        bytecheckpoint.save(tmp_path / str(number), job.states(), include=["model/norm.*"])
        assert "model/a.bias" not in content(tmp_path / str(number))
    assert len(captures) == 3


class Deciding(nn.Linear):
    """Decides by itself what its state_dict holds."""

    slim = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.slim:
            del destination[f"{prefix}bias"]


def test_a_class_with_methods_of_its_own_is_captured_each_time(tmp_path: Path) -> None:
    job = Job()
    job.model.inner.append(Deciding(6, 6))
    for number, slim in enumerate([False, False, True]):
        job.model.inner[2].slim = slim
        save(tmp_path / str(number), job)
        assert ("model/inner.2.bias" in content(tmp_path / str(number))) is not slim


def freeze_a_distributed_parameter(path: Path) -> None:
    model: Any = nn.Linear(6, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for trained in (True, False):
        model.weight.requires_grad_(trained)
        bytecheckpoint.save(path, {"model": model}, **MODES["background"]).result(60)
        assert content(path)["model/weight"][2] is trained


def test_a_distributed_parameter_that_is_frozen(worlds: Worlds, tmp_path: Path) -> None:
    worlds.get(2).run(freeze_a_distributed_parameter, tmp_path / "s")
