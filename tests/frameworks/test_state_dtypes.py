"""Optimizer state in another precision: the optimizer gets the dtype that it makes itself, and can step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.optimizers.state_dtypes import converts_exactly
from tests.frameworks.fsdp1_worlds import as_rank, fill, unit
from tests.frameworks.memory import save

LOW, FULL = torch.bfloat16, torch.float32
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "adamw-amsgrad-foreach": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "nadam": (torch.optim.NAdam, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adafactor": (torch.optim.Adafactor, {}),
    "asgd": (torch.optim.ASGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rprop": (torch.optim.Rprop, {}),
}


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    made = torch.Generator().manual_seed(7)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=made).to(parameter.dtype)
    optimizer.step()


def trained(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    kind, options = OPTIMIZERS[name]
    net = model(dtype)
    optimizer = kind(net.parameters(), **options)
    step(net, optimizer)
    return net, optimizer


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize(("saved", "live"), [(LOW, FULL), (FULL, LOW), (LOW, torch.float16), (FULL, torch.float64)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cast_optimizer_steps_as_after_load_state_dict(
    name: str, saved: torch.dtype, live: torch.dtype, stepped_before: bool
) -> None:
    source, optimizer = trained(name, saved)
    kind, options = OPTIMIZERS[name]
    expected = copy.deepcopy(source).to(live)
    reference = kind(expected.parameters(), **options)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    net = model(live)
    own = kind(net.parameters(), **options)
    if stepped_before:
        step(net, own)
    save({"model": source, "optimizer": optimizer}).load({"model": net, "optimizer": own}, cast=True)
    for one, other in zip(own.state.values(), reference.state.values(), strict=True):
        for slot in one:
            if one[slot].ndim:  # torch casts some single values too
                assert one[slot].dtype == live and torch.equal(one[slot], other[slot]), slot
    step(net, own)
    step(expected, reference)
    for got, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        # NAdam's product of momenta stays float32, as NAdam makes it; torch casts it too.
        torch.testing.assert_close(got, wanted, rtol=1e-6 if name == "nadam" else 0, atol=0)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("saved", "live"), [(LOW, FULL), (FULL, LOW)])
def test_fsdp1_steps_after_a_cast(saved: torch.dtype, live: torch.dtype, use_orig_params: bool) -> None:
    source, optimizer = trained("adamw", saved)
    checkpoint = save({"model": source, "optimizer": optimizer})
    with as_rank(0, 2):
        net = unit(model(live), use_orig_params=use_orig_params)
        own = torch.optim.AdamW(net.parameters(), lr=1.0)
        fill({"model": net, "optimizer": own}, checkpoint, cast=True)
        for state in own.state.values():
            assert {state[slot].dtype for slot in ("exp_avg", "exp_avg_sq")} == {live}
        step(net, own)


def test_state_in_lower_precision_than_its_optimizer_steps_needs_no_cast(tmp_path: Path) -> None:
    """A cast between an optimizer over bfloat16 parameters and one over float32 master weights is in the report."""
    source, optimizer = trained("adamw", LOW)
    bytecheckpoint.save(tmp_path, {"model": source, "optimizer": optimizer})
    masters = {name: p.detach().float() for name, p in source.named_parameters()}
    own = torch.optim.AdamW(masters.values())
    report = bytecheckpoint.load(tmp_path, {"optimizer": own}, names=masters, strict=False)
    assert {state["exp_avg"].dtype for state in own.state.values()} == {FULL}
    assert set(report.cast) == {f"optimizer/state/{n}/{s}" for n in masters for s in ("exp_avg", "exp_avg_sq")}


def test_rounding_state_needs_a_cast(tmp_path: Path) -> None:
    source, optimizer = trained("adamw", FULL)
    bytecheckpoint.save(tmp_path, {"model": source, "optimizer": optimizer})
    net = model(LOW)
    own = torch.optim.AdamW(net.parameters())
    with pytest.raises(IncompatibleCheckpointError, match=r"exp_avg is float32 .* bfloat16 here \(cast=True"):
        bytecheckpoint.load(tmp_path, {"optimizer": own}, names=dict(net.named_parameters()))


class OwnPrecision(torch.optim.SGD):
    """An optimizer that holds its state in float32 for parameters of any dtype."""


def test_an_optimizer_gets_state_of_a_precision_of_its_own_as_it_was() -> None:
    source, net = model(LOW), model(LOW)
    optimizer = OwnPrecision(source.parameters(), momentum=0.9)
    for parameter in source.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    own = OwnPrecision(net.parameters(), momentum=0.9)
    save({"model": source, "optimizer": optimizer}).load({"model": net, "optimizer": own})
    for one, other in zip(optimizer.state.values(), own.state.values(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


def test_names_of_states_do_not_matter() -> None:
    """Another model with the same parameters, in another precision, says nothing about the optimizer."""
    source, optimizer = trained("adamw", LOW)
    checkpoint = save(
        {"average": model(FULL), "net": source, "steps": optimizer}, names=dict(source.named_parameters())
    )
    net = model(FULL)
    own = torch.optim.AdamW(net.parameters())
    checkpoint.load({"net": net, "steps": own}, cast=True)
    assert {state["exp_avg"].dtype for state in own.state.values()} == {FULL}


def test_state_in_containers_is_cast_too() -> None:
    def run(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.LBFGS, Any]:
        net = model(dtype)
        return (
            net,
            torch.optim.LBFGS(net.parameters(), max_iter=3),
            lambda: net(torch.ones(2, 4).to(dtype)).square().sum(),
        )

    source, optimizer, closure = run(torch.float64)
    optimizer.step(lambda: _backward(optimizer, closure))
    net, own, live_closure = run(FULL)
    save({"model": source, "optimizer": optimizer}).load({"model": net, "optimizer": own}, cast=True)
    (state,) = own.state.values()
    assert {t.dtype for t in state["old_dirs"]} == {FULL}
    own.step(lambda: _backward(own, live_closure))


def _backward(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    optimizer.zero_grad()
    loss = closure()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("saved", "live", "exact"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float32", "float64", True),
        ("float8_e4m3fn", "bfloat16", True),
        ("complex64", "complex128", True),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("float32", "bfloat16", False),
        ("int32", "float32", False),
        ("int32", "int32", True),
    ],
)
def test_exact_conversions(saved: str, live: str, exact: bool) -> None:
    assert converts_exactly(saved, live) == exact
