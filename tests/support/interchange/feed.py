"""The data of the runs of the matrix: a token loader, whose position a checkpoint carries from layout to layout."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bytecheckpoint.dataloader.loader import TokenBufferLoader
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.sources.sequence import SequenceSource

__all__ = ["Batch", "Feed", "global_batches", "neighbours"]

#: The numbers of the rows of a batch, and their tokens.
Batch = tuple[list[int], list[list[int]]]

#: Few documents, so that the steps of a test lie in several epochs.
_DOCUMENTS = 70


class Feed:
    """Feeds one rank, and notes what it has fed.

    Args:
        sequences: rows of a global batch.
        length: tokens of a row: one more than the model reads, because the targets are the inputs shifted by one.
        vocabulary: number of tokens.
        rank: data-parallel coordinate.
        ranks: data-parallel degree.
        first: True if the rank's other coordinates are 0.

    Attributes:
        loader: the loader, for `states["dataloader"]`.
    """

    def __init__(self, sequences: int, length: int, vocabulary: int, rank: int, ranks: int, *, first: bool) -> None:
        dice = np.random.default_rng(9)
        documents = [dice.integers(0, vocabulary, dice.integers(1, 2 * length)) for _ in range(_DOCUMENTS)]
        sources = {SequenceSource(documents[:50], "many"): 2.0, SequenceSource(documents[50:], "few"): 1.0}
        recipe = TokenRecipe(sources, length, sequences, shuffle_buffer=3)
        self.loader = TokenBufferLoader(recipe, rank=rank, ranks=ranks, saves=first)
        self._rank = rank
        self._fed: list[Batch] = []

    def rows(self) -> torch.Tensor:
        """Return the rank's rows of the next global batch, int64 [rows, length]."""
        batch = next(self.loader)
        self._fed.append((batch["rows"].tolist(), batch["tokens"].tolist()))
        return batch["tokens"]

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the next step."""
        rows = self.rows()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def take_notes(self) -> tuple[int, list[Batch]]:
        """Return the coordinate, and what was fed since the last call."""
        fed, self._fed = self._fed, []
        return self._rank, fed


def neighbours(copies: int) -> dict[str, Any]:
    """Return the coordinates of a rank where each `copies` neighbours feed the same data."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {"rank": rank // copies, "ranks": size // copies, "first": rank % copies == 0}


def global_batches(notes: list[tuple[int, list[Batch]]]) -> list[Batch]:
    """Join what the ranks have fed; fail if ranks of one coordinate differ.

    Args:
        notes: notes of all ranks, by `take_notes`.
    """
    by_coordinate: dict[int, list[Batch]] = {}
    for coordinate, fed in notes:
        assert by_coordinate.setdefault(coordinate, fed) == fed, (
            f"ranks of coordinate {coordinate} were fed differently"
        )
    parts = [by_coordinate[coordinate] for coordinate in range(len(by_coordinate))]
    return [
        ([*chain(*(rows for rows, _ in step))], [*chain(*(tokens for _, tokens in step))])
        for step in zip(*parts, strict=True)
    ]
