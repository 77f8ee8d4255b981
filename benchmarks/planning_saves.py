"""Whole saves of thousands of ranks, without the tensors' bytes: the messages, the plan and the catalog.

The real coordinator serves ranks that one process plays in turn. Each of them describes real shards (on the meta
device), encodes its request, lays out its files from the answer and reports. The coordinator's clock stops meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.engine.save_resources import PlanCache
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.frameworks.selection import NameSelection
from bytecheckpoint.planning.local_table import LocalTable, describe, factored
from bytecheckpoint.planning.read_plan import plan_reads, stored_rows
from bytecheckpoint.planning.replicas import group_equal
from bytecheckpoint.representation import catalog_file
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.checksums import block_bytes, block_count
from bytecheckpoint.representation.names import new_generation, storage_file_name
from bytecheckpoint.representation.shards import LiveShard, TensorKey
from bytecheckpoint.saving.capture import Value
from bytecheckpoint.saving.coordinator import Coordinator
from bytecheckpoint.saving.file_layout import FileOrigin, lay_out_rows, lay_out_values
from bytecheckpoint.saving.messages import (
    CommitFacts,
    CommitResult,
    FileRecord,
    PlanRequest,
    PlanResponse,
    SaveStep,
    ValueRecord,
    WriteReport,
    decode,
    encode,
    reply_tag,
)
from bytecheckpoint.saving.messages import tag as step_tag
from bytecheckpoint.saving.request import RequestedStates, SaveRequest
from bytecheckpoint.settings import Settings

__all__ = ["Job", "Line", "Ranks", "encoded", "fsdp_file", "fsdp_tables", "measure_load", "play_save"]

T = TypeVar("T")

_GENERATION = new_generation("bench", 1)
_URL = "memory"
_RNG_BYTES = 5056  # the state of a CPU random number generator, which differs between ranks


class Line(NamedTuple):
    """One measured step."""

    label: str
    wall: float
    core: float


class Stopwatch:
    """Adds up wall and processor seconds by label: those of the current label, of none while that is ""."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._label = ""
        self._since = (0.0, 0.0)

    def switch(self, label: str) -> None:
        """Make `label` the current label."""
        now = time.perf_counter(), time.process_time()
        if self._label:
            total = self.seconds.setdefault(self._label, [0.0, 0.0])
            total[0] += now[0] - self._since[0]
            total[1] += now[1] - self._since[1]
        self._label, self._since = label, now

    def lines(self, labels: Iterable[str]) -> list[Line]:
        """Return the steps with these labels, in that order."""
        return [Line(label, *self.seconds[label]) for label in labels]


@dataclass(frozen=True)
class Job:
    """Shards and values that each rank of a job saves.

    Attributes:
        shards: the shards of each rank; ranks may share lists and shards.
        values: the values of each rank.
    """

    shards: Sequence[list[LiveShard]]
    values: Sequence[list[Value]]

    @staticmethod
    def of_columns(
        boxes: BoxTable, rank: Int64s, tensors: Sequence[tuple[TensorKey, str, tuple[int, ...]]], world_size: int
    ) -> Job:
        """Return the job with these rows, rank after rank.

        Args:
            boxes: box of each row.
            rank: holder of each row, ascending.
            tensors: key, dtype and global shape of each tensor.
            world_size: number of ranks.
        """
        group = group_equal(boxes)
        firsts = np.unique(group, return_index=True)[1].tolist()
        known = [_shard(*tensors[int(boxes.tensor[i])], boxes.offsets[i], boxes.lengths[i]) for i in firsts]
        bounds = np.searchsorted(rank, np.arange(world_size + 1)).tolist()
        groups = group.tolist()
        shards = [[known[g] for g in groups[a:b]] for a, b in pairwise(bounds)]
        return Job(shards, [_values(r, world_size) for r in range(world_size)])


def _shard(key: TensorKey, dtype: str, shape: tuple[int, ...], offsets: Int64s, lengths: Int64s) -> LiveShard:
    size = tuple(lengths.tolist())
    data = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
    return LiveShard(key, dtype, shape, tuple(offsets.tolist()), size, data, requires_grad=key.state == "model")


def _values(rank: int, world_size: int) -> list[Value]:
    """Return a rank's values: hyperparameters, equal on 560 consecutive ranks, and a random state of its own."""
    group = rank // 560 if world_size > 560 else 0
    found = []
    for state, number, nbytes, merged in (
        ("optimizer", group, 20_000, True),
        ("extra_states", rank, _RNG_BYTES, False),
    ):
        data = torch.zeros(nbytes, dtype=torch.uint8)
        digest = f"{state}{number}".encode().ljust(16)[:16]
        found.append(Value(TensorKey(state, "", VALUES_SLOT), data, "uint8", merged, digest))
    return found


