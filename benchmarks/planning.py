"""Planning at scale: `python -m benchmarks.planning [--rows 30000000]`, one core, no I/O.

Prints seconds for three jobs: many small replicated tensors; a 405B model saved by 8,960 ranks (first the columns alone,
then the whole save, without the tensors' bytes but with all messages and the catalog); and a fully sharded checkpoint of
30 million rows (the save plan, the catalog encoded and decoded, and plans of loads at other world sizes).
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from benchmarks.planning_saves import Job, encoded, fsdp_file, fsdp_tables, measure_load, play_save
from bytecheckpoint.planning.balance import assign
from bytecheckpoint.planning.coverage import missing_volume, overlapping
from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.planning.replicas import group_equal
from bytecheckpoint.planning.save_plan import plan_save as plan_tables
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.shards import TensorKey

T = TypeVar("T")

# One layer of a 405B model: (rows, columns, dimension that tensor parallelism shards, -1 for none).
_HIDDEN, _FFN, _KV, _VOCABULARY = 16384, 53248, 1024, 128256
_LAYER = [
    (_HIDDEN, _HIDDEN, 0),
    (_KV, _HIDDEN, 0),
    (_KV, _HIDDEN, 0),
    (_HIDDEN, _HIDDEN, 1),
    (_FFN, _HIDDEN, 0),
    (_FFN, _HIDDEN, 0),
    (_HIDDEN, _FFN, 1),
    (_HIDDEN, 1, -1),
    (_HIDDEN, 1, -1),
]
_NAMES = [
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.o",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "norm1",
    "norm2",
]
_STATES = ("master", "exp_avg", "exp_avg_sq")


class Rows(NamedTuple):
    """All shards of a job, rank after rank: `rank[i]` holds row i, of `element[i]` bytes per element."""

    boxes: BoxTable
    rank: Int64s
    element: Int64s


class SavePlan(NamedTuple):
    """Group of each row, writer of each group, groups in file order."""

    group: Int64s
    writer: Int64s
    order: Int64s


def dense_405b(tp: int = 8, dp: int = 70, pp: int = 16, layers: int = 126) -> Rows:
    """Return a model replicated over `dp`, with three optimizer states partitioned flat over `dp` (ZeRO-1)."""
    tables: list[BoxTable] = []
    ranks: list[Int64s] = []
    elements: list[Int64s] = []
    per_layer, states = len(_LAYER), len(_STATES)
    tensors = (layers * per_layer + 2) * (states + 1)
    for stage in range(pp):
        own_layers = np.arange(layers * stage // pp, layers * (stage + 1) // pp)
        specs = np.array(_LAYER * len(own_layers), np.int64)
        number = (own_layers[:, None] * per_layer + np.arange(per_layer)).ravel()
        if stage in (0, pp - 1):  # embedding, head
            specs = np.concatenate([specs, [[_VOCABULARY, _HIDDEN, 0]]])
            number = np.append(number, layers * per_layer + (stage > 0))
        shape, cut = specs[:, :2], specs[:, 2]
        each = np.arange(len(number))
        for t in range(tp):
            local = shape.copy()
            local[each[cut >= 0], cut[cut >= 0]] //= tp
            offset = np.zeros_like(local)
            offset[each[cut >= 0], cut[cut >= 0]] = t * local[each[cut >= 0], cut[cut >= 0]]
            replicas = (stage * dp + np.arange(dp)) * tp + t
            tables.append(BoxTable(np.tile(number, dp), np.tile(offset, (dp, 1)), np.tile(local, (dp, 1))))
            ranks.append(np.repeat(replicas, len(number)))
            elements.append(np.full(len(ranks[-1]), 2))
            # One flat buffer of all parameters, partitioned evenly over the replicas.
            ends = np.cumsum(local.prod(axis=1))
            begins = ends - local.prod(axis=1)
            bounds = ends[-1] * np.arange(dp + 1) // dp
            start = np.clip(bounds[:-1, None], begins, ends) - begins
            stop = np.clip(bounds[1:, None], begins, ends) - begins
            replica, parameter = np.nonzero(start < stop)
            boxes = flat_ranges_to_boxes(local[parameter], start[replica, parameter], stop[replica, parameter])
            source = parameter[boxes.source]
            tensor = (1 + np.arange(states))[:, None] * (tensors // (states + 1)) + number[source]
            corners = np.tile(offset[source] + boxes.offsets, (states, 1))
            tables.append(BoxTable(tensor.ravel(), corners, np.tile(boxes.lengths, (states, 1))))
            ranks.append(np.tile(replicas[replica[boxes.source]], states))
            elements.append(np.full(len(ranks[-1]), 4))
    rank = np.concatenate(ranks)
    # As a coordinator gathers them: rank after rank.
    order = np.argsort(rank, kind="stable")
    return Rows(BoxTable.concat(tables).take(order), rank[order], np.concatenate(elements)[order])


def dense_job(rows: Rows, layers: int = 126) -> Job:
    """Return the job of `dense_405b`, with tensor names."""
    parameters = [
        (f"layers.{n}.{name}.weight", size) for n in range(layers) for name, size in zip(_NAMES, _LAYER, strict=True)
    ]
    parameters += [("embedding.weight", (_VOCABULARY, _HIDDEN, 0)), ("head.weight", (_VOCABULARY, _HIDDEN, 0))]
    tensors = [(TensorKey("model", fqn), "bfloat16", size[:2]) for fqn, size in parameters]
    tensors += [
        (TensorKey("optimizer", fqn, state), "float32", size[:2]) for state in _STATES for fqn, size in parameters
    ]
    return Job.of_columns(rows.boxes, rows.rank, tensors, int(rows.rank.max()) + 1)


def small_replicated(count: int = 50_000, world_size: int = 8) -> Rows:
    """Return DDP's rows: `count` tensors of 1 to 4 KiB on every rank."""
    size = np.random.default_rng(0).integers(256, 1025, count)
    tensor = np.tile(np.arange(count), world_size)
    boxes = BoxTable(tensor, np.zeros((len(tensor), 1), np.int64), size[tensor][:, None])
    return Rows(boxes, np.repeat(np.arange(world_size), count), np.full(len(tensor), 4))


