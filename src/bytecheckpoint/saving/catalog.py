"""Make the catalog of a save from the plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bytecheckpoint.planning.save_plan import SavePlan
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import SHARED, Catalog, StorageFile
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.saving.messages import FileRecord, WriteReport
from bytecheckpoint.saving.values import owners_of_values

__all__ = ["build_catalog"]


def build_catalog(
    plan: SavePlan, reports: Mapping[int, WriteReport], generation: str, info: Mapping[str, Any]
) -> Catalog:
    """Join the plan and the ranks' reports to a catalog.

    Args:
        plan: rows and files of all ranks.
        reports: of all ranks.
        generation: of the files.
        info: facts about the save as a whole.
    """
    files: list[StorageFile] = []
    sums = []
    number: dict[tuple[int, str, int, bool], int] = {}

    def add(rank: int, record: FileRecord) -> int:
        files.append(
            StorageFile(
                name=record.name,
                state=unescape(record.state),
                rank=rank,
                size=record.size,
                data_offset=record.data_offset,
                header_sum=record.header_sum,
                block_bytes=record.block_bytes,
                generation=generation,
            )
        )
        sums.append(np.frombuffer(record.sums, np.uint64))
        return len(files) - 1

    planned = {(rank, f.state, f.part): f for rank, report in reports.items() for f in report.files if not f.values}
    for rank, state, part in zip(plan.file_rank.tolist(), plan.file_state, plan.file_part.tolist(), strict=True):
        number[rank, state, part, False] = add(rank, planned[rank, state, part])
    data_offset = np.array([f.data_offset for f in files], np.int64)

    values = owners_of_values({rank: report.values for rank, report in reports.items()}, SHARED)
    value_file = []
    for rank, record, _ in values:
        written = reports[rank].files[record.file]
        key = (rank, written.state, written.part, True)
        if key not in number:
            number[key] = add(rank, written)
        value_file.append(number[key])

    tensors = plan.tensors
    count = len(tensors)
    value_shapes = [r.shape for _, r, _ in values]
    value_boxes = BoxTable.build(
        range(count, count + len(values)), [(0,) * len(s) for s in value_shapes], value_shapes, plan.boxes.ndim
    )
    boxes = BoxTable.concat([plan.boxes, value_boxes])
    shapes = np.pad(plan.shapes, ((0, 0), (0, boxes.ndim - plan.shapes.shape[1])), constant_values=1)
    offsets = plan.offset + (data_offset[plan.file] if len(plan.file) else 0)
    value_offsets = [files[f].data_offset + r.offset for f, (_, r, _) in zip(value_file, values, strict=True)]
    return Catalog.from_columns(
        states=[unescape(t.state) for t in tensors] + [unescape(r.key[0]) for _, r, _ in values],
        fqns=[unescape(t.fqn) for t in tensors] + [unescape(r.key[1]) for _, r, _ in values],
        slots=[unescape(t.slot) for t in tensors] + [unescape(r.key[2]) for _, r, _ in values],
        dtypes=[t.dtype for t in tensors] + [r.dtype for _, r, _ in values],
        shapes=np.concatenate([shapes, value_boxes.lengths.reshape(len(values), -1)]) if values else shapes,
        ndims=np.concatenate([plan.ndims, np.array([len(s) for s in value_shapes], np.int64)]),
        owner=np.array([SHARED] * count + [o for _, _, o in values], np.int32),
        requires_grad=np.array([t.requires_grad for t in tensors] + [False] * len(values), bool),
        devices=[t.device for t in tensors] + ["cpu"] * len(values),
        boxes=boxes,
        file=np.concatenate([plan.file, np.array(value_file, np.int64)]).astype(np.int32),
        byte_offset=np.concatenate([offsets, np.array(value_offsets, np.int64)]),
        byte_length=np.concatenate([plan.nbytes, np.array([r.nbytes for _, r, _ in values], np.int64)]),
        files=files,
        sums=sums,
        aliases={
            unescape(state): {unescape(alias): unescape(fqn) for alias, fqn in names.items()}
            for state, names in plan.aliases.items()
        },
        info=info,
    )
