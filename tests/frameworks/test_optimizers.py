"""Optimizers: exact state, hyperparameters by name, several side by side."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.values.codec import equal
from tests.frameworks.memory import MemoryCheckpoint, detached, save
from tests.support.layouts import bits


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)).to(dtype)


def step(net: nn.Module, *optimizers: torch.optim.Optimizer, seed: int = 0, count: int = 2) -> float:
    dtype = next(net.parameters()).dtype
    made = torch.Generator().manual_seed(seed)
    loss = torch.tensor(math.nan)
    for _ in range(count):
        x = torch.randn(5, 4, generator=made).to(dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            net.zero_grad()
            value = net(x).square().mean()
            value.backward()
            return value

        for optimizer in optimizers:
            loss = optimizer.step(closure)
    return float(loss.detach())


def assert_same_state(one: Any, two: Any, net: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        a, b = one.state.get(p, {}), two.state.get(q, {})
        assert equal(dict(a), dict(b)), name


MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.05, history_size=3, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "used"])
def test_training_continues_exactly(maker: Any, stepped: bool) -> None:
    net, other = model(), model()
    one, two = maker(net.parameters()), maker(other.parameters())
    step(net, one)
    if stepped:
        step(other, two, seed=9, count=3)
    checkpoint = save({"model": net, "optimizer": one})
    found = checkpoint.load({"model": other, "optimizer": two})
    assert not found.missing
    assert found.recognized == {*checkpoint.keys("model"), *checkpoint.keys("optimizer")}
    assert_same_state(one, two, net, other)
    assert step(net, one, seed=5, count=5) == step(other, two, seed=5, count=5)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(bits(p.detach()), bits(q.detach()))


def test_nothing_changes_before_apply() -> None:
    net, other = model(), model()
    one, two = torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.Adam(other.parameters(), lr=0.3)
    step(net, one)
    checkpoint = save({"model": net, "optimizer": one})
    destination = NativeFramework().destination({"model": other, "optimizer": two}, checkpoint)
    assert not two.state and two.param_groups[0]["lr"] == 0.3
    checkpoint.fill(destination)
    assert not two.state and two.param_groups[0]["lr"] == 0.3
    destination.apply()
    assert two.param_groups[0]["lr"] == 0.1


def test_state_keeps_its_dtype_under_bf16_parameters() -> None:
    net, other = model(torch.bfloat16), model(torch.bfloat16)
    one, two = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
    step(net, one)
    for state in one.state.values():
        state["exp_avg"] = torch.randn_like(state["exp_avg"], dtype=torch.float32)
    save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert_same_state(one, two, net, other)
    assert all(
        s["exp_avg"].dtype == torch.float32 and s["exp_avg_sq"].dtype == torch.bfloat16 for s in two.state.values()
    )


def test_existing_state_tensors_are_reused() -> None:
    net, other = model(), model()
    one, two = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
    step(net, one)
    step(other, two)
    memory = [s["exp_avg"].data_ptr() for s in two.state.values()]
    save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert memory == [s["exp_avg"].data_ptr() for s in two.state.values()]


def test_muon_beside_adamw() -> None:
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        net = model()
        matrices = [p for p in net.parameters() if p.ndim == 2]
        rest = [p for p in net.parameters() if p.ndim != 2]
        return net, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    (net, ones), (other, twos) = build(), build()
    step(net, *ones)
    save({"model": net, "optimizer": ones}).load({"model": other, "optimizer": twos})
    for one, two in zip(ones, twos, strict=True):
        assert_same_state(one, two, net, other)
    as_dict = {"muon": twos[0], "adamw": twos[1]}
    assert not save({"model": net, "optimizer": ones}).load({"model": other, "optimizer": as_dict}).missing
    overlapping = [torch.optim.SGD(net.parameters()), torch.optim.SGD(net.parameters())]
    with pytest.raises(UsageError, match=r"0\.weight"):
        save({"model": net, "optimizer": overlapping})


class Custom(torch.optim.Optimizer):
    """State of every shape that somebody might invent."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "name": "x"})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "count": 7,
                    "ratio": math.inf,
                    "nothing": None,
                    "flag": True,
                    "nested": {"a": torch.randn(2), "deep": [torch.randn(3), (1, torch.tensor(2.0))], 5: "int key"},
                    "nested.a": torch.randn(1),
                    3: torch.randn(2),
                    "complex": torch.randn(2, dtype=torch.complex64),
                    "packed": torch.arange(4, dtype=torch.uint8),
                }
        self.state["seen"] = {"tokens": 10**30, "mean": torch.tensor([1.5])}


