"""Small token loaders, and documents whose tokens say which document they are of."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
from itertools import count
from typing import Any

import numpy as np
import torch

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.dataloader.loader import TokenBufferLoader, WorkerOptions
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.sources.base import MapSource

__all__ = ["Long", "Numbers", "gather_over", "loader", "numbers_of_stream", "rows_of", "tokens_of", "workers_of"]


class Numbers(MapSource):
    """Documents of 1 to 9 tokens; each token says which document it is of."""

    def __init__(self, name: str = "numbers", count: int = 50, first: int = 0, *, shuffle: bool = True) -> None:
        self.name, self.count, self.first, self.shuffle = name, count, first, shuffle

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return np.full(index * 7 % 9 + 1, self.first + index)

    def describe(self) -> dict[str, Any]:
        return {"count": self.count}


class Long(Numbers):
    """Documents of which some are as long as many global batches, and others are empty."""

    def __getitem__(self, index: int) -> Any:
        return np.full(700 if index in (3, 30) else index % 5, self.first + index)


def numbers_of_stream(stream: int, streams: int, epoch: int) -> Iterator[list[int]]:
    """Make the documents of an IterableSource: each stream and epoch has its own."""
    for number in range(7 + stream % 3):
        yield [10_000 * (epoch + 1) + 100 * stream + number] * (number % 4 + 1)


def loader(rank: int = 0, ranks: int = 1, **options: Any) -> TokenBufferLoader:
    """Return a loader of `Numbers` with 6 streams; `options` are those of the recipe, the workers and the loader."""
    given: dict[str, Any] = {"sources": Numbers(), "context_length": 8, "global_batch": 6, "streams": 6} | options
    of_workers = {name: given.pop(name) for name in given.keys() & {f.name for f in fields(WorkerOptions)}}
    workers = WorkerOptions(given.pop("workers", 0), **of_workers)
    of_recipe = {name: given.pop(name) for name in given.keys() & signature(TokenRecipe).parameters.keys()}
    return TokenBufferLoader(TokenRecipe(**of_recipe), rank=rank, ranks=ranks, workers=workers, **given)


def gather_over(collective: Collective, ranks: list[int] | None = None) -> Callable[[Any], list[Any]]:
    """Return the `gather` of a loader: from a value to those of some ranks, all by default."""
    calls = count()

    def gather(value: Any) -> list[Any]:
        told = collective.all_gather(f"gather/{next(calls)}", pickle.dumps(value), timeout=60)
        return [pickle.loads(told[rank]) for rank in ranks or range(len(told))]

    return gather


def workers_of(one: TokenBufferLoader) -> list[Any]:
    """Return the worker processes of a loader."""
    return [worker._process for worker, _ in one._makers]


def tokens_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the tokens of each row."""
    return batch["tokens"].tolist()


def rows_of(batch: dict[str, torch.Tensor]) -> list[list[Any]]:
    """Return everything of each row: its number, tokens, documents and positions."""
    columns = [batch[name].tolist() for name in ("rows", "tokens", "documents", "positions")]
    return [[*row] for row in zip(*columns, strict=True)]
