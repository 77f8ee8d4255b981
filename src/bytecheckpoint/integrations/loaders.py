"""Find the sampler, the generators and the length of a data loader of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler

__all__ = ["generators_of", "length_of", "sampler_of"]


def sampler_of(loader: Any) -> Any:
    """Return the sampler below all samplers of batches, or None."""
    found = getattr(loader, "batch_sampler", None)
    found = getattr(loader, "sampler", None) if found is None else found
    while isinstance(found, BatchSampler):
        found = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
    return found


def generators_of(loader: Any, dataset: Any) -> dict[str, torch.Generator]:
    """Return the private generators from which a loader, its samplers and its data set draw an order."""
    places = {
        "loader": loader,
        "batch_sampler": getattr(loader, "batch_sampler", None),
        "sampler": sampler_of(loader),
        "dataset": dataset,
    }
    found = {name: getattr(place, "generator", None) for name, place in places.items()}
    return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}


def length_of(thing: Any) -> int | None:
    """Return the length of a data set or loader, or None if it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