def test_custom_nested_state() -> None:
    net, other = model(), model()
    one, two = Custom(net.parameters()), Custom(other.parameters())
    one.step()
    checkpoint = save({"model": net, "optimizer": one})
    assert "nested.deep.1.1" in {k.slot for k in checkpoint.keys("optimizer")}
    checkpoint.load({"model": other, "optimizer": two})
    assert_same_state(one, two, net, other)
    assert equal(one.state["seen"], two.state["seen"])


def test_slots_that_the_checkpoint_lacks_are_removed_and_stateless_parameters_noted() -> None:
    net, other = model(), model()
    net[1].requires_grad_(False)
    one, two = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters(), amsgrad=True)
    step(net, one)
    step(other, two)
    found = save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert_same_state(one, two, net, other)
    assert other[1].weight not in two.state and any("1.weight" in note for note in found.notes)
    assert not found.missing


def test_hyperparameters_follow_names_not_positions() -> None:
    net, other = model(), model()
    one = torch.optim.SGD(
        [
            {"params": net[0].parameters(), "lr": 0.5, "initial_lr": 1.0},
            {"params": [*net[1].parameters(), *net[2].parameters()], "weight_decay": 0.25, "initial_lr": 2.0},
        ],
        lr=0.1,
    )
    two = torch.optim.SGD([{"params": other[i].parameters()} for i in (2, 0, 1)], lr=9.0)
    two.param_groups[0]["mine"] = "kept"
    found = save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert [(g["lr"], g["weight_decay"], g["initial_lr"]) for g in two.param_groups] == [
        (0.1, 0.25, 2.0),
        (0.5, 0, 1.0),
        (0.1, 0.25, 2.0),
    ]
    assert two.param_groups[0]["mine"] == "kept" and any("'mine'" in note for note in found.notes)


def test_merging_groups_that_differ_is_an_error_that_names_them() -> None:
    net, other = model(), model()
    one = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}], lr=0.1)
    two = torch.optim.SGD([*other[0].parameters(), *other[1].parameters()], lr=7.0, weight_decay=3.0)
    checkpoint = save({"model": net, "optimizer": one})
    with pytest.raises(IncompatibleCheckpointError) as error:
        checkpoint.load({"model": other, "optimizer": two})
    for part in ("group 0", "'lr'", "0.5", "0.1", "0.weight", "1.weight"):
        assert part in str(error.value)
    found = checkpoint.load({"model": other, "optimizer": two}, strict=False)
    assert two.param_groups[0]["lr"] == 7.0 and two.param_groups[0]["weight_decay"] == 0
    assert any("'lr'" in note for note in found.notes)


def test_tensor_hyperparameters_stay_the_same_object() -> None:
    net, other = model(), model()
    one = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.125), foreach=False)
    two = torch.optim.AdamW(other.parameters(), lr=torch.tensor(3.0), foreach=False)
    lr = two.param_groups[0]["lr"]
    save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert two.param_groups[0]["lr"] is lr and float(lr) == 0.125
    plain = torch.optim.AdamW(other.parameters(), lr=3.0)
    save({"model": net, "optimizer": one}).load({"model": other, "optimizer": plain})
    assert torch.equal(plain.param_groups[0]["lr"], torch.tensor(0.125))


