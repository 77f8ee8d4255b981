"""Optimizers follow their parameters through a layout: state by elements, steps and hyperparameters by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.layouts import Layout, Rule
from tests.loading.test_layouts import fused, module_of, sized, weights
from tests.support.worlds import on_ranks

Tensors = dict[str, torch.Tensor]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.05, weight_decay=0.3),
    "adam with amsgrad": lambda params: torch.optim.Adam(params, 0.05, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
}


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Norms without decay and the rest, as trainings do."""
    named = dict(module.named_parameters())
    plain = [p for name, p in named.items() if "norm" in name]
    return [{"params": plain, "weight_decay": 0.0}, {"params": [p for n, p in named.items() if "norm" not in n]}]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensors]) -> None:
    """Step with gradients that lie in the parameters as the weights do, so that two namings can be compared."""
    for of_step in gradients:
        for name, parameter in module.named_parameters():
            parameter.grad = of_step[name].clone()
        optimizer.step()


def gradients(count: int) -> list[Tensors]:
    torch.manual_seed(count)
    return [{name: torch.randn_like(value) for name, value in weights().items()} for _ in range(count)]


def filled(values: Tensors) -> nn.Module:
    module = module_of(values)
    module.load_state_dict(values)
    return module


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_goes_on_under_other_names_and_back(tmp_path: Path, kind: str) -> None:
    """The next steps under fused names, and then under the first ones, equal those of the training that went on."""
    model = filled(weights())
    optimizer = OPTIMIZERS[kind](groups(model))
    more = gradients(9)
    train(model, optimizer, more[:3])
    bytecheckpoint.save(tmp_path / "first", {"model": model, "optimizer": optimizer})
    other = module_of(fused(weights()))
    second = OPTIMIZERS[kind](groups(other))
    for group in second.param_groups:
        group |= {"lr": 9.0}
    report = bytecheckpoint.load(tmp_path / "first", {"model": other, "optimizer": second}, layout=sized())
    assert not report.missing and not report.unexpected
    train(model, optimizer, more[3:6])
    train(other, second, list(map(fused, more[3:6])))
    expected = fused(dict(model.named_parameters()))
    assert all(torch.equal(value, expected[name]) for name, value in other.named_parameters())
    bytecheckpoint.save(tmp_path / "second", {"model": other, "optimizer": second})
    back = module_of(weights())
    third = OPTIMIZERS[kind](groups(back))
    bytecheckpoint.load(tmp_path / "second", {"model": back, "optimizer": third}, layout=sized())
    train(model, optimizer, more[6:])
    train(back, third, more[6:])
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in back.named_parameters())


def test_open_shows_state_under_other_names(tmp_path: Path) -> None:
    model = filled(weights())
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, gradients(2))
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer})
    state = {n: optimizer.state[p] for n, p in model.named_parameters()}
    with bytecheckpoint.open(tmp_path / "own", layout=sized()) as found:
        expected = fused({name: value["exp_avg"] for name, value in state.items()})
        for name, value in expected.items():
            if value.ndim < 2:  # the norms, which have two names
                continue
            entry = found[f"optimizer/state/{name}/exp_avg"]
            assert torch.equal(entry[...], value[: entry.shape[0]]), (
                name
            )  # no live tensor says how many rows are padded
            assert found[f"optimizer/state/{name}/step"][...] == 2
        names = [name for group in found["optimizer/param_groups"] for name in group["params"]]
        assert len(names) == len(expected)


