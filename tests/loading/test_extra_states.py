"""Extra states of modules that a checkpoint holds and the program lacks: a strict load refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.support.comparisons import assert_complete
from tests.support.extra_states import LinearWithExtraState, WithExtraState
from tests.support.variants import crossed

VALUES: dict[str, Any] = {
    "plain": {"amax": [1.0, 2.0], "n": 3},
    "tensor": torch.arange(5),
    "tensors": {"scale": torch.ones(2), "history": [torch.zeros(3)]},
    "both": {"scale": torch.ones(2), "n": 3},
}


def holder(value: Any) -> WithExtraState:
    made = WithExtraState()
    made.extra = value
    return made


def model(*layers: int, extra: Any = None) -> nn.ModuleDict:
    made = nn.ModuleDict({f"layer{n}": nn.ModuleDict({"linear": nn.Linear(2, 2)}) for n in layers})
    if extra is not None:
        for n in layers:
            made[f"layer{n}"]["extra"] = holder(extra)
    return made


@pytest.mark.parametrize(("name", "stages", "readers"), crossed(list(VALUES), [1, 2], [1, 3]))
def test_extra_states_that_no_rank_has(tmp_path: Path, name: str, stages: int, readers: int) -> None:
    value = VALUES[name]
    """The layers are there without their extra states, or with those of layer 0 only."""
    path = tmp_path / "step"
    parts = [[0, 1, 2, 3]] if stages == 1 else [[0, 1], [2, 3]]
    world = ThreadWorld(stages)
    world.run(lambda ranks: bytecheckpoint.save(path, {"model": model(*parts[ranks.rank], extra=value)}))

    def load(collective: Collective) -> None:
        live = model(0, 1, 2, 3)
        for with_first in (False, True):
            if with_first:
                live["layer0"]["extra"] = holder(0)
            with pytest.raises(
                IncompatibleCheckpointError, match=r"holds .*model/layer1\.extra\._extra_state.*no rank"
            ):
                bytecheckpoint.load(path, {"model": live})
            report = bytecheckpoint.load(path, {"model": live}, strict=False)
            for n in range(4):
                named = any(name.startswith(f"model/layer{n}.extra._extra_state") for name in report.unexpected)
                assert named == (n > 0 or not with_first), report.unexpected
            assert_complete(bytecheckpoint.load(path, {"model": live}, strict={"model": False}), ("missing",))
            assert_complete(bytecheckpoint.load(path, {"model": live}, exclude=["model/layer*.extra*"]))
        assert type(live["layer0"]["extra"].extra) is type(value)

    ThreadWorld(readers).run(load)


def test_extra_states_of_other_ranks(tmp_path: Path) -> None:
    """What another stage loads is not left over, whoever reads the trees; what another stage lacks is."""
    path = tmp_path / "step"
    bytecheckpoint.save(path, {"model": model(0, 1, 2, 3, extra={"n": 3})})

    def load(collective: Collective, *layers: int) -> bytecheckpoint.LoadReport:
        states = {"model": model(*layers, extra={"n": 0})}
        return bytecheckpoint.load(path, states, strict=False)

    for report in ThreadWorld(2).run(lambda ranks: load(ranks, 2 * ranks.rank, 2 * ranks.rank + 1)):
        assert_complete(report)
    for report in ThreadWorld(2).run(lambda ranks: load(ranks, ranks.rank)):
        assert {f"model/layer{n}.extra._extra_state" for n in (2, 3)} <= set(report.unexpected)


def test_tensors_in_extra_states_of_another_stage(tmp_path: Path) -> None:
    """Two stages of two ranks, whose tensors differ from rank to rank: any other layout gets the copy of some rank."""
    path, stages = tmp_path / "step", [[0, 1], [2, 3]]

    def save(collective: Collective) -> None:
        value = {"scale": torch.full((3,), collective.rank), "n": 3}
        live = model(*stages[collective.rank // 2], extra=value)
        for parameter in live.parameters():
            nn.init.zeros_(parameter)
        bytecheckpoint.save(path, {"model": live})

    def load(collective: Collective) -> list[list[int]]:
        live = model(0, 1, 2, 3, extra=0)
        bytecheckpoint.load(path, {"model": live})
        return [live[f"layer{n}"]["extra"].extra["scale"].tolist() for n in range(4)]

    ThreadWorld(4).run(save)
    assert ThreadWorld(1).run(load) == [[[0] * 3, [0] * 3, [2] * 3, [2] * 3]]
    assert ThreadWorld(6).run(load)[3:] == [[[0] * 3] * 2 + [[n] * 3] * 2 for n in (3, 2, 2)]


@pytest.mark.parametrize("value", [None, {}, [None, {"a": b""}]], ids=str)
def test_empty_extra_states_are_nothing_to_lose(tmp_path: Path, value: Any) -> None:
    source = LinearWithExtraState(2, 2)
    source.extra = value
    bytecheckpoint.save(tmp_path / "s", {"model": source})
    assert_complete(bytecheckpoint.load(tmp_path / "s", {"model": nn.Linear(2, 2)}))


def test_a_state_dict_of_tensors_leaves_nothing_over(tmp_path: Path) -> None:
    """Its tensors have names of their own in the catalog, nested or not; plain values beside them are left over."""
    live = nn.ModuleDict({"a": nn.Linear(2, 2)})
    bytecheckpoint.save(tmp_path / "flat", {"model": live.state_dict()})
    bytecheckpoint.save(tmp_path / "nested", {"model": {"a": dict(live["a"].state_dict())}})
    bytecheckpoint.save(tmp_path / "more", {"model": {**live.state_dict(), "epoch": 3}})
    for name in ("flat", "nested"):
        assert_complete(bytecheckpoint.load(tmp_path / name, {"model": live}))
    with pytest.raises(IncompatibleCheckpointError, match=r"holds model/epoch .*which no rank wants"):
        bytecheckpoint.load(tmp_path / "more", {"model": live})


class Refusing:
    """A registered class whose saved instances cannot be made again."""


def refuse(saved: object) -> Refusing:
    raise ValueError(saved)


def test_what_is_left_out_is_not_restored(tmp_path: Path) -> None:
    bytecheckpoint.register(Refusing, encode=lambda _: {"scale": torch.ones(2), "n": 3}, decode=refuse)
    bytecheckpoint.save(tmp_path / "s", {"model": model(0, extra=Refusing())})
    report = bytecheckpoint.load(tmp_path / "s", {"model": model(0)}, strict=False)
    assert "model/layer0.extra._extra_state" in report.unexpected
