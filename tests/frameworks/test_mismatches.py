"""State that belongs to other objects than those here: refused, or named in the report of a load that is not strict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.support.worlds import on_ranks


def embedding_and_head(*, tied: bool, equal: bool = True) -> nn.ModuleDict:
    made = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    if tied:
        made["head"].weight = made["embed"].weight
    elif equal:
        made["head"].weight.data.copy_(made["embed"].weight.data)
    return made


@pytest.mark.parametrize("as_dict", [False, True], ids=["module", "state_dict"])
def test_weights_that_are_tied_here_only(tmp_path: Path, as_dict: bool) -> None:
    bytecheckpoint.save(tmp_path / "equal", {"model": embedding_and_head(tied=False)})
    apart = embedding_and_head(tied=False, equal=False)
    bytecheckpoint.save(tmp_path / "apart", {"model": apart})
    live = embedding_and_head(tied=True)
    states: dict[str, Any] = {"model": dict(live.state_dict()) if as_dict else live}
    assert not bytecheckpoint.load(tmp_path / "equal", states).notes
    with pytest.raises(IncompatibleCheckpointError, match=r"model/embed\.weight and model/head\.weight are one tensor"):
        bytecheckpoint.load(tmp_path / "apart", states)
    report = bytecheckpoint.load(tmp_path / "apart", states, strict=False)
    assert "model/head.weight would be lost" in report.notes[0]
    assert torch.equal(live["embed"].weight, apart["embed"].weight)


def test_tied_weights_of_other_shapes_and_dtypes(tmp_path: Path) -> None:
    saved = embedding_and_head(tied=False)
    saved["head"] = nn.Linear(3, 5, bias=False)
    bytecheckpoint.save(tmp_path / "s", {"model": saved})
    with pytest.raises(IncompatibleCheckpointError, match="one tensor here"):
        bytecheckpoint.load(tmp_path / "s", {"model": embedding_and_head(tied=True)})
    equal = embedding_and_head(tied=False)
    bytecheckpoint.save(tmp_path / "equal", {"model": equal})
    low = embedding_and_head(tied=True).bfloat16()
    assert not bytecheckpoint.load(tmp_path / "equal", {"model": low}, cast=True).notes
    assert torch.equal(low["head"].weight, equal["head"].weight.bfloat16())


@on_ranks(2)
def test_tied_shards_are_compared_on_the_rank_that_has_them(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    saved = nn.Sequential(*embedding_and_head(tied=False).values())
    saved[0].weight.data.fill_(1)
    saved[1].weight.data.fill_(1)[3, 0] = 2  # in the shard of rank 1
    bytecheckpoint.save(path, {"model": saved})
    live = fully_shard(nn.Sequential(*embedding_and_head(tied=True).values()), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(IncompatibleCheckpointError, match="one tensor here"):
        bytecheckpoint.load(path, {"model": live})


def train(optimizer: Callable[..., Optimizer], steps: int = 1, *, bias: bool = True, **settings: Any) -> dict[str, Any]:
    model = nn.Linear(2, 3, bias=bias)
    made = optimizer(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        made.step()
    return {"model": model, "optimizer": made}


#: Makes the states of a training of one step. Every worker collects this file, so parameters only say how to train.
trained = partial(partial, train)


class Own(AdamW):
    """An optimizer of the program, with one more slot, and without one that torch's has."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for state in self.state.values():
            state["mean"] = torch.zeros(1)
        return out


class Unknown(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = p.grad.clone()


Namesake = type("AdamW", (Unknown,), {})


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (trained(SGD, momentum=0.9), trained(AdamW, 0)), (trained(AdamW), trained(SGD, momentum=0.9)),
        (trained(AdamW), trained(SGD, 0)), (trained(SGD), trained(Adam)), (trained(Adam), trained(NAdam, 0)),
        (trained(NAdam), trained(Adam, 0)), (trained(RMSprop, momentum=0.9), trained(SGD, 0)),
        (trained(Adagrad), trained(RMSprop, 0)), (trained(Adam), trained(Unknown)), (trained(Namesake), trained(AdamW)),
        (trained(Muon, bias=False), trained(SGD, 0, bias=False, momentum=0.9)),
    ],
    ids=lambda states: states.args[0].__name__,
)  # fmt: skip
def test_state_of_another_algorithm(tmp_path: Path, saved: Callable[[], Any], live: Callable[[], Any]) -> None:
    saved, live = saved(), live()
    bytecheckpoint.save(tmp_path / "s", saved)
    before = live["model"].weight.clone()
    with pytest.raises(IncompatibleCheckpointError, match=r"does not fit: optimizer: .* of another algorithm \("):
        bytecheckpoint.load(tmp_path / "s", live)
    assert torch.equal(live["model"].weight, before), "nothing was loaded"
    report = bytecheckpoint.load(tmp_path / "s", live, strict=False)
    assert "another algorithm" in report.notes[0]
    assert torch.equal(live["model"].weight, saved["model"].weight)
    live["optimizer"].step()  # begins anew


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (trained(Adam), trained(AdamW, 0)), (trained(AdamW, amsgrad=True), trained(Adam)),
        (trained(Adam), trained(Adam, amsgrad=True)), (trained(RAdam), trained(Adam, 0)),
        (trained(AdamW, 0), trained(AdamW)), (trained(SGD), trained(SGD, momentum=0.9)), (trained(Own), trained(AdamW)),
        (trained(Adam), trained(Own, 0)), (trained(Own), trained(Own)), (trained(Unknown), trained(Unknown, 0)),
    ],
    ids=lambda states: states.args[0].__name__,
)  # fmt: skip
def test_state_that_fits(tmp_path: Path, saved: Callable[[], Any], live: Callable[[], Any]) -> None:
    saved, live = saved(), live()
    bytecheckpoint.save(tmp_path / "s", saved)
    bytecheckpoint.load(tmp_path / "s", live)
    source, target = (s["optimizer"].state.get(s["model"].weight, {}) for s in (saved, live))
    assert source.keys() == target.keys() and all(torch.equal(source[slot], target[slot]) for slot in source)


