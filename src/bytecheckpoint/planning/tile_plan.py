"""Plan a save without a row for each box, where thousands of ranks hold tiles of the same grids.

Ranks whose tables differ in nothing but their place (`local_table.factored`) form a class. A row of a class is moved along
some axes. Where no two ranks of the class have the same place along these, each rank writes its own box: the row and the
places say it all (`Tilings`). The other rows, such as replicas and whole tensors, are listed once for each distinct place,
with the set of their holders, and assigned as in any plan. Boxes that ranks of several classes hold are found among the
latter only, so at the end all boxes must cover each tensor exactly once; a tensor that they do not is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.planning.balance import HolderSets, assign_sets
from bytecheckpoint.planning.coverage import box_weights, not_tiled
from bytecheckpoint.planning.file_order import FileOrder
from bytecheckpoint.planning.local_table import (
    LocalTable,
    TensorRecord,
    axes_of,
    join_boxes,
    join_tensors,
    place_of,
    row_count,
)
from bytecheckpoint.planning.planned_rows import PlannedTiles, SavePlan
from bytecheckpoint.planning.replicas import group_equal
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.tilings import Tilings
from bytecheckpoint.tuning import tuning

__all__ = ["plan_in_tiles"]


class _Class(NamedTuple):
    """Ranks whose tables differ in nothing but their place."""

    ranks: Int64s  # [r]
    places: Int64s  # [r, a]
    boxes: BoxTable  # at place 0, [m]
    axes: Int64s  # [m, d]


class _Shared(NamedTuple):
    """Rows of a class that move along the same axes, where several ranks have one place."""

    rows: Int64s  # numbers of the rows in the class, [k]
    boxes: BoxTable  # of each row at each place, [k * p]
    holders: list[Int64s]  # ranks at each place, [p]
    place_of_rank: Int64s  # number of the place of each rank of the world, -1 for ranks of other classes


def plan_in_tiles(tables: Sequence[LocalTable]) -> SavePlan | None:
    """Plan a save as `plan_save` does, with tiles; return None if most rows must be planned one by one.

    Args:
        tables: the table of each rank.
    """
    by_form: dict[LocalTable, list[int]] = {}
    for rank, table in enumerate(tables):
        by_form.setdefault(table.form(), []).append(rank)
    if len(by_form) * tuning().tile_ranks > len(tables):
        return None
    try:
        tensors, numbers = join_tensors(list(by_form))
        at_zero = [msgspec.structs.replace(form, axes=b"") for form in by_form]
        shapes, ndims, boxes = join_boxes(tensors, at_zero, numbers)
    except IncompatibleCheckpointError:
        return None  # the other plan finds the rank
    classes = []
    ends = np.cumsum([len(of_form) for of_form in numbers])
    for (form, ranks), end in zip(by_form.items(), ends.tolist(), strict=True):
        rows = slice(end - row_count(form), end)
        places = np.array([place_of(tables[rank]) for rank in ranks], np.int64).reshape(len(ranks), -1)
        of_class = BoxTable(boxes.tensor[rows], boxes.offsets[rows], boxes.lengths[rows])
        classes.append(_Class(np.array(ranks), places, of_class, axes_of(form, boxes.ndim)))
    return _Planner(tensors, shapes, ndims, classes, len(tables)).plan()


class _Planner:
    """Plans the boxes of some classes.

    Args:
        tensors: every distinct tensor.
        shapes: global shape of each tensor, padded with 1, int64 [t, d].
        ndims: number of dimensions of each tensor, int64 [t].
        classes: classes of all ranks.
        world_size: number of ranks.
    """

    def __init__(
        self, tensors: list[TensorRecord], shapes: Int64s, ndims: Int64s, classes: list[_Class], world_size: int
    ) -> None:
        self._tensors, self._shapes, self._ndims = tensors, shapes, ndims
        self._classes = classes
        self._world_size = world_size
        self._itemsize = np.array([itemsize(t.dtype) for t in tensors], np.int64)
        self._order = FileOrder(tensors)

    def plan(self) -> SavePlan | None:
        """Make the plan; return None if most rows must be planned one by one."""
        listed = np.zeros(len(self._tensors), bool)  # tensors without tiles
        while True:
            divided = self._divided(listed)
            if divided is None:
                return None
            tiled, shared = divided
            boxes, rank, local = self._assigned(shared, tiled)
            uncovered = self._uncovered(boxes, tiled)
            if not len(uncovered):
                return self._laid_out(boxes, rank, local, self._tiles(tiled), self._copied(tiled))
            if listed[uncovered].any():
                return None  # the other plan says what is wrong
            listed[uncovered] = True  # ranks of several classes hold a box of them

    def _divided(self, listed: Mask) -> tuple[list[Int64s], list[_Shared]] | None:
        """Divide the rows of all classes by the axes along which they move.

        Args:
            listed: mask of the tensors that get no tiles.

        Returns:
            The rows of each class that each of its ranks holds alone, and the other rows; None if these are most.
        """
        total = sum(len(c.ranks) * len(c.boxes) for c in self._classes)
        count = 0
        tiled, shared = [], []
        for of_class in self._classes:
            alone = [np.zeros(0, np.int64)]
            # The proof that boxes cover a tensor does not see copies of an empty box.
            must_list = listed[of_class.boxes.tensor] | (of_class.boxes.volumes() == 0)
            keys = np.column_stack([np.sort(of_class.axes, axis=1), must_list])
            sets, code = np.unique(keys, axis=0, return_inverse=True)
            for number, (*axes, without_tiles) in enumerate(sets.tolist()):
                rows = np.flatnonzero(code.reshape(-1) == number)
                moving = of_class.places[:, [axis for axis in axes if axis >= 0]]
                first, place = np.zeros(1, np.int64), np.zeros(len(moving), np.int64)
                if moving.shape[1]:
                    _, first, place = np.unique(moving, axis=0, return_index=True, return_inverse=True)
                if len(first) == len(moving) >= tuning().tile_ranks and not without_tiles:
                    alone.append(rows)
                    continue
                count += len(rows) * len(first)
                if count > total // 2:
                    return None
                shared.append(self._shared(of_class, rows, first, place.reshape(-1)))
            tiled.append(np.sort(np.concatenate(alone)))
        return tiled, shared

    def _copied(self, tiled: list[Int64s]) -> list[Mask]:
        """Return for each rank the mask of the rows that are no tiles, which other ranks may hold too."""
        copied: list[Mask] = [np.zeros(0, bool)] * self._world_size
        for of_class, rows in zip(self._classes, tiled, strict=True):
            mask = np.ones(len(of_class.boxes), bool)
            mask[rows] = False
            for rank in of_class.ranks.tolist():
                copied[rank] = mask
        return copied

    def _shared(self, of_class: _Class, rows: Int64s, first: Int64s, place: Int64s) -> _Shared:
        """List rows at each distinct place.

        Args:
            of_class: their class.
            rows: numbers of the rows, which move along the same axes.
            first: a rank, by its position in the class, at each place.
            place: number of each rank's place.
        """
        lengths = np.repeat(of_class.boxes.lengths[rows], len(first), axis=0)
        offsets = np.repeat(of_class.boxes.offsets[rows], len(first), axis=0)
        places = np.append(of_class.places[first], np.zeros((len(first), 1), np.int64), axis=1)
        for k in range(lengths.shape[1]):
            offsets[:, k] += places[:, of_class.axes[rows, k]].T.reshape(-1) * lengths[:, k]
        holders = np.split(of_class.ranks[np.argsort(place, kind="stable")], np.cumsum(np.bincount(place))[:-1])
        place_of_rank = np.full(self._world_size, -1, np.int64)
        place_of_rank[of_class.ranks] = place
        tensor = np.repeat(of_class.boxes.tensor[rows], len(first))
        return _Shared(rows, BoxTable(tensor, offsets, lengths), holders, place_of_rank)

    def _assigned(self, shared: list[_Shared], tiled: list[Int64s]) -> tuple[BoxTable, Int64s, Int64s]:
        """Assign each box of `shared` to one of its holders.

        Returns:
            The distinct boxes, the rank that writes each, and its number among the shards of that rank.
        """
        boxes = BoxTable.concat([of_set.boxes for of_set in shared]).widened(self._shapes.shape[1])
        group = group_equal(boxes)
        order = np.argsort(group, kind="stable")
        begin = np.flatnonzero(np.diff(group[order], prepend=-1))
        end = np.append(begin[1:], len(group))
        # The set of holders of each box, and the sets of boxes that are listed several times.
        sets = [holders for of_set in shared for holders in of_set.holders]
        first_set = np.cumsum([0, *(len(of_set.holders) for of_set in shared)])
        set_of = np.concatenate(
            [np.zeros(0, np.int64)]
            + [np.tile(np.arange(a, b), len(s.rows)) for s, (a, b) in zip(shared, pairwise(first_set), strict=True)]
        )
        ident = set_of[order[begin]]
        unions: dict[tuple[int, ...], int] = {}
        for number in np.flatnonzero(end - begin > 1).tolist():
            members = tuple(np.unique(set_of[order[begin[number] : end[number]]]).tolist())
            if len(members) > 1 and members not in unions:
                unions[members] = len(sets)
                sets.append(np.unique(np.concatenate([sets[member] for member in members])))
            ident[number] = unions.get(members, members[0])
        size = np.array([len(holders) for holders in sets], np.int64)
        holders = HolderSets(
            np.arange(len(begin)),
            (np.cumsum(size) - size)[ident],
            size[ident],
            ident,
            np.concatenate([group[:0], *sets]),
        )
        nbytes = (boxes.volumes() * self._itemsize[boxes.tensor])[order[begin]]
        writer = assign_sets(holders, nbytes, self._tile_bytes(tiled))
        lowest = np.array([t.from_lowest for t in self._tensors], bool)[boxes.tensor[order[begin]]]
        writer[lowest] = holders.holders[holders.begins[lowest]]  # ascending in each set
        chosen = _chosen(shared, order, begin, end, writer)
        rows = np.concatenate([group[:0], *(np.repeat(s.rows, len(s.holders)) for s in shared)])
        return boxes.take(chosen), writer, rows[chosen]

    def _tile_bytes(self, tiled: list[Int64s]) -> Int64s:
        load = np.zeros(self._world_size, np.int64)
        for of_class, rows in zip(self._classes, tiled, strict=True):
            boxes = of_class.boxes.take(rows)
            load[of_class.ranks] = (boxes.volumes() * self._itemsize[boxes.tensor]).sum()
        return load

    def _uncovered(self, boxes: BoxTable, tiled: list[Int64s]) -> Int64s:
        """Return the tensors that the boxes and tiles do not cover exactly once."""
        filled = np.zeros(len(self._tensors), np.int64)
        np.add.at(filled, boxes.tensor, boxes.volumes())
        weight = np.zeros(len(self._tensors), np.uint64)
        for of_class, rows in zip(self._classes, tiled, strict=True):
            members, axes = of_class.boxes.take(rows), of_class.axes[rows]
            np.add.at(filled, members.tensor, members.volumes() * len(of_class.ranks))
            np.add.at(weight, members.tensor, _weights(members, axes, of_class.places))
        wrong = np.flatnonzero(filled != np.prod(self._shapes, axis=1))
        return np.union1d(wrong, not_tiled(self._shapes, boxes, weight))

    def _tiles(self, tiled: list[Int64s]) -> PlannedTiles:
        """Make a tiling of the rows of each class that lie in one section of a file; files and places in them follow."""
        order, width = self._order, self._shapes.shape[1]
        classes, members = [], []  # of each tiling
        for of_class, rows in zip(self._classes, tiled, strict=True):
            tensor = of_class.boxes.tensor
            by_file = rows[np.argsort(order.place[tensor[rows]], kind="stable")]
            cuts = np.flatnonzero(np.diff(order.section[tensor[by_file]])) + 1
            found = [part for part in np.split(by_file, cuts) if len(part)]
            members += found
            classes += [of_class] * len(found)
        boxes = BoxTable.concat([c.boxes.take(rows) for c, rows in zip(classes, members, strict=True)]).widened(width)
        tiling = np.repeat(np.arange(len(members)), [len(rows) for rows in members])
        box_bytes = boxes.volumes() * self._itemsize[boxes.tensor]
        begins = np.flatnonzero(np.diff(tiling, prepend=-1))
        box_offset = np.cumsum(box_bytes) - box_bytes
        of_tile = np.repeat(np.arange(len(members)), [len(c.ranks) for c in classes])
        axes, places = _used_axes(classes, members, width)
        nothing = np.zeros(len(of_tile), np.int64)
        return PlannedTiles(
            Tilings(
                tiling=tiling,
                boxes=boxes,
                axes=axes,
                box_offset=box_offset - box_offset[begins][tiling],
                box_bytes=box_bytes,
                of_tile=of_tile,
                file=nothing.astype(np.int32),
                byte_offset=nothing,
                byte_length=(np.add.reduceat(box_bytes, begins) if len(begins) else box_bytes)[of_tile],
                places=places,
            ),
            local=np.concatenate([nothing[:0], *members]),
            rank=np.concatenate([nothing[:0], *(c.ranks for c in classes)]),
            before=nothing,
        )

    def _laid_out(
        self, boxes: BoxTable, rank: Int64s, local: Int64s, tiles: PlannedTiles, copied: list[Mask]
    ) -> SavePlan | None:
        """Lay out files: in each section the listed boxes of a rank, then its tile."""
        order, tilings = self._order, tiles.tilings
        begins = np.flatnonzero(np.diff(tilings.tiling, prepend=-1))
        # Listed boxes, then tiles; a tensor stands for the section.
        tensor = np.concatenate([boxes.tensor, tilings.boxes.tensor[begins][tilings.of_tile]])
        nbytes = np.concatenate([boxes.volumes() * self._itemsize[boxes.tensor], tilings.byte_length])
        entries = np.concatenate([np.ones_like(local), tilings.counts()])
        ranks = np.concatenate([rank, tiles.rank])
        is_tile = np.arange(len(ranks)) >= len(rank)
        place, number = np.where(is_tile, 0, order.place[tensor]), np.concatenate([local, tilings.of_tile])
        by_file = np.lexsort((number, place, is_tile, order.section[tensor], ranks))
        ranks, nbytes, is_tile = ranks[by_file], nbytes[by_file], is_tile[by_file]
        files = order.files(ranks, tensor[by_file], nbytes)
        if len(files.first) and np.add.reduceat(entries[by_file], files.first).max() > tuning().max_entries_per_file:
            return None
        chosen, tile = by_file[~is_tile], by_file[is_tile] - len(rank)
        placed = replace(
            tilings,
            of_tile=tilings.of_tile[tile],
            file=files.file[is_tile].astype(np.int32),
            byte_offset=files.offset[is_tile],
            byte_length=nbytes[is_tile],
            places=tilings.places[tile],
        )
        return SavePlan(
            tensors=self._tensors,
            shapes=self._shapes,
            ndims=self._ndims,
            boxes=boxes.take(chosen),
            rank=rank[chosen],
            local=local[chosen],
            file=files.file[~is_tile],
            offset=files.offset[~is_tile],
            nbytes=nbytes[~is_tile],
            file_rank=ranks[files.first],
            file_state=files.state,
            file_part=files.part,
            copied=copied,
            tiles=PlannedTiles(placed, tiles.local, tiles.rank[tile], np.cumsum(~is_tile)[is_tile])
            if len(tile)
            else None,
        )


def _used_axes(classes: list[_Class], members: list[Int64s], width: int) -> tuple[Int64s, Int64s]:
    """Return the axes along which the boxes of each tiling move, numbered, and the places of tiles.

    Args:
        classes: class of each tiling.
        members: rows of the class that make each tiling.
        width: number of columns of boxes.

    Returns:
        The axis of each dimension of the boxes of all tilings, [m, width], and the place of all tiles along each, [i, a].
    """
    axes, places = [np.zeros((0, width), np.int64)], []
    for of_class, rows in zip(classes, members, strict=True):
        used, number = np.unique(of_class.axes[rows], return_inverse=True)
        none = int(len(used) > 0 and used[0] < 0)
        axes.append(number.reshape(-1, width) - none)
        places.append(of_class.places[:, used[none:]])
    most = max([1, *(found.shape[1] for found in places)])
    padded = [np.pad(found, ((0, 0), (0, most - found.shape[1]))) for found in places]
    return np.concatenate(axes), np.concatenate([np.zeros((0, most), np.int64), *padded])


def _chosen(shared: list[_Shared], order: Int64s, begin: Int64s, end: Int64s, writer: Int64s) -> Int64s:
    """Choose for each distinct box the row, among those that list it, of a class that its writer belongs to."""
    chosen = order[begin]
    several = np.flatnonzero(end - begin > 1)
    if not len(several):
        return chosen
    sizes = [len(s.boxes) for s in shared]
    of_set = np.repeat(np.arange(len(shared)), sizes)
    place = np.concatenate([np.tile(np.arange(len(s.holders)), len(s.rows)) for s in shared])
    place_of_rank = np.stack([s.place_of_rank for s in shared])
    for number in several.tolist():
        rows = order[begin[number] : end[number]]
        holds = place_of_rank[of_set[rows], writer[number]] == place[rows]
        chosen[number] = rows[holds.argmax()]
    return chosen


def _weights(boxes: BoxTable, axes: Int64s, places: Int64s) -> NDArray[np.uint64]:
    """Return the weight (`coverage.box_weights`) of each row's boxes at all places, [m]."""
    found, code = np.unique(np.concatenate([boxes.offsets, boxes.lengths, axes], axis=1), axis=0, return_inverse=True)
    places = np.append(places, np.zeros((len(places), 1), np.int64), axis=1)
    weights = np.zeros(len(found), np.uint64)
    for number, geometry in enumerate(found):  # tensors of one shape have one
        offset, length, axis = geometry.reshape(3, -1)
        lengths = np.broadcast_to(length, (len(places), len(length)))
        moved = BoxTable(np.zeros(len(places), np.int64), offset + places[:, axis] * length, lengths)
        weights[number] = box_weights(moved).sum(dtype=np.uint64)
    return weights[code.reshape(-1)]
