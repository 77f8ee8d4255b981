"""Modules whose state_dict hooks communicate, as torchtitan's Llama: every rank runs them equally often."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from tests.support.worlds import on_ranks


class Communicating(nn.Linear):
    """A layer that counts its calls of state_dict, in each of which all ranks take part."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # replicas
        super().__init__(3, 2)
        self.calls = 0
        self.register_state_dict_post_hook(Communicating._meet)

    def _meet(self, entries: dict[str, Any], *_: object) -> None:
        self.calls += 1
        most = torch.tensor([self.calls, -self.calls])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert most.tolist() == [self.calls, -self.calls], "ranks are in different calls of state_dict"
        entries["total"] = most


def counted(model: Communicating, call: Callable[[], Any]) -> int:
    """Return how often `call` runs the hook."""
    before = model.calls
    call()
    return model.calls - before


@on_ranks(2)
def test_every_call_scans_once(path: str) -> None:
    model = Communicating()
    states: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    assert counted(model, lambda: bytecheckpoint.save(path, states)) == 1
    assert counted(model, lambda: bytecheckpoint.save(path, states)) == 1
    assert counted(model, lambda: bytecheckpoint.prepare(states).result(60)) == 1
    for number, staging in enumerate(("background", "blocking")):

        def save(name: str = f"{path}-{number}", staging: str = staging) -> None:
            states["optimizer"].param_groups[0]["lr"] = float(len(name))
            bytecheckpoint.save(name, states, async_checkpoint=True, staging=staging).result(60)

        assert counted(model, save) == 1
    assert counted(model, lambda: bytecheckpoint.load(path, states, prepare_save=False)) == 1
    bytecheckpoint.release_memory()  # nothing is prepared now
    assert counted(model, lambda: bytecheckpoint.load(path, states, prepare_save=True)) == 2
    # A plan that one rank alone has cached.
    states["extra_states"] = {"rank": torch.ones(1 + dist.get_rank())}
    bytecheckpoint.save(path, states)
    if dist.get_rank() == 0:
        del states["extra_states"]
    assert counted(model, lambda: bytecheckpoint.save(path, states)) == 1


@on_ranks(2)
def test_a_load_that_fails_on_one_rank_runs_no_hook(path: str) -> None:
    model = Communicating()
    bytecheckpoint.save(path, {"model": model})
    seen = path if dist.get_rank() == 0 else f"{path}-of-another-machine"
    with pytest.raises(CheckpointNotFoundError):
        bytecheckpoint.load(seen, {"model": model})
    assert counted(model, lambda: bytecheckpoint.load(path, {"model": model})) == 1


@on_ranks(2)
def test_a_failure_that_one_rank_has_seen(path: str) -> None:
    """The other raises it in its next save, which fails on both, after the hooks."""
    model = Communicating()
    wrong = {"model": model, "extra_states": {"step": dist.get_rank()}}
    handle = bytecheckpoint.save(path, wrong, async_checkpoint=True)
    assert wait([handle.committed], 60).done, "the failure is kept on both ranks"
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError):
            handle.result(60)
    with pytest.raises(CheckpointError, match="an earlier asynchronous save failed"):
        bytecheckpoint.save(path, {"model": model})
    assert counted(model, lambda: bytecheckpoint.save(path, {"model": model})) == 1
