"""Parts of the states: include= and exclude= of saves and loads, and strict= by state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.world import world_of
from tests.support.extra_states import WithExtraState
from tests.support.seeds import seeded

States = dict[str, Any]


def trained(seed: int) -> States:
    """Two layers, an optimizer that has stepped, a schedule, and plain values."""
    with seeded(seed):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra_states": {"seed": seed}}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(states: States, name: str) -> torch.Tensor:
    parameter = states["model"].get_parameter(name)
    return states["optimizer"].state[parameter]["exp_avg"].clone()  # type: ignore[no-any-return]


def keys(path: Path) -> set[str]:
    with bytecheckpoint.open(path) as checkpoint:
        return set(checkpoint)


MODES: dict[str, States] = {
    "sync": {},
    "async": {"async_checkpoint": True},
    "background": {"async_checkpoint": True, "staging": "background"},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_save_writes_what_is_selected(tmp_path: Path, mode: str) -> None:
    states, selection = trained(0), {"include": ["*/0.*", "extra_states"], "exclude": ["*/0.bias"]}
    bytecheckpoint.prepare(states, **selection).result(30)
    assert bytecheckpoint.save(tmp_path, states, **selection, **MODES[mode]).result(30).plan_cached
    state = {f"optimizer/state/0.weight/{slot}" for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert keys(tmp_path) == {"model/0.weight", *state, "optimizer/param_groups", "extra_states/seed"}
    with bytecheckpoint.open(tmp_path) as checkpoint:
        assert [group["params"] for group in checkpoint["optimizer/param_groups"]] == [["0.weight"]]


def test_a_cached_plan_is_that_of_the_selection(tmp_path: Path) -> None:
    states = trained(0)
    world_of(current()).resources.plans.clear()  # another test may have saved such states
    found = []
    for include in (None, ["model/*"], None, ["model/*"], ["extra_states"], ["extra_states"]):
        found.append(bytecheckpoint.save(tmp_path, states, include=include).result().plan_cached)
    assert found == [False, False, True, True, False, True]
    assert keys(tmp_path) == {"extra_states/seed"}


def test_what_a_load_does_not_select_stays_as_it_is(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    bytecheckpoint.save(tmp_path, saved)
    weight, state = live["model"][1].weight.clone(), moments(live, "1.weight")
    report = bytecheckpoint.load(tmp_path, live, include=["*/0.*"])
    assert not report.missing and not report.unexpected
    assert torch.equal(live["model"][0].weight, saved["model"][0].weight)
    assert torch.equal(moments(live, "0.weight"), moments(saved, "0.weight"))
    assert torch.equal(live["model"][1].weight, weight) and torch.equal(moments(live, "1.weight"), state)
    assert live["extra_states"] == {"seed": 1}
    step(live["model"], live["optimizer"])
    assert {int(s["step"]) for s in live["optimizer"].state.values()} == {2}


def test_an_optimizer_that_is_not_selected_keeps_everything(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    bytecheckpoint.save(tmp_path, saved)
    before = moments(live, "0.weight")
    for selection in ({"include": ["model/*"]}, {"exclude": ["optimizer", "scheduler/*", "extra_states"]}):
        bytecheckpoint.load(tmp_path, live, **selection)
        assert torch.equal(live["model"][0].weight, saved["model"][0].weight)
        assert torch.equal(moments(live, "0.weight"), before)
        assert live["optimizer"].param_groups[0]["lr"] == 0.2 and live["extra_states"] == {"seed": 1}


def test_warm_start_with_another_head(tmp_path: Path) -> None:
    """The head has another shape here, and the checkpoint has a tensor that nothing here has."""
    bytecheckpoint.save(tmp_path, {"model": {"body": torch.ones(2), "head": torch.ones(5), "old": torch.ones(1)}})
    live = {"model": {"body": torch.zeros(2), "head": torch.zeros(3)}}
    report = bytecheckpoint.load(tmp_path, live, exclude=["model/head", "model/old"])
    assert live["model"]["body"].tolist() == [1, 1] and live["model"]["head"].tolist() == [0, 0, 0]
    assert not report.missing and not report.unexpected
    with pytest.raises(IncompatibleCheckpointError, match="model/old"):
        bytecheckpoint.load(tmp_path, live, exclude=["model/head"])


def test_a_partial_checkpoint_loads_by_its_own_selection(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    bytecheckpoint.save(tmp_path, saved, include=["*/0.*"])
    with pytest.raises(IncompatibleCheckpointError, match=r"lacks model/1\.weight"):
        bytecheckpoint.load(tmp_path, live)
    bytecheckpoint.load(tmp_path, live, include=["*/0.*"])
    assert torch.equal(moments(live, "0.bias"), moments(saved, "0.bias"))


def with_extra(value: Any) -> WithExtraState:
    module = WithExtraState()
    module.extra = value
    return module


def test_extra_states_and_tied_weights(tmp_path: Path) -> None:
    """An extra state is selected as a whole, and a tied weight by any of its names."""
    model = nn.ModuleDict({"a": with_extra({"t": torch.ones(2), "n": 1}), "b": with_extra(2)})
    tied = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    tied["two"].weight = tied["one"].weight
    bytecheckpoint.save(tmp_path, {"model": [model, tied]}, exclude=["model/b._extra_state", "model/two.*"])
    assert "model/one.weight" in keys(tmp_path) and "model/a._extra_state.t" in keys(tmp_path)
    assert not any("b._extra" in key for key in keys(tmp_path))
    fresh = nn.ModuleDict({"a": with_extra({}), "b": with_extra(3)})
    bytecheckpoint.load(tmp_path, {"model": fresh}, include=["model/a.*"])
    assert fresh["a"].get_extra_state()["n"] == 1 and fresh["b"].get_extra_state() == 3


def test_a_dict_of_tensors_is_saved_in_part(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(2), "v": torch.zeros(2)}, "epoch": 3}
    bytecheckpoint.save(tmp_path, {"model": state}, exclude=["model/a.v"])
    assert keys(tmp_path) == {"model/a.w", "model/epoch"}
    loaded: States = {"model": {}}
    bytecheckpoint.load(tmp_path, loaded)
    assert loaded["model"].keys() == {"a", "epoch"} and loaded["model"]["a"].keys() == {"w"}
    bytecheckpoint.save(tmp_path, {"model": state})
    parts: States = {"model": {}}
    bytecheckpoint.load(tmp_path, parts, exclude=["model/a.v"])
    assert parts["model"].keys() == {"a", "epoch"} and parts["model"]["a"].keys() == {"w"}
    bytecheckpoint.save(tmp_path, {"model": state}, include=["model/a.*"])
    assert keys(tmp_path) == {"model/a.w", "model/a.v"}, "plain values are selected by the name of the whole"
    with pytest.raises(UsageError, match=r"model/list.1 is not selected and lies in a list"):
        bytecheckpoint.save(tmp_path, {"model": {"list": [torch.ones(1), torch.ones(2)]}}, exclude=["model/list.1"])


@pytest.mark.parametrize("strict", [{"scheduler": False}, {"scheduler": False, "model": True}, False])
def test_a_state_may_be_optional(tmp_path: Path, strict: Any) -> None:
    saved, live = trained(0), trained(1)
    del saved["scheduler"]
    bytecheckpoint.save(tmp_path, saved)
    assert bytecheckpoint.load(tmp_path, live, strict=strict).missing == ("scheduler",)
    assert torch.equal(live["model"][0].weight, saved["model"][0].weight)
    with pytest.raises(IncompatibleCheckpointError, match="lacks scheduler"):
        bytecheckpoint.load(tmp_path, live, strict={"model": False})


def test_an_optional_state_may_be_there_in_part(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(1)}, "optimizer": {"m": torch.ones(1), "old": torch.ones(1)}}
    bytecheckpoint.save(tmp_path, saved)
    live = {"model": {"w": torch.zeros(1)}, "optimizer": {"m": torch.zeros(1), "new": torch.zeros(1)}}
    report = bytecheckpoint.load(tmp_path, live, strict={"optimizer": False})
    assert report.missing == ("optimizer/new",) and report.unexpected == ("optimizer/old",)
    live["model"]["other"] = torch.zeros(1)
    with pytest.raises(IncompatibleCheckpointError, match="lacks model/other, which"):
        bytecheckpoint.load(tmp_path, live, strict={"optimizer": False})


def test_settings_that_differ_are_reported_where_a_load_is_not_strict(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    first, second = (states["optimizer"].param_groups for states in (saved, live))
    first.append({**first[0], "params": [first[0]["params"].pop()], "lr": 0.7})
    bytecheckpoint.save(tmp_path, saved)
    with pytest.raises(IncompatibleCheckpointError, match="group 0 joins parameters"):
        bytecheckpoint.load(tmp_path, live, strict={"model": False})
    report = bytecheckpoint.load(tmp_path, live, strict={"optimizer": False})
    assert any("group 0 joins parameters" in note for note in report.notes) and second[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": "model/*"}, "give a list of patterns"),
        ({"include": []}, "selects nothing"),
        ({"exclude": [3]}, "exclude= has 3"),
        (
            {"include": ["model/0.wieght"]},
            r"'model/0.wieght' matches no name on any rank; names like it: 'model/0.weight'",
        ),
        ({"exclude": ["model/1.bais"]}, r"'model/1.bais' matches no name on any rank; names like it: 'model/1.bias'"),
        ({"include": ["extra_states/seed"]}, r"'extra_states/seed' matches no name on any rank; .*'extra_states'"),
        ({"include": ["Model/*"]}, "matches no name"),
    ],
)
def test_a_wrong_selection_is_refused(tmp_path: Path, arguments: States, message: str) -> None:
    states = trained(0)
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.save(tmp_path / "a", states, **arguments)
    assert not (tmp_path / "a" / "metadata.parquet").exists()
    bytecheckpoint.save(tmp_path / "b", {"model": states["model"], "extra_states": {}})
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.load(tmp_path / "b", {"model": states["model"], "extra_states": {}}, **arguments)


@pytest.mark.parametrize(
    ("strict", "message"),
    [("yes", "strict='yes'"), ({"model": 1}, r"strict\['model'\]=1"), ({"modle": False}, "did you mean 'model'")],
)
def test_a_wrong_strict_is_refused(tmp_path: Path, strict: Any, message: str) -> None:
    states = {"model": {"w": torch.ones(1)}}
    bytecheckpoint.save(tmp_path, states)
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.load(tmp_path, states, strict=strict)


def stage(rank: int, value: float) -> States:
    """A stage of a pipeline: each rank has its own names."""
    return {"model": {f"layer{rank}": torch.full((2,), value)}, "extra_states": {"rank": rank}}


def test_a_pattern_may_match_on_one_rank_only(tmp_path: Path) -> None:
    def one(collective: Collective) -> None:
        states = stage(collective.rank, 1.0)
        for _ in range(2):
            bytecheckpoint.save(tmp_path, states, include=["model/layer1"], timeout=20).result(30)
        live = stage(collective.rank, 0.0)
        bytecheckpoint.load(tmp_path, live, include=["model/layer1"], timeout=20)
        assert live["model"][f"layer{collective.rank}"].tolist() == [float(collective.rank)] * 2
        for call in (bytecheckpoint.save, bytecheckpoint.load):
            with pytest.raises(UsageError, match=r"matches no name on any rank; names like it: .*'model/layer1'"):
                call(tmp_path, live, include=["model/layr1"], timeout=20)

    ThreadWorld(2).run(one, timeout=100)
    assert keys(tmp_path) == {"model/layer1"}


def test_ranks_that_select_different_parts(tmp_path: Path) -> None:
    """A replica that only one rank loads would differ from the others."""

    def one(collective: Collective) -> None:
        states: States = {"model": {"a": torch.ones(2), "b": torch.ones(2)}}
        own = ["model/a", "model/b"][: 1 + collective.rank]
        with pytest.raises(UsageError, match=r"ranks select different parts: rank 0 has include=.*, rank 1"):
            bytecheckpoint.save(tmp_path, states, include=own, timeout=20)
        bytecheckpoint.save(tmp_path, states, timeout=20).result(30)
        with pytest.raises(UsageError, match="ranks select different parts"):
            bytecheckpoint.load(tmp_path, states, exclude=own[1:], timeout=20)
        with pytest.raises(UsageError, match="rank 0 loads with strict=True, rank 1 with strict="):
            bytecheckpoint.load(tmp_path, states, strict=[True, {"model": False}][collective.rank], timeout=20)

    ThreadWorld(2).run(one, timeout=100)


def test_one_rank_changes_its_selection_between_saves(tmp_path: Path) -> None:
    """The other rank has a cached plan and has written by it when rank 0 hears of the difference."""

    def one(collective: Collective) -> None:
        states: States = {"model": {"a": torch.ones(2), f"b{collective.rank}": torch.ones(2)}}
        bytecheckpoint.save(tmp_path, states, include=["model/*"], timeout=20).result(30)
        with pytest.raises(UsageError, match="ranks select different parts"):
            bytecheckpoint.save(tmp_path, states, include=["model/*", "model/a"][: 1 + collective.rank], timeout=20)

    ThreadWorld(2).run(one, timeout=100)
    assert keys(tmp_path) == {"model/a", "model/b0", "model/b1"}
