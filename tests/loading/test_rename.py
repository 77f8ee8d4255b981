"""rename=: names of live objects that are others in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, UsageError
from tests.support.extra_states import LinearWithExtraState

States = dict[str, Any]


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, with the names of peft."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})


def base_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), LinearWithExtraState(3, 3))


def adapted_model(seed: int) -> nn.Module:
    """The base model as peft wraps it: `base_model.model.` before every name, `.base_layer.` in some."""
    inner = base_model(seed)
    inner[0] = Adapted(inner[0])  # type: ignore[arg-type, operator]
    outer, middle = nn.Module(), nn.Module()
    middle.model, outer.base_model = inner, middle
    return outer


def to_base(name: str) -> str:
    return name.replace("base_model.model.", "").replace(".base_layer.", ".")


def to_adapted(name: str) -> str:
    return name.replace("model/0.", "model/0.base_layer.").replace("model/", "model/base_model.model.")


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + lr)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def assert_same_optimizers(saved: torch.optim.Optimizer, live: torch.optim.Optimizer) -> None:
    assert saved.param_groups[0]["lr"] == live.param_groups[0]["lr"]
    for one, other in zip(saved.param_groups[0]["params"], live.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(saved.state[one][slot], live.state[other][slot]) for slot in saved.state[one])


def wrapped(module: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.net = module
    return outer


@pytest.mark.parametrize("rename", [{"model/net.": "model/"}, lambda name: name.replace("net.", "")])
def test_a_wrapped_model_with_its_optimizer(tmp_path: Path, rename: Any) -> None:
    """Names of the optimizer's state, its hyperparameters and extra states are renamed with the parameters."""
    saved, live = base_model(0), base_model(1)
    saved[1].set_extra_state({"scale": torch.ones(2)})  # type: ignore[operator, union-attr]
    outer = wrapped(live)
    first, second = optimizer_of(saved, 0.5), optimizer_of(outer, 0.1)
    bytecheckpoint.save(tmp_path, {"model": saved, "optimizer": first})
    report = bytecheckpoint.load(tmp_path, {"model": outer, "optimizer": second}, rename=rename)
    assert not report.missing and not report.unexpected
    assert_same_optimizers(first, second)
    assert live[1].get_extra_state()["scale"].tolist() == [1, 1]  # type: ignore[operator, union-attr]
    bytecheckpoint.save(tmp_path, {"model": outer, "optimizer": second})
    bytecheckpoint.load(tmp_path, {"model": saved, "optimizer": first}, rename={"model/": "model/net."})
    assert_same_optimizers(second, first)


def test_a_base_model_into_one_with_adapters_and_back(tmp_path: Path) -> None:
    base, adapted = base_model(0), adapted_model(1)
    bytecheckpoint.save(tmp_path, {"model": base})
    adapter = adapted.get_parameter("base_model.model.0.lora_A.default.weight")
    before = adapter.clone()
    bytecheckpoint.load(tmp_path, {"model": adapted}, rename=to_base, exclude=["model/*lora_*"])
    assert torch.equal(adapted.get_parameter("base_model.model.0.base_layer.weight"), base[0].weight)  # type: ignore[index, operator]
    assert torch.equal(adapter, before)
    bytecheckpoint.save(tmp_path, {"model": adapted_model(2)})
    bytecheckpoint.load(tmp_path, {"model": base}, rename=to_adapted, exclude=["model/*lora_*"])
    assert torch.equal(base[0].weight, adapted_model(2).get_parameter("base_model.model.0.base_layer.weight"))  # type: ignore[index, operator]


def test_the_longest_prefix_wins_and_patterns_are_over_live_names(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"model": {"x.w": torch.ones(1), "y.w": torch.full((1,), 2.0), "z": torch.ones(1)}})
    live = {"model": {"a.w": torch.zeros(1), "a.b.w": torch.zeros(1), "z": torch.zeros(1)}}
    bytecheckpoint.load(tmp_path, live, rename={"model/a.": "model/x.", "model/a.b.": "model/y."}, exclude=["model/z"])
    assert [float(value) for value in live["model"].values()] == [1, 2, 0]


def test_names_may_change_places(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path, {"model": {"a": torch.ones(1), "b": torch.zeros(1)}})
    live = {"model": {"a": torch.ones(1), "b": torch.ones(1)}}
    bytecheckpoint.load(tmp_path, live, rename={"model/a": "model/b", "model/b": "model/a"})
    assert [float(value) for value in live["model"].values()] == [0, 1]


