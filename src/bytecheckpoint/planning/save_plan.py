"""The global save plan: which rank writes which box, and where (ByteCheckpoint, sections 3.3 and 4.1).

Every rank describes its shards as a `LocalTable`. The coordinator joins all tables, assigns each replicated box to its
least loaded holder, and lays out the files. All data are columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.planning.balance import assign
from bytecheckpoint.planning.coverage import first_gap, not_tiled
from bytecheckpoint.planning.file_order import FileOrder
from bytecheckpoint.planning.local_table import LocalTable, TensorRecord, join_boxes, join_tensors, row_count
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.planning.replicas import all_distinct, group_equal
from bytecheckpoint.planning.tile_plan import plan_in_tiles
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.tuning import tuning

__all__ = ["plan_save"]


def plan_save(tables: Sequence[LocalTable], fixed: Mapping[int, Int64s] | None = None) -> SavePlan:
    """Plan a save: assign each distinct box to one rank and lay out the files.

    Args:
        tables: the table of each rank, at least one.
        fixed: rank -> the indexes of the shards that it has already written by an older plan. The other ranks write
            the remaining boxes.

    Raises:
        IncompatibleCheckpointError: ranks disagree about a tensor's shape or dtype, or their boxes leave a hole in a
            tensor or overlap without being equal.
    """
    if not fixed and sum(map(row_count, tables)) >= tuning().tiled_rows:
        plan = plan_in_tiles(tables)
        if plan is not None:
            return plan
    tensors, row_tensor = join_tensors(tables)
    shapes, ndims, boxes = join_boxes(tensors, tables, row_tensor)
    counts = [len(t) for t in row_tensor]
    row_rank = np.repeat(np.arange(len(tables)), counts)
    begins = np.cumsum(counts) - counts
    tensor = boxes.tensor

    nbytes = boxes.volumes() * np.array([itemsize(t.dtype) for t in tensors], np.int64)[tensor]
    copied: Mask | None = None
    if fixed or not all_distinct(boxes):
        group = group_equal(boxes)
        copied = (np.bincount(group) > 1)[group]
        row_local = np.arange(len(tensor)) - begins[row_rank]
        lowest = np.zeros(int(group.max(initial=-1)) + 1, bool)
        lowest[group] = np.array([t.from_lowest for t in tensors], bool)[tensor]
        written = _written(group, row_rank, row_local, nbytes, len(tables), fixed or {}, lowest)
        del group, row_local
    else:
        written = np.arange(len(tensor))  # no box has a replica
    _check_cover(tensors, shapes, ndims, _taken(boxes, written), row_tensor)

    order = FileOrder(tensors)
    rows = _ordered(written, row_rank[written] * len(tensors) + order.place[tensor[written]])
    boxes, rank, nbytes = _taken(boxes, rows), row_rank[rows], nbytes[rows]
    local = rows - begins[rank]
    del written, rows, row_rank, tensor
    files = order.files(rank, boxes.tensor, nbytes)
    return SavePlan(
        tensors=tensors,
        shapes=shapes,
        ndims=ndims,
        boxes=boxes,
        rank=rank,
        local=local,
        file=files.file,
        offset=files.offset,
        nbytes=nbytes,
        file_rank=rank[files.first],
        file_state=files.state,
        file_part=files.part,
        copied=() if copied is None else np.split(copied, begins[1:]),
    )


def _ordered(rows: Int64s, key: Int64s) -> Int64s:
    """Return the rows in the order of their keys."""
    return rows if (key[1:] >= key[:-1]).all() else rows[np.argsort(key, kind="stable")]


def _taken(boxes: BoxTable, rows: Int64s) -> BoxTable:
    """Return the boxes at `rows`, without a copy if these are all in order."""
    everything = len(rows) == len(boxes) and bool((rows[1:] > rows[:-1]).all())
    return boxes if everything else boxes.take(rows)


def _written(
    group: Int64s,
    row_rank: Int64s,
    row_local: Int64s,
    nbytes: Int64s,
    world_size: int,
    fixed: Mapping[int, Int64s],
    lowest: Mask,
) -> Int64s:
    """Return the rows to write, ascending: one row of each group of equal boxes.

    It is held by the least loaded holder, or by the lowest one for the groups of the mask `lowest`.
    """
    groups = int(group.max(initial=-1)) + 1
    group_bytes = np.zeros(groups, np.int64)
    group_bytes[group] = nbytes
    if fixed:
        may_write = _may_write(fixed, group, row_rank, row_local)
        owner = np.full(groups, -1, np.int64)
        present, compact = np.unique(group[may_write], return_inverse=True)
        owner[present] = assign(compact.reshape(-1), row_rank[may_write], group_bytes[present], world_size)
    else:
        may_write = np.ones(len(group), bool)
        owner = assign(group, row_rank, group_bytes, world_size)
    if lowest.any():
        rows = may_write & lowest[group]
        owner[lowest] = world_size
        np.minimum.at(owner, group[rows], row_rank[rows])
    written = np.flatnonzero(may_write & (owner[group] == row_rank))
    # A rank may hold a box in two rows (a tensor in two modules of a list); the first row is written.
    written_group = group[written]
    first = np.empty(groups, np.int64)
    first[written_group[::-1]] = written[::-1]
    kept: Int64s = written[first[written_group] == written]
    return kept


def _may_write(fixed: Mapping[int, Int64s], group: Int64s, row_rank: Int64s, row_local: Int64s) -> Mask:
    """Return which rows may be chosen although some ranks have already written theirs."""
    allowed = np.ones(len(group), bool)
    done = np.zeros(len(group), bool)
    for rank, rows in fixed.items():
        of_rank = row_rank == rank
        allowed[of_rank] = False
        done |= of_rank & np.isin(row_local, rows)
    taken = np.zeros(int(group.max(initial=-1)) + 1, bool)
    taken[group[done]] = True
    return np.where(taken[group], done, allowed)


def _check_cover(
    tensors: list[TensorRecord],
    shapes: Int64s,
    ndims: Int64s,
    boxes: BoxTable,
    ranks: Sequence[Int64s],
) -> None:
    """Check that the written boxes tile each tensor; a load would find a hole only when the data are lost.

    `ranks` has the tensors of each rank's rows.
    """
    filled = np.zeros(len(tensors), np.int64)
    np.add.at(filled, boxes.tensor, boxes.volumes())
    total = np.prod(shapes, axis=1)
    wrong = np.flatnonzero(filled != total)
    if len(wrong):
        first = int(wrong[0])
        what = "overlap without being equal" if filled[first] > total[first] else "leave a hole"
        raise IncompatibleCheckpointError(
            f"the shards of {tensors[first].key} on all ranks {what}: {int(filled[first])} elements for a tensor of "
            f"{int(total[first])}; {len(wrong)} tensors are affected{_ranks_without(tensors[first].state, tensors, ranks)}"
        )
    untiled = not_tiled(shapes, boxes)
    if len(untiled):
        first = int(untiled[0])
        of_tensor, ndim = boxes.tensor == first, int(ndims[first])
        shape = shapes[first, :ndim]
        gap = first_gap(np.zeros_like(shape), shape, boxes.offsets[of_tensor, :ndim], boxes.lengths[of_tensor, :ndim])
        raise IncompatibleCheckpointError(
            f"the shards of {tensors[first].key} on all ranks overlap without being equal and leave a hole elsewhere: the "
            f"first hole (offsets, lengths) is {gap}; {len(untiled)} tensors are affected"
        )


def _ranks_without(state: str, tensors: list[TensorRecord], ranks: Sequence[Int64s]) -> str:
    """Name the ranks that hold nothing of a state, if others do: they may have been given other states."""
    of_state = np.array([t.state == state for t in tensors], bool)
    without = [str(rank) for rank, rows in enumerate(ranks) if not of_state[rows].any()]
    return (
        f"; without anything of {state!r}: rank {listed(without)} (give all ranks the same states)" if without else ""
    )
