"""Tensors that files shall hold whole: those of a plan, or those of another program that consist of parts of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.boxes import BoxTable, Int64s, is_one_run, row_major, widened
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize, safetensors_code
from bytecheckpoint.representation.names import escape, unescape

__all__ = ["FileTensors", "catalog_of_plan", "lie_whole", "named_tensors", "whole_tensors"]


#: A tensor may consist of so many runs, however short, and of more if they have so many bytes on average: each is a row of
#: the catalog, and a piece of its own to every load.
_FEW_RUNS, _LONG_RUN = 16, 32 << 10


@dataclass(frozen=True, slots=True)
class FileTensors:
    """Tensors that files shall hold, as boxes of the tensors of a plan. Every element of these is in one box.

    Attributes:
        boxes: the boxes, in the order in which they make up the tensors, [p].
        tensor: number of the tensor that each box belongs to, int64 [p], ascending.
        names: name of each tensor in its file; "" for a box of a plan's tensor that is listed as that.
        shapes: shape of each tensor that has a name.
    """

    boxes: BoxTable
    tensor: Int64s
    names: list[str]
    shapes: list[tuple[int, ...]]


def whole_tensors(plan: SavePlan, numbers: Int64s) -> FileTensors:
    """Return tensors of a plan as they are."""
    shapes, count = plan.shapes[numbers], len(numbers)
    return FileTensors(BoxTable(numbers, np.zeros_like(shapes), shapes), np.arange(count), [""] * count, [()] * count)


def _numbers_of(plan: SavePlan, state: str) -> Int64s:
    return np.array([k for k, tensor in enumerate(plan.tensors) if tensor.state == state], np.int64)


def catalog_of_plan(plan: SavePlan, state: str, config: Mapping[str, Any]) -> Catalog:
    """Return a catalog of the tensors of one state, as if all lay whole in one file, in the order of their numbers.

    Args:
        plan: plan of a save.
        state: escaped name of the state.
        config: configuration of the modules, as the catalog of the save will have it.
    """
    numbers = _numbers_of(plan, state)
    tensors = [plan.tensors[number] for number in numbers.tolist()]
    shapes = plan.shapes[numbers]
    nbytes = np.prod(shapes, axis=1) * np.array([itemsize(tensor.dtype) for tensor in tensors], np.int64)
    return Catalog.build(
        TensorTable.of(
            states=[unescape(tensor.state) for tensor in tensors],
            fqns=[unescape(tensor.fqn) for tensor in tensors],
            slots=[unescape(tensor.slot) for tensor in tensors],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=shapes,
            ndims=plan.ndims[numbers],
            owner=np.full(len(tensors), SHARED, np.int32),
            requires_grad=np.array([tensor.requires_grad for tensor in tensors], bool),
        ),
        boxes=BoxTable(np.arange(len(tensors)), np.zeros_like(shapes), shapes),
        file=np.zeros(len(tensors), np.int32),
        byte_offset=np.cumsum(nbytes) - nbytes,
        byte_length=nbytes,
        files=[StorageFile("", unescape(state), 0, int(nbytes.sum()), 0, 0, 0, "")],
        sums=[np.zeros(0, np.uint64)],
        aliases={
            unescape(of): {unescape(alias): unescape(fqn) for alias, fqn in names.items()}
            for of, names in plan.aliases().items()
            if of == state
        },
        info={"layout": {"config": dict(config)}},
    )


def named_tensors(plan: SavePlan, state: str, stored: Catalog, shown: Catalog) -> FileTensors | None:
    """Return the tensors of another program that ranks can write so that no byte of a state is written twice.

    Args:
        plan: plan of a save.
        state: escaped name of the state.
        stored: `catalog_of_plan` of the state.
        shown: tensors of the other program as boxes of these, with their strides.

    Returns:
        Tensors of `shown`, and what is left of the state's under its own names, which comes first. Tensors are left out
        whose elements do not follow each other in long runs (as in a transposed one), or change, or are those of a tensor
        before, and such as a safetensors file cannot hold. None if all are left out.
    """
    numbers = _numbers_of(plan, state)
    volumes = stored.shapes.prod(axis=1)
    if (volumes == 0).any() or not len(numbers) or not plan.boxes.ndim:
        return None
    names = [shown.fqn[number] for number in range(shown.count)]
    counts = Counter(names)
    fits = np.array(
        [name == escape(name) and name not in ("", "__metadata__") and counts[name] == 1 for name in names], bool
    )
    fits &= np.array([safetensors_code(name) is not None for name in shown.dtype.values], bool)[shown.dtype.codes]
    runs = _runs_of(shown)
    fits &= _are_whole(shown, runs)
    source = np.searchsorted(stored.byte_offset, runs.start, "right") - 1
    first = (runs.start - stored.byte_offset[source]) // runs.item
    last = first + runs.volume
    joins = np.append(False, (np.diff(runs.tensor) == 0) & (np.diff(source) == 0) & (first[1:] == last[:-1]))
    runs_of = np.bincount(runs.tensor[~joins], minlength=shown.count)
    fits &= (runs_of <= _FEW_RUNS) | (
        np.bincount(runs.tensor, runs.volume * runs.item, shown.count) >= runs_of * _LONG_RUN
    )
    by_source = np.lexsort((runs.tensor, first, source))
    while True:  # until no two tensors have the same elements
        order = by_source[fits[runs.tensor[by_source]]]
        again = np.flatnonzero((source[order[1:]] == source[order[:-1]]) & (first[order[1:]] < last[order[:-1]]))
        if not len(again):
            break
        fits[np.maximum(runs.tensor[order[again]], runs.tensor[order[again + 1]])] = False
    if not fits.any():
        return None
    begins = np.flatnonzero(fits[runs.tensor] & ~joins)
    ends = np.flatnonzero(fits[runs.tensor] & ~np.append(joins[1:], False))
    tensor, source, first, last = runs.tensor[begins], source[begins], first[begins], last[ends]
    # What no such tensor has lies between these runs, the beginnings and the ends.
    every, none = np.arange(len(volumes)), np.zeros_like(volumes)
    of = np.concatenate([every, source, every])
    low, high = np.concatenate([none, first, volumes]), np.concatenate([none, last, volumes])
    order = np.lexsort((high, low, of))
    of, low, high = of[order], low[order], high[order]
    rest = np.flatnonzero((of[1:] == of[:-1]) & (low[1:] > high[:-1]))
    source = np.concatenate([of[rest], source])
    cut = flat_ranges_to_boxes(
        stored.shapes[source], np.concatenate([high[rest], first]), np.concatenate([low[rest + 1], last])
    )
    count = int(np.searchsorted(cut.source, len(rest)))  # boxes of the rest, each of which is listed as it is
    known, named = np.unique(tensor[cut.source[count:] - len(rest)], return_inverse=True)
    shapes, dims = shown.shapes.tolist(), shown.ndims.tolist()
    return FileTensors(
        BoxTable(numbers[source[cut.source]], cut.offsets, cut.lengths),
        np.concatenate([np.arange(count), count + named.reshape(-1)]),
        [""] * count + [names[k] for k in known.tolist()],
        [()] * count + [tuple(shapes[k][: dims[k]]) for k in known.tolist()],
    )


def lie_whole(shown: Catalog, state: str, files: Mapping[str, str]) -> bool:
    """Return whether each of some tensors lies whole in the file that is given for it.

    Args:
        shown: tensors of another program as boxes of the stored ones.
        state: name of their state.
        files: name of the file of each tensor, by its name.
    """
    known = {file.name: number for number, file in enumerate(shown.files)}
    values = shown.slot.code_of(VALUES_SLOT)
    numbers = {shown.fqn[k]: k for k in shown.of_state(state).tolist() if shown.slot.codes[k] != values}
    if not files.keys() <= numbers.keys():
        return False
    chosen = np.array([numbers[name] for name in files], np.int64)
    wanted = np.full(shown.count, -1, np.int64)
    wanted[chosen] = [known.get(file, -1) for file in files.values()]
    runs = _runs_of(shown)
    first = np.searchsorted(runs.tensor, runs.tensor)
    there = (runs.start - runs.start[first] == (runs.place - runs.place[first]) * runs.item) & (
        runs.file == wanted[runs.tensor]
    )
    return bool(there[np.isin(runs.tensor, chosen)].all() and _are_whole(shown, runs)[chosen].all())


class _StoredRuns(NamedTuple):
    """Rows of a catalog as runs of elements, by tensor, then by place in it, int64 [n].

    Attributes:
        tensor: tensor of each row.
        place: its first element there.
        volume: number of elements; 0 if they do not follow each other in the tensor, or in the file.
        file: number of its file.
        start: first byte there.
        item: bytes of an element.
    """

    tensor: Int64s
    place: Int64s
    volume: Int64s
    file: Int64s
    start: Int64s
    item: Int64s


def _runs_of(shown: Catalog) -> _StoredRuns:
    boxes = shown.boxes
    strides = row_major(boxes.lengths) if shown.strides is None else widened(shown.strides, boxes.ndim, 1)
    dense = row_major(shown.shapes[boxes.tensor])
    follow = is_one_run(boxes.lengths, strides) & is_one_run(boxes.lengths, dense)
    place = (boxes.offsets * dense).sum(axis=1)
    order = np.lexsort((place, boxes.tensor))
    tensor = boxes.tensor[order]
    return _StoredRuns(
        tensor,
        place[order],
        np.where(follow, boxes.volumes(), 0)[order],
        shown.file[order].astype(np.int64),
        shown.byte_offset[order],
        np.array([itemsize(name) for name in shown.dtype.values], np.int64)[shown.dtype.codes[tensor]],
    )


def _are_whole(shown: Catalog, runs: _StoredRuns) -> NDArray[np.bool_]:
    """Return which tensors consist of runs that follow each other, [tensors]."""
    found: NDArray[np.bool_] = np.bincount(runs.tensor, runs.volume, shown.count) == shown.shapes.prod(axis=1)
    after = np.cumsum(runs.volume) - runs.volume
    apart = runs.place != after - after[np.searchsorted(runs.tensor, runs.tensor)]
    found[runs.tensor[apart]] = False
    return found
