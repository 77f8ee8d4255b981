"""Reading once what several ranks want (ByteCheckpoint, section 4.1).

Every rank reads its share of the chunks, where it can straight into its own destination; the others of its machine
take them from there (`peer_memory`), and those of other machines get one copy per machine over the data plane. It
goes in rounds: when a round's chunks are read, the ranks meet, and take them while the next round is being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import CheckpointError, PeerLostError, error_from_report, error_report
from ..representation.plans import ExchangePlan
from ..settings import Settings
from .file_set import FileSet
from .peer_memory import Segments, parts_of, pull, sees, segments_of
from .reading import Delivery, Landing, Readers, scratch

__all__ = ["Exchange"]


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others at the end of a round.

    Attributes:
        error: its failure, empty when it can go on.
        blind: it cannot read the memory of all ranks of its machine (told in the first round).
        held: item -> where its bytes stand in this rank's memory.
    """

    error: dict[str, str] = {}
    blind: bool = False
    held: dict[int, bytes] = {}  # int64 rows of Segments


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is told at the end of a round: addresses on its own machine only, so no more in a larger world.

    Attributes:
        error: the first failure, empty when all can go on.
        rank: who met it.
        blind: numbers of the hosts that have a blind rank.
        held: rank of the same machine -> item -> where its bytes stand.
    """

    error: dict[str, str] = {}
    rank: int = 0
    blind: list[int] = []
    held: dict[int, dict[int, bytes]] = {}


@dataclass(slots=True)
class _Held:
    """An item in this rank's memory.

    Attributes:
        buffers: the item's bytes, one after the other.
        segments: the same as addresses.
        pooled: the buffer that is to be given back when the others have taken the item.
        delivered: whether this rank's own destinations have it.
    """

    buffers: list[memoryview]
    segments: Segments
    pooled: torch.Tensor | None = None
    delivered: bool = False


class Exchange:
    """One rank's part. All ranks construct it and call `run`; keep it until all have returned from theirs.

    Args:
        collective: the ranks.
        tag: unique to this exchange.
        plan: the shared chunks, equal on all ranks, and this rank's part.
        hosts: a number for each rank, equal for ranks of one machine.
        introductions: `peer_memory.introduction` of every rank.
        files: the checkpoint's files.
        delivery: where the bytes go.
        chunk_bytes: longest item.
        chunks: items that each rank reads in a round, equal on all ranks.
        settings: threads and time limit.

    Attributes:
        read: bytes read from storage.
        received: bytes that came from other ranks.
    """

    def __init__(
        self,
        collective: Collective,
        tag: str,
        plan: ExchangePlan,
        hosts: Sequence[int],
        introductions: Sequence[bytes],
        files: FileSet,
        delivery: Delivery,
        *,
        chunk_bytes: int,
        chunks: int,
        settings: Settings,
    ) -> None:
        self._collective = collective
        self._me = collective.rank
        self._tag = tag
        self._items = plan.shared
        self._files = files
        self._delivery = delivery
        self._chunk_bytes = chunk_bytes
        self._chunks = chunks
        self._settings = settings
        self._landing = Landing(delivery, chunk_bytes)
        self._hosts = list(hosts)
        self._pids = [sees(i) if h == hosts[self._me] else 0 for h, i in zip(hosts, introductions, strict=True)]
        world = range(collective.world_size)
        self._by_reader: list[list[int]] = [np.flatnonzero(plan.shared.reader == r).tolist() for r in world]
        self._rounds = max((-(-len(items) // chunks) for items in self._by_reader), default=0)
        self._ranges: dict[int, list[int]] = {}
        for index, item in zip(plan.my_range.tolist(), plan.my_item.tolist(), strict=True):
            self._ranges.setdefault(item, []).append(index)
        self._rank_sets = plan.shared.rank_sets()
        self._buffers: list[torch.Tensor] = []  # free ones
        self._failure: BaseException | None = None
        self._machines: list[int] = []  # known after the first meeting
        self._held: dict[int, _Held] = {}
        self._elsewhere: dict[int, tuple[int, bytes]] = {}
        self.read = 0
        self.received = 0

    def run(self) -> None:
        """Read this rank's share of the items, and deliver those that it wants.

        Raises:
            CorruptCheckpointError: as `FileSet.fetch`, on every rank.
            PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        """
        if not self._rounds:
            return
        threads = self._files.threads(self._settings.read_threads)
        with (
            Readers(self._files, threads) as readers,
            ThreadPoolExecutor(threads, thread_name_prefix="bytecheckpoint-take") as takers,
        ):
            mine: dict[int, Future[_Held]] = {}
            for number in range(-1, self._rounds):
                # One round ahead: buffers for three rounds are enough, one being read, one whose readers wait for
                # the slower ranks, one being taken.
                for item in self._round_of(self._me, number + 1):
                    mine[item] = readers.submit(self._read, item)
                if number >= 0:
                    self._round(number, mine, readers, takers)
            if self._failure is not None:
                raise self._failure

    # --- one round --------------------------------------------------------------------------------------------

    def _round(self, number: int, mine: dict[int, Future[_Held]], readers: Readers, takers: ThreadPoolExecutor) -> None:
        held: dict[int, _Held] = {}
        try:
            for item in self._round_of(self._me, number):
                held[item] = readers.result(mine.pop(item))
                self.read += int(self._items.stop[item] - self._items.start[item])
        except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised
            self._failure = self._failure or error
        word = _Word(
            held={item: h.segments.tobytes() for item, h in held.items()}, blind=not number and self._is_blind()
        )
        answer = self._meet(str(number), word)
        # Whoever is here has taken what it wanted of the round before.
        for before in self._held.values():
            if before.pooled is not None:
                self._buffers.append(before.pooled)
        self._held = held
        self._elsewhere = {item: (rank, at) for rank, items in answer.held.items() for item, at in items.items()}
        if number == 0:
            self._machines = self._without(answer.blind)
        if len(set(self._machines)) > 1:
            self._across_machines(number)
        try:
            self._take_all(number, takers)
        except BaseException as error:  # noqa: BLE001  told to the other ranks when they meet next, then raised
            self._failure = error

    def _take_all(self, number: int, takers: ThreadPoolExecutor) -> None:
        taken = []
        for reader in range(self._collective.world_size):
            for item in self._round_of(reader, number):
                if item not in self._ranges:
                    continue
                if (here := self._held.get(item)) is None:
                    taken.append(takers.submit(self._take, item, *self._elsewhere[item]))
                elif not here.delivered:
                    self._deliver(item, here.buffers[0])
        for future in taken:
            self.received += future.result()

    def _round_of(self, rank: int, number: int) -> list[int]:
        return self._by_reader[rank][number * self._chunks : (number + 1) * self._chunks]

    def _read(self, item: int) -> _Held:
        """Read an item: straight into this rank's destination, else into a buffer and from there."""
        start, stop = int(self._items.start[item]), int(self._items.stop[item])
        file = int(self._items.file[item])
        indexes = self._ranges[item]
        buffers = None
        if len(indexes) == 1 and self._bounds(indexes[0]) == (start, stop):
            buffers = self._delivery.direct_buffers(indexes[0])
        if buffers is not None:
            self._files.fetch(file, start, stop, buffers)
            return _Held(buffers, segments_of(buffers), delivered=True)
        try:
            pooled = self._buffers.pop()
        except IndexError:
            pooled = scratch(self._chunk_bytes, self._landing.accelerator)
        buffers = [memoryview(pooled[: stop - start].numpy())]
        # Each range is delivered while it is in the processor's cache; others may want what lies between them.
        done = start
        for index in [*sorted(indexes), None]:
            end = stop if index is None else max(self._bounds(index)[1], done)
            if end > done:
                self._files.fetch(file, done, end, [buffers[0][done - start : end - start]])
                done = end
            if index is not None:
                self._landing.deliver(index, pooled, start)
        return _Held(buffers, segments_of(buffers), pooled, delivered=True)

    def _deliver(self, item: int, memory: memoryview) -> None:
        data = torch.frombuffer(memory, dtype=torch.uint8)
        for index in self._ranges[item]:
            self._landing.deliver(index, data, int(self._items.start[item]))

    def _take(self, item: int, rank: int, segments: bytes) -> int:
        """Copy what this rank wants of an item out of the memory of `rank`, straight to its destinations if that pays."""
        held = np.frombuffer(segments, np.int64).reshape(-1, 2)
        first = int(self._items.start[item])
        total = 0
        for index in self._ranges[item]:
            start, stop = self._bounds(index)
            runs = self._delivery.runs(index)
            try:
                if runs is not None:
                    pull(self._pids[rank], parts_of(held, runs.source - first, runs.pieces[:, 1]), runs.pieces)
                    total += int(runs.pieces[:, 1].sum())
                else:
                    data = self._landing.buffer(stop - start)
                    whole = parts_of(held, np.array([start - first]), np.array([stop - start]))
                    pull(self._pids[rank], whole, segments_of([memoryview(data.numpy())]))
                    self._landing.deliver(index, data, start)
                    total += stop - start
            except OSError as error:
                raise PeerLostError(f"rank {self._me}: rank {rank} went away during an exchange: {error}") from error
        return total

    def _bounds(self, index: int) -> tuple[int, int]:
        plan = self._delivery.plan
        return int(plan.start[index]), int(plan.stop[index])

    # --- who sees whom ----------------------------------------------------------------------------------------

    def _is_blind(self) -> bool:
        here = self._hosts[self._me]
        return any(host == here and not pid for host, pid in zip(self._hosts, self._pids, strict=True))

    def _without(self, blind: Sequence[int]) -> list[int]:
        """A machine's number for each rank: on a host where one cannot read the others' memory each stands alone."""
        names = [(h, rank) if h in blind else (h, -1) for rank, h in enumerate(self._hosts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return [numbers[name] for name in names]

    def _receivers(self, item: int, reader: int) -> list[int]:
        """One rank of each other machine that wants the item; the items of a machine are spread over its ranks."""
        by_machine: dict[int, list[int]] = {}
        for rank in self._rank_sets[int(self._items.wanted_by[item])]:
            by_machine.setdefault(self._machines[rank], []).append(rank)
        by_machine.pop(self._machines[reader], None)
        return [ranks[item % len(ranks)] for ranks in by_machine.values()]

    def _across_machines(self, number: int) -> None:
        outgoing: dict[int, list[NDArray[np.uint8]]] = {}
        incoming: dict[int, list[tuple[int, int]]] = {}
        for reader in range(self._collective.world_size):
            for item in self._round_of(reader, number):
                receivers = self._receivers(item, reader)
                if reader == self._me:
                    for rank in receivers:
                        pieces = (np.frombuffer(b, np.uint8) for b in self._held[item].buffers)
                        outgoing.setdefault(rank, []).extend(pieces)
                elif self._me in receivers:
                    size = int(self._items.stop[item] - self._items.start[item])
                    incoming.setdefault(reader, []).append((item, size))
        into = {rank: np.empty(sum(s for _, s in parts), np.uint8) for rank, parts in incoming.items()}
        arrived: dict[int, _Held] = {}
        try:
            self._collective.exchange(
                f"{self._tag}/{number}/far",
                {rank: np.concatenate(parts) for rank, parts in outgoing.items()},
                into,
                timeout=self._settings.timeout,
            )
        except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised
            self._failure = error
        for reader, parts in incoming.items():
            at = 0
            for item, size in parts:
                data = into[reader][at : at + size]
                # `scatter` wants aligned data.
                memory = memoryview(data if at % 16 == 0 else data.copy())
                arrived[item] = _Held([memory], segments_of([memory]))
                self.received += size
                at += size
        answer = self._meet(f"{number}/across", _Word(held={i: h.segments.tobytes() for i, h in arrived.items()}))
        self._held.update(arrived)
        for rank, items in answer.held.items():
            self._elsewhere.update((item, (rank, at)) for item, at in items.items())

    def _meet(self, step: str, word: _Word) -> _Answer:
        """Tell rank 0 this rank's word, and hear of its neighbours; raise its own failure, or else another's."""
        failure = self._failure
        if failure is not None:
            word = _Word(error=error_report(failure))
        tag, timeout = f"{self._tag}/{step}", self._settings.timeout
        try:
            told = self._collective.consult(tag, msgspec.msgpack.encode(word), self._decide, timeout=timeout)
        except CheckpointError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        answer = msgspec.msgpack.decode(told, type=_Answer)
        if answer.error:
            raise error_from_report(answer.error, prefix=f"rank {answer.rank}: ")
        return answer

    def _decide(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Rank 0: the answer for each rank."""
        words = [msgspec.msgpack.decode(payload, type=_Word) for payload in payloads]
        for rank, word in enumerate(words):
            if word.error:
                return [msgspec.msgpack.encode(_Answer(word.error, rank))] * len(words)
        blind = sorted({self._hosts[rank] for rank, word in enumerate(words) if word.blind})
        machines = self._machines or self._without(blind)
        held: dict[int, dict[int, dict[int, bytes]]] = {}
        for rank, word in enumerate(words):
            held.setdefault(machines[rank], {})[rank] = word.held
        answers = {m: msgspec.msgpack.encode(_Answer(blind=blind, held=h)) for m, h in held.items()}
        return [answers[machine] for machine in machines]
