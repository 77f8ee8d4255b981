"""Tensors in extra states keep what makes them parameters; what cannot be kept is said by name."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import CorruptCheckpointError, UsageError
from bytecheckpoint.frameworks.objects import capture
from bytecheckpoint.representation.values.codec import TensorRef, decode, encode


def values() -> dict[str, torch.Tensor]:
    return {
        "parameter": nn.Parameter(torch.arange(3.0)),
        "frozen": nn.Parameter(torch.arange(4.0), requires_grad=False),
        "integers": nn.Parameter(torch.arange(5), requires_grad=False),
        "leaf": torch.arange(6.0, requires_grad=True),
        "result": torch.arange(7.0, requires_grad=True) * 2,
        "complex": torch.zeros(2, dtype=torch.complex64, requires_grad=True),
        "plain": torch.arange(8.0),
    }


def check(loaded: dict[str, Any]) -> None:
    for name, saved in values().items():
        tensor = loaded[name]
        assert torch.equal(tensor, saved), name
        assert (type(tensor), tensor.requires_grad, tensor.is_leaf) == (type(saved), saved.requires_grad, True), name


@dataclasses.dataclass
class Holder:
    weight: Any


def test_new_tensors_get_the_saved_attributes(path: str) -> None:
    nested = {"deep": [values(), (values(),)], "held": Holder(values()["parameter"])}
    bytecheckpoint.save(path, {"extra_states": {**values(), **nested}, "other": nn.ParameterDict(values())})
    states: dict[str, Any] = {"extra_states": {"held": Holder(None)}, "other": {}}
    bytecheckpoint.load(path, {"extra_states": states["extra_states"]})
    loaded = states["extra_states"]
    check(loaded)
    check(loaded["deep"][0])
    check(loaded["deep"][1][0])
    assert type(loaded["held"].weight) is nn.Parameter and loaded["held"].weight.requires_grad
    loaded["parameter"].sum().backward()
    assert torch.equal(loaded["parameter"].grad, torch.ones(3))


def test_live_tensors_stay_what_they_are(path: str) -> None:
    bytecheckpoint.save(path, {"extra_states": values()})
    live = {name: torch.zeros_like(tensor) for name, tensor in values().items()}
    live["plain"] = nn.Parameter(live["plain"])
    kept = dict(live)
    bytecheckpoint.load(path, {"extra_states": live})
    for name, tensor in values().items():
        assert live[name] is kept[name] and torch.equal(live[name], tensor)
    assert live["plain"].requires_grad and not live["parameter"].requires_grad


def test_extra_states_of_modules(path: str) -> None:
    class Extra(nn.Module):
        def __init__(self, extra: Any) -> None:
            super().__init__()
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, extra: Any) -> None:
            self.extra = extra

    bytecheckpoint.save(path, {"model": Extra(values())})
    live = Extra({})
    bytecheckpoint.load(path, {"model": live})
    check(live.extra)


class Tagged(torch.Tensor):
    """A subclass without a dispatcher of its own."""


class TaggedParameter(nn.Parameter):
    """A subclass of parameters."""


def test_subclasses_are_named(path: str, caplog: pytest.LogCaptureFixture) -> None:
    capture._warned_of.clear()
    saved = {"a": torch.arange(3.0).as_subclass(Tagged), "b": TaggedParameter(torch.arange(4.0))}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bytecheckpoint.save(path, {"extra_states": saved})
    assert caplog.text.count("extra_states/a is of type") == 1 and "Tagged, of which" in caplog.text
    assert "a load makes a plain parameter of it" in caplog.text
    loaded: dict[str, Any] = {}
    bytecheckpoint.load(path, {"extra_states": loaded})
    assert type(loaded["a"]) is torch.Tensor and type(loaded["b"]) is nn.Parameter
    live = {"a": torch.zeros(3).as_subclass(Tagged), "b": TaggedParameter(torch.zeros(4))}
    bytecheckpoint.load(path, {"extra_states": live})
    assert type(live["a"]) is Tagged and type(live["b"]) is TaggedParameter
    assert torch.equal(live["b"], saved["b"])


def test_a_subclass_with_a_dispatcher_is_refused(path: str) -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    made = torch.Tensor._make_wrapper_subclass(Wrapped, (3,))
    with pytest.raises(UsageError, match=r"extra_states/w .*Wrapped, which is not supported"):
        bytecheckpoint.save(path, {"extra_states": {"w": made}})


def test_readers_of_plain_values_see_tensors(path: str) -> None:
    bytecheckpoint.save(path, {"extra_states": {**values(), "n": 3}})
    with bytecheckpoint.open(path) as checkpoint:
        assert torch.equal(checkpoint["extra_states/parameter"][...], torch.arange(3.0))
        assert checkpoint["extra_states/n"] == 3
    blob = encode({"p": nn.Parameter(torch.ones(1)), "t": torch.ones(1)}, on_tensor=lambda path, _: str(path[-1]))
    decoded = decode(blob, on_tensor=TensorRef)
    assert decoded == {"p": TensorRef("p", True, True), "t": TensorRef("t")}
    assert decode(encode(decoded, on_tensor=lambda *_: ""), on_tensor=TensorRef) == decoded
    assert decode(blob, on_tensor=lambda name: name) == {"p": "p", "t": "t"}


@pytest.mark.parametrize("saved", [3, [], [1, True], [1, 2, 3], [1, True, None]])
def test_malformed_attributes(saved: Any) -> None:
    from msgspec.msgpack import Ext

    from bytecheckpoint.representation.values.codes import Code
    from bytecheckpoint.representation.values.encoder import pack

    blob = b"\xc1\x01" + pack(Ext(Code.REGISTERED.value, pack(["torch.Tensor", saved])))
    with pytest.raises(CorruptCheckpointError, match="attributes that it cannot have"):
        decode(blob, on_tensor=TensorRef)
