"""Models and optimizers in another precision than the checkpoint's, over several ranks: the next step works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from tests.support.worlds import on_ranks

LOW, FULL = torch.bfloat16, torch.float32


def build(wrapping: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(dtype)
    if wrapping == "ddp":
        model = DistributedDataParallel(model)
    elif wrapping == "fsdp2":
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()


def whole(values: Any) -> list[torch.Tensor]:
    return [v.full_tensor() if hasattr(v, "full_tensor") else v.detach() for v in values]


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp2"])
@on_ranks(2)
def test_the_step_after_a_cast(wrapping: str, path: str) -> None:
    for saved, live in ((LOW, FULL), (FULL, LOW)):
        source, optimizer = build(wrapping, saved, 1)
        step(source, optimizer, saved)
        bytecheckpoint.save(f"{path}/{saved}", {"model": source, "optimizer": optimizer})
        expected, reference = build("", live, 2)
        bytecheckpoint.load(f"{path}/{saved}", {"model": expected}, cast=True, strict=False)
        for parameter, state in zip(expected.parameters(), optimizer.state.values(), strict=True):
            reference.state[parameter] = {
                slot: value if slot == "step" else whole([value])[0].to(live) for slot, value in state.items()
            }
        model, own = build(wrapping, live, 2)
        bytecheckpoint.load(f"{path}/{saved}", {"model": model, "optimizer": own}, cast=True)
        step(model, own, live)
        step(expected, reference, live)
        assert all(map(torch.equal, whole(model.parameters()), whole(expected.parameters())))