def test_adams_settings_do_not_turn_an_adamw_into_an_adam(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", train(Adam))
    live = train(AdamW, 0)
    bytecheckpoint.load(tmp_path / "s", live)
    assert live["optimizer"].param_groups[0]["decoupled_weight_decay"] is True


def schedule(make: Callable[[Optimizer], LRScheduler]) -> dict[str, Any]:
    optimizer = SGD([torch.ones(1)], lr=1.0)
    scheduler = make(optimizer)
    optimizer.step()
    scheduler.step()
    return {"extra_states": {"schedule": scheduler}}


def cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, 10)


def joined(*inner: Callable[[Optimizer], LRScheduler]) -> Callable[[Optimizer], LRScheduler]:
    return lambda optimizer: SequentialLR(optimizer, [make(optimizer) for make in inner], [*range(3, 2 + len(inner))])


@pytest.mark.parametrize(
    ("saved", "live"),
    [(cosine, LinearLR), (lambda o: StepLR(o, 3), lambda o: ExponentialLR(o, 0.5)),
     (joined(LinearLR, cosine), joined(LinearLR, LinearLR)), (joined(LinearLR, cosine), joined(LinearLR, cosine, cosine)),
     (joined(LinearLR, cosine), cosine)],
)  # fmt: skip
def test_another_learning_rate_schedule(tmp_path: Path, saved: Any, live: Any) -> None:
    bytecheckpoint.save(tmp_path / "s", schedule(saved))
    with pytest.raises(IncompatibleCheckpointError, match=r"does not fit: extra_states: .*schedule"):
        bytecheckpoint.load(tmp_path / "s", schedule(live))


def test_one_object_for_a_list(tmp_path: Path) -> None:
    torch.save({"state_dict": nn.Linear(2, 2).state_dict(), "lr_schedulers": [{"last_epoch": 3}]}, tmp_path / "f.ckpt")
    model, scheduler = nn.Linear(2, 2), schedule(cosine)["extra_states"]["schedule"]
    before = model.weight.detach().clone()
    with pytest.raises(
        IncompatibleCheckpointError, match="has a list of 1 where the program has one CosineAnnealingLR"
    ):
        bytecheckpoint.load(tmp_path / "f.ckpt", {"model": model, "lr_schedulers": scheduler})
    assert torch.equal(model.weight, before)


class Converting(Adam):
    """An optimizer with one value for each parameter, and moments in bfloat16, as NovoGrad and Adafactor of timm."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for slots in self.state.values():
            slots["exp_avg"] = slots["exp_avg"].bfloat16()


def test_state_of_dtypes_and_shapes_of_its_own(tmp_path: Path) -> None:
    saved, live = (nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = Converting(saved.parameters())
    slots = {"exp_avg": torch.ones(2, 2).bfloat16(), "exp_avg_sq": torch.tensor(3.0), "step": torch.tensor(1.0)}
    optimizer.state[saved.weight] = slots
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt")
    bytecheckpoint.load(tmp_path / "s.pt", {"model": live, "optimizer": (here := Converting(live.parameters()))})
    assert {key: (one.dtype, one.shape) for key, one in here.state[live.weight].items()} == {
        key: (one.dtype, one.shape) for key, one in slots.items()
    }


def test_the_same_learning_rate_schedule(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", schedule(joined(LinearLR, cosine)))
    assert not bytecheckpoint.load(tmp_path / "s", schedule(joined(LinearLR, cosine))).notes
    bytecheckpoint.save(tmp_path / "e", schedule(lambda o: ExponentialLR(o, 0.5)))
    (note,) = bytecheckpoint.load(tmp_path / "e", schedule(lambda o: StepLR(o, 3))).notes
    assert "StepLR keeps 'step_size'" in note


def test_a_load_that_finds_nothing_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"a": torch.ones(1)}, "extra_states": {"step": 3}})
    other = {"model": {"module.a": torch.zeros(1)}}
    report = bytecheckpoint.load(tmp_path / "s", other, strict=False)
    assert "nothing was loaded" in report.notes[0] and "nothing was loaded" in caplog.text
    for states in ({**other, "extra_states": {}}, {"model": {"a": torch.zeros(1), "b": torch.zeros(1)}}):
        assert not bytecheckpoint.load(tmp_path / "s", states, strict=False).notes, states
