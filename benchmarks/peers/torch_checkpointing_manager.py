"""The torch-checkpointing package (PyTorch's rewrite of DCP)."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.base import Peer
from benchmarks.state import Tensors

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing(Peer):
    """torch_checkpointing, without the default that needs unaligned O_DIRECT, and without copies behind a step on CPUs."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        self._managers: dict[str, Any] = {}

    @classmethod
    def available(cls) -> bool:
        return importlib.util.find_spec("torch_checkpointing") is not None

    def _manager(self, mode: str) -> Any:
        if mode not in self._managers:
            import torch_checkpointing as tc
            from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
            from torch_checkpointing.config import AsyncCheckpointSaverConfig
            from torch_checkpointing.staging import CheckpointStagerConfig
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

            storage = LocalFileSystemStorageConfig(use_direct_io=False)
            # Its defaults are made for CUDA: page-locked memory, copies behind the next forward and backward pass.
            staging = CheckpointStagerConfig(use_async_staging=torch.cuda.is_available())
            # The process imports torch: the default of 30 s may be too short.
            process = CheckpointProcessConfig(subprocess_init_timeout_secs=200)
            save = (
                tc.SyncCheckpointSaverConfig()
                if mode == "sync"
                else AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)
            )
            self._managers[mode] = tc.CheckpointManager.Config(save=save, storage_config=storage).build()
        return self._managers[mode]

    def save(self, path: Path, state: Tensors) -> None:
        self._manager("sync").save(str(path), {"model": state})

    def save_async(self, path: Path, state: Tensors) -> Callable[[], object]:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 3 * len(state) > limit:
            raise RuntimeError(f"takes a file descriptor per CPU tensor: {len(state)} tensors, ulimit -n is {limit}")
        return self._manager("async").save(str(path), {"model": state}).result  # type: ignore[no-any-return]

    def wait_until_staged(self) -> None:
        with self._manager("async").lock():
            pass

    def load(self, path: Path, state: Tensors) -> None:
        self._manager("sync").load(str(path), into={"model": state})

    def close(self) -> None:
        for manager in self._managers.values():
            with contextlib.suppress(Exception):
                manager.close()
        self._managers.clear()
