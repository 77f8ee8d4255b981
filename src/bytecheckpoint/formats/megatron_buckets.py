"""Find the parameters in the buckets of Megatron's distributed optimizer (dp_reshardable), and prove each by its content.

A bucket is a flat tensor of one data-parallel group: the parameters of its model-parallel rank in the reverse order of the
model, each from a multiple of 64 elements on. Nothing in the checkpoint says which. A parameter is taken for the one whose
weights in the same checkpoint are, bit for bit and in all elements, what its fp32 elements round to. Where several have
equal weights, as norms that training has not changed yet, their order in the model decides.

So all weights and all fp32 elements are read once, in blocks of 8 MiB.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, listed
from bytecheckpoint.formats.files import RangedFile, open_files
from bytecheckpoint.formats.rounding import BLOCK_BYTES, rounded
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.storage import Storage

__all__ = ["ALIGNMENT", "BUCKET", "ModelWeight", "OptimizerBucket", "PlacedParameter", "Run", "cut", "place_parameters"]

BUCKET: Final = re.compile(
    r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)"
)
"""Name of a bucket: group, buffer, dtypes, number, slot."""
ALIGNMENT: Final = 64
"""Number of elements of which the places of parameters in a bucket are multiples."""

#: A part of a weight or bucket: first element, elements, file, first byte.
Run = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A tensor of the model.

    Attributes:
        fqn: its name.
        dtype: its dtype.
        order: its place in the order of the model.
        boxes: offsets, lengths, file and first byte of each part, in the order of the offsets.
    """

    fqn: str
    dtype: str
    order: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int], ...]


@dataclass(frozen=True, slots=True)
class _Local:
    """A parameter of one tensor-parallel rank: one part of a weight, or gate and up.

    Attributes:
        weight: the weight.
        rank, ranks: number of the part, and how many parts there are.
        boxes: positions of the parts in the weight's boxes.
    """

    weight: ModelWeight
    rank: int
    ranks: int
    boxes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(math.prod(self.weight.boxes[k][1]) for k in self.boxes)


@dataclass(slots=True)
class OptimizerBucket:
    """A bucket.

    Attributes:
        group, buffer, number: names of its group and buffer, and its number in the buffer.
        slots: dtype and parts of each slot, in the order of the elements.
    """

    group: str
    buffer: str
    number: int
    slots: dict[str, tuple[str, list[Run]]] = field(default_factory=dict)


