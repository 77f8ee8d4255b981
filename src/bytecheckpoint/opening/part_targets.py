"""Fill tensors through a layout: memory of live tensors as boxes of parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bytecheckpoint.engine.scatter import BoxTarget
from bytecheckpoint.layouts.lowering import PartBoxes
from bytecheckpoint.planning.part_space import LaidOut
from bytecheckpoint.planning.read_plan import plan_reads
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.plans import ReadPlan

__all__ = ["PartReads", "plan_parts"]


@dataclass(frozen=True, slots=True)
class PartReads:
    """The reads that fill some boxes through a layout.

    Attributes:
        plan: ranges of files, with the copies of their bytes. `missing` counts elements of the wanted boxes.
        targets: memory of the parts, to which the copies refer.
        padding: memory of elements that no part has; they become 0.
    """

    plan: ReadPlan
    targets: list[BoxTarget]
    padding: list[torch.Tensor]


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
    parts = [BoxTarget(view, targets[origin].dtype) for origin, view in _views(found, targets)]
    contiguous = np.array([part.contiguous for part in parts], bool)
    plan = plan_reads(laid.rows, found.boxes, contiguous, chunk_bytes)
    # Elements that belong to no part are missing, too.
    missing = boxes.volumes()
    np.subtract.at(missing, found.origin, found.boxes.volumes() - plan.missing)
    np.subtract.at(missing, padding.origin, padding.boxes.volumes())
    return PartReads(replace(plan, missing=missing), parts, [view for _, view in _views(padding, targets)])


def _views(found: PartBoxes, targets: Sequence[BoxTarget]) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over boxes of parts: the number of the box that each is cut from, and its elements in memory."""
    columns = (found.origin.tolist(), found.first.tolist(), found.boxes.lengths.tolist(), found.strides.tolist())
    for origin, first, lengths, strides in zip(*columns, strict=True):
        data = targets[origin].data
        yield origin, data.as_strided(lengths, strides, data.storage_offset() + first)
