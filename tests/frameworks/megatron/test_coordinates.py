"""The coordinates of the ranks of a real Megatron job in its layout, for the metrics."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bytecheckpoint.frameworks.coordinates import mesh_coordinates
from tests.support.megatron.models import Layout, in_layout, initialize_parallel


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(dp=4, ep=2, moe=True)],
    ids=str,
)
@in_layout
def test_the_place_of_a_rank(layout: Layout) -> None:
    """Megatron counts the ranks of a tensor-parallel group first, and those of a pipeline last."""
    initialize_parallel(layout)
    rank = dist.get_rank()
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    assert mesh_coordinates({}, "", rank, layout.world) == {
        "tp": tp, "pp": pp, "dp": dp, "cp": 0, "ep": dp % layout.ep
    }  # fmt: skip