@dataclass
class Ranks:
    """All ranks of a world, as its coordinator sees them: the part of `collectives.Collective` that it uses."""

    job: Job
    clock: Stopwatch = field(default_factory=Stopwatch)
    requests: list[bytes] = field(default_factory=list)
    answers: dict[int, bytes] = field(default_factory=dict)
    outcomes: list[Any] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    catalog: bytes = b""
    rank: int = 0
    world_id: str = "bench"
    url: str = _URL

    @property
    def world_size(self) -> int:
        return len(self.job.shards)

    def collect(self, ranks: Sequence[int], tag: str, *, timeout: float, cancel: Cancellation) -> list[bytes]:
        """Return the next message of each rank."""
        assert timeout > 0
        self.clock.switch("ranks")
        if tag == step_tag(1, SaveStep.FIRST):
            messages = [self._request(rank) for rank in ranks]
            after = "coordinator: read requests, plan"
        else:
            assert tag == step_tag(1, SaveStep.REPORT), tag
            messages = [self._report(rank) for rank in ranks]
            after = "coordinator: read reports, make and encode the catalog"
        self.bytes_in += sum(map(len, messages))
        self.clock.switch(after)
        return messages

    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Store what the coordinator sends to a rank."""
        self.bytes_out += len(payload)
        if tag == reply_tag(1, SaveStep.FIRST):
            self.answers[to] = payload
        else:
            self.outcomes.append(decode(payload))

    def send_each(self, tag: str, payloads: Mapping[int, bytes]) -> None:
        """Store what the coordinator sends to ranks."""
        for rank, payload in payloads.items():
            self.send(rank, tag, payload)

    def watch(self, tag: str, on_message: Callable[[bytes], None]) -> Callable[[], None]:
        """Watch nothing: no rank fails."""
        return lambda: None

    def forget(self, tag: str) -> None:
        """Do nothing: no message is kept."""

    def publish(self, name: str, data: bytes, *_: Any, **__: Any) -> None:
        """Store the catalog."""
        self.catalog = data
        self.clock.switch("coordinator: tell the end")

    def list(self) -> list[tuple[str, int]]:
        """Return the files of all ranks."""
        return [*self.written.items()]

    def delete(self, names: Iterable[str]) -> None:
        """Check that there is nothing to delete."""
        assert not [*names]

    def _record(self, value: Value, file: int = -1, offset: int = 0) -> ValueRecord:
        return ValueRecord(
            tuple(value.key), value.digest, value.dtype, (value.nbytes,), value.merged, file, offset, value.nbytes
        )

    def _request(self, rank: int) -> bytes:
        self.clock.switch("ranks: describe and encode")
        table = factored(describe(self.job.shards[rank]))
        return encode(PlanRequest(_URL, table, [self._record(v) for v in self.job.values[rank]]))

    def _report(self, rank: int) -> bytes:
        self.clock.switch("ranks: lay out files, headers but for sums")
        answer = decode(self.answers.pop(rank))
        assert isinstance(answer, PlanResponse), answer
        origin = FileOrigin(rank, self.world_size, _GENERATION)
        rows = np.frombuffer(answer.rows, np.int64)
        files, _ = lay_out_rows(self.job.shards[rank], rows, origin)
        written = [v for v in self.job.values[rank] if tuple(v.key) in answer.values]
        more, places = lay_out_values(written, origin, first=len(rows), position=0, part=0)
        where = {v.key: (len(files) + f, offset) for v, (f, offset) in zip(written, places, strict=True)}
        records = []
        random = np.random.default_rng(rank)
        for file in (*files, *more):
            header = file.header
            records.append(
                FileRecord(
                    origin.file_name(file.state, file.part, values=file.values),
                    file.state,
                    file.part,
                    file.values,
                    header.data_offset + header.data_length,
                    header.data_offset,
                    rank,
                    header.block_bytes,
                    (random.bytes(8 * header.blocks), b""),
                )
            )
        self.written |= {record.name: record.size for record in records}
        values = [self._record(v, *where.get(v.key, (-1, 0))) for v in self.job.values[rank]]
        facts = CommitFacts() if rank == 0 else None
        return encode(WriteReport(_URL, answer.plan, records, values, commit=facts))


def play_save(job: Job) -> tuple[Ranks, list[Line]]:
    """Play one save of `job` whose plan is not cached; return the seconds of the coordinator and of all ranks."""
    ranks = Ranks(job)
    storage: Any = ranks
    collective: Any = ranks
    states: Any = RequestedStates(NativeFramework(), {}, None, NameSelection())
    request = SaveRequest(storage, states, Settings(timeout=600.0))
    ranks.clock.switch("coordinator: read requests, plan")
    stop = StopSignal(collective, "save/1", Cancellation())
    with stop:
        Coordinator(collective, 1, PlanCache(1), request, stop).run()
    ranks.clock.switch("")
    failed = [outcome for outcome in ranks.outcomes if not isinstance(outcome, CommitResult)]
    assert not failed, failed[0]
    steps = [label for label in ranks.clock.seconds if label != "ranks"]
    return ranks, ranks.clock.lines(sorted(steps, key=lambda label: label.startswith("coordinator")))


def fsdp_file(boxes: BoxTable, tensors: int, shards: int) -> Catalog:
    """Return the catalog of a fully sharded bf16 save: shard i of every tensor is in the file of rank i.

    Args:
        boxes: sorted by tensor; `shards` boxes of each of `tensors` matrices.
        tensors: number of matrices.
        shards: number of ranks.
    """
    nbytes = boxes.volumes() * 2
    by_tensor = nbytes.reshape(tensors, shards)
    sizes = by_tensor.sum(axis=0)
    header = -(-400 * tensors // 4096) * 4096
    start = (np.cumsum(by_tensor, axis=0) - by_tensor).ravel() + header
    files = []
    sums = []
    random = np.random.default_rng(0)
    for rank, size in enumerate(sizes.tolist()):
        block = block_bytes(size)
        name = storage_file_name("model", rank, _GENERATION)
        files.append(StorageFile(name, "model", rank, header + size, header, rank, block, _GENERATION))
        sums.append(np.frombuffer(random.bytes(8 * block_count(size, block)), np.uint64))
    ends = (boxes.offsets + boxes.lengths)[shards - 1 :: shards]
    return Catalog.build(
        TensorTable.of(
            states=["model"] * tensors,
            fqns=[f"layers.{i}.weight" for i in range(tensors)],
            slots=[""] * tensors,
            dtypes=["bfloat16"] * tensors,
            shapes=ends,
            ndims=np.full(tensors, 2, np.int64),
            owner=np.full(tensors, -1, np.int32),
            requires_grad=np.ones(tensors, bool),
        ),
        boxes=boxes,
        file=np.tile(np.arange(shards, dtype=np.int32), tensors),
        byte_offset=start,
        byte_length=nbytes,
        files=files,
        sums=sums,
        info={"world_size": shards},
    )


def fsdp_tables(boxes: BoxTable, tensors: int, shards: int) -> list[LocalTable]:
    """Return the tables of all ranks of that job."""
    row = np.arange(tensors * shards).reshape(tensors, shards)
    ends = (boxes.offsets + boxes.lengths)[shards - 1 :: shards]
    first = [
        _shard(TensorKey("model", f"layers.{i}.weight"), "bfloat16", (1, 1), *np.ones((2, 2), np.int64))
        for i in range(tensors)
    ]
    names = describe(first)
    return [
        LocalTable(
            names.tensors,
            names.ndims,
            np.concatenate([ends, boxes.offsets[row[:, r]], boxes.lengths[row[:, r]]], axis=1).tobytes(),
        )
        for r in range(shards)
    ]


def encoded(catalog: Catalog, timed: Callable[[str, Callable[[], Any]], Any]) -> bytes:
    """Encode the catalog, in a function of its own, which frees the catalog's memory at its end."""
    data: bytes = timed("  encode the catalog", lambda: catalog_file.encode(catalog))
    blocks = sum(map(len, catalog.file_sums))
    print(
        f"    {len(data):,} bytes, {8 * blocks:,} of them sums: {catalog.count:,} tensors, {len(catalog.boxes):,} boxes, "
        f"{len(catalog.files):,} files"
    )
    return data


def measure_load(data: bytes, wanted: BoxTable, timed: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Decode the catalog, and plan what one rank of another world size reads."""
    catalog = timed("  decode the catalog", lambda: catalog_file.decode(data))
    everywhere = np.ones(len(wanted), bool)
    plan = timed("  plan what 1 rank reads", lambda: plan_reads(stored_rows(catalog), wanted, everywhere, 8 << 20))
    assert not plan.missing.any()
