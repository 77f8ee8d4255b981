"""Trainers that publish versions of one model, and engines that follow them, at layouts of ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.publishing import Follower, FollowReport, Publisher
from tests.support.layouts import Leaf, bits, grid_boxes
from tests.support.ranks import outcomes

__all__ = ["Engine", "Model", "Trainer", "check", "cut_by", "fine"]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((90, 70), torch.bfloat16),
    "v": ((33, 5, 7), torch.float32),
    "q": ((64, 300), torch.float8_e4m3fn),
    "n": ((41,), torch.float64),
    "mask": ((50, 3), torch.bool),
    "scale": ((), torch.float32),
}


class Model:
    """Whole tensors that change by seeds, and the parts of them that ranks hold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.whole = {name: _random(shape, dtype) for name, (shape, dtype) in SHAPES.items()}

    def change(self, share: float) -> None:
        """Change about this share of the elements of each tensor."""
        for name, tensor in self.whole.items():
            shape, dtype = SHAPES[name]
            changed = torch.rand(shape) < share
            self.whole[name] = torch.where(changed, _random(shape, dtype).float(), tensor.float()).to(dtype)
            if dtype in (torch.float64, torch.float32):
                self.whole[name] = torch.where(changed, _random(shape, dtype), tensor)

    def held(self, cut: Callable[[str], list[list[Any]]], rank: int, *, blank: bool = False) -> dict[str, Any]:
        """Return the states of a rank, whose boxes of each tensor `cut` lists."""
        found = {}
        for name, tensor in self.whole.items():
            leaf = Leaf(tuple(tensor.shape), cut(name)[rank])
            found[name] = leaf.fill(torch.zeros_like(tensor) if blank else tensor, strided=blank)
        return {"model": found}


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def cut_by(ranks: int, dim: int, copies: int = 1) -> Callable[[str], list[list[Any]]]:
    """Return how `ranks` ranks hold the tensors: cut along `dim` where they have it, each part on `copies` ranks."""

    def cut(name: str) -> list[list[Any]]:
        shape, parts = SHAPES[name][0], ranks // copies
        if not shape:
            return [[((), ())]] * ranks
        along = min(dim, len(shape) - 1)
        cuts = [[shape[k] * p // parts for p in range(1, parts)] if k == along else [] for k in range(len(shape))]
        boxes = grid_boxes(shape, cuts)
        return [[boxes[rank % parts]] for rank in range(ranks)]

    return cut


def check(states: dict[str, Any], model: Model) -> None:
    """Fail unless a rank holds the model's elements."""
    for name, leaf in states["model"].items():
        for (offsets, lengths), tensor in zip(leaf.boxes, leaf.tensors, strict=True):
            piece = model.whole[name][tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            assert torch.equal(bits(piece), bits(tensor)), name


class Trainer:
    """A publisher on some ranks, which are threads."""

    def __init__(self, root: str | Path, ranks: int = 2, dim: int = 0, copies: int = 1, **options: Any) -> None:
        self.model, self.root, self.step = Model(), root, 0
        self._cut, self._options, self.world = cut_by(ranks, dim, copies), options, ThreadWorld(ranks)
        self._publishers: dict[int, Publisher] = {}

    def publish(self, share: float = 0.02, place: str | Path | None = None) -> list[Any]:
        """Change a share of the elements, and publish; return each rank's report or error."""
        self.model.change(share)
        self.step += 1

        def one(collective: Collective) -> Any:
            rank = collective.rank
            if rank not in self._publishers:
                self._publishers[rank] = Publisher(place or self.root, **self._options)
            states = self.model.held(self._cut, rank)
            return self._publishers[rank].publish(states, self.step).result(60)

        return outcomes(self.world, one)

    def end(self) -> None:
        outcomes(self.world, lambda collective: self._publishers.pop(collective.rank).close())


class Engine:
    """A follower on some ranks, which are threads."""

    def __init__(self, model: Model, root: str | Path, ranks: int, dim: int, copies: int = 1) -> None:
        self._model, self.world, cut = model, ThreadWorld(ranks), cut_by(ranks, dim, copies)
        self.followers = [Follower(root) for _ in range(ranks)]
        self.states = [model.held(cut, rank, blank=True) for rank in range(ranks)]

    def update(self, **options: Any) -> list[Any]:
        def one(collective: Collective) -> Any:
            return self.followers[collective.rank].update(self.states[collective.rank], **options)

        return outcomes(self.world, one)

    def check(self) -> None:
        for states in self.states:
            check(states, self._model)

    def snapshot(self) -> list[torch.Tensor]:
        return [bits(t).clone() for states in self.states for leaf in states["model"].values() for t in leaf.tensors]


def fine(found: list[Any]) -> list[FollowReport]:
    """Return reports; raise the first error."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
