"""Checkpoints are exported for DCP and torch.save, and those programs load them and train on."""

from __future__ import annotations

import zipfile
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import CheckpointError, CorruptCheckpointError, UsageError, tools
from bytecheckpoint.cli.main import run
from bytecheckpoint.integrations.dcp import Reader
from bytecheckpoint.opening import Entry
from bytecheckpoint.tools import exporting, huggingface, torch_files
from tests.loading.test_layouts import fused, module_of, sized, weights
from tests.support.damage import damage, storage_file
from tests.support.warned import warned
from tests.support.worlds import on_ranks

WIDTH = 6


class Tied(nn.Module):
    """A model with tied weights, a buffer of integers, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embedding(tokens))).sum() + self.empty.sum()
        return found


def run_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0}]
    return model, torch.optim.AdamW([*groups, {"params": [p for n, p in named.items() if "norm" not in n]}], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randint(10, (8,), generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()


def saved(path: Path) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model, optimizer = run_of(1)
    train(model, optimizer, 1)
    extra = {
        "epoch": 3,
        "list": [torch.arange(3.0), {"deep": torch.ones(2, 2)}, "text"],
        "pair": ({"a": torch.ones(2)}, None),
    }
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer, "extra_states": extra})
    return model, optimizer, extra


def check_same(first: nn.Module, second: nn.Module) -> None:
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("max_shard_bytes", [700, 1 << 50])  # more than any disk has
def test_dcp_loads_and_trains_on(tmp_path: Path, max_shard_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "_PIECE_BYTES", 50)  # so that most tensors are several chunks
    model, optimizer, extra = saved(tmp_path / "own")
    report = tools.export(tmp_path / "own", tmp_path / "dcp", format="dcp", max_shard_bytes=max_shard_bytes)
    assert sorted(report.files) == sorted(file.name for file in (tmp_path / "dcp").iterdir())
    assert (len(report.files) > 3) == (max_shard_bytes == 700)
    other, second = run_of(2)
    train(other, second, 2)
    of_model, of_optimizer = get_state_dict(other, second)
    empty = {"epoch": 0, "list": [torch.zeros(3), {"deep": torch.zeros(2, 2)}, ""], "pair": (0, 0)}
    states = {"model": of_model, "optimizer": of_optimizer, "extra_states": empty}
    dcp.load(states, checkpoint_id=str(tmp_path / "dcp"))
    set_state_dict(other, second, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert str(states["extra_states"]) == str(extra)
    check_same(model, other)
    for run_ in ((model, optimizer), (other, second)):
        train(*run_, 3)
    check_same(model, other)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_dcp_loads_optimizers_of_named_parameters(tmp_path: Path, named: bool, flat: bool) -> None:
    """Their param groups have names, which DCP demands; those of other optimizers have none, and get none."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = run_of(seed)[0]
        return model, torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)  # type: ignore[arg-type]

    first, second = made(1), made(2)
    train(*first, 1)
    bytecheckpoint.save(tmp_path / "own", {"model": first[0], "optimizer": first[1]})
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(*second, options=options)
    states, readers = {"model": of_model, "optimizer": of_optimizer}, {"own": Reader()}
    if not flat:
        tools.export(tmp_path / "own", tmp_path / "dcp", format="dcp")
        readers["dcp"] = None
    for name, reader in readers.items():
        dcp.load(states, checkpoint_id=str(tmp_path / name), storage_reader=reader)
        set_state_dict(*second, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
        check_same(first[0], second[0])
        assert second[1].param_groups[0].get("param_names") == first[1].param_groups[0].get("param_names")
    train(*first, 3)
    train(*second, 3)
    check_same(first[0], second[0])


def test_a_file_of_torch(tmp_path: Path) -> None:
    model, optimizer, extra = saved(tmp_path / "own")
    target = tmp_path / "new" / "all.pt"
    tools.export(tmp_path / "own", target, format="torch")
    found = torch.load(target, weights_only=True)
    mapped = torch.load(target, weights_only=True, mmap=True)
    assert str(found["extra_states"]) == str(extra) and list(target.parent.iterdir()) == [target]
    for name, value in model.state_dict().items():
        assert torch.equal(found["model"][name], value) and torch.equal(mapped["model"][name], value)
        assert not found["model"][name].requires_grad
    tied = (found["model"][name].data_ptr() for name in ("embedding.weight", "head.weight"))
    assert len(set(tied)) == 1
    other, second = run_of(2)
    other.load_state_dict(found["model"])
    set_state_dict(other, second, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for run_ in ((model, optimizer), (other, second)):
        train(*run_, 3)
    check_same(model, other)
    with zipfile.ZipFile(target) as members:
        assert members.testzip() is None
    assert tools.verify(target).restorable  # by the CRC32 of its members
    empty: dict[str, Any] = {}
    bytecheckpoint.load(target, {"extra_states": empty}, include=["extra_states/*"])
    assert str(empty) == str(extra)


@pytest.mark.parametrize("format_", ["dcp", "torch"])
def test_this_package_reads_it_back(tmp_path: Path, format_: str) -> None:
    """Under other names, too: a model that a layout shows is exported as it is shown."""
    model = module_of(weights())
    model.load_state_dict(weights())
    bytecheckpoint.save(tmp_path / "own", {"model": model})
    with bytecheckpoint.open(tmp_path / "own", layout=sized()) as shown:
        tools.export(shown, tmp_path / "out", format=format_)  # type: ignore[arg-type]
        expected = {key: entry[...] for key, entry in shown.tensors.items()}
    with bytecheckpoint.open(tmp_path / "out") as found:
        assert found.tensors.keys() >= expected.keys()
        assert all(torch.equal(found[key][...], value) for key, value in expected.items())
    assert expected["model/decoder.layers.1.mlp.linear_fc1.weight"].shape == (
        fused(weights())["decoder.layers.1.mlp.linear_fc1.weight"].shape
    )


@pytest.mark.parametrize("format_", ["dcp", "torch"])
def test_models_alone_are_read_back_as_states(tmp_path: Path, format_: str) -> None:
    states = {"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)}
    bytecheckpoint.save(tmp_path / "own", dict(states))
    tools.export(tmp_path / "own", tmp_path / "out", format=format_)  # type: ignore[arg-type]
    found: dict[str, Any] = {name: torch.nn.Linear(2, 2) for name in states}
    bytecheckpoint.load(tmp_path / "out", found)
    assert all(torch.equal(found[name].weight, state.weight) for name, state in states.items())


class Phase(Enum):
    """A value of a program that other programs do not have."""

    WARM = 1


@pytest.mark.parametrize("format_", ["dcp", "torch"])
def test_classes_whose_instances_become_plain_values_are_named(tmp_path: Path, format_: str) -> None:
    for name, value in (("class", Phase.WARM), ("plain", 1)):
        bytecheckpoint.save(tmp_path / name, {"model": nn.Linear(2, 2), "extra_states": {"phase": value}})
        with warned() as said:
            tools.export(tmp_path / name, tmp_path / f"{name}.out", format=format_)
        assert [line for line in said if "Phase in 'extra_states' become their plain" in line] == said
        assert len(said) == (name == "class")


@pytest.mark.parametrize("format_", ["dcp", "torch"])
def test_tied_tensors_in_containers_have_their_places_alone(tmp_path: Path, format_: str) -> None:
    shared = torch.arange(3.0)
    extra = {"lists": [[shared], [shared]], "namespace": Namespace(weight=shared, name="x"), "w": {"w": shared}}
    bytecheckpoint.save(tmp_path / "own", {"extra_states": extra})
    tools.export(tmp_path / "own", tmp_path / "out", format=format_)  # type: ignore[arg-type]
    if format_ == "torch":
        assert str(torch.load(tmp_path / "out", weights_only=False)["extra_states"]) == str(extra)
    found: dict[str, Any] = {}
    if format_ == "dcp":
        bytecheckpoint.load(tmp_path / "out", {"extra_states": found})
        assert {name: str(value) for name, value in found.items()} == {
            name: str(value) for name, value in extra.items()
        }


class Remembering(torch.optim.SGD):
    """SGD that keeps the gradients of the last two steps in a list, and plain values in a dict, for each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            last = [*state.get("last", ([], None))[0], parameter.grad.clone()][-2:]
            state |= {"last": (last, None), "facts": {"steps": [state.get("facts", {"steps": [0]})["steps"][0] + 1]}}
            parameter.data.sub_(sum(last), alpha=0.1 / state["facts"]["steps"][0])


@pytest.mark.parametrize("format_", ["dcp", "torch", "state_dict"])
@pytest.mark.parametrize("make", [
    lambda parameters: Remembering(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False),
])  # fmt: skip
def test_optimizers_load_from_what_was_exported(tmp_path: Path, format_: str, make: Any) -> None:
    """With tied parameters, lists in the state, a rate that is a tensor; without state, of which DCP keeps nothing."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Tied()
        runs.append((model, make(list(model.parameters()))))
        train(*runs[-1], seed)
    (model, optimizer), other = runs
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer})
    if format_ == "state_dict":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "out")
    else:
        tools.export(tmp_path / "own", tmp_path / "out", format=format_)  # type: ignore[arg-type]
    bytecheckpoint.load(tmp_path / "out", {"model": other[0], "optimizer": other[1]})
    for run_ in ((model, optimizer), other):
        train(*run_, 3)
    check_same(model, other[0])


