"""The safetensors package: one rank, one file, no checksums, no resharding."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.peers.base import Peer
from benchmarks.state import Tensors

__all__ = ["Safetensors"]


class Safetensors(Peer):
    """`save_file`, and `safe_open` with a copy into the live tensors."""

    name = "safetensors"
    asynchronous = False
    ranks = False
    reshards = False

    def save(self, path: Path, state: Tensors) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file(state, str(path / "model.safetensors"))

    def load(self, path: Path, state: Tensors) -> None:
        with safe_open(str(path / "model.safetensors"), "pt") as file, torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))
