"""Choose the rank that reads each chunk that several ranks want (ByteCheckpoint, section 4.1: redundant reads)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytecheckpoint.planning.balance import assign
from bytecheckpoint.representation.boxes import Int64s, Mask
from bytecheckpoint.representation.plans import ExchangePlan, SharedChunks
from bytecheckpoint.tuning import tuning

__all__ = ["exchange_plan_of_rank", "plan_shared_reads"]

#: A copy from another rank costs about as much as a read from the page cache. In a split of rows it would be needed
#: for 3 to 8 bytes to save one (`python -m benchmarks --only cuts`), in replicas and columns for one or less.
_MOST_COPIES = 2
_NO_CHUNKS = SharedChunks.from_columns([])


def plan_shared_reads(ranges: Sequence[Int64s], chunk_bytes: int) -> SharedChunks:
    """Assign each chunk that several ranks want to one of them, Worst-Fit by bytes.

    Ranks share a chunk if they copy at most `_MOST_COPIES` bytes from each other for each byte that is not read again. So
    replicas share their chunks, and so do columns of stored rows. Neighbours that want different rows of a chunk do not
    share it: both read the block at their border. If there are fewer bytes to share than `tuning().min_exchange_bytes`, no
    chunk is shared.

    Args:
        ranges: byte ranges that each rank wants: (file, start, stop) rows, int64 [r, 3].
        chunk_bytes: size of a chunk; no range crosses a multiple of it.
    """
    rows = np.concatenate(ranges)
    if not len(rows):
        return _NO_CHUNKS
    rank = np.repeat(np.arange(len(ranges)), [len(r) for r in ranges])
    position = rows[:, 1] // chunk_bytes
    order = np.lexsort((rank, position, rows[:, 0]))
    rows, rank, position = rows[order], rank[order], position[order]
    new = np.ones(len(rows), bool)
    new[1:] = (position[1:] != position[:-1]) | (rows[1:, 0] != rows[:-1, 0])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rows)) - 1
    start, stop = np.minimum.reduceat(rows[:, 1], first), np.maximum.reduceat(rows[:, 2], first)
    shared = rank[first] != rank[last]
    shared &= _saves_enough(
        ranks=np.add.reduceat(new | (np.diff(rank, prepend=-1) != 0), first, dtype=np.int64),
        alone=np.add.reduceat(rows[:, 2] - rows[:, 1], first),
        once=stop - start,
    )
    start, stop = start[shared], stop[shared]
    if (stop - start).sum() < tuning().min_exchange_bytes:
        return _NO_CHUNKS
    chunk = np.cumsum(new) - 1
    kept = shared[chunk]
    chunk, rank = (np.cumsum(shared) - 1)[chunk[kept]], rank[kept]
    reader = assign(chunk, rank, stop - start, len(ranges))
    once = np.ones(len(chunk), bool)
    once[1:] = (chunk[1:] != chunk[:-1]) | (rank[1:] != rank[:-1])
    sets = _rank_sets(chunk[once], rank[once], len(start), len(ranges))
    return SharedChunks(rows[first[shared], 0], start, stop, reader, *sets)


def _saves_enough(ranks: Int64s, alone: Int64s, once: Int64s) -> Mask:
    """Return whether sharing a chunk saves enough reads for the bytes that ranks copy from each other.

    Args:
        ranks: number of ranks that want each chunk, [n].
        alone: bytes that these ranks read in all, each for itself, [n].
        once: bytes that one of them reads for all, [n].
    """
    enough: Mask = (alone - once) * _MOST_COPIES * ranks >= alone * (ranks - 1)
    return enough


def _rank_sets(chunk: Int64s, rank: Int64s, chunks: int, world: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return the distinct sets of ranks that want a chunk: (set of each chunk, ends of the sets, their ranks).

    Args:
        chunk: chunk of each (chunk, rank) pair, ascending.
        rank: rank of each pair, ascending within the chunk.
        chunks: number of chunks.
        world: number of ranks.
    """
    begins = np.searchsorted(chunk, np.arange(chunks))
    ends = np.append(begins[1:], len(chunk))
    # Sets are compared by 128 bits: the sum of two random numbers for each rank.
    tokens = np.random.default_rng().integers(0, 1 << 63, (world, 2), np.int64)
    with np.errstate(over="ignore"):
        fingerprints = np.add.reduceat(tokens[rank], begins, axis=0)
    _, examples, wanted_by = np.unique(fingerprints, axis=0, return_index=True, return_inverse=True)
    ranks = [rank[begins[i] : ends[i]] for i in examples.tolist()]
    return wanted_by.reshape(-1).astype(np.int64), np.cumsum([len(r) for r in ranks]), np.concatenate(ranks)


def exchange_plan_of_rank(shared: SharedChunks, ranges: Int64s, chunk_bytes: int) -> ExchangePlan:
    """Return one rank's part of the exchange: the ranges that it reads alone, and the shared chunks that it wants.

    Args:
        shared: result of `plan_shared_reads` over the ranges of all ranks.
        ranges: (file, start, stop) rows of this rank, int64 [r, 3].
        chunk_bytes: size of a chunk, as for `plan_shared_reads`.
    """
    if not len(shared) or not len(ranges):
        return ExchangePlan(shared, np.arange(len(ranges)), *np.zeros((2, 0), np.int64))
    # Chunks are sorted by (file, position); one number stands for both.
    width = int(max(shared.start.max(), ranges[:, 1].max())) // chunk_bytes + 1
    keys = shared.file * width + shared.start // chunk_bytes
    wanted = ranges[:, 0] * width + ranges[:, 1] // chunk_bytes
    chunk = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    covered = keys[chunk] == wanted
    return ExchangePlan(shared, np.flatnonzero(~covered), np.flatnonzero(covered), chunk[covered])
