"""Reading once what several ranks want (ByteCheckpoint, section 4.1).

In rounds: every rank reads its next few chunks into a region of shared memory, the ranks meet, and each takes what it
wants out of all regions. Ranks of other hosts get the bytes over the data plane. The region has two halves, so that
one meeting per round suffices: who meets in round r has finished copying round r - 1.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import CheckpointError, error_from_report, error_report
from ..representation.plans import ExchangePlan
from ..settings import Settings
from .reading import Delivery, FileSet

__all__ = ["exchange_ranges"]

_SLOTS = 1


class _Region:
    """Two halves of `_SLOTS` slots each, in a file of the memory file system or of the temporary folder."""

    def __init__(self, path: str | None, nbytes: int) -> None:
        self.path = path
        if path is None:
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            fd, self.path = tempfile.mkstemp(prefix="bytecheckpoint-exchange-", dir=memory)
            os.ftruncate(fd, nbytes)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    def unlink(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class _Exchange:
    def __init__(
        self,
        collective: Collective,
        tag: str,
        plan: ExchangePlan,
        hosts: Sequence[str],
        files: FileSet,
        delivery: Delivery,
        force: Settings,
    ) -> None:
        self._collective = collective
        self._tag = tag
        self._plan = plan
        self._files = files
        self._delivery = delivery
        self._force = force
        self._slot = force.chunk_bytes
        self._near = [host == hosts[collective.rank] for host in hosts]
        world = collective.world_size
        # Item k of its reader stands in round k // _SLOTS.
        self._by_reader = [np.flatnonzero(plan.reader == r) for r in range(world)]
        self._rounds = max((-(-len(items) // _SLOTS) for items in self._by_reader), default=0)
        self._ranges: dict[int, list[int]] = {}
        for index, item in zip(plan.my_range.tolist(), plan.my_item.tolist(), strict=True):
            self._ranges.setdefault(item, []).append(index)
        self._wanting: dict[int, list[int]] = {}
        for item, rank in plan.pairs.tolist():
            self._wanting.setdefault(item, []).append(rank)
        self.received = 0
        self.read = 0

    def run(self) -> None:
        nbytes = 2 * _SLOTS * self._slot
        own = _Region(None, nbytes)
        try:
            paths = self._meet("open", (own.path or "").encode())
            regions = {
                rank: own if rank == self._collective.rank else _Region(path.decode(), nbytes)
                for rank, path in enumerate(paths)
                if self._near[rank]
            }
            self._meet("opened", b"")
        finally:
            own.unlink()
        with ThreadPoolExecutor(self._force.read_threads, thread_name_prefix="bytecheckpoint-read") as pool:
            for number in range(self._rounds):
                self._round(number, regions, own, pool)

    def _round(self, number: int, regions: dict[int, _Region], own: _Region, pool: ThreadPoolExecutor) -> None:
        me = self._collective.rank
        half = number % 2 * _SLOTS
        failure: BaseException | None = None
        try:
            list(pool.map(lambda s: self._fill(own, half + s[0], s[1]), enumerate(self._items(me, number))))
        except BaseException as error:  # noqa: BLE001  told to the other ranks, then raised
            failure = error
        report = msgspec.msgpack.encode(error_report(failure)) if failure else b""
        try:
            words = self._meet(f"{number}", report)
        except CheckpointError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        for rank, word in enumerate(words):
            if word:
                raise error_from_report(msgspec.msgpack.decode(word), prefix=f"rank {rank}: ")
        far = self._send_far(number, own, half)
        for rank in range(self._collective.world_size):
            for slot, item in enumerate(self._items(rank, number)):
                if item not in self._ranges:
                    continue
                if rank in regions:
                    data = regions[rank].data[(half + slot) * self._slot : (half + slot + 1) * self._slot]
                else:
                    data = torch.from_numpy(far[item])
                start = int(self._plan.start[item])
                for index in self._ranges[item]:
                    self._delivery.scatter(index, data, start)
                if rank != me:
                    self.received += int(self._plan.stop[item]) - start

    def _items(self, rank: int, number: int) -> list[int]:
        items: list[int] = self._by_reader[rank][number * _SLOTS : (number + 1) * _SLOTS].tolist()
        return items

    def _fill(self, own: _Region, slot: int, item: int) -> None:
        start, stop = int(self._plan.start[item]), int(self._plan.stop[item])
        data = own.data[slot * self._slot : slot * self._slot + stop - start]
        self._files.fetch(int(self._plan.file[item]), start, stop, [memoryview(data.numpy())])
        self.read += stop - start

    def _send_far(self, number: int, own: _Region, half: int) -> dict[int, NDArray[np.uint8]]:
        """Exchange with ranks of other hosts, which do not see this host's memory."""
        me = self._collective.rank
        outgoing: dict[int, list[NDArray[np.uint8]]] = {}
        incoming: dict[int, list[tuple[int, int]]] = {}
        for rank in range(self._collective.world_size):
            for slot, item in enumerate(self._items(rank, number)):
                size = int(self._plan.stop[item] - self._plan.start[item])
                if rank == me:
                    at = (half + slot) * self._slot
                    for other in self._wanting[item]:
                        if not self._near[other]:
                            outgoing.setdefault(other, []).append(own.data[at : at + size].numpy())
                elif not self._near[rank] and item in self._ranges:
                    incoming.setdefault(rank, []).append((item, size))
        if all(self._near):
            return {}
        into = {rank: np.empty(sum(s for _, s in parts), np.uint8) for rank, parts in incoming.items()}
        self._collective.exchange(
            f"{self._tag}/{number}/far",
            {rank: np.concatenate(parts) for rank, parts in outgoing.items()},
            into,
            timeout=self._force.timeout,
        )
        found: dict[int, NDArray[np.uint8]] = {}
        for rank, parts in incoming.items():
            at = 0
            for item, size in parts:
                # scatter() wants aligned data; a slice of a joint buffer need not be.
                found[item] = into[rank][at : at + size].copy()
                at += size
        return found

    def _meet(self, step: str, word: bytes) -> list[bytes]:
        return self._collective.all_gather(f"{self._tag}/{step}", word, timeout=self._force.timeout)


def exchange_ranges(
    collective: Collective,
    tag: str,
    plan: ExchangePlan,
    hosts: Sequence[str],
    files: FileSet,
    delivery: Delivery,
    force: Settings,
) -> tuple[int, int]:
    """Read this rank's share of the shared items, and deliver those that it wants. All ranks call it.

    Args:
        collective: the ranks.
        tag: unique to this exchange.
        plan: equal on all ranks, but for what is "mine" in it.
        hosts: `Collective.host` of every rank.
        files: the checkpoint's files.
        delivery: where the bytes go.
        force: settings.

    Returns:
        Bytes read from storage, bytes received from other ranks.

    Raises:
        CorruptCheckpointError: as `FileSet.fetch`, on every rank.
    """
    if not len(plan.file):
        return 0, 0
    exchange = _Exchange(collective, tag, plan, hosts, files, delivery, force)
    exchange.run()
    return exchange.read, exchange.received
