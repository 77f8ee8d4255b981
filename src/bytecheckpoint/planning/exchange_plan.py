"""Who reads what several ranks want (ByteCheckpoint, section 4.1: redundant reads eliminated)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..representation.boxes import Int64s
from ..representation.plans import ExchangePlan
from .balance import assign

__all__ = ["plan_exchange"]

#: Below this many bytes in all, meeting costs more than reading twice.
_WORTHWHILE = 8 << 20


def plan_exchange(ranges: Sequence[Int64s], rank: int, chunk_bytes: int) -> ExchangePlan:
    """Divide the chunks that several ranks want among them, Worst-Fit by bytes.

    All ranks come to the same result, since all see the same `ranges`.

    Args:
        ranges: what each rank wants to read: (file, start, stop) rows, int64 [r, 3].
        rank: the rank whose part is returned.
        chunk_bytes: the grid that no range crosses.
    """
    counts = [len(r) for r in ranges]
    mine = np.arange(counts[rank])
    rows = np.concatenate(ranges)
    who = np.repeat(np.arange(len(ranges)), counts)
    number = np.concatenate([np.arange(c) for c in counts])
    key = np.stack([rows[:, 0], rows[:, 1] // chunk_bytes], axis=1)
    order = np.lexsort((who, key[:, 1], key[:, 0]))
    rows, who, number, key = rows[order], who[order], number[order], key[order]
    new = np.ones(len(rows), bool)
    new[1:] = (key[1:] != key[:-1]).any(axis=1)
    item = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    if not len(first):
        return ExchangePlan.nothing(mine)
    start = np.minimum.reduceat(rows[:, 1], first)
    stop = np.maximum.reduceat(rows[:, 2], first)
    last = np.append(first[1:], len(rows)) - 1
    shared = who[first] != who[last]
    if (stop - start)[shared].sum() < _WORTHWHILE:
        return ExchangePlan.nothing(mine)
    in_shared = shared[item]
    compact = np.cumsum(shared) - 1
    reader = assign(compact[item[in_shared]], who[in_shared], (stop - start)[shared], len(ranges))
    wanted = in_shared & (who == rank)
    private = ~in_shared & (who == rank)
    return ExchangePlan(
        private=np.sort(number[private]),
        file=rows[first[shared], 0],
        start=start[shared],
        stop=stop[shared],
        reader=reader,
        my_range=number[wanted],
        my_item=compact[item[wanted]],
        pairs=np.unique(np.stack([compact[item[in_shared]], who[in_shared]], axis=1), axis=0),
    )
