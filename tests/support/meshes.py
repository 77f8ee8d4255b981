"""Tables and catalogs of worlds whose ranks lie in a mesh, as DTensor cuts tensors, without the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.planning.local_table import LocalTable, describe, factored
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.checksums import block_bytes, block_count
from bytecheckpoint.representation.names import new_generation, storage_file_name
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.commit import build_catalog
from bytecheckpoint.saving.messages import FileRecord, WriteReport


class Cut(NamedTuple):
    """A tensor, and how a mesh cuts it.

    Attributes:
        key: state, FQN and slot.
        dtype: name of its dtype.
        shape: global shape.
        cuts: for each dimension of the tensor the dimensions of the mesh that cut it, one after the other. Ranks that
            differ in other dimensions of the mesh hold copies.
        only: place along the last dimension of the mesh, such as a stage of a pipeline, where alone the tensor is; -1: all.
        frozen: True for a parameter that is not trained.
    """

    key: tuple[str, str, str]
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    only: int = -1
    frozen: bool = False


def mesh_tables(mesh: Sequence[int], tensors: Sequence[Cut]) -> list[LocalTable]:
    """Return the tables that all ranks of a mesh send."""
    found = []
    for place in itertools.product(*map(range, mesh)):
        shards = [_shard(cut, mesh, place) for cut in tensors if cut.only in (-1, place[-1])]
        found.append(factored(describe(shards, incremental=True)))
    return found


def _shard(cut: Cut, mesh: Sequence[int], place: Sequence[int]) -> LiveShard:
    offsets, lengths = [], []
    for extent, along in zip(cut.shape, cut.cuts, strict=True):
        begin, end = 0, extent
        for axis in along:
            chunk = -(-(end - begin) // mesh[axis])
            begin, end = min(begin + chunk * place[axis], end), min(begin + chunk * (place[axis] + 1), end)
        offsets.append(begin)
        lengths.append(end - begin)
    data = torch.empty(lengths, dtype=getattr(torch, cut.dtype), device="meta")
    box = (tuple(offsets), tuple(lengths))
    return LiveShard(TensorKey(*cut.key), cut.dtype, cut.shape, *box, data, frozen=cut.frozen)


def catalog_of_plan(plan: SavePlan) -> Catalog:
    """Return the catalog of a plan, as a save makes it of its ranks' reports, with random checksums."""
    random = np.random.default_rng(0)
    size = np.zeros(len(plan.file_rank), np.int64)
    np.add.at(size, plan.file, plan.nbytes)
    if plan.tiles is not None:
        np.add.at(size, plan.tiles.tilings.file, plan.tiles.tilings.byte_length)
    generation = new_generation("test", 0)
    files: dict[int, list[FileRecord]] = {rank: [] for rank in plan.file_rank.tolist()}
    columns = (plan.file_state, plan.file_rank.tolist(), plan.file_part.tolist(), size.tolist())
    for state, rank, part, data in zip(*columns, strict=True):
        name, block, start = storage_file_name(state, rank, generation, part), block_bytes(data), 4096 * (1 + rank % 2)
        sums = random.integers(0, 1 << 63, block_count(data, block), np.uint64).tobytes()
        files[rank].append(FileRecord(name, state, part, False, start + data, start, rank, block, (sums, b"")))
    reports = {rank: WriteReport("", "", of_rank, []) for rank, of_rank in files.items()}
    return build_catalog(plan, reports, generation, {"world_size": max(files, default=0) + 1})
