"""Loaders of map-style data, and what they feed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, Dataset

from bytecheckpoint.dataloader.map_style import ResumableLoader, ResumableSampler


class Numbers(Dataset[int]):
    """The numbers below `length`; a class, so that spawned workers can have it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(
    length: int, batch: int, *, workers: int = 0, persistent: bool = False, **options: Any
) -> ResumableLoader:
    data = Numbers(length)
    sampler = ResumableSampler(data, batch, **options)
    return ResumableLoader(
        DataLoader(data, batch_sampler=sampler, num_workers=workers, persistent_workers=persistent, collate_fn=list)
    )


def take(loaders: Sequence[Any], count: int) -> Iterator[list[int]]:
    """Take `count` global batches from the loaders of all ranks, over the ends of epochs."""
    iterators = [iter(loader) for loader in loaders]
    while count:
        parts: list[list[int]] = []
        for iterator in iterators:
            parts += [part] if (part := next(iterator, None)) is not None else []
        if parts:
            assert len(parts) == len(loaders)
            yield [*chain(*parts)]
            count -= 1
        else:
            iterators = [iter(loader) for loader in loaders]


def hand_over(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Load the state that all old loaders hold into the new ones, as a checkpoint does."""
    shared = old[0].shared_state()
    assert all(loader.shared_state() == shared and loader.stream_states() == {0: {}} for loader in old)
    for loader in new:
        chosen = loader.choose_streams(shared, [0])
        loader.load_streams(shared, {n: {} for n in chosen})
