"""Optimizers whose state_dict holds more than state and groups: it would be lost without a word."""

from __future__ import annotations

import enum
import threading
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.optimizers.own_values import pack_own_values
from bytecheckpoint.tools import export
from tests.frameworks.memory import save
from tests.support.worlds import on_ranks


class Decaying(torch.optim.AdamW):
    """Counts in attributes of its own, and saves them as torch's Optimizer would want it."""

    def __init__(self, parameters: Any, count: float = 1.0) -> None:
        super().__init__(parameters, lr=torch.tensor(0.1))
        self.count = torch.tensor(count)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "form": ("a", 1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.count = state_dict.pop("count")
        assert state_dict.pop("form") == ("a", 1)
        super().load_state_dict(state_dict)


class Averager:
    step = 0

    def average_parameters(self, params: Any) -> None:
        self.step += 1


def trained(optimizer: Any, steps: int = 2, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(3, 2).bfloat16()
    made = optimizer(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        made.step()
    for state in made.state.values():  # as optimizers that step in higher precision keep it
        state["exp_avg"] = state["exp_avg"].float() + 1e-5
    return model, made


def test_values_of_an_overridden_state_dict() -> None:
    model, one = trained(Decaying, count=0.25)
    other, two = trained(Decaying, steps=0)
    groups, rate = two.param_groups[0], two.param_groups[0]["lr"]
    found = save({"model": model, "optimizer": one}).load({"model": other, "optimizer": two})
    assert two.count == 0.25 and not found.notes
    assert two.param_groups[0] is groups and groups["lr"] is rate, "a compiled step reads this very tensor"
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(two.state[same]["exp_avg"], one.state[parameter]["exp_avg"])
        assert two.state[same]["exp_avg"].dtype == torch.float32, "torch's part of load_state_dict casts"
    assert torch.optim.Optimizer.load_state_dict.__qualname__ == "Optimizer.load_state_dict"


def test_values_of_a_file_of_torch_save(tmp_path: Path) -> None:
    model, one = trained(Decaying, count=0.25)
    torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "x.pt")
    other, two = trained(Decaying, steps=0)

    def notes(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        return bytecheckpoint.load(tmp_path / "x.pt", {"model": other, "optimizer": optimizer}, cast=True).notes

    assert not notes(two) and two.count == 0.25 and two.count.dtype == torch.float32
    (note,) = notes(torch.optim.AdamW(other.parameters()))
    assert "has no place for 'count', 'form'" in note


class Norm(enum.Enum):
    AUTO = 1
    SIGN = 2


class Queued(torch.optim.SGD):
    """Has an enum among its settings, a queue of tensors, and a value for each row of a matrix (pytorch_optimizer)."""

    def __init__(self, parameters: Any, norm: Norm = Norm.AUTO) -> None:
        super().__init__(parameters)
        self.param_groups[0]["norm"] = norm

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("queue", deque(maxlen=3)).append(p.grad.clone())
            state["exp_avg_sq"] = p.grad.square().sum(-1, keepdim=True)


def test_forms_of_values_of_a_file(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    one = Queued(model.parameters(), Norm.SIGN)
    for _ in range(2):
        model(torch.rand(4, 3)).sum().backward()
        one.step()
    torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "x.pt")
    other = nn.Linear(3, 2)
    two = Queued(other.parameters())
    bytecheckpoint.load(tmp_path / "x.pt", {"model": other, "optimizer": two})
    assert two.param_groups[0]["norm"] is Norm.SIGN
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert two.state[q]["queue"].maxlen == 3
        assert all(map(torch.equal, one.state[p]["queue"], two.state[q]["queue"]))
        assert torch.equal(one.state[p]["exp_avg_sq"], two.state[q]["exp_avg_sq"])


class Counting(torch.optim.SGD):
    """Keeps counts beside the state of its parameters (MADGRAD, SPAM), and moments in other forms than theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        state.setdefault("k", torch.tensor([0])).add_(1)
        state["ema"] = {"short": 0.5}
        for p in self.param_groups[0]["params"]:
            state[p]["exp_avg"] = p.grad.flatten().bfloat16()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg"] = self.state[p]["exp_avg"].bfloat16()


def counted(steps: int = 2) -> tuple[nn.Module, Counting]:
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters())
    for _ in range(steps):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_counted(model: nn.Module, optimizer: Counting, other: nn.Module, got: Counting) -> None:
    assert got.state["k"] == 2 and got.state["ema"] == {"short": 0.5}  # type: ignore[index]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], got.state[q]["exp_avg"])
        assert got.state[q]["exp_avg"].dtype == torch.bfloat16


def test_state_of_no_parameter_in_a_file(tmp_path: Path) -> None:
    """It was refused; the moments became float32, with which the next step of such an optimizer failed."""
    (model, one), (other, two), (_, three) = counted(), counted(0), counted(0)
    torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "x.pt")
    assert not bytecheckpoint.load(tmp_path / "x.pt", {"model": other, "optimizer": two}).notes
    assert_counted(model, one, other, two)
    states: dict[str, Any] = {"model": other, "optimizer": {}}
    bytecheckpoint.load(tmp_path / "x.pt", states)
    assert states["optimizer"].keys() == {"state", "param_groups"}
    assert states["optimizer"]["state"].keys() == {"k", "ema", 0, 1}
    three.load_state_dict(states["optimizer"])
    assert three.state["k"] == 2  # type: ignore[index]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_tensors_in_lists_are_loaded_into_dicts(tmp_path: Path, foreign: bool, filled: bool) -> None:
    """The file was called damaged, or the state missing (SOAP, LBFGS)."""
    model = nn.Linear(3, 2)
    one = Queued(model.parameters())
    del one.param_groups[0]["norm"]  # no destination here would know its class
    model(torch.rand(4, 3)).sum().backward()
    one.step()
    for slots in one.state.values():
        slots["queue"] = [*slots["queue"]]
    if foreign:
        torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "x")
    else:
        bytecheckpoint.save(tmp_path / "x", {"model": model, "optimizer": one})
    names = [0, 1] if foreign else ["weight", "bias"]
    live: dict[str, Any] = {"state": {}, "param_groups": [{"params": names}]} if filled else {}
    for name, p in zip(names if filled else (), model.parameters(), strict=False):
        live["state"][name] = {"queue": [torch.zeros_like(p)], "exp_avg_sq": torch.zeros(*p.shape[:-1], 1)}
    states = {"model": nn.Linear(3, 2), "optimizer": live}
    bytecheckpoint.load(tmp_path / "x", states)
    state: Any = states["optimizer"]["state"]  # type: ignore[index]
    for name, p in zip(names, model.parameters(), strict=True):
        assert torch.equal(state[name]["queue"][0], one.state[p]["queue"][0])
        assert torch.equal(state[name]["exp_avg_sq"], one.state[p]["exp_avg_sq"])


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_state_of_no_parameter_is_exported(tmp_path: Path, format_: Any) -> None:
    """It was left out without a word: MADGRAD began anew with its rate."""
    (model, one), (other, two) = counted(), counted(0)
    bytecheckpoint.save(tmp_path / "own", {"model": model, "optimizer": one})
    export(tmp_path / "own", tmp_path / "out.pt", format=format_)
    bytecheckpoint.load(tmp_path / "out.pt", {"model": other, "optimizer": two})
    assert_counted(model, one, other, two)


class Hiding(torch.optim.SGD):
    """Hides its state in a dict of its state_dict (bitsandbytes), and has tensors by parameter under one key (TRAC)."""

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for p in params:
            self.state[p]["state1"] = p.grad.to(torch.uint8)
        self.state["trac"] = {p: p.detach().clone() for p in params}  # type: ignore[index]

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        trac = found["state"].pop("trac", {})
        hidden = {key: {"hidden": dict(slots)} for key, slots in found["state"].items()}
        return {**found, "state": {**hidden, "trac": dict(enumerate(trac.values()))}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = self.param_groups[0]["params"]
        state = {params[key]: slots["hidden"] for key, slots in state_dict["state"].items() if key != "trac"}
        trac = {params[key]: value for key, value in state_dict["state"]["trac"].items()}
        self.__setstate__({"state": defaultdict(dict, {**state, "trac": trac}), "param_groups": self.param_groups})


def test_a_file_has_the_form_of_the_optimizers_own_state_dict(tmp_path: Path) -> None:
    """Only its own load_state_dict knows the state behind that form; the next step failed."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    one, two = Hiding(model.parameters()), Hiding(other.parameters())
    model(torch.ones(4, 3)).sum().backward()
    one.step()
    torch.save({"model": model.state_dict(), "optimizer": one.state_dict()}, tmp_path / "x.pt")
    bytecheckpoint.load(tmp_path / "x.pt", {"model": other, "optimizer": two})
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert two.state[q].keys() == {"state1"} and torch.equal(two.state[q]["state1"], one.state[p]["state1"])
        assert torch.equal(two.state["trac"][q], p)  # type: ignore[index]


class Warming(torch.optim.SGD):
    """Has an optimizer inside that steps something else, among the values of its state_dict (SPAM)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], momentum=0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.load_state_dict(state_dict["inner"])


def test_an_optimizer_among_the_values() -> None:
    """Its state was lost."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    one, two = Warming(model.parameters()), Warming(other.parameters())
    one.inner.param_groups[0]["params"][0].grad = torch.ones(1)
    one.inner.step()
    save({"model": model, "optimizer": one}).load({"model": other, "optimizer": two})
    assert next(iter(two.inner.state.values()))["momentum_buffer"] == 1


class Slow(torch.optim.Optimizer):
    """An optimizer around another one, both with a state (Lookahead of pytorch_optimizer)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state = defaultdict(dict, {p: {"slow": p.detach().clone()} for p in inner.param_groups[0]["params"]})


def test_two_states_in_one_optimizer_are_refused(tmp_path: Path) -> None:
    """The inner one's was left out without a word."""
    model, inner = trained(torch.optim.Adam)
    with pytest.raises(UsageError, match="Slow holds another optimizer, Adam, with a state of its own"):
        bytecheckpoint.save(tmp_path / "x", {"model": model, "optimizer": Slow(inner)})


class Lookback(torch.optim.Optimizer):
    """Has no state before it has stepped (LookSAM), or never any, around several (Muon with Adam)."""

    def __init__(self, *inside: torch.optim.Optimizer) -> None:
        self.inside, self.first, self.state = inside, inside[0], defaultdict(dict)
        self.last, self.param_groups = inside[-1], inside[0].param_groups
        if len(inside) > 1:
            self.param_groups = [group for one in inside for group in one.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self.first.state_dict()["param_groups"], "first": self.first.state_dict()}


def test_states_inside_of_a_new_optimizer_are_refused(tmp_path: Path) -> None:
    """They were loaded from a file, or saved, as if there were none, without a word."""
    model, inner = trained(torch.optim.Adam)
    torch.save({"model": model.state_dict(), "optimizer": Lookback(inner).state_dict()}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="Lookback holds another optimizer, Adam, with a state of its own"):
        bytecheckpoint.load(tmp_path / "x.pt", {"model": model, "optimizer": Lookback(inner)})
    two = Lookback(torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias]))
    with pytest.raises(UsageError, match="Lookback holds another optimizer, SGD, with a state of its own"):
        bytecheckpoint.save(tmp_path / "x", {"model": model, "optimizer": two})


class Masters(torch.optim.Optimizer):
    def __init__(self) -> None:
        """Have no groups (SafeFP16Optimizer of pytorch_optimizer)."""


def test_optimizers_that_only_their_own_methods_can_save(tmp_path: Path) -> None:
    model, around = trained(torch.optim.Adam)
    around.state["trac"] = {p: p.detach().clone() for p in model.parameters()}  # TRAC
    for optimizer, reason in ((around, "Adam keeps tensors by parameter under 'trac'"), (Masters(), "no param_groups")):
        with pytest.raises(UsageError, match=f"{reason}.*: save its state_dict\\(\\) as a state"):
            bytecheckpoint.save(tmp_path / "x", {"model": model, "optimizer": optimizer})


def test_a_wrapper_of_torch_that_counts() -> None:
    """Its param groups are those of the optimizer inside, also after a load: schedulers change them."""

    def make(parameters: Any) -> Any:
        from torch.distributed.optim import PostLocalSGDOptimizer  # takes a second, and every worker collects this file

        return PostLocalSGDOptimizer(torch.optim.Adam(parameters), Averager())  # type: ignore[arg-type]

    (model, one), (other, two) = trained(make), trained(make, steps=0)
    save({"model": model, "optimizer": one}).load({"model": other, "optimizer": two})
    assert two.averager.step == 2
    assert two.param_groups[0] is two.optim.param_groups[0]
    assert len(two.state) == 2


def test_values_that_hooks_add_and_take() -> None:
    (model, one), (other, two) = trained(torch.optim.AdamW), trained(torch.optim.AdamW, steps=0)
    one.register_state_dict_post_hook(lambda _, state: state.update(seen=5))
    got: list[Any] = []
    two.register_load_state_dict_pre_hook(lambda _, state: got.append(state["seen"]))
    two.register_load_state_dict_post_hook(lambda o: got.append(len(o.state)))
    save({"model": model, "optimizer": one}).load({"model": other, "optimizer": two})
    assert got == [5, 2]


@pytest.mark.parametrize("saver", [Decaying, torch.optim.AdamW])
def test_values_without_a_place_are_noted(saver: Any) -> None:
    loader = torch.optim.AdamW if saver is Decaying else Decaying
    (model, one), (other, two) = trained(saver), trained(loader, steps=0)
    found = save({"model": model, "optimizer": one}).load({"model": other, "optimizer": two}, cast=True)
    (note,) = [note for note in found.notes if "'count', 'form'" in note]
    assert note.startswith("optimizer: AdamW has no place for" if saver is Decaying else "optimizer: Decaying keeps")


@on_ranks(2)
def test_under_fsdp1(path: str) -> None:
    from tests.frameworks.fsdp1_worlds import unit

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = unit(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
        return model, Decaying(model.parameters(), count=seed / 4)

    model, one = make(1)
    model(torch.ones(1, 3)).sum().backward()
    one.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": one}, timeout=60)
    other, two = make(2)
    bytecheckpoint.load(path, {"model": other, "optimizer": two}, timeout=60)
    assert two.count == 0.25
    with bytecheckpoint.open(path) as checkpoint:
        assert checkpoint["optimizer/own"][0]["form"] == ("a", 1)


def test_other_threads_see_torchs_own_state_dict() -> None:
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.5)
    bystander.param_groups[0]["params"][0].grad = torch.ones(2)
    bystander.step()
    seen: list[Any] = []

    class Asking(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            thread = threading.Thread(target=lambda: seen.append(bystander.state_dict()))
            thread.start()
            thread.join()
            return {**super().state_dict(), "own": 1}

    optimizer = Asking([nn.Parameter(torch.ones(2))])
    assert pack_own_values(optimizer) == {"own": 1}
    assert seen[0]["state"] and bystander.state_dict()["state"]
