"""What a data loader that accelerate has prepared is made of: its sampler, its data set, and its generators."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler

from bytecheckpoint.dataloader.hugging_face import check_exact
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.rng.sources import RandomSource, own_source, process_sources

__all__ = [
    "SkipOnce",
    "States",
    "dataset_of",
    "dispatches",
    "has_exact_state",
    "length_of",
    "own_generators",
    "process_generators",
    "sampler_of",
    "samples_in_batch",
    "set_generators",
]

#: States of generators, by name: uint8 [n].
States = Mapping[str, torch.Tensor]
#: Generators of the process from which an order may be drawn.
_OF_PROCESS = ("python", "numpy", "torch")


def process_generators() -> dict[str, RandomSource]:
    """Return the generators of the process from which an order may be drawn."""
    return {name: source for name, source in process_sources().items() if name in _OF_PROCESS}


def set_generators(sources: Mapping[str, RandomSource], states: States) -> None:
    """Let the generators go on from these states; those that have none stay."""
    for name in sources.keys() & states.keys():
        sources[name].set(states[name])


def own_generators(loader: Any) -> dict[str, RandomSource]:
    """Return the generators of a loader itself. One that accelerate seeds anew for each epoch is none."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = sampler_of(loader)
    candidates = {
        "sampler": None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None),
        "loader": getattr(loader.base_dataloader, "generator", None),
        "dataset": getattr(dataset_of(loader), "generator", None),
    }
    return {
        f"own.{name}": own_source(name, value)
        for name, value in candidates.items()
        if isinstance(value, torch.Generator)
    }


def sampler_of(loader: Any) -> Any:
    """Return the sampler below all samplers of batches."""
    found = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while isinstance(found, BatchSampler):
        found = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
    return found


def dataset_of(loader: Any) -> Any:
    """Return the data set of the program."""
    from accelerate.data_loader import IterableDatasetShard

    return loader.dataset.dataset if isinstance(loader.dataset, IterableDatasetShard) else loader.dataset


def length_of(dataset: Any) -> int | None:
    """Return the number of samples, if the data set knows it."""
    with contextlib.suppress(TypeError, NotImplementedError):
        return len(dataset)
    return None


def dispatches(loader: Any) -> bool:
    """Return whether rank 0 reads for all ranks."""
    from accelerate.data_loader import DataLoaderDispatcher

    return isinstance(loader, DataLoaderDispatcher)


def has_exact_state(loader: Any) -> bool:
    """Return whether torchdata's state of a loader says more than the number of batches, and leaves nothing out."""
    if dispatches(loader) or not loader.use_stateful_dataloader or not hasattr(loader.dataset, "state_dict"):
        return False
    try:
        check_exact(loader.dataset, "")
    except UsageError:
        return False
    return True


def samples_in_batch(loader: Any, ranks: int) -> int | None:
    """Return how many samples all ranks take in a batch, of one order; None where each rank has an order of its own."""
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    base = loader.base_dataloader
    sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
    size = getattr(sampler, "batch_size", None)
    if dispatches(loader):
        ranks = 1 if loader.split_batches else ranks
    elif isinstance(sampler, BatchSamplerShard):
        ranks = 1 if sampler.split_batches else sampler.num_processes
    elif isinstance(base.dataset, IterableDatasetShard):
        ranks = base.dataset.num_processes
    elif ranks > 1:  # each rank has a part of the data, as of a sharded data set of Hugging Face
        return None
    return None if size is None else int(size) * ranks


class SkipOnce(BatchSampler):
    """A sampler without its first batches, at the first iteration: workers that stay keep it for all epochs."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0  # when the first batch is asked for: torch makes iterators that it drops
        yield from itertools.islice(self._sampler, count, None)

    def __len__(self) -> int:
        return len(self._sampler)