def test_an_optimizer_may_have_names_of_its_own(tmp_path: Path) -> None:
    """Its names win over those of the model; and without a module in the states, names= gives the live ones."""
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = optimizer_of(saved, 0.5), optimizer_of(live, 0.1)
    bytecheckpoint.save(tmp_path, {"optimizer": first}, names={"weight": saved.weight, "bias": saved.bias})
    live.load_state_dict(saved.state_dict())
    names = {"net.weight": live.weight, "net.bias": live.bias}
    with pytest.raises(
        IncompatibleCheckpointError, match=r"groups/net.bias \(did you mean 'optimizer/param_groups/bias'"
    ):
        bytecheckpoint.load(tmp_path, {"optimizer": second}, names=names)
    bytecheckpoint.load(tmp_path, {"optimizer": second}, names=names, rename={"optimizer/net.": "optimizer/"})
    assert_same_optimizers(first, second)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"model/a": "model/b"}, r"model/a and model/b the same name in the checkpoint, model/b"),
        (lambda name: "model/b", r"the same name in the checkpoint"),
        (lambda name: name.removeprefix("model/"), r"makes 'a' of 'model/a'"),
        (lambda name: None, r"makes None of"),
        ({"a": "b"}, r"both begin with the same state"),
        ({"model/a": "ema/a"}, r"both begin with the same state"),
        ({"model/a": 3}, r"give prefixes of names"),
        ("model/", r"give a dict"),
    ],
)
def test_a_wrong_rename_is_refused(tmp_path: Path, rename: Any, message: str) -> None:
    states: States = {"model": {"a": torch.ones(1), "b": torch.zeros(1)}}
    bytecheckpoint.save(tmp_path, states)
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.load(tmp_path, states, rename=rename)
    assert [float(value) for value in states["model"].values()] == [1, 0]


def test_replicas_may_share_a_name(tmp_path: Path) -> None:
    """Modules of a list hold a tensor of one name several times, and a tied weight has several names."""
    bytecheckpoint.save(tmp_path, {"model": {"x": torch.ones(2, 2)}})
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    tied = nn.ModuleDict({"weight_a": nn.Linear(2, 2, bias=False), "weight_b": nn.Linear(2, 2, bias=False)})
    tied["weight_b"].weight = tied["weight_a"].weight
    for modules in ([first, second], [tied]):
        bytecheckpoint.load(tmp_path, {"model": modules}, rename=lambda name: "model/x")
        assert all(float(p.detach().sum()) == 4 for module in modules for p in module.parameters())


def test_errors_name_what_may_be_meant(tmp_path: Path) -> None:
    saved, live = base_model(0), wrapped(base_model(1))
    bytecheckpoint.save(tmp_path, {"model": saved})
    with pytest.raises(IncompatibleCheckpointError, match=r"model/net.0.weight \(did you mean 'model/0.weight'\?\), "):
        bytecheckpoint.load(tmp_path, {"model": live})
    with pytest.raises(IncompatibleCheckpointError, match=r"holds model/1.weight \(nearest here: 'model/0.weight'\), "):
        bytecheckpoint.load(tmp_path, {"model": saved[:1]})  # type: ignore[index]


class Holder(nn.Module):
    """A module of a program that has the name of DDP's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "1._orig_mod."])
@pytest.mark.parametrize("live", [lambda model: model, torch.compile])
def test_files_of_wrapped_models(tmp_path: Path, prefix: str, live: Any) -> None:
    """Files of torch.save have the names of DDP and torch.compile; a part of a model may be compiled, too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(Holder(model).named_parameters())  # names of its own
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    first, part = ("1.", prefix.removeprefix("1.")) if prefix[0] == "1" else ("", prefix)
    names = {
        name: name.replace(first, first + part, 1) if name.startswith(first) else name for name in model.state_dict()
    }
    weights = {names[name]: value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loaded = torch.optim.AdamW(other.named_parameters())
    bytecheckpoint.load(tmp_path / "old.pt", {"model": live(other), "optimizer": loaded})
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    for before, after in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert all(torch.equal(before[slot], after[slot]) for slot in before)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_a_module_with_the_name_of_ddps(tmp_path: Path, prefix: str) -> None:
    saved, live = nn.Linear(2, 2), Holder(nn.Linear(2, 2))
    torch.save({prefix + name: value for name, value in saved.state_dict().items()}, tmp_path / "old.pt")
    bytecheckpoint.load(tmp_path / "old.pt", {"model": live})
    assert torch.equal(live.module.weight, saved.weight)


def test_a_name_below_a_wrapper_that_two_tensors_have(tmp_path: Path) -> None:
    """Neither of them is chosen."""
    torch.save({"a._orig_mod.b": torch.ones(1), "_orig_mod.a.b": torch.zeros(1)}, tmp_path / "old.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/a\.b"):
        bytecheckpoint.load(tmp_path / "old.pt", {"model": {"a": {"b": torch.empty(1)}}})
