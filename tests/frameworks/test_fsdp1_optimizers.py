"""FSDP1: state and settings of optimizers by original parameter, and state that a flat parameter cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.values.codec import decode
from bytecheckpoint.tools import compare
from tests.frameworks.fsdp1_models import (
    States,
    UnevenModel,
    coordinates,
    fresh_states,
    trained_states,
    uneven_model,
    unsharded_checkpoint,
    wrapped,
)
from tests.frameworks.fsdp1_worlds import as_rank, differences, fill, load, save, unit
from tests.frameworks.memory import save as save_plain


def test_saved_steps_come_from_ranks_with_elements() -> None:
    """A rank without elements of a parameter gets no gradient for it from FSDP1, so its step is out of date."""

    def states() -> States:
        live = trained_states(unit(coordinates(nn.Linear(4, 3)), use_orig_params=True))
        for p in live["model"].parameters():
            live["optimizer"].state[p]["step"] = torch.tensor(5.0 if p.numel() else 1.0)
            live["optimizer"].state[p].setdefault("exp_avg", torch.zeros(0))
        return live

    saved = save(states, 3)
    assert saved.whole[TensorKey("optimizer", "bias", "step")] == 5
    with as_rank(0, 3):
        live = trained_states(unit(nn.Linear(4, 3), use_orig_params=True))
        assert live["model"].bias.numel() == 0
        fill(live, saved)
        assert live["model"].bias not in live["optimizer"].state


def test_settings_are_saved_by_original_parameter() -> None:
    def states(lr: float) -> States:
        model = wrapped("f", False)
        inner, outer = model.module.first.parameters(), [p for n, p in model.named_parameters() if "first" not in n]
        return {
            "model": model,
            "optimizer": torch.optim.SGD(
                [{"params": list(inner), "lr": lr}, {"params": outer, "lr": lr * 10}], momentum=lr / 2
            ),
        }

    saved = save(partial(states, 0.25), 2)
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert [sorted(g["params"])[0] for g in tree["groups"]] == ["first.bias", "cube"]
    assert [(g["lr"], g["momentum"]) for g in tree["groups"]] == [(0.25, 0.125), (2.5, 0.125)]
    with as_rank(1, 2):
        live = states(8.0)
        fill(live, saved, 1)
        assert [(g["lr"], g["momentum"]) for g in live["optimizer"].param_groups] == [(0.25, 0.125), (2.5, 0.125)]
        assert live["optimizer"].param_groups[0]["params"][0] is live["model"].module.first._handle.flat_param


def test_a_flat_parameter_has_one_step() -> None:
    model = uneven_model()
    states = trained_states(model)
    states["optimizer"].state[model.last.weight]["step"] = torch.tensor(3.0)
    saved = save_plain(states)
    message = (
        r"'the root'.*step differs.*5\.0 for 'cube', 'first.weight', 'first.bias' and 6 more; 3\.0 for 'last.weight'"
    )
    with as_rank(0, 4):
        live = trained_states(wrapped("", False))
        before = {key: value.clone() for key, value in next(iter(live["optimizer"].state.values())).items()}
        with pytest.raises(IncompatibleCheckpointError, match=message):
            fill(live, saved)
        assert live["optimizer"].state[next(iter(live["model"].parameters()))]["step"] == before["step"]
    # Units of their own for the differing parameters, or use_orig_params=True, can load it.
    for how in (("l", False), ("", True)):
        if how[1]:
            assert differences(saved, load(lambda how=how: fresh_states(wrapped(*how)), 4, saved)) == []
    expected = pytest.raises(IncompatibleCheckpointError, match=r"3\.0 for 'last.weight'; 5\.0 for 'last.bias'")
    with as_rank(0, 2), expected:
        fill(fresh_states(wrapped("l", False)), saved)


def test_a_flat_parameter_has_one_set_of_settings() -> None:
    model = uneven_model()
    last = list(model.last.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in last)]
    groups = [{"params": rest, "lr": 0.25}, {"params": last, "lr": 0.75}]
    saved = save_plain({"model": model, "optimizer": torch.optim.AdamW(groups)})
    with as_rank(0, 2):
        with pytest.raises(
            IncompatibleCheckpointError, match=r"settings differ.*'lr' is 0\.25 for 'cube', 0\.75 for 'last.weight'"
        ):
            fill(fresh_states(wrapped("", False)), saved)
        live = fresh_states(wrapped("l", False))
        params = list(live["model"].parameters())
        live["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in params])
        fill(live, saved)
        assert [g["lr"] for g in live["optimizer"].param_groups] == [0.25, 0.75]


def test_a_flat_parameter_has_the_same_state_for_all_its_parameters() -> None:
    model = uneven_model()
    states = trained_states(model)
    del states["optimizer"].state[model.cube]
    expected = pytest.raises(IncompatibleCheckpointError, match=r"state differs.*\{\} for 'cube'.*exp_avg")
    with as_rank(0, 2), expected:
        fill(fresh_states(wrapped("", False)), save_plain(states))
    missing = load(lambda: fresh_states(wrapped("", True)), 2, save_plain(states))
    assert differences(save_plain(states), missing) == []


def test_a_checkpoint_without_state_clears_the_live_state() -> None:
    saved = save_plain(fresh_states(uneven_model()))
    for use_orig_params in (True, False):
        with as_rank(0, 2):
            live = trained_states(wrapped("", use_orig_params))
            fill(live, saved)
            assert not live["optimizer"].state


def test_state_keeps_the_dtype_that_it_was_saved_with() -> None:
    assert unsharded_checkpoint().whole[TensorKey("optimizer", "cube", "exp_avg_sq")].dtype == torch.float32

    def low(use_orig_params: bool) -> States:
        model = uneven_model().bfloat16()
        return fresh_states(wrapped("f", use_orig_params, model=model))

    states = trained_states(uneven_model().bfloat16())
    saved = save_plain(states)
    for use_orig_params in (True, False):
        again = load(partial(low, use_orig_params), 3, saved)
        assert again.whole[TensorKey("optimizer", "cube", "exp_avg_sq")].dtype == torch.float32
        assert differences(saved, again) == []


def test_live_state_is_filled_in_place_and_the_padding_is_harmless() -> None:
    with as_rank(1, 4):
        live = trained_states(wrapped("", False))
        (flat,) = live["model"].parameters()
        old = live["optimizer"].state[flat]["exp_avg"]
        fill(live, unsharded_checkpoint(), 1)
        assert live["optimizer"].state[flat]["exp_avg"] is old
    with as_rank(3, 4):
        live = fresh_states(wrapped("", False))
        (flat,) = live["model"].parameters()
        fill(live, unsharded_checkpoint(), 3)
        padding = live["model"]._handle.flat_param._shard_numel_padded
        assert padding
        assert live["optimizer"].state[flat]["exp_avg"][-padding:].tolist() == [0.0] * padding


def sgd_with(state: Callable[[torch.Tensor], dict[str, Any]], params: Any) -> torch.optim.Optimizer:
    """Make an SGD with the state that `state` makes for each parameter."""
    optimizer = torch.optim.SGD(params)
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = state(p)
    return optimizer


factored = partial(sgd_with, lambda p: {"row_var": torch.zeros(2, 1)})
nested = partial(sgd_with, lambda p: {"history": [torch.zeros_like(p)]})


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "match"),
    [(factored, r"row_var is a tensor of shape \(2, 1\)"), (nested, "history is a tensor in a list")],
)
def test_state_without_one_value_per_element_is_refused(
    optimizer: Callable[[Any], torch.optim.Optimizer], match: str, use_orig_params: bool
) -> None:
    with as_rank(0, 2):
        model = unit(nn.Linear(4, 6), use_orig_params=use_orig_params)
        with pytest.raises(UsageError, match=f"optimizer/state/weight/{match}"):
            FSDP1Framework().capture({"model": model, "optimizer": optimizer(model.parameters())})


def test_factored_state_loads_without_sharding_but_not_into_flat_parameters() -> None:
    model = coordinates(nn.Linear(4, 6))
    optimizer = torch.optim.Adafactor(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = save_plain({"model": model, "optimizer": optimizer})
    for use_orig_params in (True, False):
        with as_rank(0, 2):
            live = unit(nn.Linear(4, 6), use_orig_params=use_orig_params)
            states: States = {"model": live, "optimizer": torch.optim.Adafactor(live.parameters())}
            with pytest.raises(IncompatibleCheckpointError, match=r"weight/row_var has shape \(6, 1\)"):
                fill(states, saved)

    def unsharded() -> States:
        live = unit(nn.Linear(4, 6), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
        return {"model": live, "optimizer": torch.optim.Adafactor(live.parameters())}

    assert differences(saved, load(unsharded, 2, saved)) == []


def test_a_container_of_tensors_does_not_load_into_flat_parameters() -> None:
    model = nn.Linear(4, 6)
    saved = save_plain({"model": model, "optimizer": nested(model.parameters())})
    with as_rank(0, 2):
        live = unit(nn.Linear(4, 6), use_orig_params=True)
        with pytest.raises(IncompatibleCheckpointError, match="stands in a container"):
            fill({"model": live, "optimizer": torch.optim.SGD(live.parameters())}, saved)


def test_parameters_that_the_checkpoint_lacks() -> None:
    model = uneven_model()
    states = trained_states(nn.ModuleDict({"odd": model}))
    saved = save_plain(states)
    for use_orig_params in (True, False):
        with as_rank(0, 2):
            grown = nn.ModuleDict({"odd": UnevenModel(), "new": nn.Linear(2, 2)})
            live = trained_states(unit(grown, use_orig_params=use_orig_params), step=1.0)
            destination = FSDP1Framework().destination(live, saved, strict=False)
            assert "model/new.weight" in destination.missing
            assert "optimizer/param_groups/new.weight" in destination.missing
            saved.fill(destination)
            destination.apply()
            if not use_orig_params:
                assert any("new.bias" in note for note in destination.notes)
            held = [p for p in live["model"].parameters() if p.numel()]
            assert live["optimizer"].state[held[0]]["step"] == 5


def test_an_optimizer_without_its_module_is_refused() -> None:
    with as_rank(0, 2):
        for use_orig_params in (True, False):
            model = unit(nn.Linear(4, 6), use_orig_params=use_orig_params)
            states: States = {"optimizer": torch.optim.AdamW(model.parameters())}
            assert registry.resolve("auto", states).name == "fsdp1"
            with pytest.raises(UsageError, match=r"AdamW has a parameter of an FSDP1 module.*put the module beside"):
                FSDP1Framework().capture(states)
            # names= does not tell which elements the parameter holds.
            with pytest.raises(UsageError, match="put the module beside"):
                FSDP1Framework().capture(states, names=dict(model.named_parameters()))


def test_an_optimizer_that_was_made_before_the_wrapping() -> None:
    """It steps the original parameters, which exist only with use_orig_params=True."""

    def states(use_orig_params: bool) -> States:
        model = uneven_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        whole = wrapped("f", use_orig_params, model=model)
        for p in optimizer.param_groups[0]["params"]:
            if p.numel():
                optimizer.state[p]["momentum_buffer"] = p.detach().clone() * 2
        return {"model": whole, "optimizer": optimizer}

    saved = save(partial(states, True), 3)
    assert torch.equal(
        saved.whole[TensorKey("optimizer", "cube", "momentum_buffer")], saved.whole[TensorKey("model", "cube")] * 2
    )
    with as_rank(0, 3), pytest.raises(UsageError, match="made before FSDP1 wrapped the module without use_orig_params"):
        FSDP1Framework().capture(states(False))


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2), (3, 5), (2, 3), (5, 1)])
def test_plain_values_are_saved_by_original_parameter_and_found_whichever_ranks_saved_them(
    sizes: tuple[int, int], use_orig_params: bool
) -> None:
    """A rank saves the values of its own parameters; in another world, other ranks need them."""

    def states(value: int) -> States:
        live = trained_states(wrapped("f", use_orig_params))
        for state in live["optimizer"].state.values():
            state.update(step=value, history=[value, {"mean": 0.5}], momentum_buffer=None)
        return live

    saved = save(partial(states, 3), sizes[0])
    wanted = {"step": 3, "history": [3, {"mean": 0.5}], "momentum_buffer": None}
    tree: Any = decode(saved.trees("optimizer")[0], on_tensor=lambda name: None)
    assert tree["state"]["first.weight"] == wanted
    for rank in range(sizes[1]):
        with as_rank(rank, sizes[1]):
            for live in (fresh_states(wrapped("f", use_orig_params)), states(0)):
                fill(live, saved, rank)
                for state in (live["optimizer"].state[p] for p in live["model"].parameters() if p.numel()):
                    assert {key: state[key] for key in wanted} == wanted
                    assert state.keys() == {*wanted, "exp_avg", "exp_avg_sq"}
    model = uneven_model()
    optimizer = torch.optim.AdamW(model.parameters())
    saved.load({"model": model, "optimizer": optimizer})
    assert [{key: state[key] for key in wanted} for state in optimizer.state.values()] == [wanted] * 10


def test_errors_name_what_differs_inside_a_flat_parameter() -> None:
    model = uneven_model()
    for change, match in (
        ({"k": 4}, r"values differs.*\{'k': 4\} for 'last.weight'"),
        ({"exp_avg_sq": None}, "for 'last.weight'"),
        ({"exp_avg": torch.zeros(1, 7, dtype=torch.float64)}, "'exp_avg': 'float64'.* for 'last.weight'"),
        ({"max_exp_avg_sq": torch.zeros(1, 7)}, "'max_exp_avg_sq': 'float32'.* for 'last.weight'"),
    ):
        states = trained_states(model)
        states["optimizer"].state[model.last.weight].update(change)
        saved = save_plain(states)
        for rank in range(3):
            with as_rank(rank, 3), pytest.raises(IncompatibleCheckpointError, match=f"'the root'.*{match}"):
                fill(fresh_states(wrapped("", False)), saved, rank)


def test_inside_a_container_it_is_refused() -> None:
    with as_rank(0, 2):
        model = unit(nn.Linear(4, 6), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters())
        for states in ({"all": {"net": model}}, {"model": model, "trainer": {"a": [optimizer]}}):
            assert registry.resolve("auto", states).name == "fsdp1"
            with pytest.raises(UsageError, match=r"^(all|trainer).*inside a container.*names of their own"):
                FSDP1Framework().capture(states)


def test_a_container_that_holds_itself_is_somebody_elses_problem() -> None:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    assert registry.resolve("auto", {"extra": cycle}).name == "native"


def test_parameters_that_are_left_alone_keep_state_of_another_dtype(tmp_path: Path) -> None:
    """The dtype of the live state holds for the whole flat tensor."""
    saved = trained_states(uneven_model())
    bytecheckpoint.save(tmp_path, saved)
    with as_rank(0, 1):
        live = trained_states(wrapped("", False))
        (state,) = live["optimizer"].state.values()
        before = state["exp_avg"] = torch.arange(state["exp_avg"].numel(), dtype=torch.float64)
        bytecheckpoint.load(tmp_path, live, include=["optimizer/first.weight"])
        (flat,) = live["optimizer"].param_groups[0]["params"]
        after = live["optimizer"].state[flat]["exp_avg"]
        begin = {fqn: sum(flat._numels[:number]) for number, fqn in enumerate(flat._fqns)}["first.weight"]
        inside = slice(begin, begin + 15)
        expected = before.clone()
        expected[inside] = saved["optimizer"].state[saved["model"].first.weight]["exp_avg"].flatten()
        assert after.dtype == torch.float64 and torch.equal(after[: len(expected)], expected)


def test_numbers_of_parameters_follow_the_order_of_the_model(tmp_path: Path) -> None:
    """Flat parameters have another order, the outer modules' first: with equal shapes, moments got to other parameters."""

    def made() -> nn.Sequential:
        model = coordinates(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))))
        assert isinstance(model, nn.Sequential)
        return model

    plain = trained_states(made())
    torch.save({name: item.state_dict() for name, item in plain.items()}, tmp_path / "numbered.pt")
    bytecheckpoint.save(tmp_path / "named", plain)
    with as_rank(0, 1):
        model = made()
        model[1], model[2] = (unit(model[n], use_orig_params=False) for n in (1, 2))
        live = fresh_states(unit(model, use_orig_params=False))
        bytecheckpoint.load(tmp_path / "numbered.pt", live)
        bytecheckpoint.save(tmp_path / "loaded", live)
    assert compare(tmp_path / "named", tmp_path / "loaded").differences == ()
