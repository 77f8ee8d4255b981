"""The contenders, one per file, all behind `Peer`."""

from __future__ import annotations

from benchmarks.peers.base import Peer

__all__ = ["Peer", "all_peers"]


def all_peers() -> list[Peer]:
    """One of each that is installed; ours first."""
    from benchmarks.peers.dcp import DCP
    from benchmarks.peers.ours import Ours
    from benchmarks.peers.safetensors_file import Safetensors
    from benchmarks.peers.torch_checkpointing_manager import TorchCheckpointing

    return [kind() for kind in (Ours, DCP, TorchCheckpointing, Safetensors) if kind.available()]
