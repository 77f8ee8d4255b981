"""Comparison of the copies that several ranks hold of one box of one tensor. Only one of them is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.engine.tensor_bytes import flat_bytes, movable
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.planning.local_table import LocalTable, all_rows
from bytecheckpoint.planning.replicas import differing_rows, group_equal
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.representation.shards import Fragments, LiveShard, TensorKey, each_box
from bytecheckpoint.saving.capture import content_digest
from bytecheckpoint.saving.messages import RankChecks

__all__ = ["check_copies", "full_digests", "sampled_digests"]

_SAMPLES = 8  # elements of each shard


def full_digests(shards: Sequence[LiveShard]) -> NDArray[np.uint64]:
    """Hash the whole content of every box."""
    return np.array([xxhash.xxh3_64_intdigest(content_digest(s.data, s.dtype)) for s in each_box(shards)], np.uint64)


def sampled_digests(shards: Sequence[LiveShard]) -> NDArray[np.uint64]:
    """Hash a few elements of every box that must be equal, the same ones on all ranks; 0 for other boxes."""
    digests = np.zeros(sum(shard.rows for shard in shards), np.uint64)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    number = -1
    with torch.no_grad():
        for shard in shards:
            number += 1
            if shard.fragments is not None:
                digests[number : number + shard.rows] = _of_fragments(shard, shard.fragments)
                number += shard.rows - 1
            elif _is_compared(shard, shard.data.numel()):
                sample = _sample(movable(shard.data))
                groups.setdefault((sample.device, sample.dtype), []).append((number, sample))
        for found in groups.values():
            # One copy for all tensors of a device.
            samples = flat_bytes(torch.cat([sample for _, sample in found]).cpu()).numpy()
            first = 0
            for number, sample in found:
                digests[number] = xxhash.xxh3_64_intdigest(samples[first : first + sample.nbytes])
                first += sample.nbytes
    return digests


def _of_fragments(shard: LiveShard, found: Fragments) -> NDArray[np.uint64]:
    """Hash the elements of each box of a shard that `_sample` takes."""
    memory = movable(shard.data)
    steps = found.counts // _SAMPLES | 1
    counts = -(-found.counts // steps)
    ends = np.cumsum(counts)
    number = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    places = torch.from_numpy(np.repeat(found.places, counts) + number * np.repeat(steps, counts))
    samples = flat_bytes(memory.index_select(0, places.to(memory.device)).cpu()).numpy()
    bounds = (ends * memory.element_size()).tolist()
    digest = xxhash.xxh3_64_intdigest
    digests = np.array([digest(samples[a:b]) for a, b in pairwise([0, *bounds])], np.uint64)
    for of_length, count in ((found.counts == 1, 1), (found.counts > 1, 2)):
        if not _is_compared(shard, count):
            digests[of_length] = 0
    return digests


def _is_compared(shard: LiveShard, count: int) -> bool:
    # Counts of steps, which are single values, are compared before, with an error of their own.
    return count > 0 and (shard.requires_grad or (count > 1 and (shard.must_be_equal or bool(shard.key.slot))))


def _sample(data: torch.Tensor) -> torch.Tensor:
    """Return some elements of `data`, by their places in row-major order, for any strides."""
    step = data.numel() // _SAMPLES | 1  # odd: else all may be of one column
    if data.is_contiguous():
        return data.view(-1)[::step]
    places = np.unravel_index(np.arange(0, data.numel(), step), data.shape)
    return data[tuple(torch.from_numpy(place).to(data.device) for place in places)]


def check_copies(checks: Mapping[int, RankChecks], tables: Sequence[LocalTable], *, replicated: bool = True) -> None:
    """Refuse a save in which the copies of a box differ between ranks.

    Args:
        checks: facts of all ranks.
        tables: shards of each rank.
        replicated: True if some boxes have copies; else nothing is compared, which for thousands of ranks takes long.

    Raises:
        UsageError: ranks compare differently.
        IncompatibleCheckpointError: copies differ; the message names the tensors, and the ranks of the first one.
    """
    if len({found.check_replicas for found in checks.values()}) > 1:
        raise UsageError("check_replicas differs between ranks; give all the same")
    if not replicated:
        return
    digests = {rank: np.frombuffer(found.digests, np.uint64) for rank, found in sorted(checks.items())}
    digests = {rank: found for rank, found in digests.items() if found.any()}
    if len(digests) < 2:
        return
    tensors, boxes = all_rows([tables[rank] for rank in digests])
    value = np.concatenate(list(digests.values()))
    rank_of_row = np.repeat(list(digests), [len(found) for found in digests.values()])
    boxes, rank_of_row, value = boxes.take(value != 0), rank_of_row[value != 0], value[value != 0]
    group = group_equal(boxes)
    differing = differing_rows(group, value)
    if not len(differing):
        return
    names = [str(TensorKey(*map(unescape, tensors[int(number)].key))) for number in boxes.tensor[differing]]
    of_first = np.flatnonzero(group == group[differing[0]])
    holders = sorted(rank_of_row[of_first[value[of_first] == one]].tolist() for one in np.unique(value[of_first]))
    others = sorted(set(names) - {names[0]})
    raise IncompatibleCheckpointError(
        f"{names[0]} is replicated, but its copies differ between {' and '.join(map(names_of_ranks, holders[:3]))}"
        + (f", and so do those of {listed(others, 3)}" if others else "")
        + ". Keep replicas equal, describe shards as shards (DTensor, SupportsShards), or save with check_replicas='off'"
    )
