"""A loader in streams without data: each stream has a counter and a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError

__all__ = ["Loader", "state_of"]


class Loader:
    """A loader whose rank feeds the streams rank, rank + ranks, ...: each has a counter and a buffer of its length."""

    def __init__(self, count: int, rank: int, ranks: int, *, seed: int = 0, fed: int = 0) -> None:
        self.stream_count = count
        self.seed = seed
        self.own = range(rank, count, ranks)
        self.states: dict[int, Any] = {n: state_of(n, fed) for n in self.own}

    def shared_state(self) -> Any:
        return {"seed": self.seed, "sources": ["a", "b"]}

    def stream_states(self) -> Mapping[int, Any]:
        return self.states

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        if shared["seed"] != self.seed:
            raise IncompatibleCheckpointError(f"the seed was {shared['seed']}")
        return [n for n in saved if n in self.own]

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        self.states = dict(states)


def state_of(number: int, fed: int) -> dict[str, Any]:
    return {"fed": fed, "buffer": torch.arange(fed * number) + number, "rng": [number, (fed, {"x": b"\0"})]}
