"""torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.peers.base import Peer
from benchmarks.state import Tensors

__all__ = ["DCP", "DCPWithKeptStager"]


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
            saved: Any = dcp.async_save({"model": state}, checkpoint_id=str(path), no_dist=not dist.is_initialized())
        return saved.result  # type: ignore[no-any-return]

    def async_ways(self) -> Sequence[Peer]:
        return (DCPWithKeptStager(),)

    def load(self, path: Path, state: Tensors) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({"model": state}, checkpoint_id=str(path), no_dist=not dist.is_initialized())


class DCPWithKeptStager(DCP):
    """DCP with one stager for all saves, which keeps the staged memory; by default each save makes a stager anew.

    With an accelerator it copies to page-locked memory behind the next forward and backward pass. The remaining option,
    shared memory, serves the process that writes instead of a thread, which needs a process group.
    """

    name = "DCP, kept stager"

    def __init__(self) -> None:
        fast = torch.accelerator.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=fast, use_shared_memory=False, use_async_staging=fast, use_non_blocking_copy=fast
            )
        )

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved: Any = dcp.async_save(
                {"model": state},
                checkpoint_id=str(path),
                no_dist=not dist.is_initialized(),
                async_stager=self._stager,
            )
        return getattr(saved, "upload_completion", saved).result  # type: ignore[no-any-return]

    def wait_until_staged(self) -> None:
        self._stager.synchronize_staging()

    def close(self) -> None:
        self._stager.close()
