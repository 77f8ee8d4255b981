"""A world of ranks on threads of one process that talk over real sockets, on as many machines as a test wants."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from bytecheckpoint.collectives import ThreadWorld
from bytecheckpoint.collectives.process_group import StoreCollective
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuned

__all__ = ["SocketWorld", "certificates"]


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority and a certificate that it has signed; return the settings that name them."""
    folder.mkdir(exist_ok=True)
    authority, key, certificate, request = (
        str(folder / name) for name in ("authority", "key", "certificate", "request")
    )
    new = ["openssl", "req", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    sign = ["openssl", "x509", "-req", "-days", "1", "-in", request, "-out", certificate]
    for command in (
        [*new, "-x509", "-days", "1", "-subj", "/CN=authority", "-keyout", f"{authority}.key", "-out", authority],
        [*new, "-subj", "/CN=rank", "-keyout", key, "-out", request],
        [*sign, "-CA", authority, "-CAkey", f"{authority}.key", "-CAcreateserial"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return {"tls_certificate": certificate, "tls_key": key, "tls_authority": authority}


class SocketWorld(ThreadWorld):
    """Ranks over sockets. Use as a context manager.

    Args:
        machines: number of the machine of each rank.
        tree: pass messages through one rank of each machine.
    """

    ranks: list[StoreCollective]  # type: ignore[assignment]

    def __init__(self, machines: Sequence[int], *, tree: bool = False) -> None:
        assert settings().message_tree == "auto"
        self.size = len(machines)
        store = dist.HashStore()

        def join(rank: int) -> StoreCollective:
            return StoreCollective(store, rank, self.size, timeout=60, host=f"machine {machines[rank]}")

        with tuned(star_ranks=0 if tree else self.size), ThreadPoolExecutor(self.size) as pool:
            self.ranks = list(pool.map(join, range(self.size)))

    def __enter__(self) -> SocketWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.ranks:
            each.close()
        assert all(loop.join(20) for each in self.ranks for loop in each._loops)
