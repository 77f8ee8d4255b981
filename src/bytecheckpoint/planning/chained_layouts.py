"""Show a catalog through several layouts, each of which leads on from the names to which the one before it led.

The tensors between two layouts are stored nowhere. They become a catalog whose rows are boxes of them with strides in the
files, so that the next layout is bound to it as to any foreign checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts import Layout
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.planning.part_space import LaidOut, LiveSide, concatenated, lay_out
from bytecheckpoint.planning.shown_tensors import JoinedValue
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major, widened
from bytecheckpoint.representation.catalog import Catalog, row_order
from bytecheckpoint.representation.catalog_rows import cells, rows_of
from bytecheckpoint.representation.dtypes import itemsize

__all__ = ["as_stored", "lay_out_through"]

_MOST_BOXES = 4_000_000


def lay_out_through(catalog: Catalog, layouts: Sequence[Layout], live: LiveSide | None = None) -> LaidOut:
    """Show a catalog through layouts.

    Args:
        catalog: catalog of the checkpoint, with all rows.
        layouts: the layouts, from that of the checkpoint's names to that of the program's.
        live: tensors to load into, as for `lay_out`.

    Raises:
        IncompatibleCheckpointError: names, shapes or dtypes do not fit a layout; a layout before the last one changes
            elements.
        UsageError: a requirement of a layout is not met.
    """
    between = None if live is None else replace(live, shapes=None)
    *before, last = layouts
    laid: LaidOut | None = None
    for layout in before:
        found = lay_out(catalog, layout, between)
        if found.maps:
            raise IncompatibleCheckpointError(
                f"{layout.label} changes elements (scales or sums), which a further layout cannot move: load through it "
                "alone, save, and load the result through the others"
            )
        laid = found if laid is None else _joined(laid, found)
        catalog = as_stored(found)
    found = lay_out(catalog, last, live)
    return found if laid is None else _joined(laid, found)


def as_stored(laid: LaidOut) -> Catalog:
    """Return the tensors that `laid` shows as if they were stored: all their boxes, with their places in the files.

    Elements that change, and padding, have no boxes. A tensor without boxes has a row that stands for no element.
    """
    shown, rows = laid.catalog, laid.rows
    assert rows.strides is not None
    whole = BoxTable(np.arange(shown.count), np.zeros_like(shown.shapes), shown.shapes)
    wanted, _ = laid.wanted(whole, row_major(whole.lengths))
    pairs = intersect(rows.boxes, wanted.boxes)
    pairs = pairs.take(~np.isin(wanted.boxes.tensor[pairs.right], [*laid.maps]))
    width = pairs.offsets.shape[1]
    within_row, within_part = (
        pairs.offsets - widened(boxes.offsets, width, 0)[at]
        for boxes, at in ((rows.boxes, pairs.left), (wanted.boxes, pairs.right))
    )
    from_step, step = widened(rows.strides, width, 1)[pairs.left], widened(wanted.strides, width, 1)[pairs.right]
    tensor = wanted.origin[pairs.right]
    first = wanted.first[pairs.right] + (within_part * step).sum(1)
    cut = _cut(whole.lengths[tensor], first, pairs.lengths, step, from_step)
    row = pairs.left[cut.source]
    begin = rows.start[row] + ((within_row * from_step).sum(1)[cut.source] + cut.skipped) * rows.element[row]
    boxes = BoxTable(tensor[cut.source], cut.offsets, cut.lengths)
    empty = np.setdiff1d(whole.tensor, boxes.tensor)
    boxes = BoxTable.concat([boxes, whole.take(empty)])
    file = np.append(rows.file[row], shown.file[np.searchsorted(shown.boxes.tensor, empty)]).astype(np.int32)
    offset = np.append(begin, np.zeros(len(empty), np.int64)) + np.array([f.data_offset for f in shown.files])[file]
    strides = np.concatenate([cut.strides, np.zeros_like(whole.lengths[empty])])
    order = row_order(boxes)
    at = np.arange(len(boxes)) if order is None else order
    boxes, strides = boxes.take(at), strides[at]
    elements = np.where((boxes.lengths > 0).all(1), ((boxes.lengths - 1) * strides).sum(1) + 1, 0)
    item = np.array([itemsize(name) for name in shown.dtype.values], np.int64)[shown.dtype.codes]
    return replace(
        shown,
        boxes=boxes,
        file=file[at],
        byte_offset=offset[at],
        byte_length=elements * item[boxes.tensor],
        strides=strides,
    )


class _CutBoxes(NamedTuple):
    """Boxes of tensors that are cut from strided boxes.

    Attributes:
        source: number of the strided box that each is cut from, int64 [m].
        offsets: first coordinates in the tensor, int64 [m, d].
        lengths: extents, int64 [m, d].
        strides: elements of the file from one element to the next along each dimension, int64 [m, d].
        skipped: elements of the file from the first one of the strided box to that of the box, int64 [m].
    """

    source: Int64s
    offsets: Int64s
    lengths: Int64s
    strides: Int64s
    skipped: Int64s


def _cut(shapes: Int64s, first: Int64s, lengths: Int64s, steps: Int64s, from_steps: Int64s) -> _CutBoxes:
    """Cut strided boxes into boxes in the coordinates of their tensors.

    Several dims of a part may lie in one dimension of a tensor. The innermost of them, as far as the elements follow each
    other there and are evenly spaced in the file, become the extent of a box; the others are counted off.

    Args:
        shapes: shape of the tensor of each strided box, int64 [n, d].
        first: place of each one's first element in the tensor, int64 [n].
        lengths: extent along each dim, int64 [n, k].
        steps: elements of the tensor per step of each dim, int64 [n, k].
        from_steps: elements of the file per step, int64 [n, k].
    """
    rows = np.arange(len(first))
    dense = row_major(shapes)
    extent, stride, grows = np.ones_like(shapes), np.ones_like(shapes), np.ones(shapes.shape, bool)
    counts = lengths.copy()
    order = np.argsort(np.where(lengths > 1, steps, np.iinfo(np.int64).max), axis=1, kind="stable")
    for k in order.T:
        length, step, move = lengths[rows, k], steps[rows, k], from_steps[rows, k]
        dim = (dense <= step[:, None]).argmax(1)  # the dimension of the tensor in which the dim lies
        here = extent[rows, dim]
        joins = grows[rows, dim] & (step == dense[rows, dim] * here)
        joins &= (here == 1) | (move == stride[rows, dim] * here)
        joins &= length > 1
        grows[rows, dim] &= joins | (length == 1)
        stride[rows, dim] = np.where(joins & (here == 1), move, stride[rows, dim])
        extent[rows, dim] = np.where(joins, here * length, here)
        counts[rows, k] = np.where(joins, 1, length)
    if (total := np.prod(counts, axis=1, dtype=np.float64).sum()) > _MOST_BOXES:
        raise IncompatibleCheckpointError(
            f"the tensors between two layouts would lie in {total:,.0f} pieces: load through one layout"
        )
    source, index = cells(counts)
    place = first[source] + (index * steps[source]).sum(1)
    offsets = place[:, None] // dense[source] % shapes[source]
    skipped = (index * from_steps[source]).sum(1)
    return _CutBoxes(source, offsets, extent[source], stride[source], skipped)


def _joined(first: LaidOut, second: LaidOut) -> LaidOut:
    """Return what the layouts of both show together.

    Args:
        first: the checkpoint's catalog through the first layouts.
        second: that of `first` through the next layout.
    """
    stored = np.where(second.stored >= 0, first.stored[second.stored], -1)
    names = {
        name: [x for between in shown for x in second.names.get(between, [between])]
        for name, shown in first.names.items()
    }
    known = {name for shown in first.names.values() for name in shown}
    names |= {name: list(shown) for name, shown in second.names.items() if name not in known}
    # Values that the first layout joined stay joined.
    count, rows, twins = int(second.rows.boxes.tensor.max(initial=-1)) + 1, [second.rows], dict(second.twins)
    for shown in np.flatnonzero(second.stored >= 0).tolist():
        own = second.twins.get(shown) or [JoinedValue(int(second.alone[shown]), int(second.stored[shown]), "")]
        more = [twin for t in own for twin in first.twins.get(t.stored, ())]
        if not more:
            continue
        parts, at = rows_of(first.rows.boxes.tensor, np.array([twin.part for twin in more]))
        taken = first.rows.take(at)
        rows.append(replace(taken, boxes=BoxTable(count + parts, taken.boxes.offsets, taken.boxes.lengths)))
        twins[shown] = [own[0], *(replace(twin, part=count + n) for n, twin in enumerate(more))]
        count += len(more)
    notes = list(dict.fromkeys([*first.notes, *second.notes]))
    return replace(second, rows=concatenated(rows), stored=stored, names=names, twins=twins, notes=notes)
