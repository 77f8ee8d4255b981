"""torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.peers.base import Peer
from benchmarks.state import Tensors

__all__ = ["DCP"]


class DCP(Peer):
    """DCP by its defaults: FileSystemWriter with fsync, async_save on a thread."""

    name = "DCP"
    durable = True

    def save(self, path: Path, state: Tensors) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=str(path), no_dist=not dist.is_initialized())

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save({"model": state}, checkpoint_id=str(path), no_dist=not dist.is_initialized())
        return future.result  # type: ignore[union-attr]

    def load(self, path: Path, state: Tensors) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"model": state}, checkpoint_id=str(path), no_dist=not dist.is_initialized())
