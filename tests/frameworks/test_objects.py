"""Nested values and objects with a state_dict: exact, in place, and by name in the kinds model and optimizer."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.values.codec import equal
from tests.frameworks.memory import MemoryCheckpoint, detached, save
from tests.support.layouts import Declared


def state() -> dict[str, Any]:
    return {
        "step": 3,
        "nested": {
            "list": [1, torch.arange(3), {"deep": torch.ones(2, dtype=torch.bfloat16)}],
            "tuple": (1, 2.5, None),
        },
        "rng": torch.get_rng_state(),
        "numpy": np.random.RandomState(3).get_state(),
        "python": random.Random(4).getstate(),
        "array": np.arange(4, dtype=np.int16),
        7: {"seven"},
        "default": collections.defaultdict(list, a=[1]),
        "ordered": collections.OrderedDict(b=1, a=2),
    }


@pytest.mark.parametrize(
    "before", [{}, {"step": 1, "gone": torch.ones(3), "nested": {"list": [], "x": 1}}, {"nested": 3}]
)
def test_a_loaded_dict_equals_the_saved_one(before: dict[str, Any]) -> None:
    source, states = state(), {"extra_states": before}
    found = save({"extra_states": source}).load(states)
    assert states["extra_states"] is before
    assert equal(before, source)
    assert not found.missing


def test_live_containers_and_tensors_are_reused() -> None:
    live = state()
    live["nested"]["list"][1].fill_(9)
    nested, items, tensor = live["nested"], live["nested"]["list"], live["nested"]["list"][1]
    save({"extra_states": state()}).load({"extra_states": live})
    assert live["nested"] is nested and nested["list"] is items and items[1] is tensor
    assert torch.equal(tensor, torch.arange(3))


def test_tensors_that_do_not_fit_are_replaced() -> None:
    for other in (
        torch.zeros(3),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64).expand(3),
        "text",
    ):
        live = {"t": other}
        save({"extra_states": {"t": torch.arange(3)}}).load({"extra_states": live})
        assert torch.equal(live["t"], torch.arange(3)) and live["t"] is not other


def test_a_live_tensor_at_two_places_receives_one_value_only() -> None:
    shared = torch.zeros(2)
    live = {"a": shared, "b": shared, "c": [1], "d": [1]}
    live["d"] = live["c"]
    source = {"a": torch.tensor([1.0, 2]), "b": torch.tensor([3.0, 4]), "c": [1], "d": [2]}
    save({"extra_states": source}).load({"extra_states": live})
    assert equal(live, source)


def test_equal_dotted_names_are_numbered() -> None:
    source = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(2)}
    checkpoint = save({"extra_states": source})
    assert {k.fqn for k in checkpoint.keys("extra_states")} == {"a.b", "a.b#2"}
    live: dict[str, Any] = {}
    checkpoint.load({"extra_states": live})
    assert equal(live, source)


@pytest.mark.parametrize("value", [5, "x", (1, torch.ones(2)), torch.arange(4), [1, 2], None])
def test_a_whole_state_may_be_any_value(value: Any) -> None:
    states: dict[str, Any] = {"thing": None}
    save({"thing": value}).load(states)
    assert equal(states["thing"], value)


def test_a_whole_tensor_is_filled_in_place() -> None:
    live = torch.zeros(4, dtype=torch.int64)
    states = {"thing": live}
    save({"thing": torch.arange(4)}).load(states)
    assert states["thing"] is live and torch.equal(live, torch.arange(4))


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.builds(torch.arange, st.integers(0, 3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4), st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_any_dict_loads_into_any_dict(source: dict[str, Any], live: dict[str, Any]) -> None:
    save({"extra_states": source}).load({"extra_states": live})
    assert equal(live, source)


def test_ranks_load_their_own_values_and_new_ranks_load_rank_0s() -> None:
    ranks = [detached(NativeFramework().capture({"rng": {"seed": r, "t": torch.tensor([r])}})) for r in range(2)]
    for rank, expected in ((0, 0), (1, 1), (5, 0)):
        live: dict[str, Any] = {}
        checkpoint = MemoryCheckpoint(ranks, rank)
        found = checkpoint.load({"rng": live})
        assert equal(live, {"seed": expected, "t": torch.tensor([expected])})
        assert found.recognized == set(checkpoint.keys("rng"))


def test_schedulers_load_alone_or_inside_a_dict() -> None:
    net = nn.Linear(2, 2)

    def scheduler() -> Any:
        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1.0), 2)

    source, alone, inside = scheduler(), scheduler(), scheduler()
    for _ in range(5):
        source.optimizer.step()
        source.step()
    save({"scheduler": source}).load({"scheduler": alone})
    assert equal(alone.state_dict(), source.state_dict())
    live = {"scheduler": inside, "epoch": 0}
    save({"extra_states": {"scheduler": source, "epoch": 4}}).load({"extra_states": live})
    assert live["scheduler"] is inside and live["epoch"] == 4
    assert equal(inside.state_dict(), source.state_dict())


def test_an_unsaved_state_is_missing() -> None:
    assert save({"a": 1}).load({"b": {}}).missing == ["b"]


def test_a_model_loads_as_a_state_dict() -> None:
    net, other = nn.Linear(2, 3), nn.Linear(2, 3)
    save({"model": net}).load({"model": other.state_dict()})
    assert torch.equal(net.weight, other.weight)
    third = nn.Linear(2, 3)
    save({"model": net.state_dict()}).load({"model": third})
    assert torch.equal(net.weight, third.weight)
    empty: dict[str, Any] = {}
    save({"model": net}).load({"model": empty})
    assert equal(empty, {k: v.detach().clone() for k, v in net.state_dict().items()})
    found = save({"model": net}).load({"model": {"weight": torch.zeros(3, 2), "new": torch.zeros(1)}})
    assert found.missing == ["model/new"] and {k.fqn for k in found.recognized} == {"weight"}


def test_a_nested_model_dict_loads_plain_values_and_keeps_its_tensors() -> None:
    source = {"net": {"w": torch.arange(3.0)}, "config": {"width": 3, "sizes": [1, 2]}, "version": 2}
    live = {"net": {"w": torch.zeros(3)}, "config": {"width": 1}, "version": 0}
    tensor = live["net"]["w"]
    save({"model": source}).load({"model": live})
    assert live["net"]["w"] is tensor and equal(live, source)


def test_a_live_optimizer_fills_an_empty_dict() -> None:
    net = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    live: dict[str, Any] = {}
    save({"model": net, "optimizer": optimizer}).load({"optimizer": live})
    assert torch.equal(live["state"]["weight"]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert live["param_groups"][0]["lr"] == 0.001


def rows(first: int, data: torch.Tensor) -> Any:
    """Declare some rows of a tensor of 6 by 2."""
    return (6, 2), (first, 0), data


def test_declared_shards_are_resharded() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    ranks = [
        detached(NativeFramework().capture({"model": {"w": Declared(*parts), "same": torch.ones(1)}}))
        for parts in ([rows(0, whole[:1]), rows(4, whole[4:])], [rows(1, whole[1:4])], [])
    ]
    checkpoint = MemoryCheckpoint(ranks)
    pieces = [torch.zeros(2, 2), torch.zeros(3, 2)]
    found = checkpoint.load({"model": {"w": Declared(rows(0, pieces[0]), rows(3, pieces[1])), "same": torch.zeros(1)}})
    assert not found.missing
    assert torch.equal(pieces[0], whole[:2]) and torch.equal(pieces[1], whole[3:])
    with pytest.raises(UsageError, match="model/w"):
        NativeFramework().capture({"model": {"w": Declared(((3, 2), (2, 0), torch.zeros(2, 2)))}})


@pytest.mark.parametrize("make", [lambda: (x := [], x.append(x))[0], lambda: iter([1]), lambda: {"f": lambda: 0}])
def test_values_that_cannot_be_stored_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        NativeFramework().capture({"extra_states": {"bad": make()}})


class Engine:
    """An object whose state_dict holds copies, so that only load_state_dict can restore it."""

    def __init__(self, fill: float) -> None:
        self.weight, self.count = torch.full((2,), fill), int(fill)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight.clone(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.count = state["weight"], state["count"]


@pytest.mark.parametrize("state", ["model", "engine"])
def test_objects_inside_containers_restore_themselves(state: str) -> None:
    checkpoint = save({state: {"inner": [Engine(3), 1], "net": nn.Linear(1, 1)}})
    live = {"inner": [Engine(0), 0], "net": nn.Linear(1, 1)}
    engine, net = live["inner"][0], live["net"]
    found = checkpoint.load({state: live})
    assert not found.missing and live["inner"] == [engine, 1] and live["net"] is net
    assert engine.count == 3 and torch.equal(engine.weight, torch.full((2,), 3.0))


def test_objects_inside_containers_that_a_checkpoint_lacks() -> None:
    """Nothing would restore them: they are missing, and a load that is not strict leaves them where they are."""
    one, two, net = Engine(1), Engine(2), nn.Linear(1, 1)
    live = {"one": one, "gone": 1, "inner": {"nets": (net, torch.ones(1))}, "list": [0, two, 3]}
    found = save({"extra_states": {"step": 3, "list": [5]}}).load({"extra_states": live})
    assert found.missing == ["extra_states/one", "extra_states/inner.nets.0", "extra_states/list.1"]
    assert live == {"step": 3, "one": one, "inner": {"nets": (net, torch.ones(1))}, "list": [5, two]}
    assert (one.count, two.count) == (1, 2)
    assert found.notes == ["extra_states: the dict here loses what the checkpoint lacks: gone"]


def test_an_object_that_rejects_its_state(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    bytecheckpoint.save(tmp_path / "s", {"sampler": Picky()})
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="KeyError: 'b'") as failure:
        bytecheckpoint.load(tmp_path / "s", {"sampler": Picky()})
    assert isinstance(failure.value.__cause__, KeyError)
