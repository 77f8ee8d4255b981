"""A file of torch.save knows an optimizer's parameters by number: they are those of the live optimizer, in its order."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, tools
from bytecheckpoint.layouts import Layout, Rule
from tests.support.worlds import on_ranks

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


def run_of(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of which the optimizer has the last parameters first, as trainers that group by decay do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if (n[0] == "1") == last], "lr": lr} for last, lr in GROUPS]
    return model, make(groups)


GROUPS = ((True, 0.5), (False, 0.1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(3, 4)).pow(3).sum().backward()
        optimizer.step()


def left_by(path: Path, make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = run_of(make)
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}, path)
    return model, optimizer


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_continues(tmp_path: Path, kind: str, adopted: bool) -> None:
    path = tmp_path / "old.pt"
    model, optimizer = left_by(path, OPTIMIZERS[kind])
    if adopted:
        tools.adopt(path, tmp_path / "adopted")
        path = tmp_path / "adopted"
    other, second = run_of(OPTIMIZERS[kind])
    train(other, second, 5)
    second.param_groups[0]["lr"] = 9.0
    extra: dict[str, Any] = {"epoch": 0}
    states = {"model": other, "optimizer": second, "extra_states": extra}
    report = bytecheckpoint.load(path, states)
    assert extra == {"epoch": 7} and not report.unexpected and not report.missing
    train(model, optimizer, 2)
    train(other, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_another_order_is_refused(tmp_path: Path) -> None:
    left_by(tmp_path / "old.pt", OPTIMIZERS["adamw"])
    model, _ = run_of(OPTIMIZERS["adamw"])
    params = list(model.parameters())
    for groups, message in (
        ([{"params": params}], "in groups of 2, 2, and the optimizer here has groups of 4"),
        (
            [{"params": params[:2]}, {"params": params[2:]}],
            r"#0/exp_avg has shape \(2,\), and .* 0.weight, has \(2, 4\)",
        ),
    ):
        states = {"model": model, "optimizer": torch.optim.AdamW(groups)}
        with pytest.raises(IncompatibleCheckpointError, match=message):
            bytecheckpoint.load(tmp_path / "old.pt", states, strict={"extra_states": False})


def test_errors_name_what_the_file_holds(tmp_path: Path) -> None:
    """A program's file does not say the class of its optimizer, and holds all plain values of a state in one pickle."""
    model, optimizer = left_by(tmp_path / "old.pt", OPTIMIZERS["adamw"])
    momentum = OPTIMIZERS["momentum"](optimizer.param_groups)
    with pytest.raises(IncompatibleCheckpointError, match=r"another algorithm \(exp_avg, exp_avg_sq, step\), .* SGD"):
        bytecheckpoint.load(
            tmp_path / "old.pt", {"model": model, "optimizer": momentum}, strict={"extra_states": False}
        )
    torch.save({"model": model.state_dict(), "run": {"phase": Phase.WARM, "epoch": 7}}, tmp_path / "other.pt")
    with pytest.raises(
        IncompatibleCheckpointError, match=r"^values of 'run': the checkpoint holds an instance of .*Phase"
    ):
        bytecheckpoint.load(tmp_path / "other.pt", {"model": model, "run": {"epoch": 0, "phase": None}})


class Phase(Enum):
    """A value of the program that saved."""

    WARM = 1


def test_no_layout_renames_numbers(tmp_path: Path) -> None:
    """The numbers are of the model that was saved, in its order, whatever its parameters are called here."""
    model, optimizer = run_of(OPTIMIZERS["adamw"])
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    layout = Layout("own", "old", "new", rules=[Rule({"{l}.<x>": "..."}, {"layers.{l}.<x>": "..."})])
    other = nn.ModuleDict({"layers": run_of(OPTIMIZERS["adamw"])[0]})
    second = torch.optim.AdamW([{"params": list(other.parameters())[2:]}, {"params": list(other.parameters())[:2]}])
    with pytest.raises(IncompatibleCheckpointError, match="by number only, which a layout cannot rename"):
        bytecheckpoint.load(tmp_path / "old.pt", {"model": other, "optimizer": second}, layout=layout)
    bytecheckpoint.load(tmp_path / "old.pt", {"model": other}, layout=layout)
    assert torch.equal(other.get_parameter("layers.0.weight"), model.get_parameter("0.weight"))


def test_names_in_the_file_decide(tmp_path: Path) -> None:
    """torch keeps the names that a program gave; then any order loads."""
    model, _ = run_of(OPTIMIZERS["adamw"])
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    other, second = run_of(OPTIMIZERS["adamw"])
    bytecheckpoint.load(tmp_path / "old.pt", {"model": other, "optimizer": second})
    for (name, parameter), mine in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(second.state[parameter]["exp_avg"], optimizer.state[mine]["exp_avg"]), name


@on_ranks(2)
def test_into_shards(path: str) -> None:
    file = Path(path) / "old.pt"
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        left_by(file, OPTIMIZERS["adamw"])
    dist.barrier()
    saved = torch.load(file, weights_only=True)["optimizer"]["state"]
    model, _ = run_of(OPTIMIZERS["adamw"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    named = dict(model.named_parameters())
    groups = [{"params": [p for n, p in named.items() if (n[0] == "1") == last]} for last, _ in GROUPS]
    optimizer = torch.optim.AdamW(groups)
    bytecheckpoint.load(file, {"model": model, "optimizer": optimizer}, strict={"extra_states": False})
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        whole = optimizer.state[parameter]["exp_avg"].full_tensor()
        assert torch.equal(whole, saved[number]["exp_avg"])