def test_joined_parameters_must_agree(tmp_path: Path) -> None:
    """Parameters with other steps or hyperparameters do not become one; separate ones may have them."""
    model = filled(weights())
    named = dict(model.named_parameters())
    optimizer = OPTIMIZERS["adamw"]([{"params": [p]} for p in named.values()])
    train(model, optimizer, gradients(1))
    key, norm = named["model.layers.0.self_attn.k_proj.weight"], named["model.norm.weight"]
    optimizer.state[norm]["step"] += 7
    other = module_of(fused(weights()))

    def load(path: Path) -> torch.optim.Optimizer:
        bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
        second = OPTIMIZERS["adamw"](other.parameters())
        bytecheckpoint.load(path, {"model": other, "optimizer": second}, layout=sized())
        return second

    second = load(tmp_path / "good")
    assert second.state[other.get_parameter("decoder.final_layernorm.weight")]["step"] == 8
    optimizer.state[key]["step"] += 2
    with pytest.raises(
        IncompatibleCheckpointError, match=r"joins .*layers\.0\.self_attn.*which are (1.0 and 3.0|3.0 and 1)"
    ):
        load(tmp_path / "steps")
    optimizer.state[key]["step"] -= 2
    optimizer.param_groups[list(named).index("model.layers.0.self_attn.k_proj.weight")]["lr"] = 0.07
    with pytest.raises(IncompatibleCheckpointError, match=r"joins .*k_proj.* differ in 'lr'"):
        load(tmp_path / "rates")


def test_state_that_follows_no_elements_is_refused(tmp_path: Path) -> None:
    value = torch.arange(24.0).reshape(6, 4)
    layout = Layout("own", "one", "other", rules=[Rule({"w": "[a: n | b: n] h"}, {"a": "a = n h", "b": "b = n h"})])
    model = filled({"w": value})
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, [{"w": value}])
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": optimizer})
    other = module_of({"a": value[:3], "b": value[3:]})
    second = torch.optim.Adafactor(other.parameters())
    with pytest.raises(IncompatibleCheckpointError, match=r"optimizer has '(row|col)_var' of its parameters, and"):
        bytecheckpoint.load(tmp_path / "own", {"model": other, "optimizer": second}, layout=layout)
    assert all((value == 7).all() for value in other.state_dict().values())


def test_an_optimizer_needs_its_module(tmp_path: Path) -> None:
    model = filled(weights())
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    other = module_of(fused(weights()))
    names, alone = dict(other.named_parameters()), {"optimizer": torch.optim.AdamW(other.parameters())}
    with pytest.raises(UsageError, match="'optimizer' is loaded without one: put the module beside"):
        bytecheckpoint.load(tmp_path / "own", alone, layout=sized(), names=names)


def test_dicts_of_tensors_are_filled(tmp_path: Path) -> None:
    model = filled(weights())
    bytecheckpoint.save(tmp_path / "own", {"model": model})
    found = {name: torch.zeros_like(value) for name, value in fused(weights()).items()}
    bytecheckpoint.load(tmp_path / "own", {"model": found}, layout=sized())
    assert all(torch.equal(value, fused(weights())[name]) for name, value in found.items())


@on_ranks(2)
def test_state_of_two_ranks(path: str) -> None:
    """FSDP2 on two ranks under the first names becomes FSDP2 under fused ones."""
    mesh = init_device_mesh("cpu", (2,))
    model = filled(weights())
    whole = filled(weights())
    reference = OPTIMIZERS["adamw"](groups(whole))
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    more = gradients(4)
    train(whole, reference, more[:2])
    sharded = [{n: _like(value, model.get_parameter(n)) for n, value in of.items()} for of in more]
    train(model, optimizer, sharded[:2])
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other = filled(fused(weights()))
    fully_shard(other, mesh=mesh)
    second = OPTIMIZERS["adamw"](groups(other))
    bytecheckpoint.load(path, {"model": other, "optimizer": second}, layout=sized())
    train(whole, reference, more[2:])
    train(other, second, [{n: _like(v, other.get_parameter(n)) for n, v in fused(of).items()} for of in more[2:]])
    expected = fused(dict(whole.named_parameters()))
    for name, value in other.named_parameters():
        assert torch.equal(value.full_tensor(), expected[name]), name  # type: ignore[attr-defined]
    dist.barrier()


def _like(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
