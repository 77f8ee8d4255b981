"""Comparing: equal whatever the layout, and every kind of difference by name."""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.tools import CompareReport, compare
from tests.tools.conftest import save_layout


def report(a: Path, b: Path, **tolerance: float) -> CompareReport:
    with bytecheckpoint.open(a) as one, bytecheckpoint.open(b) as two:
        return compare(one, two, **tolerance)


def states(folder: Path, name: str, values: dict[str, Any]) -> Path:
    bytecheckpoint.save(folder / name, {"model": values})
    return folder / name


@dataclass
class _Setting:
    x: int


@dataclass
class Held:
    tensor: torch.Tensor


bytecheckpoint.register(Held, name="tests.compare.Held")


def test_another_layout_of_the_same_state_is_equal(saved: Path, tmp_path: Path) -> None:
    save_layout(tmp_path / "other", 2, [[5, 6, 7], [1, 30]])
    found = report(saved, tmp_path / "other")
    assert found.equal, found.differences
    assert found.tensors > 8 and found.values > 2
    assert any("ranks 2 " in note and "first" in note for note in found.notes)


def test_each_difference_is_named(saved: Path, tmp_path: Path) -> None:
    save_layout(tmp_path / "other", 3, [[10, 30], [17]], epoch=2, salt=1)
    found = {d.key: d for d in report(saved, tmp_path / "other").differences}
    assert set(found) == {"model/w", "extra_states/epoch"}
    assert (found["extra_states/epoch"].a, found["extra_states/epoch"].b) == ("1", "2")
    assert (found["model/w"].kind, found["model/w"].count, found["model/w"].first) == ("tensor", 48 * 40, (0, 0))
    assert found["model/w"].max_abs == 1_000_003


def test_missing_dtype_shape_and_type(tmp_path: Path) -> None:
    a = states(tmp_path, "a", {"x": torch.ones(2), "d": torch.ones(2), "s": torch.ones(2), "t": torch.ones(2), "p": 1})
    b = states(tmp_path, "b", {"y": torch.ones(2), "d": torch.ones(2).half(), "s": torch.ones(3), "t": 5, "p": 1.0})
    found = [(d.kind, d.key) for d in report(a, b).differences]
    assert sorted(found) == sorted(
        [("only_a", "model/x"), ("dtype", "model/d"), ("shape", "model/s"), ("type", "model/t"), ("value", "model/p"),
         ("only_b", "model/y")]
    )  # fmt: skip


def test_bits_unless_a_tolerance_is_given(tmp_path: Path) -> None:
    nan = float("nan")
    a = states(tmp_path, "a", {"z": torch.tensor([0.0, nan, 1.0, 5.0]), "lr": 0.1, "i": torch.tensor([1, 2**60])})
    b = states(tmp_path, "b", {"z": torch.tensor([-0.0, nan, 1.001, 5.0]), "lr": 0.1001, "i": torch.tensor([1, 2**60])})
    exact = {d.key: d for d in report(a, b).differences}
    assert exact["model/z"].count == 2 and exact["model/z"].first == (0,)
    assert exact["model/z"].max_abs == pytest.approx(0.001, rel=1e-3)
    assert set(exact) == {"model/z", "model/lr"}
    assert report(a, b, rtol=0.01).equal
    assert {d.key for d in report(a, b, atol=0.0005).differences} == {"model/z"}
    for wrong in ({"rtol": -1.0}, {"atol": nan}):
        with pytest.raises(UsageError):
            report(a, b, **wrong)


def test_infinity_and_dtypes_without_arithmetic(tmp_path: Path) -> None:
    raw, packed = torch.arange(8, dtype=torch.uint8), torch.float4_e2m1fn_x2
    a = states(tmp_path, "a", {"f": torch.tensor([1.0]), "q": raw.view(packed), "c": torch.tensor([1j])})
    infinite = torch.tensor([float("inf")])
    b = states(tmp_path, "b", {"f": infinite, "q": raw.flip(0).view(packed), "c": torch.tensor([2j])})
    found = {d.key: d for d in report(a, b, atol=0.5).differences}
    assert found["model/f"].max_abs is None and found["model/q"].max_abs is None
    assert found["model/q"].count == 8 and found["model/q"].a == "0x00"
    assert found["model/c"].max_abs == 1


def test_values_of_their_own(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "same")
    assert report(saved, tmp_path / "same").equal
    with bytecheckpoint.open(saved) as one, bytecheckpoint.open(tmp_path / "same", rank=1) as two:
        # Seen as another rank: its own values differ from those of rank 0.
        assert {d.key for d in compare(one, two).differences} == {"extra_states/rng", "extra_states/rank"}


def test_classes_that_are_not_registered_here(tmp_path: Path) -> None:
    bytecheckpoint.register(_Setting, name="compare.Setting")
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        extra = {"one": _Setting(number), "in": [{"x": _Setting(3)}], "epoch": 4}
        bytecheckpoint.save(tmp_path / name, {"extra_states": extra})
    bytecheckpoint.register(_Setting, name="compare.Other")  # the class gives up its earlier name
    first, same, other = (bytecheckpoint.open(tmp_path / name) for name in "abc")
    assert compare(first, same).equal
    (difference,) = compare(first, other).differences
    assert (difference.kind, difference.key) == ("value", "extra_states/one")


def test_the_first_difference_inside_of_settings_is_named(tmp_path: Path) -> None:
    """Long values that begin alike are cut before their difference."""
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(9))
    for name, change, count in (("a", {}, 9), ("rate", {"lr": 0.2}, 9), ("key", {"own": 1}, 9), ("length", {}, 8)):
        group = {"params": list(layers[:count].parameters()), "lr": 0.1, **change}
        optimizer = torch.optim.SGD([group, {"params": list(layers[count:].parameters())}] if count < 9 else [group])
        bytecheckpoint.save(tmp_path / name, {"model": layers, "optimizer": optimizer})
    texts = [compare(tmp_path / "a", tmp_path / name).differences[0].message for name in ("rate", "key", "length")]
    for text, place in zip(
        texts,
        (
            "[0]['lr'] is 0.1 in the first and 0.2",
            "[0]['own'] is missing in the first and 1",
            "[0]['params'][16] is '8.weight' in the first and missing",
        ),
        strict=True,
    ):
        assert text == f"optimizer/param_groups at {place} in the second checkpoint"


def test_tensors_in_any_container_are_compared(tmp_path: Path) -> None:
    """Their elements count, not the objects that an open checkpoint shows for them."""
    for name, last in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        tensor = torch.tensor([0.0, last])
        value = {"deque": deque([tensor], 3), "space": SimpleNamespace(t=tensor), "class": Held(tensor)}
        bytecheckpoint.save(tmp_path / name, {"extra_states": value})
    assert compare(tmp_path / "a", tmp_path / "b").equal
    found = {difference.key for difference in compare(tmp_path / "a", tmp_path / "c").differences}
    assert found >= {"extra_states/deque", "extra_states/space", "extra_states/class"}
