"""Fill tensors through a layout: memory of live tensors as boxes of parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bytecheckpoint.engine.scatter import BoxTarget
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.layouts.lowering import PartBoxes
from bytecheckpoint.opening.changed_parts import ChangedBox, changed_box
from bytecheckpoint.planning.element_maps import in_bytes, pairs_of
from bytecheckpoint.planning.part_space import LaidOut
from bytecheckpoint.planning.read_plan import plan_reads
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major
from bytecheckpoint.representation.catalog_rows import cells
from bytecheckpoint.representation.plans import ReadPlan

__all__ = ["PartReads", "plan_parts"]

#: Bytes of the shortest runs that become boxes of their own.
_LONG_RUN = 256 << 10


@dataclass(frozen=True, slots=True)
class _Twin:
    """Two values of the checkpoint that must be equal.

    Attributes:
        names: name of each in the checkpoint.
        values: memory of each, without dimensions.
    """

    names: tuple[str, str]
    values: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PartReads:
    """The reads that fill some boxes through a layout.

    Attributes:
        plan: ranges of files, with the copies of their bytes. `missing` counts elements of the wanted boxes.
        targets: memory of the parts, to which the copies refer.
        padding: memory of elements that no part has; they become 0.
        twins: values that the layout joins.
        changed: memory whose elements change on the way.
    """

    plan: ReadPlan
    targets: list[BoxTarget]
    padding: Sequence[torch.Tensor] = ()
    twins: Sequence[_Twin] = ()
    changed: Sequence[ChangedBox] = ()

    def finish(self) -> None:
        """Fill the padding, change elements, and compare what the layout joins; to be called after the bytes have arrived.

        Raises:
            IncompatibleCheckpointError: the layout joins parameters of which the checkpoint has different values, such as
                steps of an optimizer.
        """
        with torch.no_grad():
            for padding in self.padding:
                padding.zero_()
            for box in self.changed:
                box.change()
        for twin in self.twins:
            first, second = (value.detach().cpu() for value in twin.values)
            if not torch.equal(first, second):
                raise IncompatibleCheckpointError(
                    f"the layout joins {' and '.join(twin.names)}, which are {first.item()} and {second.item()} in the "
                    "checkpoint: an optimizer keeps one value for both here; leave the optimizer out, or load it under "
                    "its own names"
                )


def plan_parts(laid: LaidOut, boxes: BoxTable, targets: Sequence[BoxTarget], chunk_bytes: int) -> PartReads:
    """Plan the reads that fill `boxes` of a catalog under other names.

    Args:
        laid: the catalog.
        boxes: wanted boxes, numbered by its tensors.
        targets: memory of each box.
        chunk_bytes: size of a chunk, as for `plan_reads`.
    """
    strides = np.ones((len(boxes), boxes.ndim), np.int64)
    for number, target in enumerate(targets):
        strides[number, : target.data.ndim] = target.data.stride()
    found, padding = laid.wanted(boxes, strides)
    found = _in_long_runs(found, np.array([target.data.element_size() for target in targets], np.int64))
    parts = [BoxTarget(view, targets[origin].dtype) for origin, view in _views(found, targets)]
    # Boxes to read beside those of the wanted elements: part, offsets, extent, number of the wanted box.
    more: list[tuple[int, Sequence[int], Sequence[int], int]] = []
    changed = _change(laid, found, parts, more, lambda box: str(laid.catalog.key(int(boxes.tensor[box]))))
    twins: list[_Twin] = []
    if laid.twins:
        for number, tensor in enumerate(boxes.tensor.tolist()):
            joined = laid.twins.get(tensor, ())
            for twin in joined[1:]:
                target = targets[number]
                parts.append(BoxTarget(torch.empty_like(target.data), target.dtype))
                twins.append(_Twin((joined[0].name, twin.name), (target.data, parts[-1].data)))
                more.append((twin.part, (), (), number))
    beside = BoxTable.build([m[0] for m in more], [m[1] for m in more], [m[2] for m in more])
    pairs = pairs_of(laid.maps, found.boxes.tensor)
    wanted = BoxTable.concat([in_bytes(found.boxes, pairs), beside])
    origin = np.append(found.origin, np.array([m[3] for m in more], np.int64))
    contiguous = np.array([part.contiguous for part in parts], bool)
    plan = plan_reads(laid.rows, wanted, contiguous, chunk_bytes)
    # Elements that belong to no part are missing, too.
    missing = boxes.volumes()
    np.subtract.at(missing, found.origin, found.boxes.volumes())
    np.add.at(missing, origin, plan.missing)
    np.subtract.at(missing, padding.origin, padding.boxes.volumes())
    empty = [view for _, view in _views(padding, targets)]
    return PartReads(replace(plan, missing=missing), parts, empty, twins, changed)


def _change(
    laid: LaidOut,
    found: PartBoxes,
    parts: list[BoxTarget],
    more: list[tuple[int, Sequence[int], Sequence[int], int]],
    name: Callable[[int], str],
) -> list[ChangedBox]:
    """Replace the targets of boxes whose elements change; add the targets of their scales, and the boxes to read."""
    changed: list[ChangedBox] = []
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for k, part in enumerate(found.boxes.tensor.tolist() if laid.maps else ()):
        change = laid.maps.get(part)
        if change is None:
            continue
        data, origin = parts[k].data, int(found.origin[k])
        target, box = changed_box(name(origin), change, found.boxes.offsets[k], found.boxes.lengths[k], data)
        parts[k] = target
        memory = (data.data_ptr(), tuple(data.shape), data.stride())
        if memory in seen:  # another name of the same memory
            continue
        seen.add(memory)
        for index in itertools.product(*(range(count) for _, count in change.mean)):
            if any(index):
                offsets = found.boxes.offsets[k].copy()
                offsets[[dim for dim, _ in change.mean]] = index
                parts.append(BoxTarget(torch.empty(data.shape, dtype=data.dtype, device=data.device), target.dtype))
                more.append((part, offsets.tolist(), data.shape, origin))
                box = replace(box, others=(*box.others, parts[-1].data))
        changed.append(box)
        for factors in box.factors:
            parts.append(factors.target)
            more.append((factors.part, factors.offsets, factors.target.data.shape, origin))
    return changed


def _in_long_runs(found: PartBoxes, element: Int64s) -> PartBoxes:
    """Cut boxes whose elements are long runs in memory, as heads of fused attention, so that storage reads into each."""
    lengths, strides = found.boxes.lengths, found.strides
    inner = (lengths == 1) | (strides == row_major(lengths))
    inner = np.logical_and.accumulate(inner[:, ::-1], axis=1)[:, ::-1]
    run = np.prod(np.where(inner, lengths, 1), axis=1) * element[found.origin]
    counts = np.where(inner | (run < _LONG_RUN)[:, None], 1, lengths)
    if (counts == 1).all():
        return found
    box, index = cells(counts)
    extents = np.where(counts[box] > 1, 1, lengths[box])
    boxes = BoxTable(found.boxes.tensor[box], found.boxes.offsets[box] + index, extents)
    first = found.first[box] + (index * strides[box]).sum(axis=1)
    return PartBoxes(boxes, found.origin[box], first, strides[box])


def _views(found: PartBoxes, targets: Sequence[BoxTarget]) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over boxes of parts: the number of the box that each is cut from, and its elements in memory."""
    columns = (found.origin.tolist(), found.first.tolist(), found.boxes.lengths.tolist(), found.strides.tolist())
    for origin, first, lengths, strides in zip(*columns, strict=True):
        data = targets[origin].data
        yield origin, data.as_strided(lengths, strides, data.storage_offset() + first)
