"""A tensor subclass of which each rank holds one flat range, and declares it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["CUTS", "SHAPE", "WHOLE", "Ragged", "ragged"]

SHAPE = (5, 3)
WHOLE = torch.arange(15.0).reshape(SHAPE)
CUTS = (0, 4, 4, 13, 15)  # unequal flat ranges of four ranks, one of them empty


class Ragged(torch.Tensor):
    """A tensor of shape `SHAPE` of which this rank has one flat range, as under veScale's RaggedShard."""

    start: int
    run: torch.Tensor

    @staticmethod
    def __new__(cls, start: int, run: torch.Tensor) -> Ragged:
        made = torch.Tensor._make_wrapper_subclass(cls, SHAPE, dtype=run.dtype, requires_grad=run.requires_grad)
        made.start, made.run = start, run
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def local(x: Any) -> Any:
            return x.run if isinstance(x, Ragged) else x

        one = next(a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Ragged))
        args, kwargs = torch.utils._pytree.tree_map(local, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return one
        return type(one)(one.start, out) if isinstance(out, torch.Tensor) and out.shape == one.run.shape else out

    def __bytecheckpoint_shards__(self) -> Iterable[tuple[Sequence[int], int, torch.Tensor]]:
        return [(SHAPE, self.start, self.run)]


def ragged(rank: int, *, zero: bool = False) -> Ragged:
    run = WHOLE.flatten()[CUTS[rank] : CUTS[rank + 1]].clone()
    return Ragged(CUTS[rank], torch.zeros_like(run) if zero else run)
