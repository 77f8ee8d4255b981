"""Tensors of a checkpoint that the model lacks: a strict load refuses them by name, with virtual stages or without."""

from __future__ import annotations

import io
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.frameworks.megatron.variants import VariantModel, save_variant
from tests.support.comparisons import assert_complete
from tests.support.extra_states import WithExtraState
from tests.support.megatron.models import Layout
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)

FEWER = "fewer layers"  # four of the six of "thirds"


def load_fewer_layers(layout: Layout, source: str) -> tuple[str, ...]:
    trained = VariantModel(FEWER, layout)
    for states in (trained.states(), {"model": trained.states()["model"]}):
        with pytest.raises(IncompatibleCheckpointError, match=r"holds model/decoder\.layers\.4\..*no rank wants"):
            bytecheckpoint.load(source, states)
    return bytecheckpoint.load(source, trained.states(), strict=False).unexpected


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, vpp=2)], ids=str)
def test_layers_that_the_model_lacks(worlds: Worlds, layout: Layout, first: str) -> None:
    worlds.run(1, save_variant, "thirds", Layout(), first)
    for unexpected in worlds.run(layout.world, load_fewer_layers, layout, first):
        for key in ("model/decoder.layers.5.mlp.linear_fc1.weight", "optimizer/state/decoder.layers.5."):
            assert any(name.startswith(key) for name in unexpected)


def with_extra_states(variant: str, layout: Layout, extra: Any) -> dict[str, Any]:
    """Return a model with an extra state in each layer, as Transformer Engine's layers have them."""
    trained = VariantModel(variant, layout)
    for layer in (layer for chunk in trained.bare for layer in chunk.decoder.layers):
        layer.own = WithExtraState()
        layer.own.extra = extra
    return {"model": trained.model}


def save_extra_states(layout: Layout, path: str) -> None:
    bytecheckpoint.save(path, with_extra_states("thirds", layout, io.BytesIO(b"scales")))


def load_without_extra_states(layout: Layout, source: str) -> list[set[str]]:
    """Load into layers without them, and into fewer layers; return what the reports name."""
    without = {"model": VariantModel("thirds", layout).model}
    with pytest.raises(
        IncompatibleCheckpointError, match=r"holds model/decoder\.layers\.0\.own\._extra_state.*no rank"
    ):
        bytecheckpoint.load(source, without)
    assert_complete(bytecheckpoint.load(source, without, exclude=["model/*_extra_state"]))
    report = bytecheckpoint.load(source, without, strict=False)
    fewer = bytecheckpoint.load(source, with_extra_states(FEWER, layout, 0), strict=False)
    assert not report.missing and not fewer.missing
    return [{name for name in found.unexpected if "_extra_state" in name} for found in (report, fewer)]


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_extra_states_that_the_model_lacks(worlds: Worlds, layout: Layout, first: str) -> None:
    worlds.run(layout.world, save_extra_states, layout, first)
    for other in (Layout(), Layout(pp=2), Layout(tp=2, dp=2)):
        for without, fewer in worlds.run(other.world, load_without_extra_states, other, first):
            assert without == {f"model/decoder.layers.{n}.own._extra_state" for n in range(6)}
            assert fewer == {f"model/decoder.layers.{n}.own._extra_state" for n in (4, 5)}
