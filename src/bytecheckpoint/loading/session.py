"""One load on one rank, step by step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..collectives import Collective
from ..engine.exchange import Exchange
from ..engine.file_set import FileSet
from ..engine.peer_memory import introduction, readable_by_peers
from ..engine.reading import Delivery, Target, read_all
from ..errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    error_from_report,
    error_report,
)
from ..frameworks.base import Destination, Framework
from ..handles import LoadReport
from ..monitoring.collector import collector_paused
from ..monitoring.phases import Phases
from ..planning.coverage import first_gap
from ..planning.exchange_plan import part_of_rank, share
from ..planning.intersect import intersect
from ..planning.read_plan import plan_reads
from ..representation.boxes import BoxTable
from ..representation.catalog import SHARED, VALUES_SLOT, Catalog
from ..representation.names import CATALOG_NAME
from ..representation.plans import ReadPlan, SharedChunks
from ..representation.shards import LiveShard
from ..settings import Settings
from ..storage import Storage
from .saved import SavedView, read_catalog

__all__ = ["LoadSession"]

_SHOWN = 5
_ATTEMPTS = 3
_PAUSES = (0.0, 1.0, 0.0)
_SMALLEST_READ = 1 << 20
#: Readers of one rank that there are enough reads for, where the settings leave their number open.
_READERS = 2
#: Chunks that each rank reads in a round of an exchange, at least.
_FEWEST_CHUNKS = 2


class _Word(msgspec.Struct, frozen=True):
    """What a rank tells the others at a meeting point.

    Attributes:
        error: its failure, empty when it can go on.
        replaced: the failure came from another save's replacing the checkpoint during the load.
        catalog: digest of the catalog that it read.
        claimed: bitmap of the catalog's tensors that it accounts for.
        ranges: what it will read: int64 (file, start, stop) triples as bytes.
        host: ranks with the same one are on one machine.
        introduction: for `peer_memory.sees`.
        ready: the next save of these objects needs no preparation here.
    """

    error: dict[str, str] = {}
    replaced: bool = False
    catalog: bytes = b""
    claimed: bytes = b""
    ranges: bytes = b""
    host: str = ""
    introduction: bytes = b""
    ready: bool = False


class _Verdict(msgspec.Struct, frozen=True):
    """What rank 0 makes of all ranks' words, for all of them: every rank's word at every rank would not scale.

    Attributes:
        error: the first failure, empty when all ranks can go on.
        rank: who met it.
        replaced: some rank saw the checkpoint replaced.
        differ: the ranks read different catalogs.
        claimed: bitmap of the catalog's tensors that some rank accounts for.
        shared: columns of `SharedChunks`.
        hosts: a number for each rank, equal for ranks of one machine, where something is shared.
        introductions: each rank's, where something is shared.
        chunks: how many of the shared chunks each rank reads in a round.
        ready: no rank needs preparation for its next save.
    """

    error: dict[str, str] = {}
    rank: int = 0
    replaced: bool = False
    differ: bool = False
    claimed: bytes = b""
    shared: list[bytes] = []
    hosts: list[int] = []
    introductions: list[bytes] = []
    chunks: int = 0
    ready: bool = False


class _ReplacedError(Exception):
    """The checkpoint was replaced while it was being loaded; every rank starts again."""


class LoadSession:
    """The steps of one load. Ranks meet twice: before the first byte is written, and before values are installed.

    Attributes:
        all_ready: no rank needs preparation for its next save; known after `run`.
    """

    def __init__(
        self, collective: Collective, number: int, force: Settings, *, overlap: bool, strict: bool, cast: bool
    ) -> None:
        self._collective = collective
        self._number = number
        self._settings = force
        self._overlap = overlap
        self._strict = strict
        self._cast = cast
        self._phases = Phases()
        self._attempt = 0
        self._converted: list[str] = []
        self.all_ready = False
        self._chunk_bytes = force.chunk_bytes
        self._chunks = _FEWEST_CHUNKS

    def run(
        self,
        prepare: Callable[[], tuple[Storage, Framework]],
        states: MutableMapping[str, object],
        names: Mapping[Any, Any] | None,
        *,
        ready: Callable[[], bool],
    ) -> LoadReport:
        """Load; see `bytecheckpoint.load`. `ready` tells whether the next save needs no preparation on this rank."""
        for self._attempt in range(_ATTEMPTS):
            try:
                return self._run(prepare, states, names, ready)
            except _ReplacedError:
                # Where ranks see different things, caches of a network file system may need a moment.
                time.sleep(_PAUSES[self._attempt])
        raise IncompatibleCheckpointError(
            f"the checkpoint was replaced {_ATTEMPTS} times while it was being loaded; load one that is not being saved"
        )

    def _run(
        self,
        prepare: Callable[[], tuple[Storage, Framework]],
        states: MutableMapping[str, object],
        names: Mapping[Any, Any] | None,
        ready: Callable[[], bool],
    ) -> LoadReport:
        with contextlib.ExitStack() as stack:
            word = _Word()
            data = b""
            storage: Storage | None = None
            failure: BaseException | None = None
            self._converted = []
            try:
                storage, adapter = prepare()
                catalog, data = read_catalog(storage)
                files = stack.enter_context(FileSet(storage, catalog))
                self._phases.mark("catalog")
                self._choose_chunk(catalog)
                # Read while the chunks of the round before are taken.
                self._chunks = max(files.threads(self._settings.read_threads) // 2, _FEWEST_CHUNKS)
                view = SavedView(catalog, files, self._collective.rank, self._settings)
                with collector_paused():
                    destination = adapter.destination(states, view, strict=self._strict, names=names)
                    self._phases.mark("destination")
                    self._refuse_missing(storage, destination)
                    plan, targets = self._plan(storage, catalog, view, destination.wanted)
                    self._phases.mark("plan")
                    word = self._first_word(catalog, view, data, destination, plan)
            except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised
                failure = error
                word = _failed(error, storage, data)
            verdict = self._meet("agree", word, failure)
            assert storage is not None
            unexpected = self._agree(storage, catalog, states, verdict)
            self._phases.mark("agree")
            read = received = 0
            try:
                delivery = Delivery(plan, targets)
                # Kept until all ranks are done: they read this rank's memory.
                exchange, mine = self._exchange(stack, files, delivery, verdict)
                if exchange is not None:
                    exchange.run()
                    read, received = exchange.read, exchange.received
                threads = self._settings.read_threads
                read += read_all(files, delivery, mine, threads=threads, chunk_bytes=self._chunk_bytes)
                destination.check()
            except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised
                failure = error
            self._phases.mark("read")
            last = _failed(failure, storage, data) if failure else _Word(ready=ready())
            self.all_ready = self._meet("done", last, failure).ready
        destination.apply()
        self._phases.mark("apply")
        notes = list(destination.notes)
        if view.from_rank_0:
            notes.append(
                f"rank {self._collective.rank} has no copy of its own and got rank 0's: "
                + ", ".join(dict.fromkeys(view.from_rank_0))
            )
        total = self._phases.total()
        return LoadReport(
            path=storage.url,
            bytes_read=read + view.bytes_read,
            bytes_received=received,
            blocking_seconds=total,
            total_seconds=total,
            phases=dict(self._phases.seconds),
            missing=tuple(destination.missing),
            unexpected=tuple(unexpected),
            cast=tuple(self._converted),
            notes=tuple(notes),
        )

    # --- fit --------------------------------------------------------------------------------------------------

    def _refuse_missing(self, storage: Storage, destination: Destination) -> None:
        if destination.missing and self._strict:
            raise IncompatibleCheckpointError(
                f"{storage.url} lacks {_some(destination.missing)}, which the program wants; "
                f"load with strict=False to leave that as it is"
            )

    def _plan(
        self, storage: Storage, catalog: Catalog, view: SavedView, wanted: Sequence[LiveShard]
    ) -> tuple[ReadPlan, list[Target]]:
        numbers = np.full(len(wanted), -1, np.int64)
        for by_content in (False, True):
            chosen = [i for i, s in enumerate(wanted) if s.by_content == by_content]
            numbers[chosen] = view.resolve([wanted[i].key for i in chosen], by_content=by_content)
        targets: list[Target] = []
        wrong: list[str] = []
        dtypes = {name: getattr(torch, name) for name in catalog.dtype.values}
        assert (numbers >= 0).all(), "every wanted tensor was found in the checkpoint"
        for shard, number in zip(wanted, numbers.tolist(), strict=True):
            _, dtype, shape = view.saved(number)
            if shape != shard.global_shape:
                wrong.append(f"{shard.key} has shape {shape} in the checkpoint and {shard.global_shape} here")
            elif dtype != shard.dtype and not (self._cast or shard.converts):
                wrong.append(f"{shard.key} is {dtype} in the checkpoint and {shard.dtype} here (cast=True converts)")
            elif dtype != shard.dtype and not shard.converts:
                if not _converts(dtypes[dtype], shard.data.dtype):
                    wrong.append(
                        f"{shard.key} is {dtype} in the checkpoint, which torch cannot convert to {shard.dtype}"
                    )
                self._converted.append(str(shard.key))
            targets.append(Target(shard.data, dtypes[dtype]))
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise IncompatibleCheckpointError(f"{storage.url} does not fit: {'; '.join(wrong[:_SHOWN])}{more}")
        boxes = BoxTable.build(numbers.tolist(), [s.offsets for s in wanted], [s.lengths for s in wanted])
        contiguous = np.array([t.contiguous for t in targets], bool)
        plan = plan_reads(view.rows, boxes, contiguous, self._chunk_bytes)
        self._prove_coverage(storage, catalog, boxes, plan)
        return plan, targets

    @staticmethod
    def _prove_coverage(storage: Storage, catalog: Catalog, boxes: BoxTable, plan: ReadPlan) -> None:
        """Every element of every destination is filled exactly once, or the load is refused."""
        if len(plan.overlaps):
            first = int(plan.overlaps[0, 0])
            raise CorruptCheckpointError(
                f"{storage.url}: stored shards of {catalog.key(int(catalog.boxes.tensor[first]))} overlap "
                f"({len(plan.overlaps)} pairs); use another checkpoint"
            )
        holes = np.flatnonzero(plan.missing)
        if len(holes):
            one = boxes.take(holes[:1])
            stored = catalog.boxes.take(np.flatnonzero(catalog.boxes.tensor == one.tensor[0]))
            found = intersect(stored, one.widened(max(one.ndim, stored.ndim)))
            width = found.offsets.shape[1]
            gap = first_gap(one.widened(width).offsets[0], one.widened(width).lengths[0], found.offsets, found.lengths)
            names = [str(catalog.key(int(boxes.tensor[i]))) for i in holes[:_SHOWN].tolist()]
            raise IncompatibleCheckpointError(
                f"{storage.url} has no data for {int(plan.missing.sum())} elements of {_some(names)}; "
                f"the first hole (offsets, lengths) is {gap}"
            )

    # --- agreement --------------------------------------------------------------------------------------------

    def _first_word(
        self, catalog: Catalog, view: SavedView, data: bytes, destination: Destination, plan: ReadPlan
    ) -> _Word:
        claimed = np.zeros(catalog.count, bool)
        found = np.array(view.numbers(list(destination.claimed)), np.int64)
        claimed[found[found >= 0]] = True
        ranges = b""
        if self._overlap and self._collective.world_size > 1:
            ranges = _columns(plan).tobytes()
        return _Word(
            catalog=xxhash.xxh3_128_digest(data),
            claimed=np.packbits(claimed).tobytes(),
            ranges=ranges,
            host=self._collective.host,
            introduction=introduction() if ranges else b"",
        )

    def _meet(self, step: str, word: _Word, failure: BaseException | None) -> _Verdict:
        """Tell rank 0 this rank's word, and hear what it makes of all; raise this rank's failure, or else another's."""
        tag = f"load/{self._number}.{self._attempt}/{step}"
        timeout = self._settings.timeout
        if self._collective.world_size == 1:
            verdict = self._decide([word])
        else:
            try:
                answer = self._collective.consult(tag, msgspec.msgpack.encode(word), self._answers, timeout=timeout)
            except CheckpointError:
                if failure is not None:
                    raise failure from None
                raise
            verdict = msgspec.msgpack.decode(answer, type=_Verdict)
        if verdict.replaced:
            raise _ReplacedError from failure
        if failure is not None:
            raise failure
        if verdict.error:
            raise error_from_report(verdict.error, prefix=f"rank {verdict.rank}: ")
        return verdict

    def _answers(self, words: Sequence[bytes]) -> list[bytes]:
        verdict = self._decide([msgspec.msgpack.decode(w, type=_Word) for w in words])
        return [msgspec.msgpack.encode(verdict)] * len(words)

    def _decide(self, words: Sequence[_Word]) -> _Verdict:
        replaced = any(w.replaced for w in words)
        for rank, word in enumerate(words):
            if word.error:
                return _Verdict(error=word.error, rank=rank, replaced=replaced)
        if len({w.catalog for w in words}) > 1:
            return _Verdict(differ=True)
        claimed = np.bitwise_or.reduce([np.frombuffer(w.claimed, np.uint8) for w in words])
        ready = all(w.ready for w in words)
        ranges = [np.frombuffer(w.ranges, np.int64).reshape(-1, 3) for w in words]
        shared = share(ranges, self._chunk_bytes)
        if not len(shared):
            return _Verdict(claimed=claimed.tobytes(), ready=ready)
        numbers = {host: number for number, host in enumerate(dict.fromkeys(w.host for w in words))}
        return _Verdict(
            claimed=claimed.tobytes(),
            ready=ready,
            shared=shared.to_columns(),
            hosts=[numbers[w.host] for w in words],
            introductions=[w.introduction for w in words],
            chunks=self._chunks,
        )

    def _agree(self, storage: Storage, catalog: Catalog, states: Collection[str], verdict: _Verdict) -> list[str]:
        """What the checkpoint holds, within the kinds asked for, and no rank wants."""
        if verdict.differ:
            if self._attempt + 1 < _ATTEMPTS:
                raise _ReplacedError
            raise IncompatibleCheckpointError(
                f"ranks see different checkpoints at {storage.url}; it was replaced during the load, or the path is "
                f"not shared; load again"
            )
        claimed = np.unpackbits(np.frombuffer(verdict.claimed, np.uint8), count=catalog.count).astype(bool)
        asked = np.isin(catalog.kind.codes, catalog.kind.codes_of([k for k in states if k in catalog.kind.values]))
        tree = catalog.slot.codes == catalog.slot.codes_of([VALUES_SLOT])[0]
        left = np.flatnonzero(asked & ~claimed & ~tree & (catalog.owner == SHARED))
        unexpected = [str(catalog.key(i)) for i in left.tolist()]
        if unexpected and self._strict:
            raise IncompatibleCheckpointError(
                f"{storage.url} holds {_some(unexpected)}, which no rank wants; load with strict=False to ignore that"
            )
        return unexpected

    # --- bytes ------------------------------------------------------------------------------------------------

    def _exchange(
        self, stack: contextlib.ExitStack, files: FileSet, delivery: Delivery, verdict: _Verdict
    ) -> tuple[Exchange | None, Sequence[int]]:
        """The exchange of what several ranks want, and the ranges that are left for this rank alone."""
        shared = SharedChunks.from_columns(verdict.shared)
        if not len(shared):
            return None, range(len(delivery.plan.file))
        # A rank that does not want to exchange meets the others all the same.
        ranges = _columns(delivery.plan)
        plan = part_of_rank(shared, ranges if self._overlap else ranges[:0], self._chunk_bytes)
        stack.enter_context(readable_by_peers())
        exchange = Exchange(
            self._collective,
            f"load/{self._number}.{self._attempt}/exchange",
            plan,
            verdict.hosts,
            verdict.introductions,
            files,
            delivery,
            chunk_bytes=self._chunk_bytes,
            chunks=verdict.chunks,
            settings=self._settings,
        )
        return exchange, plan.private.tolist() if self._overlap else range(len(ranges))

    def _choose_chunk(self, catalog: Catalog) -> None:
        """The length of one read: shorter for a small checkpoint, so that every reader of every rank has some."""
        most = self._settings.chunk_bytes
        readers = self._collective.world_size * (self._settings.read_threads or _READERS)
        fair = sum(file.size for file in catalog.files) // (2 * readers)
        least = max((file.block_bytes for file in catalog.files), default=1)
        while most % 2 == 0 and most > max(fair, _SMALLEST_READ) and (most // 2) % max(least, 1) == 0:
            most //= 2
        self._chunk_bytes = most


@functools.cache
def _converts(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether torch copies elements of one dtype into a tensor of the other."""
    try:
        torch.empty(1, dtype=live, device="cpu").copy_(torch.empty(1, dtype=saved, device="cpu"))
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def _columns(plan: ReadPlan) -> NDArray[np.int64]:
    """(file, start, stop) of each range."""
    return np.stack([plan.file, plan.start, plan.stop], axis=1).astype(np.int64, copy=False)


def _failed(error: BaseException, storage: Storage | None, data: bytes) -> _Word:
    """The word of a rank that met `error` after it had read the catalog `data`."""
    replaced = False
    if isinstance(error, CorruptCheckpointError) and storage is not None and data:
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            replaced = storage.read(CATALOG_NAME) != data
    return _Word(error=error_report(error), replaced=replaced)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
