"""Facts that tell data sets of others apart and cost nothing: rows, features, names and sizes of files, some samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from bytecheckpoint.dataloader.checks import short
from bytecheckpoint.dataloader.hugging_face_steps import steps_of
from bytecheckpoint.dataloader.sources.fingerprint import even_places, value_fingerprint
from bytecheckpoint.representation.values.equality import equal

__all__ = ["changed_facts", "data_facts"]

_SAMPLES: Final = 16


def data_facts(dataset: Any) -> dict[str, Any]:
    """Return plain values that are equal for data that was moved, and differ for most other data.

    Args:
        dataset: map-style data set or streaming one of Hugging Face. Of one whose items may cost something or change from
            read to read, as behind transforms, only the number of items is known.
    """
    facts: dict[str, Any] = {}
    features = getattr(dataset, "features", None)
    if features is not None and hasattr(dataset, "info"):
        facts["features"] = repr(sorted((name, repr(kind)) for name, kind in dict(features).items()))
    parts = [step.kwargs for step in steps_of(dataset) if hasattr(step, "kwargs")]
    for number, arguments in enumerate(parts):
        for name, value in sorted(arguments.items()):
            if isinstance(value, list) and value:
                facts |= {f"{fact} ({name}, part {number})": found for fact, found in _facts_of_shards(value).items()}
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        facts |= _facts_of_items(dataset)
    return facts


def changed_facts(saved: Any, own: dict[str, Any]) -> list[str]:
    """Compare facts that both data sets have; return the differences in words."""
    saved = saved if isinstance(saved, dict) else {}
    return [
        f"the {name} of the data set were {short(saved[name])} and are {short(value)} here: bring back the data"
        for name, value in own.items()
        if name in saved and not equal(saved[name], value)
    ]


def _facts_of_shards(shards: list[Any]) -> dict[str, Any]:
    if all(isinstance(shard, str) for shard in shards):
        chosen = [shards[place] for place in even_places(len(shards), _SAMPLES)]
        return {"number of files": len(shards), "names and sizes of files": [_name_and_size(path) for path in chosen]}
    if all(hasattr(shard, "num_rows") for shard in shards):
        chosen = [shards[place] for place in even_places(len(shards), _SAMPLES)]
        return {
            "numbers of rows": sum(shard.num_rows for shard in shards),
            "samples": value_fingerprint([_facts_of_items(shard) for shard in chosen]),
        }
    return {}


def _name_and_size(path: str) -> list[Any]:
    return [os.path.basename(path), os.path.getsize(path) if os.path.isfile(path) else None]


def _facts_of_items(items: Any) -> dict[str, Any]:
    found = [*_sampled(items)] if len(items) else []
    return {"samples": value_fingerprint(found)} if found else {}


def _sampled(items: Any) -> Iterator[Any]:
    """Yield some items that lie evenly, if reading them costs nothing and is the same at each time."""
    if isinstance(items, torch.utils.data.Subset):
        yield value_fingerprint([items.indices[place] for place in even_places(len(items), _SAMPLES)])
        items = items.dataset
    if isinstance(items, torch.utils.data.ConcatDataset):
        for part in items.datasets:
            yield len(part)  # type: ignore[arg-type]
            yield from _sampled(part)
    elif type(items) in (list, tuple, range) or isinstance(
        items, np.ndarray | torch.Tensor | torch.utils.data.TensorDataset
    ):
        yield from (items[place] for place in even_places(len(items), _SAMPLES))
    elif hasattr(items, "with_format") and hasattr(items, "column_names"):  # of Hugging Face, undecoded
        rows = items.with_format("arrow")
        for place in even_places(len(items), _SAMPLES):
            row = rows[place].to_pylist()[0]
            yield [value for _, value in sorted(row.items()) if not isinstance(value, dict)]  # a dict may have a path
    elif isinstance(files := getattr(items, "samples", None), list):  # of torchvision's folders
        yield from ([_name_and_size(files[place][0]), *files[place][1:]] for place in even_places(len(files), _SAMPLES))
