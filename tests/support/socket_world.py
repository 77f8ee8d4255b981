"""A world of ranks on threads of one process that talk over real sockets, on as many machines as a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from bytecheckpoint.collectives import ThreadWorld
from bytecheckpoint.collectives.store_collective import StoreCollective
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuned

__all__ = ["SocketWorld"]


class SocketWorld(ThreadWorld):
    """Ranks over sockets. Use as a context manager.

    Args:
        machines: number of the machine of each rank.
        tree: pass messages through one rank of each machine.
    """

    ranks: list[StoreCollective]  # type: ignore[assignment]

    def __init__(self, machines: Sequence[int], *, tree: bool = False) -> None:
        assert settings().transport.message_tree == "auto"
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
