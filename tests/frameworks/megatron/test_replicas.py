"""Virtual pipeline chunks that hold tensors under one name: replicas, as in a list of plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from tests.frameworks.megatron.variants import variant_chunks
from tests.support.megatron.models import Layout, MegatronModel
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)


class Replicated(MegatronModel):
    """A model with a buffer, and a trained parameter, that every chunk holds."""

    def __init__(self, layout: Layout, value: float, *, trained: bool) -> None:
        bare = variant_chunks("fewer layers", layout)
        for chunk in bare:
            chunk.register_buffer("scale", torch.full((3,), value))
            if trained:
                chunk.gain = nn.Parameter(torch.full((3,), value, dtype=chunk.config.params_dtype))
        super().__init__(layout, bare, clip_grad=0.0)

    def step(self, gradient: float) -> None:
        for _, parameter in self.named_parameters():
            parameter.main_grad.fill_(gradient)
        self.optimizer.step()


@on_ranks(2)
def test_a_buffer_in_every_chunk(path: str) -> None:
    layout = Layout(pp=2, vpp=2)
    bytecheckpoint.save(f"{path}/equal", Replicated(layout, 4.0, trained=False).states())
    other = Replicated(layout, 5.0, trained=False)
    bytecheckpoint.load(f"{path}/equal", other.states())
    assert [chunk.scale.tolist() for chunk in other.bare] == [[4.0] * 3] * 2
    other.bare[1].scale.fill_(6.0)
    with pytest.raises(IncompatibleCheckpointError, match="model/scale is held twice"):
        bytecheckpoint.save(f"{path}/different", other.states())
    other.bare[1].scale = torch.ones(2)
    with pytest.raises(UsageError, match="model/scale names two different tensors"):
        bytecheckpoint.save(f"{path}/shapes", other.states())


def gains(model: Replicated) -> list[dict[str, Any]]:
    """Return the parameter, master weight and state of each chunk."""
    states = [(master, state) for name, master, state in model.named_states() if name == "gain"]
    weights = [chunk.gain.detach().clone() for chunk in model.bare]
    return [
        {"weight": w, "master": m.clone(), **{k: v.clone() for k, v in s.items()}}
        for w, (m, s) in zip(weights, states, strict=True)
    ]


@on_ranks(2)
def test_a_trained_parameter_in_every_chunk(path: str) -> None:
    layout = Layout(pp=2, vpp=2, bf16=True, distributed=False)
    one, two = Replicated(layout, 4.0, trained=True), Replicated(layout, 5.0, trained=True)
    one.step(0.5)
    bytecheckpoint.save(f"{path}/equal", one.states())
    bytecheckpoint.load(f"{path}/equal", two.states())
    for got, wanted in zip(gains(two), gains(one), strict=True):
        assert got.keys() == wanted.keys() and all(torch.equal(got[k], wanted[k]) for k in wanted)
    two.step(0.25)
    one.step(0.25)
    for got, wanted in zip(gains(two), gains(one), strict=True):
        assert all(torch.equal(got[k], wanted[k]) for k in wanted)
    distributed = Replicated(Layout(pp=2, vpp=2, bf16=True), 4.0, trained=True)
    with pytest.raises(UsageError, match="'gain' names two parameters of the optimizer"):
        bytecheckpoint.save(f"{path}/distributed", distributed.states())