@dataclass(slots=True)
class PlacedParameter:
    """A parameter in a bucket.

    Attributes:
        bucket: the bucket.
        start, size: first element and number of elements.
        found: the parameters that have this content.
    """

    bucket: OptimizerBucket
    start: int
    size: int
    found: list[_Local]

    def boxes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each box of the weight, its first element in the bucket, and its number of elements."""
        start = self.start
        for k in self.found[0].boxes:
            size = math.prod(self.found[0].weight.boxes[k][1])
            yield k, start, size
            start += size


def place_parameters(
    storage: Storage,
    files: Sequence[str],
    weights: Iterable[ModelWeight],
    buckets: Sequence[OptimizerBucket],
    slot: str,
) -> list[PlacedParameter]:
    """Return the parameters in the buckets, whose fp32 weights are in `slot`; each part of a weight once.

    Raises:
        CorruptCheckpointError: the content of a part of a bucket is that of no parameter, or of several ones.
    """
    with open_files(storage, files) as opened:
        return _ContentSearch(storage.url, opened, weights, slot).place(buckets)


class _ContentSearch:
    """The search for parameters by their content."""

    def __init__(self, url: str, files: Callable[[int], RangedFile], weights: Iterable[ModelWeight], slot: str) -> None:
        self._url = url
        self._files = files
        self._slot = slot
        self._by_size: dict[int, list[_Local]] = {}
        self._digests: dict[tuple[int, str], dict[bytes, list[_Local]]] = {}
        for weight in weights:
            for local in _locals(weight):
                if local.size:
                    self._by_size.setdefault(local.size, []).append(local)

    def place(self, buckets: Sequence[OptimizerBucket]) -> list[PlacedParameter]:
        """Return the parameters in the buckets."""
        buffers: dict[tuple[str, str], list[PlacedParameter]] = {}
        for bucket in sorted(buckets, key=lambda bucket: bucket.number):
            buffers.setdefault((bucket.group, bucket.buffer), []).extend(self._walk(bucket))
        ranks: dict[str, set[int]] = {}
        for (group, _), placed in buffers.items():
            proven = (one.found[0] for one in placed if len(one.found) == 1)
            ranks.setdefault(group, set()).update(local.rank for local in proven if local.ranks > 1)
        taken: dict[tuple[str, int], PlacedParameter] = {}
        for (group, _), placed in buffers.items():
            if all(one.found for one in placed):
                self._decide(placed, ranks[group])
            for one in (one for one in placed if one.found):  # other groups have replicas
                taken.setdefault((one.found[0].weight.fqn, one.found[0].boxes[0]), one)
        self._check([one for placed in buffers.values() for one in placed])
        return list(taken.values())

    def _walk(self, bucket: OptimizerBucket) -> Iterator[PlacedParameter]:
        """Yield the parameters of a bucket with all that have the content."""
        dtype, runs = bucket.slots[self._slot]
        ends = {start + count for start, count, _, _ in runs}
        last, at = max(ends), 0
        while (at := -(-at // ALIGNMENT) * ALIGNMENT) < last:
            sizes = sorted((size for size in self._by_size if at + size in ends), reverse=True)
            found = next((one for size in sizes if (one := self._matching(bucket, dtype, runs, at, size))), None)
            yield found or PlacedParameter(bucket, at, min(sizes, default=1), [])
            at += found.size if found else min(sizes, default=1)

    def _check(self, placed: Sequence[PlacedParameter]) -> None:
        """Refuse a part of a bucket that is no parameter, by the names of those that are not found."""
        found = {(one.found[0].weight.fqn, k) for one in placed if one.found for k in one.found[0].boxes}
        for one in placed:
            if one.found:
                continue
            alike = self._by_size.get(one.size, ())
            lost = {local.weight.fqn for local in alike if not found & {(local.weight.fqn, k) for k in local.boxes}}
            here = (other for other in placed if other.found and other.bucket.group == one.bucket.group)
            names = lost or {local.weight.fqn for local in alike} - {other.found[0].weight.fqn for other in here}
            where = f"{self._url}: the elements from {one.start} on in bucket {one.bucket.number} of {one.bucket.group}"
            raise CorruptCheckpointError(
                f"{where} round to the weights of no parameter; not found are {listed(sorted(names)) or 'none'}"
            )

    def _matching(
        self, bucket: OptimizerBucket, dtype: str, runs: Sequence[Run], at: int, size: int
    ) -> PlacedParameter | None:
        for of in sorted({local.weight.dtype for local in self._by_size[size]}):
            digest = hashlib.sha256()
            for block in self._elements(cut(runs, at, size, itemsize(dtype)), dtype):
                digest.update(rounded(block, of))
            if found := self._known(size, of).get(digest.digest()):
                return PlacedParameter(bucket, at, size, list(found))
        return None

    def _known(self, size: int, dtype: str) -> dict[bytes, list[_Local]]:
        """Return the parameters of a size and dtype by their content."""
        found = self._digests.get((size, dtype))
        if found is None:
            found = self._digests[size, dtype] = {}
            for local in self._by_size[size]:
                if local.weight.dtype != dtype:
                    continue
                digest = hashlib.sha256()
                for k in local.boxes:
                    _, lengths, file, begin = local.weight.boxes[k]
                    for block in self._blocks(file, begin, math.prod(lengths) * itemsize(dtype)):
                        digest.update(block)
                found.setdefault(digest.digest(), []).append(local)
        return found

    def _elements(self, runs: Iterable[Run], dtype: str) -> Iterator[NDArray[np.float32]]:
        if dtype != "float32":
            raise CorruptCheckpointError(f"{self._url}: the weights in the buckets are {dtype}, not float32")
        for _, count, file, begin in runs:
            for block in self._blocks(file, begin, count * 4):
                yield np.frombuffer(block, "<f4")

    def _blocks(self, file: int, begin: int, size: int) -> Iterator[bytes]:
        for first in range(0, size, BLOCK_BYTES):
            yield self._files(file).read(begin + first, min(size - first, BLOCK_BYTES))

    def _decide(self, placed: Sequence[PlacedParameter], ranks: set[int]) -> None:
        """Choose among parameters of equal content, by the rank of the group and by the order in the model.

        A buffer has its parameters in the reverse order. From the last one before, and from the first one after, that the
        content proves, both ways have to lead to the same.

        Raises:
            CorruptCheckpointError: they lead to none, or to several.
        """
        known = [one.found[0].weight.order if len(one.found) == 1 else None for one in placed]
        for first, rest in itertools.groupby(range(len(placed)), key=lambda k: known[k] is None):
            if not first:
                continue
            run = list(rest)
            before = known[run[0] - 1] if run[0] else None
            after = known[run[-1] + 1] if run[-1] + 1 < len(placed) else None
            if before is not None and after is not None and before <= after:  # the copy of a tied embedding comes first
                before = None
            chosen: list[list[_Local]] = []
            if before is not None:
                chosen.append(_chain([placed[k] for k in run], ranks, before, 1))
            if after is not None:
                chosen.append(_chain([placed[k] for k in reversed(run)], ranks, after, -1)[::-1])
            if not chosen or len(chosen[0]) < len(run) or chosen[0] != chosen[-1]:
                names = listed(sorted({local.weight.fqn for k in run for local in placed[k].found}))
                raise CorruptCheckpointError(f"{self._url}: nothing says which state in the buckets is that of {names}")
            for k, local in zip(run, chosen[0], strict=True):
                placed[k].found = [local]


def _chain(run: Sequence[PlacedParameter], ranks: set[int], bound: tuple[int, ...], sign: int) -> list[_Local]:
    """Return the parameters that follow a place in the order of the model, backwards (1) or forwards (-1)."""
    chosen: list[_Local] = []
    for one in run:
        fitting = [
            local
            for local in one.found
            if (local.weight.order < bound if sign > 0 else local.weight.order > bound)
            and (local.ranks == 1 or ranks == {local.rank})
        ]
        if not fitting:
            break
        chosen.append((max if sign > 0 else min)(fitting, key=lambda local: local.weight.order))
        bound = chosen[-1].weight.order
    return chosen


def _locals(weight: ModelWeight) -> Iterator[_Local]:
    """Yield what may be parameters of single ranks: each part, and a pair of parts if these may be gate and up."""
    count = len(weight.boxes)
    for k in range(count):
        yield _Local(weight, k, count, (k,))
    for k in range(count // 2 if count % 2 == 0 else 0):
        yield _Local(weight, k, count // 2, (k, k + count // 2))


def cut(runs: Iterable[Run], at: int, size: int, item: int) -> Iterator[Run]:
    """Yield the parts of runs between two elements."""
    for start, count, file, begin in runs:
        first, stop = max(start, at), min(start + count, at + size)
        if first < stop:
            yield first, stop - first, file, begin + (first - start) * item
