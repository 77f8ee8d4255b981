"""Compare the copies that several ranks hold of one box of one tensor. Only one of them is written.

Ranks send a digest of some elements. If digests differ, rank 0 asks for the elements and compares their values: copies that
drifted apart by rounding are replicas, other data is not (decision 0060).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.engine.tensor_bytes import flat_bytes, movable
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.planning.local_table import LocalTable, all_rows
from bytecheckpoint.planning.replicas import differing_rows, group_equal
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.representation.shards import LiveShard, TensorKey, each_box
from bytecheckpoint.saving.capture import content_digest
from bytecheckpoint.saving.drift import relative_drift
from bytecheckpoint.saving.messages import RankChecks

__all__ = [
    "CopyComparison",
    "DifferingCopies",
    "Samples",
    "differing_copies",
    "full_digests",
    "sample",
]

#: Runs of two neighbours that are sampled of each box. A box of at most twice as many elements is sampled whole.
_RUNS = 16


@dataclass(frozen=True, slots=True)
class Samples:
    """Some elements of each box of one rank that must equal its copies on other ranks.

    Attributes:
        data: bytes of the elements, box after box, uint8.
        lengths: bytes of each box's elements, int64 [rows]; 0 for boxes that are not compared.
    """

    data: NDArray[np.uint8]
    lengths: NDArray[np.int64]

    def digests(self) -> NDArray[np.uint64]:
        """Hash the samples of each box; 0 for boxes that are not compared."""
        ends = np.cumsum(self.lengths).tolist()
        digest = xxhash.xxh3_64_intdigest
        found = [digest(self.data[a:b]) if a < b else 0 for a, b in pairwise([0, *ends])]
        return np.array(found, np.uint64)

    def take(self, rows: NDArray[np.int64]) -> Samples:
        """Return the samples of some boxes."""
        ends = np.cumsum(self.lengths)
        parts = [self.data[end - length : end] for end, length in zip(ends[rows], self.lengths[rows], strict=True)]
        return Samples(np.concatenate(parts), self.lengths[rows])


def full_digests(shards: Sequence[LiveShard]) -> NDArray[np.uint64]:
    """Hash the whole content of every box."""
    return np.array([xxhash.xxh3_64_intdigest(content_digest(s.data, s.dtype)) for s in each_box(shards)], np.uint64)


def sample(shards: Sequence[LiveShard], chosen: NDArray[np.int64]) -> Samples:
    """Take a few elements of those of the chosen boxes that must be equal, the same ones on all ranks."""
    rows = np.cumsum([0, *(shard.rows for shard in shards)])
    sizes = [s.data.numel() if s.fragments is None else s.fragments.counts for s in shards]
    size = np.concatenate([np.zeros(0, np.int64), *map(np.atleast_1d, sizes)])
    # Counts of steps, which are single values, are compared before, with an error of their own.
    least = [1 if s.requires_grad else 2 if s.must_be_equal or s.key.slot else 1 << 62 for s in shards]
    runs = size // 2
    step = np.where(runs <= _RUNS, 1, runs // _RUNS | 1)  # odd: else all may be of one column
    count = np.where(runs <= _RUNS, size, -(-runs // step) * 2)
    other = np.ones(len(size), bool)
    other[chosen] = False
    count[other | (size < np.repeat(least, np.diff(rows)))] = 0
    counts, steps = count.tolist(), step.tolist()
    itemsize = np.ones(len(shards), np.int64)
    parts = [np.zeros(0, np.uint8)] * len(shards)
    groups: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, torch.Tensor]]] = {}
    with torch.no_grad():
        for number, (shard, (first, last)) in enumerate(zip(shards, pairwise(rows.tolist()), strict=True)):
            if not any(counts[first:last]):
                continue
            taken = _elements(shard, counts[first:last], steps[first:last])
            itemsize[number] = taken.element_size()
            groups.setdefault((taken.device, taken.dtype, taken.ndim), []).append((number, taken))
        for found in groups.values():
            # One copy for all tensors of a device.
            joined = flat_bytes(torch.cat([taken for _, taken in found]).cpu()).numpy()
            begin = 0
            for number, taken in found:
                parts[number] = joined[begin : begin + taken.nbytes]
                begin += taken.nbytes
    return Samples(np.concatenate([np.zeros(0, np.uint8), *parts]), count * np.repeat(itemsize, np.diff(rows)))


def _elements(shard: LiveShard, counts: list[int], steps: list[int]) -> torch.Tensor:
    """Return some elements of the boxes of a shard, box after box, by their places in row-major order, [n] or [n / 2, 2].

    Args:
        shard: one box, with any strides, or its fragments.
        counts: elements of each box.
        steps: runs of two neighbours from one that is taken to the next.
    """
    data, many = movable(shard.data), shard.fragments
    if many is None and data.is_contiguous():
        (count,), (step,) = counts, steps
        return data.view(-1)[:count] if step == 1 else data.as_strided((count // 2, 2), (2 * step, 1))
    ends = np.cumsum(counts)
    number = np.arange(ends[-1]) - np.repeat(ends - np.array(counts), counts)
    places = number // 2 * 2 * np.repeat(steps, counts) + number % 2
    if many is not None:
        index = torch.from_numpy(np.repeat(many.places, counts) + places)
        return data.index_select(0, index.to(data.device))
    at = np.unravel_index(places, data.shape)
    return data[tuple(torch.from_numpy(place).to(data.device) for place in at)]


@dataclass(frozen=True, slots=True)
class DifferingCopies:
    """All copies of the boxes whose digests differ between ranks, one row for each copy, in order of their holders.

    Attributes:
        names: name of the tensor of each such box.
        dtypes: dtype of the tensor of each such box, in torch.
        box: number of the box of each copy, int64 [n].
        rank: holder of each copy, int64 [n].
        row: number of each copy among the boxes of its holder, int64 [n].
        digest: digest of each copy, uint64 [n].
    """

    names: list[str]
    dtypes: list[str]
    box: NDArray[np.int64]
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    digest: NDArray[np.uint64]

    def of_rank(self, rank: int) -> slice:
        """Return the place of the copies that a rank holds."""
        return slice(*np.searchsorted(self.rank, [rank, rank + 1]).tolist())


def differing_copies(checks: Mapping[int, RankChecks], tables: Sequence[LocalTable]) -> DifferingCopies | None:
    """Find the boxes whose copies differ between ranks, by their digests.

    Args:
        checks: facts of all ranks.
        tables: shards of each rank.

    Returns:
        The copies of these boxes; None if there are none.

    Raises:
        UsageError: ranks compare differently.
        IncompatibleCheckpointError: copies differ, and the save demands equal bits; the message names the tensors, and the
            ranks of the first one.
    """
    if len({found.check_replicas for found in checks.values()}) > 1:
        raise UsageError("check_replicas differs between ranks; give all the same")
    compared = {rank: np.frombuffer(found.rows, np.int64) for rank, found in sorted(checks.items()) if found.rows}
    if len(compared) < 2:
        return None
    tensors, boxes = all_rows([tables[rank] for rank in compared], list(compared.values()))
    digest = np.concatenate([np.frombuffer(checks[rank].digests, np.uint64) for rank in compared])
    rank = np.repeat(list(compared), [len(rows) for rows in compared.values()])
    row = np.concatenate(list(compared.values()))
    group = group_equal(boxes)
    differing = differing_rows(group, digest)
    if not len(differing):
        return None
    groups, first = np.unique(group[differing], return_index=True)
    of_box = [tensors[number] for number in boxes.tensor[differing[first]].tolist()]
    chosen = np.isin(group, groups)
    copies = DifferingCopies(
        names=[str(TensorKey(*map(unescape, tensor.key))) for tensor in of_box],
        dtypes=[tensor.dtype for tensor in of_box],
        box=np.searchsorted(groups, group[chosen]),
        rank=rank[chosen],
        row=row[chosen],
        digest=digest[chosen],
    )
    if next(iter(checks.values())).check_replicas == "full":
        of_first = copies.box == 0
        ranks, found = copies.rank[of_first], copies.digest[of_first]
        raise _refusal(copies.names, [sorted(ranks[found == one].tolist()) for one in np.unique(found)])
    return copies


class CopyComparison:
    """Compares the samples of copies, rank after rank, with those of the first rank that holds the box.

    Args:
        copies: copies whose digests differ.
    """

    def __init__(self, copies: DifferingCopies) -> None:
        self._copies = copies
        self._first: dict[int, torch.Tensor] = {}
        self._near: dict[int, list[int]] = {}
        self._far: dict[int, list[int]] = {}
        self._drift: dict[str, float] = {}

    def rows_of(self, rank: int) -> NDArray[np.int64]:
        """Return the rows of a rank whose samples are needed."""
        return self._copies.row[self._copies.of_rank(rank)]

    def add(self, rank: int, samples: Samples) -> None:
        """Compare the samples of the rows of a rank."""
        ends = np.cumsum(samples.lengths).tolist()
        boxes = self._copies.box[self._copies.of_rank(rank)].tolist()
        for box, (begin, end) in zip(boxes, pairwise([0, *ends]), strict=True):
            dtype = dtype_named(self._copies.dtypes[box])
            found = torch.from_numpy(samples.data[begin:end].copy()).view(dtype)
            drift = relative_drift(self._first.setdefault(box, found), found)
            if math.isinf(drift):
                self._far.setdefault(box, []).append(rank)
                continue
            self._near.setdefault(box, []).append(rank)
            name = self._copies.names[box]
            self._drift[name] = max(self._drift.get(name, 0.0), drift)

    def drift(self) -> dict[str, float]:
        """Return the largest relative difference between the copies of each tensor, by name.

        Raises:
            IncompatibleCheckpointError: copies differ by more than rounding; the message names the tensors, and the ranks
                that hold the first one.
        """
        if self._far:
            boxes = sorted(self._far)
            raise _refusal([self._copies.names[box] for box in boxes], [self._near[boxes[0]], self._far[boxes[0]]])
        return self._drift


def _refusal(names: Sequence[str], holders: list[list[int]]) -> IncompatibleCheckpointError:
    """Make the error of copies that differ.

    Args:
        names: names of the tensors.
        holders: ranks that hold one content of the first of them, for each content.
    """
    others = sorted(set(names) - {names[0]})
    return IncompatibleCheckpointError(
        f"{names[0]} is replicated, but its copies differ between {' and '.join(map(names_of_ranks, sorted(holders)[:3]))}"
        + (f", and so do those of {listed(others, 3)}" if others else "")
        + ". Keep replicas equal, describe shards as shards (DTensor, SupportsShards), or save with check_replicas='off'"
    )
