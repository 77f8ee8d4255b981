"""Saves in the background whose copies begin late, while the caller trains on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.frameworks.base import Framework
from bytecheckpoint.saving.background import copy_volatile
from tests.support.comparisons import assert_same_checkpoints
from tests.support.modes import MODES


@contextmanager
def late_copies(seconds: float = 0.3) -> Iterator[None]:
    """Let each copy of this process begin after some time."""
    stage = Image.stage

    def late(self: Image, *arguments: Any) -> None:
        time.sleep(seconds)
        stage(self, *arguments)

    with patch.object(Image, "stage", late):
        yield


def save_and_step(path: str, states: dict[str, Any], step: Callable[[], object], **options: Any) -> None:
    """Save in the call and in the background, step at once, and fail unless both checkpoints are equal.

    The first is at `path`/before, the second at `path`/behind.
    """
    bytecheckpoint.save(f"{path}/before", states, **options)
    with late_copies():
        handle = bytecheckpoint.save(f"{path}/behind", states, **MODES["background"], **options)
        step()
        assert handle.result(120).staging == "background"
    dist.barrier()
    assert_same_checkpoints(f"{path}/before", f"{path}/behind")


def copied_share(framework: Framework, states: dict[str, Any]) -> float:
    """Return the part of this rank's bytes that a save in the background copies in its call."""
    captured = framework.capture(states)
    total = sum(shard.data.nbytes for state in captured for shard in state.shards)
    return copy_volatile(captured) / total


def staging_under_a_manager(path: str, states: dict[str, Any], train: Callable[[], object], saves: int) -> list[str]:
    """Train and save in turn under a manager with its own options; return how each save copied the state."""
    handles = []
    with bytecheckpoint.CheckpointManager(path, states, every=1) as manager:
        for step in range(1, saves + 1):
            train()
            handle = manager.save(step)
            assert handle is not None
            handles.append(handle)
    return [handle.result(60).staging for handle in handles]
