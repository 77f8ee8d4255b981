"""Names of frameworks, and what none of them takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.native import NativeFramework


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp", "fsdp2", "tp", "torch", "vescale"])
def test_native_names(name: str) -> None:
    assert registry.resolve(name, {"model": nn.Linear(1, 1)}).name == "native"


@pytest.mark.parametrize("name", ["fsdp1", "megatron", "deepspeed"])
def test_names_of_adapters(name: str) -> None:
    assert registry.resolve(name, {"model": nn.Linear(1, 1)}).name == name


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match="auto, ddp, fsdp, fsdp2, tp, torch, vescale, fsdp1"):
        registry.resolve("tensorflow", {})


def test_registered_adapters_come_first_under_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(NativeFramework):
        name = "mine"

        def matches(self, states: Any) -> bool:
            return "special" in states

    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    registry.register("mine", Mine)
    assert registry.resolve("mine", {}).name == "mine"
    assert registry.resolve("auto", {"special": 1}).name == "mine"
    assert registry.resolve("auto", {"model": {}}).name == "native"
    assert "mine" in registry.known()
    for taken in ("mine", "auto", "megatron", "torch", "fsdp1"):
        with pytest.raises(UsageError, match="in use"):
            registry.register(taken, Mine)


def test_a_layout_can_be_described() -> None:
    net = nn.Linear(1, 1)
    found = NativeFramework().describe({"model": net, "optimizer": torch.optim.SGD(net.parameters()), "extra": {}})
    assert found["kinds"]["model"] == {"type": "Linear", "tensors": 2, "layouts": {"plain": 2}}
