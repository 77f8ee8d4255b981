"""Choice of the rank that writes each replicated box: its least loaded holder (ByteCheckpoint, section 4.1: Worst-Fit)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.tuning import tuning

__all__ = ["HolderSets", "assign", "assign_sets", "scrambled"]

_UInt64s = np.ndarray[tuple[int], np.dtype[np.uint64]]


def scrambled(values: Int64s, seed: int) -> _UInt64s:
    """Return a 64-bit mix of each value (the finaliser of splitmix64)."""
    x = values.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def assign(
    group: Int64s,
    rank: Int64s,
    nbytes: Int64s,
    world_size: int,
    load: Int64s | None = None,
    *,
    scramble: Callable[[Int64s, int], _UInt64s] = scrambled,
) -> Int64s:
    """Choose for each group of equal boxes the rank that writes it.

    A group with one holder is written by this holder; such groups are counted first. Each large group, largest first,
    goes to the holder with the fewest bytes to write so far, the lowest rank among equals. The many small groups with
    the same holders are then spread over them at once, in runs of consecutive groups, so that the holders end at a
    common level (`tuning().small_group_part` separates small from large). The result does not depend on the order of
    the rows.

    Args:
        group: group of each copy, as `group_equal` numbers groups, [n]; each group has a copy.
        rank: rank that holds each copy, [n]. A rank may hold several copies of a group.
        nbytes: size of each group, [g].
        world_size: number of ranks.
        load: bytes that each rank must write in any case, [world_size]; not changed.
        scramble: hashes ranks by a seed, [n]. A weak hash costs time, and does not change the result.

    Returns:
        The rank that writes each group, [g].
    """
    level = np.zeros(world_size, np.int64) if load is None else load.astype(np.int64, copy=True)
    writer = np.full(len(nbytes), -1, np.int64)
    copies = np.bincount(group, minlength=len(nbytes))
    assert (copies > 0).all(), "a group without holder"
    single = copies[group] == 1
    writer[group[single]] = rank[single]
    if single.all():
        return writer
    np.add.at(level, rank[single], nbytes[group[single]])
    _assign(_holder_sets(group[~single], rank[~single], world_size, scramble), nbytes, level, writer)
    return writer


def assign_sets(sets: HolderSets, nbytes: Int64s, load: Int64s) -> Int64s:
    """Choose for each group of equal boxes the rank that writes it, as `assign` does.

    Args:
        sets: holders of all groups.
        nbytes: size of each group, [g].
        load: bytes that each rank must write in any case, [world_size]; not changed.

    Returns:
        The rank that writes each group, [g].
    """
    writer = np.full(len(nbytes), -1, np.int64)
    if len(writer):
        _assign(sets, nbytes, load.astype(np.int64), writer)
    return writer


class HolderSets(NamedTuple):
    """The holders of some groups; groups with the same holders have the same `ident`."""

    groups: Int64s  # [m], ascending
    begins: Int64s  # [m]: the holders of groups[i] are holders[begins[i] : begins[i] + counts[i]]
    counts: Int64s  # [m]
    ident: Int64s  # [m]
    holders: Int64s  # ascending and distinct within each group


def _holder_sets(
    group: Int64s, rank: Int64s, world_size: int, scramble: Callable[[Int64s, int], _UInt64s]
) -> HolderSets:
    keys = np.sort(group * world_size + rank)
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    owner = keys // world_size
    holders = keys - owner * world_size
    begins = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    counts = np.diff(begins, append=len(owner))
    place = np.repeat(np.arange(len(begins)), counts)
    within = np.arange(len(owner)) - begins[place]
    seed = 0
    while True:
        # Sets are compared by a 64-bit sum of scrambled ranks; the comparison rank by rank then confirms the result.
        sums = np.add.reduceat(scramble(holders, seed), begins)
        _, first, ident = np.unique(sums, return_index=True, return_inverse=True)
        twin = first[ident]
        if (counts == counts[twin]).all() and (holders == holders[begins[twin][place] + within]).all():
            break
        seed += 1
    # Sets are numbered in the order of their first groups, so the result does not depend on the sums.
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return HolderSets(owner[begins], begins, counts, number[ident], holders)


def _assign(sets: HolderSets, nbytes: Int64s, level: Int64s, writer: Int64s) -> None:
    """Choose the writers of all groups of `sets`; update `level` and `writer` in place."""
    one_holder = sets.counts == 1
    alone = sets.groups[one_holder]
    writer[alone] = sets.holders[sets.begins[one_holder]]
    np.add.at(level, writer[alone], nbytes[alone])
    if not one_holder.all():
        _place(sets, nbytes, level, writer)


def _place(sets: HolderSets, nbytes: Int64s, level: Int64s, writer: Int64s) -> None:
    """Choose the writers of all groups with several holders; update `level` and `writer` in place."""
    size = nbytes[sets.groups]
    total = np.zeros(int(sets.ident.max()) + 1, np.int64)
    np.add.at(total, sets.ident, size)
    several = sets.counts > 1
    large = several & (size * (tuning().small_group_part * sets.counts) >= total[sets.ident]) & (size > 0)
    _place_large(sets, np.flatnonzero(large), size, level, writer)

    small = np.flatnonzero(several & ~large)
    # Fewest holders first: groups with little choice are placed before groups with much.
    small = small[np.lexsort((sets.ident[small], sets.counts[small]))]
    runs = np.flatnonzero(np.diff(sets.ident[small], prepend=-1))
    for begin, end in pairwise([*runs.tolist(), len(small)]):
        members = small[begin:end]
        first = int(sets.begins[members[0]])
        holders = sets.holders[first : first + int(sets.counts[members[0]])]
        chosen = holders[_spread_evenly(size[members], level[holders])]
        np.add.at(level, chosen, size[members])
        writer[sets.groups[members]] = chosen


def _place_large(sets: HolderSets, items: Int64s, size: Int64s, level: Int64s, writer: Int64s) -> None:
    items = items[np.lexsort((sets.groups[items], -size[items]))]
    loads: list[int] = level.tolist()
    heaps: dict[int, list[tuple[int, int]]] = {}
    chosen: list[int] = []
    columns = (sets.ident[items], size[items], sets.begins[items], sets.counts[items])
    for ident, nbytes, begin, count in zip(*(column.tolist() for column in columns), strict=True):
        heap = heaps.get(ident)
        if heap is None:
            heap = [(loads[holder], holder) for holder in sets.holders[begin : begin + count].tolist()]
            heapq.heapify(heap)
            heaps[ident] = heap
        # Another set may have loaded a rank since it entered this heap. Loads only grow, so checking the top suffices.
        while (least := heap[0])[0] != loads[least[1]]:
            heapq.heapreplace(heap, (loads[least[1]], least[1]))
        holder = least[1]
        loads[holder] += nbytes
        heapq.heapreplace(heap, (loads[holder], holder))
        chosen.append(holder)
    level[:] = loads
    writer[sets.groups[items]] = chosen


def _spread_evenly(size: Int64s, loads: Int64s) -> Int64s:
    """Spread items over `loads` so that all loads rise to one level; return the position of each item's load.

    Each load ends within one item of that level; a load above the level stays as it was.
    """
    order = np.argsort(loads, kind="stable")
    base = loads[order]
    total = int(size.sum())
    # spare[k]: bytes that raise the k lowest loads to the level of the next load.
    spare = base * np.arange(len(base)) - (np.cumsum(base) - base)
    filled = int(np.searchsorted(spare, total, side="left")) or 1
    surface = (total + int(base[:filled].sum())) / filled
    ends = np.cumsum(surface - base[:filled])
    middles = np.cumsum(size) - size / 2
    return order[np.minimum(np.searchsorted(ends, middles, side="right"), filled - 1)]