def test_an_unsaved_parameter_is_missing() -> None:
    net, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    one, two = torch.optim.SGD(net.parameters()), torch.optim.SGD(other.parameters())
    found = save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert found.missing == ["model/bias", "optimizer/param_groups/bias"]


def test_a_parameter_without_a_name_is_refused() -> None:
    loose = torch.optim.SGD([nn.Parameter(torch.ones(7, 2))])
    with pytest.raises(UsageError, match=r"\(7, 2\), group 0"):
        save({"model": model(), "optimizer": loose})


@pytest.mark.parametrize("direction", [False, True])
def test_explicit_names(direction: bool) -> None:
    net, other = model(), model()
    one, two = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
    step(net, one)
    named, others = dict(net.named_parameters()), dict(other.named_parameters())
    flip = {p: n for n, p in named.items()}
    checkpoint = save({"optimizer": one}, names=flip if direction else named)
    assert not checkpoint.load({"optimizer": two}, names=others).missing
    assert_same_state(one, two, net, other)


def test_state_of_tied_weights_is_found_by_every_name() -> None:
    tied = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    one = torch.optim.Adam(tied.parameters(), lr=0.5)
    tied["embed"].weight.sum().backward()
    one.step()
    stage = nn.ModuleDict({"head": nn.Linear(3, 4, bias=False)})
    two = torch.optim.Adam(stage.parameters())
    found = save({"model": tied, "optimizer": one}).load({"model": stage, "optimizer": two})
    assert not found.missing and two.param_groups[0]["lr"] == 0.5
    assert equal(dict(one.state[tied["embed"].weight]), dict(two.state[stage["head"].weight]))


def test_pipeline_stages_merge_into_one_optimizer_and_back() -> None:
    whole = model()
    ranks, reference = [], {}
    for names in (("0", "1"), ("2",)):
        part = nn.ModuleDict({n: copy.deepcopy(whole[int(n)]) for n in names})
        optimizer = torch.optim.Adam(part.parameters(), lr=0.25)
        sum(p.sum() for p in part.parameters()).backward()
        optimizer.step()
        reference.update({n: dict(optimizer.state[p]) for n, p in part.named_parameters()})
        ranks.append(detached(NativeFramework().capture({"model": [part], "optimizer": [optimizer]})))
    checkpoint = MemoryCheckpoint(ranks)
    other = model()
    two = torch.optim.Adam(other.parameters())
    found = checkpoint.load({"model": other, "optimizer": two})
    assert not found.missing and two.param_groups[0]["lr"] == 0.25
    assert all(equal(dict(two.state[p]), reference[n]) for n, p in other.named_parameters())


def test_an_optimizer_does_not_load_from_plain_values() -> None:
    net = model()
    checkpoint = save({"optimizer": {"lr": 3}})
    with pytest.raises(IncompatibleCheckpointError, match="has not the form of an optimizer"):
        checkpoint.load({"model": net, "optimizer": torch.optim.SGD(net.parameters())})


def test_an_optimizer_made_from_named_parameters_keeps_its_own_names() -> None:
    net, other = model(), model()
    one = torch.optim.Adam(net.named_parameters(), lr=0.5)
    two = torch.optim.Adam([(f"my.{n}", p) for n, p in other.named_parameters()])
    save({"model": net, "optimizer": one}).load({"model": other, "optimizer": two})
    assert two.param_groups[0]["lr"] == 0.5 and two.param_groups[0]["param_names"][0] == "my.0.weight"