def plan_save(rows: Rows, world_size: int) -> SavePlan:
    """Deduplicate and balance the rows, and put each writer's boxes in order."""
    group = group_equal(rows.boxes)
    nbytes = np.zeros(int(group.max()) + 1, np.int64)
    nbytes[group] = rows.boxes.volumes() * rows.element
    writer = assign(group, rows.rank, nbytes, world_size)
    return SavePlan(group, writer, np.argsort(writer * len(writer) + np.arange(len(writer))))


def fsdp_catalog(tensors: int, shards: int, width: int = 4096, seed: int = 0, by_rank: bool = False) -> BoxTable:
    """Return `tensors` matrices, each sharded unevenly along dimension 0 into `shards` boxes, by tensor or by rank."""
    lengths = np.random.default_rng(seed).integers(1, 200, (tensors, shards), dtype=np.int64)
    # The last shard brings the tensor to its full length.
    lengths[:, -1] = 0
    lengths[:, -1] = 220 * shards - lengths.sum(axis=1)
    starts = np.cumsum(lengths, axis=1) - lengths
    tensor = np.repeat(np.arange(tensors), shards).reshape(tensors, shards)
    if by_rank:
        lengths, starts, tensor = lengths.T, starts.T, tensor.T
    offsets = np.zeros((tensors * shards, 2), np.int64)
    extents = np.full((tensors * shards, 2), width, np.int64)
    offsets[:, 0], extents[:, 0] = starts.ravel(), lengths.ravel()
    return BoxTable(tensor.ravel().copy(), offsets, extents)


