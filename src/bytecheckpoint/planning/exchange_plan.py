"""Who reads what several ranks want (ByteCheckpoint, section 4.1: redundant reads eliminated)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..representation.boxes import Int64s
from ..representation.plans import ExchangePlan, SharedChunks
from .balance import assign

__all__ = ["part_of_rank", "share"]

#: Below this many bytes in all, meeting costs more than reading twice.
_WORTHWHILE = 8 << 20
_NOTHING = SharedChunks.from_columns([])


def share(ranges: Sequence[Int64s], chunk_bytes: int) -> SharedChunks:
    """Divide the chunks that several ranks want among them, Worst-Fit by bytes.

    Args:
        ranges: what each rank wants to read: (file, start, stop) rows, int64 [r, 3].
        chunk_bytes: the grid that no range crosses.
    """
    rows = np.concatenate(ranges)
    if not len(rows):
        return _NOTHING
    who = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
    chunk = rows[:, 1] // chunk_bytes
    order = np.lexsort((who, chunk, rows[:, 0]))
    rows, who, chunk = rows[order], who[order], chunk[order]
    new = np.ones(len(rows), bool)
    new[1:] = (chunk[1:] != chunk[:-1]) | (rows[1:, 0] != rows[:-1, 0])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rows)) - 1
    shared = who[first] != who[last]
    start = np.minimum.reduceat(rows[:, 1], first)[shared]
    stop = np.maximum.reduceat(rows[:, 2], first)[shared]
    if (stop - start).sum() < _WORTHWHILE:
        return _NOTHING
    item = np.cumsum(new) - 1
    kept = shared[item]
    item, who = (np.cumsum(shared) - 1)[item[kept]], who[kept]
    reader = assign(item, who, stop - start, len(ranges))
    once = np.ones(len(item), bool)
    once[1:] = (item[1:] != item[:-1]) | (who[1:] != who[:-1])
    sets = _sets(item[once], who[once], len(start), len(ranges))
    return SharedChunks(rows[first[shared], 0], start, stop, reader, *sets)


def _sets(item: Int64s, who: Int64s, items: int, world: int) -> tuple[Int64s, Int64s, Int64s]:
    """The distinct sets of ranks among the items: (set of each item, ends of the sets, their ranks).

    Args:
        item: of each (item, rank) pair, ascending.
        who: its rank, ascending within the item.
        items: their number.
        world: number of ranks.
    """
    begins = np.searchsorted(item, np.arange(items))
    ends = np.append(begins[1:], len(item))
    # Sets are told apart by 128 bits: the sums of random numbers that stand for the ranks.
    tokens = np.random.default_rng().integers(0, 1 << 63, (world, 2), np.int64)
    with np.errstate(over="ignore"):
        prints = np.add.reduceat(tokens[who], begins, axis=0)
    _, examples, wanted_by = np.unique(prints, axis=0, return_index=True, return_inverse=True)
    ranks = [who[begins[i] : ends[i]] for i in examples.tolist()]
    return wanted_by.reshape(-1).astype(np.int64), np.cumsum([len(r) for r in ranks]), np.concatenate(ranks)


def part_of_rank(shared: SharedChunks, ranges: Int64s, chunk_bytes: int) -> ExchangePlan:
    """What a rank does that wants to read `ranges`.

    Args:
        shared: from `share`, over the ranges of all ranks.
        ranges: (file, start, stop) rows of this rank, int64 [r, 3].
        chunk_bytes: as for `share`.
    """
    if not len(shared) or not len(ranges):
        return ExchangePlan(shared, np.arange(len(ranges)), *np.zeros((2, 0), np.int64))
    # Items are sorted by (file, chunk); one number for both.
    width = int(max(shared.start.max(), ranges[:, 1].max())) // chunk_bytes + 1
    keys = shared.file * width + shared.start // chunk_bytes
    wanted = ranges[:, 0] * width + ranges[:, 1] // chunk_bytes
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = keys[at] == wanted
    mine = np.flatnonzero(found)
    return ExchangePlan(shared, np.flatnonzero(~found), mine, at[mine])
