"""Names of frameworks: built in, registered, and added by the entry points of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
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


class Special(NativeFramework):
    name = "special"

    def matches(self, states: Any) -> bool:
        return "special" in states


@pytest.fixture
def special() -> Iterator[None]:
    """The adapter `Special`, registered."""
    registry.register("special", Special)
    yield
    registry.unregister("special")


@pytest.mark.usefixtures("special")
def test_registered_adapters_come_first_under_auto() -> None:
    assert registry.resolve("special", {}).name == "special"
    assert registry.resolve("auto", {"special": 1}).name == "special"
    assert registry.resolve("auto", {"model": {}}).name == "native"
    assert "special" in registry.known()
    for taken in ("special", "auto", "megatron", "torch", "fsdp1"):
        with pytest.raises(UsageError, match="in use"):
            registry.register(taken, Special)


def test_only_registered_adapters_can_be_removed() -> None:
    for name in ("auto", "megatron", "special"):
        with pytest.raises(UsageError, match="was not registered"):
            registry.unregister(name)


_PLUGIN = """
from bytecheckpoint.frameworks.native import NativeFramework

class Plugin(NativeFramework):
    name = "plugin"

    def matches(self, states):
        return "special" in states

def no_framework():
    return object()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose entry points name adapters."""
    info = tmp_path / "my_adapters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-adapters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bytecheckpoint.frameworks]\nbroken = my_adapters:absent\nnone = my_adapters:no_framework\n"
        "plugin = my_adapters:Plugin\nmegatron = my_adapters:Plugin\nauto = my_adapters:Plugin\n"
    )
    (tmp_path / "my_adapters.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    registry._warn_once.cache_clear()
    yield
    sys.modules.pop("my_adapters", None)
    registry._entry_points.cache_clear()


@pytest.mark.usefixtures("plugin")
def test_packages_add_adapters_by_entry_points(caplog: pytest.LogCaptureFixture) -> None:
    assert registry.known()[-3:] == ["broken", "none", "plugin"]
    assert registry.resolve("plugin", {}).name == "plugin"
    assert registry.resolve("megatron", {}).name == "megatron"
    assert registry.resolve("auto", {"special": 1}).name == "plugin"
    assert registry.resolve("auto", {"model": {}}).name == "native"
    # Each broken adapter is logged once, and ends no save of other states.
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 2
    assert "'my_adapters:absent' of my-adapters cannot be imported" in messages[0]
    assert "made an object of type object, which is no bytecheckpoint Framework" in messages[1]
    for name, match in (("broken", "cannot be imported"), ("none", "is no bytecheckpoint Framework")):
        with pytest.raises(UsageError, match=match):
            registry.resolve(name, {})
    with pytest.raises(UsageError, match="in use"):
        registry.register("plugin", NativeFramework)


def test_a_layout_can_be_described() -> None:
    net = nn.Linear(1, 1)
    states = {"model": net, "optimizer": torch.optim.SGD(net.parameters()), "extra": {}}
    model, optimizer, extra = (state.layout() for state in NativeFramework().capture(states))
    assert model == {"type": "Linear", "tensors": 2, "layouts": {"plain": 2}}
    assert optimizer == {"type": "SGD"} and extra == {"type": "dict"}


@pytest.mark.parametrize("framework", ["auto", "torch", "fsdp", "deepspeed"])
def test_megatron_fsdp_without_megatron_is_refused(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    """The package megatron-fsdp, which needs CUDA, shards modules of torch."""
    package = ModuleType("megatron_fsdp.megatron_fsdp")
    package.MegatronFSDP = type("MegatronFSDP", (nn.Sequential,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    states = {"model": nn.ModuleList([package.MegatronFSDP(nn.Linear(2, 2))])}
    with pytest.raises(
        UsageError, match=r"^model: (Megatron-FSDP is not supported|ModuleList belongs to Megatron-Core)"
    ):
        registry.resolve(framework, states).capture(states)
    plain = {"model": nn.Linear(2, 2)}
    assert registry.resolve("auto", plain).capture(plain)