def wanted_by(ranks: Int64s, world_size: int, tensors: int, rows: int, width: int = 4096) -> BoxTable:
    """Return what `ranks` of `world_size` want of tensors of `rows` rows, sharded evenly along dimension 0."""
    share = -(-rows // world_size)
    start = np.minimum(ranks * share, rows)
    length = np.minimum(start + share, rows) - start
    tensor = np.tile(np.arange(tensors), len(ranks))
    offsets = np.zeros((len(tensor), 2), np.int64)
    extents = np.full((len(tensor), 2), width, np.int64)
    offsets[:, 0], extents[:, 0] = np.repeat(start, tensors), np.repeat(length, tensors)
    return BoxTable(tensor, offsets, extents)


def report(label: str, wall: float, processor: float) -> None:
    """Print seconds of wall and processor time, and the process's peak memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{label:<70} {wall:8.3f} s  {processor:8.3f} s cpu  peak {peak:5.2f} GiB", flush=True)


def timed(label: str, work: Callable[[], T]) -> T:
    """Run `work`, and report its time."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    report(label, time.perf_counter() - wall, time.process_time() - processor)
    return result


def bench_small() -> None:
    """Plan a save of many small replicated tensors."""
    rows = small_replicated()
    plan = timed(f"50k small tensors on 8 ranks, {len(rows.rank):,} rows: save plan", lambda: plan_save(rows, 8))
    sizes = np.bincount(rows.boxes.tensor, rows.boxes.volumes() * rows.element).astype(np.int64) // 8
    timed("  of which assign", lambda: assign(plan.group, rows.rank, sizes, 8))


def bench_dense() -> None:
    """Plan a save of a 405B model on 8,960 ranks."""
    rows = dense_405b()
    world = int(rows.rank.max()) + 1
    plan = timed(f"405B on {world:,} ranks, {len(rows.rank):,} rows: save plan", lambda: plan_save(rows, world))
    boxes = rows.boxes.take(np.unique(plan.group, return_index=True)[1])
    optimizer = int((boxes.tensor >= int(boxes.tensor.max() + 1) // 4).sum())
    print(f"  {len(boxes):,} boxes written, {optimizer:,} of them optimizer state")
    timed("  proof that no boxes overlap", lambda: overlapping(boxes))
    bench_save(dense_job(rows), "405B")


def bench_save(job: Job, name: str) -> None:
    """Play one save with its messages and its catalog."""
    world = len(job.shards)
    print(f"{name} saved by {world:,} ranks")
    ranks, lines = play_save(job)
    for line in lines:
        report(f"  {line.label}", line.wall, line.core)
    coordinator = [line for line in lines if line.label.startswith("coordinator")]
    report("  coordinator, in all", sum(line.wall for line in coordinator), sum(line.core for line in coordinator))
    print(f"    to the coordinator {ranks.bytes_in:,} bytes, from it {ranks.bytes_out:,}")
    catalog = timed("  one rank: decode the catalog", lambda: decode(ranks.catalog))
    blocks = sum(map(len, catalog.file_sums))
    print(
        f"    {len(ranks.catalog):,} bytes, {8 * blocks:,} of them sums: {catalog.count:,} tensors, {len(catalog.boxes):,} "
        f"boxes, {len(catalog.files):,} files"
    )


def bench_catalog(tensors: int, shards: int, by_rank: bool) -> None:
    """Group a fully sharded catalog for a save, and intersect it with what other world sizes want."""
    catalog = fsdp_catalog(tensors, shards, by_rank=by_rank)
    print(f"catalog of {len(catalog):,} rows, {'rank after rank' if by_rank else 'sorted by tensor'}")
    timed("  group_equal", lambda: group_equal(catalog))
    timed("  overlapping", lambda: overlapping(catalog))
    rows = 220 * shards
    one_rank = wanted_by(np.array([shards // 3]), shards // 2 + 7, tensors, rows)
    all_ranks = wanted_by(np.arange(1000), 1000, tensors, rows)
    timed("  intersect with what 1 rank wants, and coverage", lambda: load(catalog, one_rank))
    found = timed("  intersect with what 1000 ranks want, and coverage", lambda: load(catalog, all_ranks))
    print(f"    {len(found):,} pairs")


def bench_file(tensors: int, shards: int) -> None:
    """Plan a fully sharded save from all ranks' tables, encode and decode its catalog, and plan one rank's load."""
    boxes = fsdp_catalog(tensors, shards)
    print(f"checkpoint of {len(boxes):,} rows by {shards:,} ranks")
    plan_fsdp(boxes, tensors, shards)
    data = encoded(fsdp_file(boxes, tensors, shards), timed)
    measure_load(data, wanted_by(np.array([shards // 3]), shards // 2 + 7, tensors, 220 * shards), timed)


def plan_fsdp(boxes: BoxTable, tensors: int, shards: int) -> None:
    """Plan the save, in a function of its own, which frees the memory at its end."""
    tables = fsdp_tables(boxes, tensors, shards)
    plan = timed("  plan the save", lambda: plan_tables(tables))
    assert len(plan.rank) == len(boxes)


def load(catalog: BoxTable, wanted: BoxTable) -> Intersections:
    """Intersect `wanted` with the catalog, and check that nothing is missing."""
    found = intersect(catalog, wanted)
    assert not missing_volume(wanted, found).any()
    return found


def main() -> None:
    """Run all three jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=30_000_000, help="rows of the fully sharded catalog")
    shards = parser.parse_args().rows // 1000
    bench_small()
    bench_dense()
    bench_file(1000, shards)
    for by_rank in (False, True):
        bench_catalog(1000, shards, by_rank)


if __name__ == "__main__":
    main()
