"""Destinations whose elements share memory: refused by name, unless they are one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.support.settings import using

VALUES = torch.arange(12.0).reshape(3, 4)


def module(**tensors: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def saved(path: str, state: str = "model") -> str:
    bytecheckpoint.save(path, {state: {"a": VALUES, "b": VALUES + 50}})
    return path


def overlapping(memory: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """Layouts that share a part of their memory, or of which elements are one place."""
    columns = memory[:24].view(3, 8)
    return {
        "one range": {"a": memory[:12].view(3, 4), "b": memory[6:18].view(3, 4)},
        "inside": {"a": memory.as_strided((3, 4), (8, 1)), "b": memory[8:20].view(3, 4)},
        "columns": {"a": columns[:, :4], "b": columns[:, 3:7]},
        "transposed": {"a": memory[:12].view(3, 4), "b": memory[2:14].view(4, 3).T},
        "itself": {"a": memory.as_strided((3, 4), (3, 1)), "b": memory[30:42].view(3, 4)},
        "itself, shifted": {"a": memory.as_strided((3, 4), (1, 2)), "b": memory[30:42].view(3, 4)},
    }


@pytest.mark.parametrize("layout", list(overlapping(torch.zeros(42))))
@pytest.mark.parametrize("as_dict", [True, False])
def test_overlapping_destinations_are_refused_by_name(path: str, layout: str, as_dict: bool) -> None:
    memory = torch.zeros(42)
    tensors = overlapping(memory)[layout]
    states: dict[str, Any] = {"model": dict(tensors) if as_dict else module(**tensors)}
    with pytest.raises(UsageError, match=r"model/[ab] (and model/[ab] share a part|shows one element)"):
        bytecheckpoint.load(saved(path), states)
    assert not memory.any(), "nothing was loaded"


def test_extra_states_that_overlap_themselves(path: str) -> None:
    states = {"extra_states": {"a": torch.zeros(10).as_strided((3, 4), (3, 1)), "b": torch.zeros(3, 4)}}
    with pytest.raises(UsageError, match="extra_states/a shows one element"):
        bytecheckpoint.load(saved(path, "extra_states"), states)


def test_parts_of_one_memory_that_lie_side_by_side(path: str) -> None:
    memory = torch.zeros(3, 16)
    tensors = {"a": memory[:, 0:8:2], "b": memory[:, 1:8:2]}
    for states in ({"model": dict(tensors)}, {"model": module(**tensors)}):
        memory.zero_()
        bytecheckpoint.load(saved(path), states)
        assert torch.equal(memory[:, 0:8:2], VALUES) and torch.equal(memory[:, 1:8:2], VALUES + 50)


def test_equal_ranges_are_tied(path: str) -> None:
    """Their values in the checkpoint must be equal."""
    memory = torch.zeros(3, 4)
    for states in ({"model": module(a=memory, b=memory.view(3, 4))}, {"model": {"a": memory, "b": memory.view(3, 4)}}):
        with pytest.raises(IncompatibleCheckpointError, match="model/a and model/b are one tensor here"):
            bytecheckpoint.load(saved(path), states)
        other = f"{path}_equal"
        bytecheckpoint.save(other, {"model": {"a": VALUES, "b": VALUES.clone()}})
        bytecheckpoint.load(other, states)
        assert torch.equal(memory, VALUES)


def test_an_expanded_destination(path: str) -> None:
    """It takes values that are equal where it has one element."""
    live = torch.zeros(4).expand(3, 4)
    with pytest.raises(IncompatibleCheckpointError, match="model/a is an expanded tensor here"), using(timeout=60):
        bytecheckpoint.load(saved(path), {"model": {"a": live, "b": torch.zeros(3, 4)}})
    assert not live.any()
    bytecheckpoint.save(path, {"model": {"a": VALUES[:1].expand(3, 4).contiguous()}})
    bytecheckpoint.load(path, {"model": {"a": live}})
    assert torch.equal(live, VALUES[:1].expand(3, 4))
