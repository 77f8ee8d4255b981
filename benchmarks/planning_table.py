"""Measure catalogs and plans as ranks grow: `python -m benchmarks.planning_table [--jobs a b c d] [--ranks 1000 ...]`.

One row per job and number of ranks, in two processes of their own, so that peak memory is that of the step: the coordinator
of a save (plan all ranks' tables, make and encode the catalog), and one rank that loads at another layout (read the parts
of the catalog that it needs, plan its reads). No tensor bytes, no messages, one core, the catalog in a folder's page cache.
At the end, seconds are fitted as a power of the ranks for each job that was measured at several sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

import bytecheckpoint
from benchmarks.planning_saves import fsdp_file
from bytecheckpoint.engine.catalogs import CatalogReader
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.planning.local_table import LocalTable, TensorRecord, describe, factored
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.planning.read_plan import groups_to_read, plan_reads, stored_rows
from bytecheckpoint.planning.save_plan import plan_save
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.checksums import block_bytes, block_count
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.names import CATALOG_NAME, new_generation, storage_file_name
from bytecheckpoint.representation.string_column import StringColumn
from bytecheckpoint.saving.file_layout import FileOrigin, lay_out_rows
from bytecheckpoint.storage import resolve

T = TypeVar("T")

_GENERATION = new_generation("bench", 1)
_STATES = ("", "exp_avg", "exp_avg_sq", "master")  # the first is the parameter
_PER_MACHINE = 8
_HEADER = 400  # bytes of a storage file's header for each of its entries, about


class Layout(NamedTuple):
    """A job at one layout.

    Attributes:
        world: number of ranks.
        names: (kind, fqn, slot, dtype) of each tensor.
        shapes: shape of each tensor, int64 [t, 2].
        rows: returns the boxes of one rank, numbered by tensor.
    """

    world: int
    names: list[tuple[str, str, str, str]]
    shapes: Int64s
    rows: Callable[[int], BoxTable]


def _states_of(parameters: list[tuple[str, tuple[int, int]]], states: int, dtype: str) -> tuple[Any, Int64s]:
    """Name the parameters, and after them each of their states; return names and shapes."""
    names = [("model", name, "", dtype) for name, _ in parameters]
    for slot in _STATES[1:states]:
        names += [("optimizer", name, slot, "float32") for name, _ in parameters]
    return names, np.tile(np.array([shape for _, shape in parameters], np.int64), (states, 1))


def fsdp(world: int, tensors: int = 1000, rows: int = 30_000) -> Layout:
    """Return FSDP2's layout of float32 matrices with two states each, all sharded evenly along dimension 0."""
    names, shapes = _states_of([(f"layers.{i}.weight", (rows, 128)) for i in range(tensors)], 3, "float32")
    share = -(-rows // world)

    def of_rank(rank: int) -> BoxTable:
        begin = min(rank * share, rows)
        count = len(names) if begin < rows else 0
        offsets, lengths = np.zeros((count, 2), np.int64), np.full((count, 2), 128, np.int64)
        offsets[:, 0], lengths[:, 0] = begin, min(begin + share, rows) - begin
        return BoxTable(np.arange(count), offsets, lengths)

    return Layout(world, names, shapes, of_rank)


def mesh(tp: int, fsdp_ranks: int, replicas: int, tensors: int = 1000) -> Layout:
    """Return FSDP2 with tensor parallelism and Adam, on a mesh of replicas x FSDP x TP ranks.

    A third of the matrices is cut along rows by both, a third along columns by TP; the norms only by FSDP. Each parameter
    has two states like it and a step, which all ranks hold.
    """
    kinds = np.arange(tensors) % 3
    size = np.where(kinds[:, None] == 2, [fsdp_ranks * 4, 1], [fsdp_ranks * tp * 4, 64 * tp]).astype(np.int64)
    names, shapes = _states_of([(f"layers.{i}.weight", (a, b)) for i, (a, b) in enumerate(size.tolist())], 3, "float32")
    names += [("optimizer", name, "step", "float32") for _, name, *_ in names[:tensors]]
    shapes = np.concatenate([shapes, np.ones((tensors, 2), np.int64)])

    def of_rank(rank: int) -> BoxTable:
        f, t = rank // tp % fsdp_ranks, rank % tp
        grid = np.stack([np.where(kinds == 0, fsdp_ranks * tp, fsdp_ranks), np.where(kinds == 1, tp, 1)], axis=1)
        place = np.stack([np.where(kinds == 0, t * fsdp_ranks + f, f), np.where(kinds == 1, t, 0)], axis=1)
        offsets, lengths = (np.tile(column, (3, 1)) for column in (place * (size // grid), size // grid))
        steps = np.zeros((tensors, 2), np.int64)
        boxes = np.concatenate([offsets, steps]), np.concatenate([lengths, steps + 1])
        return BoxTable(np.arange(len(names)), *boxes)

    return Layout(replicas * fsdp_ranks * tp, names, shapes, of_rank)


class Block(NamedTuple):
    """Parameters that one stage holds: name, shape, and the dimension that its model parallel ranks cut, -1 for none."""

    name: str
    shape: tuple[int, int]
    cut: int


def flat_optimizer(stages: list[list[Block]], tp: int, dp: int) -> Layout:
    """Return a layout with a flat, distributed optimizer: stages x `dp` x `tp` ranks, the weights replicated over `dp`.

    Three float32 states of all of a rank's parameters are joined and cut evenly over `dp`, anywhere (ZeRO-1).
    """
    blocks = [block for stage in stages for block in stage]
    names, shapes = _states_of([(b.name, b.shape) for b in blocks], 4, "bfloat16")
    first = np.cumsum([0, *map(len, stages)])
    known: dict[tuple[int, int], tuple[Int64s, Int64s, Int64s]] = {}

    def local(stage: int, t: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return number, offsets and lengths of the parameters of one stage on model parallel rank `t`."""
        if (stage, t) not in known:
            size = np.array([b.shape for b in stages[stage]], np.int64)
            offset, cut = np.zeros_like(size), np.array([b.cut for b in stages[stage]])
            of = np.flatnonzero(cut >= 0)
            size[of, cut[of]] //= tp
            offset[of, cut[of]] = t * size[of, cut[of]]
            known[stage, t] = np.arange(first[stage], first[stage + 1]), offset, size
        return known[stage, t]

    def of_rank(rank: int) -> BoxTable:
        stage, replica, t = rank // (dp * tp), rank // tp % dp, rank % tp
        number, offset, size = local(stage, t)
        ends = np.cumsum(size.prod(axis=1))
        begins = ends - size.prod(axis=1)
        low, high = (np.clip(ends[-1] * r // dp, begins, ends) - begins for r in (replica, replica + 1))
        held = np.flatnonzero(low < high)
        flat = flat_ranges_to_boxes(size[held], low[held], high[held])
        source = held[flat.source]
        states = [
            BoxTable(number[source] + s * len(blocks), offset[source] + flat.offsets, flat.lengths) for s in (1, 2, 3)
        ]
        return BoxTable.concat([BoxTable(number, offset, size), *states])

    return Layout(len(stages) * dp * tp, names, shapes, of_rank)


def dense(tp: int, dp: int, pp: int, *, layers: int, hidden: int, ffn: int) -> Layout:
    """Return a dense transformer under tensor, data and pipeline parallelism."""
    parts = [("q", hidden, hidden, 0), ("k", 1024, hidden, 0), ("v", 1024, hidden, 0), ("o", hidden, hidden, 1)]
    parts += [("gate", ffn, hidden, 0), ("up", ffn, hidden, 0), ("down", hidden, ffn, 1), ("norm", hidden, 1, -1)]
    layer = [[Block(f"layers.{n}.{name}.weight", (a, b), cut) for name, a, b, cut in parts] for n in range(layers)]
    stages = [[*chain.from_iterable(layer[layers * s // pp : layers * (s + 1) // pp])] for s in range(pp)]
    stages[0].append(Block("embedding.weight", (128256, hidden), 0))
    stages[-1].append(Block("head.weight", (128256, hidden), 0))
    return flat_optimizer(stages, tp, dp)


def experts(ep: int, dp: int, pp: int, *, layers: int = 58, count: int = 256) -> Layout:
    """Return a mixture of experts: each of `pp` x `ep` groups of `dp` ranks holds the same experts of the same layers."""
    stages = []
    for s in range(pp):
        of_stage = range(layers * s // pp, layers * (s + 1) // pp)
        for e in range(ep):
            numbers = [(n, x) for n in of_stage for x in range(count * e // ep, count * (e + 1) // ep)]
            stages.append(
                [
                    Block(f"layers.{n}.experts.{x}.{name}.weight", shape, -1)
                    for n, x in numbers
                    for name, shape in (("gate", (2048, 7168)), ("up", (2048, 7168)), ("down", (7168, 2048)))
                ]
            )
    return flat_optimizer(stages, 1, dp)


def layouts(job: str, ranks: int) -> tuple[str, Layout, Layout]:
    """Return what a job is, its layout at a number of ranks, and the layout that loads."""
    if job == "a":
        dp, size = ranks // 128, {"layers": 126, "hidden": 16384, "ffn": 53248}
        return f"405B, TP 8 x DP {dp} x PP 16", dense(8, dp, 16, **size), dense(8, dp, 8, **size)
    if job == "b":
        dp, size = ranks // 32, {"layers": 80, "hidden": 8192, "ffn": 28672}
        return f"70B, TP 8 x DP {dp} x PP 4", dense(8, dp, 4, **size), dense(4, dp, 8, **size)
    if job == "c":
        return "FSDP2, 1,000 tensors x 3", fsdp(ranks), fsdp(ranks * 3 // 4)
    if job == "e":
        return f"TP 8 x FSDP2 {ranks // 8}, 1,000 x 4", mesh(8, ranks // 8, 1), mesh(4, ranks // 8, 1)
    if job == "f":
        return f"TP 8 x FSDP2 {ranks // 80} x 10 replicas, 1,000 x 4", mesh(8, ranks // 80, 10), mesh(8, ranks // 80, 5)
    dp = ranks // 512
    return f"256 experts, EP 64 x DP {dp} x PP 8", experts(64, dp, 8), experts(32, dp, 8)


SIZES = {"a": [8960], "b": [2400, 4800], "c": [1000, 2500, 5000, 10000], "d": [2048], "e": [10000], "f": [10000]}


def tables(layout: Layout) -> list[LocalTable]:
    """Return what all ranks send to the coordinator. Ranks share the columns that they have in common, as there."""
    records = [TensorRecord(*name, True, "cuda", ()) for name in layout.names]
    known: dict[bytes, bytes] = {}
    found = []
    for rank in range(layout.world):
        boxes = layout.rows(rank)
        key = boxes.tensor.tobytes()
        if key not in known:
            known[key] = msgspec.msgpack.encode([records[t] for t in boxes.tensor.tolist()])
        columns = [layout.shapes[boxes.tensor], boxes.offsets, boxes.lengths]
        numbers = np.concatenate(columns, axis=1).tobytes()
        table = factored(LocalTable((known[key],), np.full(len(boxes), 2, np.int32).tobytes(), numbers))
        alike = {
            name: known.setdefault(data, data) for name in ("ndims", "boxes", "axes") if (data := getattr(table, name))
        }
        found.append(msgspec.structs.replace(table, **alike))
    return found


def catalog_of(plan: SavePlan) -> Catalog:
    """Return the catalog of a save with random checksums."""
    random = np.random.default_rng(0)
    size = np.zeros(len(plan.file_rank), np.int64)
    entries = np.bincount(plan.file, minlength=len(size))
    np.add.at(size, plan.file, plan.nbytes)
    if plan.tiles is not None:
        np.add.at(size, plan.tiles.tilings.file, plan.tiles.tilings.byte_length)
        np.add.at(entries, plan.tiles.tilings.file, plan.tiles.tilings.counts())
    header = -(-_HEADER * entries // 4096) * 4096
    files, sums = [], []
    for rank, state, part, data, start in zip(
        plan.file_rank.tolist(), plan.file_state, plan.file_part.tolist(), size.tolist(), header.tolist(), strict=True
    ):
        block = block_bytes(data)
        name = storage_file_name(state, rank, _GENERATION, part)
        files.append(StorageFile(name, state, rank, start + data, start, rank, block, _GENERATION))
        sums.append(np.frombuffer(random.bytes(8 * block_count(data, block)), np.uint64))
    return Catalog.build(
        TensorTable.of(
            states=[t.state for t in plan.tensors],
            fqns=[t.fqn for t in plan.tensors],
            slots=[t.slot for t in plan.tensors],
            dtypes=[t.dtype for t in plan.tensors],
            shapes=plan.shapes,
            ndims=plan.ndims,
            owner=np.full(len(plan.tensors), -1, np.int32),
            requires_grad=np.ones(len(plan.tensors), bool),
        ),
        boxes=plan.boxes,
        file=plan.file.astype(np.int32),
        byte_offset=plan.offset + header[plan.file],
        byte_length=plan.nbytes,
        files=files,
        sums=sums,
        info={"world_size": int(plan.file_rank.max()) + 1},
    ).with_tilings(None if plan.tiles is None else plan.tiles.tilings.shifted(header))


def timed(figures: dict[str, float], label: str, work: Callable[[], T]) -> T:
    """Run `work`; note its processor seconds."""
    begin = time.process_time()
    result = work()
    figures[label] = figures.get(label, 0.0) + time.process_time() - begin
    return result


def save(job: str, ranks: int, folder: Path) -> dict[str, float]:
    """Plan a save and write its catalog; return the figures of the coordinator."""
    _, layout, _ = layouts(job, ranks)
    figures: dict[str, float] = {}
    sent = tables(layout)
    catalog = planned(figures, sent)
    figures["rows"] = len(catalog.boxes) + (0 if catalog.tilings is None else int(catalog.tilings.counts().sum()))
    figures["plan bytes"] = 8 * figures["rows"] / layout.world
    data = timed(figures, "catalog", lambda: encode(catalog))
    figures["catalog bytes"] = len(data)
    (folder / CATALOG_NAME).write_bytes(data)
    return figures


def planned(figures: dict[str, float], sent: list[LocalTable]) -> Catalog:
    """Make the catalog from all ranks' tables, in a function of its own, which frees the plan at its end."""
    plan = timed(figures, "plan", lambda: plan_save(sent))
    sent.clear()
    return timed(figures, "catalog", lambda: catalog_of(plan))


def unplanned(ranks: int, folder: Path) -> dict[str, float]:
    """Write the catalog of job c without a plan, which takes more than 8 GiB for 10,000 ranks."""
    layout = fsdp(ranks)
    ends = np.minimum(np.arange(1, ranks + 1) * -(-layout.shapes[0, 0] // ranks), layout.shapes[0, 0])
    begins = np.concatenate([[0], ends[:-1]])
    tensors = len(layout.names)
    offsets, lengths = np.zeros((tensors * ranks, 2), np.int64), np.full((tensors * ranks, 2), 128, np.int64)
    offsets[:, 0], lengths[:, 0] = np.tile(begins, tensors), np.tile(ends - begins, tensors)
    catalog = fsdp_file(BoxTable(np.repeat(np.arange(tensors), ranks), offsets, lengths), tensors, ranks)
    states, fqns, slots, _ = map(StringColumn.of, zip(*layout.names, strict=True))
    catalog = replace(catalog, state=states, fqn=fqns, slot=slots)
    figures: dict[str, float] = {"rows": len(catalog.boxes), "plan": 0.0, "plan bytes": 8 * tensors}
    data = timed(figures, "catalog", lambda: encode(catalog))
    (folder / CATALOG_NAME).write_bytes(data)
    return {**figures, "catalog bytes": len(data)}


def load(job: str, ranks: int, folder: Path) -> dict[str, float]:
    """Plan what one rank of the other layout reads; return its figures, and all ranks' requests to an object store."""
    _, _, layout = layouts(job, ranks)
    rank = layout.world // 3 // _PER_MACHINE * _PER_MACHINE
    boxes = layout.rows(rank)
    storage = resolve(folder)
    figures: dict[str, float] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # As a load does: rank 0 reads the head (index, plain values), each rank decodes it, and reads the groups it needs.
    head = CatalogReader(storage).head()
    figures["head bytes"] = len(head.whole) + sum(map(len, head.pieces.values()))
    reader = timed(figures, "read", lambda: CatalogReader(storage, head))
    catalog, groups = reader.catalog, reader.groups
    wanted = boxes_in(catalog, layout, boxes)
    figures["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    figures["groups"] = figures["groups read"] = 1
    figures["requests"] = 1 + max(len(head.pieces), 1)  # rank 0: the length, then the head
    if groups is not None:
        numbers = groups_to_read(groups, wanted)
        catalog = timed(figures, "read", lambda: reader.rows(numbers, wanted=wanted))
        figures["groups"], figures["groups read"] = len(np.unique(groups.group)), len(numbers)
        figures["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        machine = range(rank, min(rank + _PER_MACHINE, layout.world))
        theirs = [groups_to_read(groups, boxes_in(reader.catalog, layout, layout.rows(r))) for r in machine]
        each = np.setdiff1d(np.concatenate(theirs), groups.value_groups)
        figures["requests"] += len(each) * -(-layout.world // _PER_MACHINE)
    everywhere = np.ones(len(wanted), bool)
    plan = timed(figures, "plan", lambda: plan_reads(stored_rows(catalog), wanted, everywhere, 8 << 20))
    assert not plan.missing.any()
    figures["rows read"] = len(catalog.boxes)
    return figures


def boxes_in(catalog: Catalog, layout: Layout, boxes: BoxTable) -> BoxTable:
    """Return boxes that refer to tensors by their number in the catalog."""
    place = {key: number for number, key in enumerate(catalog.keys())}
    numbers = [place[tuple(layout.names[t][:3])] for t in boxes.tensor.tolist()]  # type: ignore[index]
    return BoxTable(np.array(numbers, np.int64), boxes.offsets, boxes.lengths)


def measure(step: str, job: str, ranks: int, folder: str) -> dict[str, float]:
    """Run one step in a process of its own; return its figures and its peak memory in bytes."""
    command = [sys.executable, "-m", "benchmarks.planning_table", "--step", step, job, str(ranks), folder]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


class Fragments:
    """A tensor of `count` rows that lie in memory in the opposite order: as many flat ranges, none beside another.

    With `table` they are listed as one table, else as a tensor for each, which torch takes most of the time to make.
    """

    def __init__(self, count: int, *, table: bool) -> None:
        self.memory = torch.zeros(12 * count)
        self._table = table

    def __bytecheckpoint_shards__(self) -> Iterator[tuple[tuple[int, int], Any, torch.Tensor]]:
        count = len(self.memory) // 12
        if self._table:
            first = np.arange(count) * 12
            yield (count, 12), np.stack([first, first[::-1], np.full(count, 12)], axis=1), self.memory
            return
        for row in range(count):
            place = 12 * (count - 1 - row)
            yield (count, 12), 12 * row, self.memory[place : place + 12]


def fragments(count: int, *, table: bool) -> dict[str, float]:
    """Save and load so many fragments by the public calls; return the processor seconds, and those of the plan alone."""
    figures: dict[str, float] = {}
    saved, loaded = Fragments(count, table=table), Fragments(count, table=table)
    torch.arange(12.0 * count, out=saved.memory)
    shards = timed(figures, "views", lambda: NativeFramework().capture({"model": {"w": saved}})[0].shards)
    plan = timed(figures, "plan", lambda: plan_save([describe(shards)]))
    origin = FileOrigin(0, 1, _GENERATION)
    timed(figures, "headers of the files", lambda: lay_out_rows(shards, plan.locals_of(0), origin))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step"
        timed(figures, "whole save", lambda: bytecheckpoint.save(path, {"model": {"w": saved}}))
        timed(figures, "whole load", lambda: bytecheckpoint.load(path, {"model": {"w": loaded}}))
    assert torch.equal(saved.memory, loaded.memory)
    return figures


def fitted(job: str, points: NDArray[np.float64], plot: str) -> str:
    """Fit seconds as a power of the ranks; plot them to a file if one is named.

    Args:
        job: its letter.
        points: (ranks, seconds of the save, seconds of a rank that loads), [n, 3].
        plot: name of the file, or "".
    """
    logs = np.log(np.maximum(points, 1e-3))
    powers = [np.polyfit(logs[:, 0], logs[:, k], 1) for k in (1, 2)]
    if plot:
        from matplotlib import pyplot

        for k, label in ((1, "save: coordinator"), (2, "load: one rank")):
            (line,) = pyplot.loglog(points[:, 0], points[:, k], "o", label=f"{job}, {label}")
            fit = np.exp(np.polyval(powers[k - 1], logs[:, 0]))
            pyplot.loglog(points[:, 0], fit, "--", color=line.get_color())
        pyplot.xlabel("ranks")
        pyplot.ylabel("seconds")
        pyplot.legend()
        pyplot.savefig(plot)
    return f"{job}: a save costs ranks ** {powers[0][0]:.2f}, a load ranks ** {powers[1][0]:.2f} on each rank"


def main() -> None:
    """Measure, and print a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[], help="numbers of ranks in place of a job's own")
    parser.add_argument("--fragments", type=int, help="only save and load a tensor in so many fragments")
    parser.add_argument("--plot", default="", help="a file for a plot of the jobs that are measured at several sizes")
    parser.add_argument("--unplanned", action="store_true", help="job c without the plan of the save, in less memory")
    parser.add_argument("--step", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        step, job, ranks, folder = arguments.step
        if step == "unplanned":
            figures = unplanned(int(ranks), Path(folder))
        else:
            figures = {"save": save, "load": load}[step](job, int(ranks), Path(folder))
        print(json.dumps({**figures, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))
        return
    if arguments.fragments:
        for table in (False, True):
            found = fragments(arguments.fragments, table=table)
            form = "in a table" if table else "as tensors"
            print(f"{arguments.fragments:,} fragments {form}: " + ", ".join(f"{k} {v:.2f} s" for k, v in found.items()))
        return
    print(
        "| job | ranks | rows | save: plan, catalog, peak | catalog | plan per rank | one rank loads: read, plan, memory | "
        "sent to all | groups of one rank | requests to an object store |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for job in arguments.jobs:
        points = []
        for ranks in arguments.ranks or SIZES[job]:
            with tempfile.TemporaryDirectory() as folder:
                step = "unplanned" if arguments.unplanned and job == "c" else "save"
                saved, loaded = measure(step, job, ranks, folder), measure("load", job, ranks, folder)
            points.append((ranks, saved["plan"] + saved["catalog"], loaded["read"] + loaded["plan"]))
            print(
                f"| {job}: {layouts(job, ranks)[0]} | {ranks:,} | {saved['rows']:,.0f} | {saved['plan']:.2f} s, "
                f"{saved['catalog']:.2f} s, {saved['peak'] / 2**30:.2f} GiB | {saved['catalog bytes'] / 2**20:.1f} MiB | "
                f"{saved['plan bytes'] / 1024:.1f} KiB | {loaded['read']:.2f} s, {loaded['plan']:.2f} s, "
                f"{loaded['memory'] / 2**10:.0f} MiB | {loaded['head bytes'] / 2**20:.1f} MiB | "
                f"{loaded['groups read']:.0f} of {loaded['groups']:.0f} | {loaded['requests']:,.0f} |",
                flush=True,
            )
        if len(points) > 2:
            print("\n" + fitted(job, np.array(points), arguments.plot) + "\n")


if __name__ == "__main__":
    main()
