"""What a checkpoint holds and the model lacks: a strict load refuses it by name, chunks of virtual stages or not."""

from __future__ import annotations

import pytest

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron.variants import VariantModel, save_variant
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
