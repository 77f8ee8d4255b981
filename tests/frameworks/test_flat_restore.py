"""Loads into flat optimizer tensors, without a framework that makes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.frameworks.optimizers.flat_restore import load_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_tensors import ErrorAdvice, FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.frameworks.tensors.flat_ranges import WHOLE_TENSOR, ParameterRange
from tests.frameworks.memory import MemoryCheckpoint, detached

ADVICE = ErrorAdvice("flat", "", "", "")


@pytest.mark.parametrize("shapes", [{"scale": (), "w": (3,)}, {"w": (3,), "scale": ()}], ids=["first", "last"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_parameter_without_dimensions_has_one_step(
    shapes: dict[str, tuple[int, ...]], optimizer: type[torch.optim.Optimizer]
) -> None:
    """The step of such a parameter has the parameter's shape, and is not one value per element all the same."""
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    source = optimizer(model.parameters())  # type: ignore[call-arg]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    source.step()
    saved = MemoryCheckpoint([detached(NativeFramework().capture({"model": model, "optimizer": source}))])

    flat = nn.Parameter(torch.zeros(4))
    live = optimizer([flat])  # type: ignore[call-arg]
    view, ranges, names = optimizer_view(optimizer.__name__), list[ParameterRange](), {}
    placeholders, offset = [], 0
    for name, parameter in model.named_parameters():
        shape, count = tuple(parameter.shape), parameter.numel()
        ranges.append(ParameterRange(name, [], shape, 0, offset, count, True, WHOLE_TENSOR, True))
        placeholders.append(placeholder_parameter(shape, flat))
        names[id(placeholders[-1])] = (name, ())
        offset += count
    view.param_groups.append({**live.param_groups[0], "params": placeholders})
    tensor = FlatOptimizerTensor(
        optimizer=live,
        view=view,
        tensor=flat,
        ranges=ranges,
        joined=True,
        local_shape=(4,),
        description="the flat tensor",
        advice=ADVICE,
        placeholders=placeholders,
    )
    destination = Destination()
    load_flat_tensors("optimizer", [view], ParameterNames(names), [tensor], saved, destination, strict=True)
    saved.fill(destination)
    destination.apply()
    expected = source.state[model.w]
    assert live.state[flat].keys() == expected.keys()
    for slot, value in live.state[flat].items():
        want = expected[slot] if expected[slot].ndim == 0 else expected[slot][:1].expand(4)
        assert torch.equal(value, want), slot
