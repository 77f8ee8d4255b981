"""Layers that AutoTP splits over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.frameworks.deepspeed.engines import Zero, configuration, prepare, trained
from tests.support.tiny_model import SEQUENCES, Gpt
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)

#: Which layers of the tiny transformer are split, and how.
SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attention\.[qkv]\.weight$", r".*mlp\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.attention\.o\.weight$", r".*mlp\.down\.weight$"], "partition_type": "row"},
    ],
}


def auto_tp(size: int, stage: int) -> Any:
    """Return an engine of which AutoTP has split the layers over `size` ranks."""
    prepare()
    import deepspeed

    model = Gpt()
    trained(model)
    config = configuration(
        Zero(size, stage),
        train_micro_batch_size_per_gpu=SEQUENCES,
        tensor_parallel={"autotp_size": size, "partition_config": SPLIT},
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


@on_ranks(2)
def test_split_layers_are_seen_without_their_engine(path: str) -> None:
    engine = auto_tp(2, 0)
    for states in ({"model": engine.module}, {"model": engine.module, "optimizer": engine.optimizer}):
        with pytest.raises(UsageError, match=r"module 'blocks.0.attention.q' \(LinearLayer\) is split"):
            bytecheckpoint.save(path, states)
    with pytest.raises(UsageError, match="belongs to an engine of DeepSpeed"):
        bytecheckpoint.save(path, {"model": engine.module}, framework="torch")
