"""The peers: checkpointing libraries behind one interface, one per file."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.base import Peer

__all__ = ["Peer", "all_peers"]


def all_peers(chosen: Sequence[str] = ()) -> list[Peer]:
    """Return one of each that is installed (and in `chosen`, unless that is empty), ours first."""
    from benchmarks.peers.dcp import DCP
    from benchmarks.peers.ours import Ours
    from benchmarks.peers.safetensors_file import Safetensors
    from benchmarks.peers.torch_checkpointing_manager import TorchCheckpointing

    kinds: tuple[type[Peer], ...] = (Ours, DCP, TorchCheckpointing, Safetensors)
    return [kind() for kind in kinds if kind.available() and (not chosen or kind is Ours or kind.name in chosen)]