@pytest.mark.parametrize("format_", ["hf", "dcp"])
def test_an_export_leaves_the_files_of_another_that_was_quicker(
    tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the folder empty."""
    for name in ("first", "second"):
        bytecheckpoint.save(tmp_path / name, {"model": {"name": torch.tensor([len(name)])}})
    tools.export(tmp_path / "first", tmp_path / "out", format=format_)  # type: ignore[arg-type]
    for module in (exporting, huggingface):
        monkeypatch.setattr(module, "check_target", lambda *_, **__: [])
    with pytest.raises(CheckpointError, match=r"File exists|not empty"):
        tools.export(tmp_path / "second", tmp_path / "out", format=format_)  # type: ignore[arg-type]
    with bytecheckpoint.open(tmp_path / "out") as found:
        assert found["model/name"][...].item() == len("first")


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "own")
    for arguments, message in (
        ({"format": "onnx"}, "use 'hf', 'dcp'"),
        ({"format": "dcp", "dtype": "bfloat16"}, "dtype= is for format='hf'"),
        ({"format": "dcp", "state": "nosuch"}, "has no 'nosuch'"),
        ({"format": "torch", "state": "nosuch"}, "has no 'nosuch'"),
        ({"format": "deepspeed-universal", "state": "nosuch"}, "has no 'nosuch'"),
        ({"format": "deepspeed-universal", "state": "extra_states"}, "has no 'extra_states_optimizer'"),
    ):
        with pytest.raises(UsageError, match=message):
            tools.export(tmp_path / "own", tmp_path / "out", **arguments)
    for format_ in ("torch", "deepspeed-universal"):
        with pytest.raises(UsageError, match="local file system"):
            tools.export(tmp_path / "own", "mem://exported/x.pt", format=format_)  # type: ignore[arg-type]
    (tmp_path / "there.pt").write_text("other")
    with pytest.raises(UsageError, match="exists"):
        tools.export(tmp_path / "own", tmp_path / "there.pt", format="torch")
    with pytest.raises(UsageError, match=r"not empty|is a checkpoint"):
        tools.export(tmp_path / "own", tmp_path / "own", format="dcp")
    for format_ in ("dcp", "deepspeed-universal"):
        with pytest.raises(UsageError, match=r"is not empty .*: give a new folder$"):
            tools.export(tmp_path / "own", tmp_path, format=format_, force=True)  # type: ignore[arg-type]
    assert (tmp_path / "there.pt").read_text() == "other"
    damage(storage_file(tmp_path / "own", "model"))
    for format_ in ("dcp", "torch", "deepspeed-universal"):
        with pytest.raises(CorruptCheckpointError):
            tools.export(tmp_path / "own", tmp_path / format_, format=format_)  # type: ignore[arg-type]
    left = [file.name for file in tmp_path.rglob("*") if file.is_file() and "own" not in file.parts]
    assert left == ["there.pt"]


def test_the_universal_form_is_read_back(tmp_path: Path) -> None:
    """Under other names, too, and with an optimizer that DeepSpeed's own conversion does not know."""
    model = module_of(weights())
    model.load_state_dict(weights())
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "momentum": 0.9}, {"params": vectors, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    bytecheckpoint.save(
        tmp_path / "own", {"actor": model, "actor_optimizer": optimizer, "lr_scheduler": {"gamma": 0.9}}
    )
    layouts = (None, sized())
    for layout, name in zip(layouts, ("plain", "laid"), strict=True):
        with bytecheckpoint.open(tmp_path / "own", layout=layout) as shown:
            report = tools.export(shown, tmp_path / name, format="deepspeed-universal", state="actor")
            expected = {key.replace("actor_", "").replace("actor", "model"): shown[key] for key in shown}
            expected |= {key: entry[...] for key, entry in expected.items() if isinstance(entry, Entry)}
        files = {str(file.relative_to(tmp_path / name)) for file in (tmp_path / name).rglob("*") if file.is_file()}
        assert files == set(report.files) and report.tensors == 3 * len(shown.tensors) // 2
        assert (tmp_path / name / "latest_universal").read_text() == "global_step0"
        with bytecheckpoint.open(tmp_path / name / "global_step0") as found:
            for key in found.tensors.keys() & expected.keys():
                assert torch.equal(found.tensors[key][...], expected[key]), key
            assert found.tensors.keys() >= {key for key in expected if key.startswith(("model", "optimizer/state"))}
            assert found["optimizer/param_groups"] == expected["optimizer/param_groups"]
            assert found["extra_states/lr_scheduler.gamma"] == 0.9


def test_what_deepspeed_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before a byte is written."""
    model, optimizer, _ = saved(tmp_path / "own")
    unused = nn.Linear(2, 2)

    def refused(path: str, states: dict[str, Any], message: str) -> None:
        bytecheckpoint.save(tmp_path / path, states)
        with pytest.raises(CheckpointError, match=message):
            tools.export(tmp_path / path, tmp_path / "out", format="deepspeed-universal")
        assert not [file for file in tmp_path.iterdir() if "out" in file.name]

    refused("no groups", {"model": model, "optimizer": {"a": 1}}, "is no optimizer")
    optimizer.state[model.norm.weight]["step"] += 1
    refused("steps", {"model": model, "optimizer": optimizer}, "different steps in one group.*'norm.* has 2.0")
    optimizer.state[model.norm.weight]["step"] -= 1
    refused(
        "names", {"model": model, "optimizer": optimizer, "module": {"a": 1}}, "other meanings for the names module"
    )
    both = nn.ModuleDict({"run": model, "other": unused})
    optimizer.add_param_group({"params": list(unused.parameters())})
    refused("no state", {"model": both, "optimizer": optimizer}, r"different states.*'other.weight' has \[\]")
    factored = torch.optim.Adafactor(unused.parameters())
    unused(torch.ones(2)).sum().backward()
    factored.step()
    refused("factored", {"model": unused, "optimizer": factored}, "'weight' has a state 'row_var'")


def test_the_command_exports_one_state(tmp_path: Path) -> None:
    saved(tmp_path / "own")
    arguments = ["--format", "torch", "--state", "optimizer"]
    assert run(["export", str(tmp_path / "own"), str(tmp_path / "x.pt"), *arguments]) == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == {"optimizer"}


@on_ranks(2)
def test_dcp_of_two_ranks(path: str) -> None:
    """FSDP2 on two ranks is saved, exported by one and by both, and loaded by DCP on both."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    bytecheckpoint.save(f"{path}/own", {"model": model})
    if dist.get_rank() == 0:
        tools.export(f"{path}/own", f"{path}/dcp", format="dcp")
        expected = [whole]
    else:
        expected = [{}]
    dist.broadcast_object_list(expected, 0)
    report = tools.export(f"{path}/own", f"{path}/both", format="dcp", process_group=dist.group.WORLD)
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == set(report.files)
    for folder in ("dcp", "both"):
        other = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3))
        fully_shard(other, mesh=mesh)
        dcp.load({"model": other.state_dict()}, checkpoint_id=f"{path}/{folder}")
        for name, value in other.state_dict().items():
            found = value.full_tensor()
            assert dist.get_rank() != 0 or torch.equal(found, expected[0][name])
