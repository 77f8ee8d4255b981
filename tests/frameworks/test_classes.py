"""Instances of classes that nobody registered: enums, dataclasses, named tuples, dict subclasses."""

from __future__ import annotations

import copy
import dataclasses
import enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.values.codec import equal
from tests.support.extra_states import LinearWithExtraState


class Attributes(dict):  # type: ignore[type-arg]
    """A dict whose items are attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mode(enum.StrEnum):
    TRAIN = "train"
    TEST = "test"


class Level(enum.IntEnum):
    LOW = 1


class Place(NamedTuple):
    shard: int
    row: int


class Sums(NamedTuple):
    count: int
    total: torch.Tensor


@dataclasses.dataclass
class Progress:
    mode: Mode
    at: Attributes
    ema: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))


@dataclasses.dataclass(frozen=True)
class Fixed:
    level: Level


def values() -> dict[str, Any]:
    return {
        "mode": Mode.TEST,
        "config": Attributes(lr=0.1, inner=Attributes(level=Level.LOW), weight=torch.arange(3.0)),
        "progress": Progress(Mode.TEST, Attributes(n=3), torch.tensor([1.0, 2.0])),
        "fixed": Fixed(Level.LOW),
        "sums": Sums(3, torch.tensor([4.0, 5.0])),
        "places": {Place(1, 2): [Mode.TRAIN]},
    }


def other_values() -> dict[str, Any]:
    return {
        "mode": Mode.TRAIN,
        "config": Attributes(lr=0.5, gone=1, weight=torch.zeros(3)),
        "progress": Progress(Mode.TRAIN, Attributes()),
        "fixed": [Fixed(Level.LOW)],
        "sums": Sums(0, torch.zeros(2)),
        "places": {Place(0, 0): None},
    }


def test_they_load_as_what_they_were(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"extra_states": values()})
    live = other_values()
    config, progress, weight, ema = live["config"], live["progress"], live["config"].weight, live["progress"].ema
    bytecheckpoint.load(tmp_path / "s", {"extra_states": live})
    assert equal(live, values())
    # What is no constant is filled in place, as other containers and tensors are.
    assert live["config"] is config and live["progress"] is progress
    assert config.weight is weight and progress.ema is ema and config.inner.level is Level.LOW


def test_a_whole_state_of_such_a_class(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"extra_states": values()["progress"], "other": Mode.TEST})
    states: dict[str, Any] = {"extra_states": other_values()["progress"], "other": Mode.TRAIN}
    live = states["extra_states"]
    bytecheckpoint.load(tmp_path / "s", states)
    assert states["extra_states"] is live and equal(live, values()["progress"]) and states["other"] is Mode.TEST


def test_a_class_that_the_program_does_not_show_is_not_looked_up(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"extra_states": {"mode": Mode.TEST}})
    live: dict[str, Any] = {"mode": 3}
    with pytest.raises(IncompatibleCheckpointError, match=r"'tests.*\.Mode'.*bytecheckpoint\.register\(Mode\)"):
        bytecheckpoint.load(tmp_path / "s", {"extra_states": live})
    assert live == {"mode": 3}
    with (
        bytecheckpoint.open(tmp_path / "s") as checkpoint,
        pytest.raises(IncompatibleCheckpointError, match="register"),
    ):
        checkpoint["extra_states/mode"]


@pytest.mark.parametrize("live", [Mode.TRAIN, [Mode.TRAIN]], ids=["enum", "another form"])
def test_extra_states_of_modules(tmp_path: Path, live: Any) -> None:
    source, target = LinearWithExtraState(2, 2), LinearWithExtraState(2, 2)
    source.extra, target.extra = Mode.TEST, live
    bytecheckpoint.save(tmp_path / "s", {"model": source})
    bytecheckpoint.load(tmp_path / "s", {"model": target})
    assert target.extra is Mode.TEST


def test_hyperparameters_and_state_of_optimizers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "mode": Mode.TRAIN}])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["place"] = Place(1, 2)
    expected = copy.deepcopy(optimizer.state_dict())
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    optimizer.state[model.weight]["place"] = Place(0, 0)
    bytecheckpoint.load(tmp_path / "s", {"model": model, "optimizer": optimizer})
    assert equal(optimizer.state_dict(), expected)
    with (
        bytecheckpoint.open(tmp_path / "s") as checkpoint,
        pytest.raises(IncompatibleCheckpointError, match="register"),
    ):
        checkpoint["optimizer/param_groups"]


def test_kinds_that_are_filled_by_name(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": values()})
    live = other_values()
    ema = live["progress"].ema
    bytecheckpoint.load(tmp_path / "s", {"model": live})
    # What the checkpoint lacks stays in these kinds.
    assert live["config"].pop("gone") == 1 and live["places"].pop(Place(0, 0)) is None
    assert equal(live, values()) and live["progress"].ema is ema


class Device:
    def __init__(self, name: str) -> None:
        self.name = name


@dataclasses.dataclass
class Holder:
    module: nn.Module


def test_what_is_refused_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"extra_states/a: .*Device cannot be stored: .* bytecheckpoint\.register\(Device"
    ):
        bytecheckpoint.save(tmp_path / "s", {"extra_states": {"a": Device("x")}})
    with pytest.raises(UsageError, match=r"extra_states/a.module: .*Linear.*its state_dict is used only"):
        bytecheckpoint.save(tmp_path / "s", {"extra_states": {"a": Holder(nn.Linear(1, 1))}})