class Chunks:
    """Two chunks that hold the parameter "tied", each with an optimizer of its own, whose settings differ."""

    def __init__(self, seed: int = 0, *, apart: bool = False, rates: tuple[float, float] = (0.5, 0.25)) -> None:
        torch.manual_seed(seed)
        self.modules = [nn.ParameterDict({"tied": torch.ones(3), str(i): torch.randn(3)}) for i in range(2)]
        self.optimizers = []
        for i, (module, rate) in enumerate(zip(self.modules, rates, strict=True)):
            groups: list[dict[str, Any]] = [{"params": [module["tied"]]}, {"params": [module[str(i)]], "lr": rate / 2}]
            made = torch.optim.Adam(groups if apart else module.parameters(), lr=rate)
            self.optimizers.append(made)

    def step(self) -> None:
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            sum(p.square().sum() for p in module.parameters()).backward()
            optimizer.step()
            module["tied"].data.fill_(1.0)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.modules, "optimizer": self.optimizers}

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]


@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
def test_replicas_keep_the_hyperparameters_of_their_own_optimizer(apart: bool) -> None:
    source, target = Chunks(apart=apart), Chunks(1, apart=apart, rates=(9.0, 9.0))
    source.step()
    checkpoint = save(source.states)
    found = checkpoint.load(target.states)
    assert not found.missing and target.rates == source.rates
    for one, two, module, other in zip(
        source.optimizers, target.optimizers, source.modules, target.modules, strict=True
    ):
        assert_same_state(one, two, module, other)
    states = [o.state[m["tied"]]["exp_avg"] for o, m in zip(target.optimizers, target.modules, strict=True)]
    assert states[0].data_ptr() != states[1].data_ptr()

    # In another order, a group is recognized by its other parameters; one of its own goes by its place.
    target = Chunks(1, rates=(9.0, 9.0))
    target.optimizers.reverse()
    if not apart:
        checkpoint.load(target.states)
        assert target.rates == source.rates[::-1]


def test_one_parameter_in_place_of_replicas_whose_hyperparameters_differ() -> None:
    source = Chunks(apart=True)
    checkpoint = save(source.states)
    one = nn.ParameterDict({"tied": torch.ones(3)})
    with pytest.raises(IncompatibleCheckpointError, match=r"'lr' is 0\.5 for 'tied', 0\.25 for 'tied'"):
        checkpoint.load({"model": one, "optimizer": torch.optim.Adam(one.parameters())})
    optimizer = torch.optim.Adam(one.parameters(), lr=7.0)
    checkpoint.load({"model": one, "optimizer": optimizer}, strict=False)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_nested_state_of_replicas_is_not_shared() -> None:
    source, target = Chunks(), Chunks(1)
    for module, optimizer in zip(source.modules, source.optimizers, strict=True):
        moments = {slot: torch.zeros_like(module["tied"]) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[module["tied"]] = {**moments, "factors": [torch.arange(4.0), 3]}
    save(source.states).load(target.states)
    loaded = [o.state[m["tied"]]["factors"] for o, m in zip(target.optimizers, target.modules, strict=True)]
    for factors in loaded:
        assert torch.equal(factors[0], torch.arange(4.0)) and factors[1] == 3
    assert loaded[0][0] is not loaded[1][0] and loaded[0] is not loaded[1]
    source.optimizers[1].state[source.modules[1]["tied"]]["factors"][1] = 4
    with pytest.raises(IncompatibleCheckpointError, match="optimizer/state/tied is held twice"):
        NativeFramework().capture(source.states)


@pytest.mark.parametrize("case", ["two states", "one parameter", "explicit"])
def test_equal_names_that_are_no_replicas_are_refused(case: str) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    states: dict[str, Any] = {"optimizer": [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]}
    names: dict[Any, str] | None = None
    if case == "two states":
        states |= {"generator": [one], "critic": [two]}
    elif case == "one parameter":
        states |= {"model": one, "optimizer": [torch.optim.SGD(one.parameters(), lr=0.1) for _ in range(2)]}
    else:
        names = {parameter: name for m in (one, two) for name, parameter in m.named_parameters()}
    with pytest.raises(UsageError, match="'weight' names two parameters of the optimizer"):
        NativeFramework().capture(states, names=names)
