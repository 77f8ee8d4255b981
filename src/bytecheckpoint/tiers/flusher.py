"""One rank's thread that takes committed hot steps further: to other machines' memory, then to the durable storage."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ..collectives import Collective
from ..engine.workers import Workers
from ..errors import CheckpointError, CheckpointTimeoutError
from ..handles import SaveHandle, SaveReport
from ..representation.catalog import Catalog
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, generation_of
from ..settings import Settings
from ..storage import resolve
from ..storage.local import LocalStorage
from ..storage.tier import PREFIX, UNKNOWN, Record, TierStorage
from .flushing import flush_together
from .party import Machines, Party
from .replicas import replicate

__all__ = ["Flusher"]

_log = logging.getLogger("bytecheckpoint")
#: A flush slower than this is taken for hanging, bytes per second.
_SLOWEST = 4 << 20


class _Step(msgspec.Struct, frozen=True):
    """A hot step on its way to all machines."""

    catalog: bytes
    record: Record


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    storage: TierStorage
    handle: SaveHandle
    report: SaveReport
    settings: Settings
    failed: Callable[[CheckpointError], None]


class Flusher:
    """The flushes of one rank of one world, in the order of the saves.

    Args:
        collective: the ranks that save together.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._workers: Workers | None = None
        self._waiting: dict[int, str] = {}  # saves that are not committed in the durable storage: handle, URL
        self._jobs = 0
        self._changed = threading.Condition()
        self._machines: Machines | None = None
        self._recovered: set[str] = set()
        self._begun = time.time()

    # --- called by saves --------------------------------------------------------------------------------------

    def expect(self, handle: SaveHandle, settings: Settings) -> None:
        """A save begins. To a tier: wait while that holds as many unflushed steps as it may, or one of this very path.

        Args:
            handle: of the save; its path is what the user gave.
            settings: of the save.
        """
        if not handle.path.lower().startswith(PREFIX):
            return
        try:
            url = resolve(handle.path).url
        except CheckpointError:
            return  # the save itself will say it
        if self._workers is None:
            self._workers = Workers(1, "bytecheckpoint-flush")
        with self._changed:
            while len(self._waiting) >= settings.tier_waiting or url in self._waiting.values():
                # Every save and every flush ends by time limits of its own, and notifies.
                self._changed.wait(60.0)
            self._waiting[id(handle)] = url
        handle.committed.add_done_callback(lambda _: self._over(id(handle)))

    def _over(self, save: int) -> None:
        with self._changed:
            self._waiting.pop(save, None)
            self._changed.notify_all()

    def take(
        self,
        number: int,
        storage: TierStorage,
        handle: SaveHandle,
        report: SaveReport,
        settings: Settings,
        failed: Callable[[CheckpointError], None],
    ) -> None:
        """Take over a step that was committed in the hot tier; all ranks call it for all saves, in order.

        Args:
            number: of the save, equal on all ranks.
            storage: where it is.
            handle: whose `restorable` and `committed` are set.
            report: for `committed`.
            settings: of the save.
            failed: told of what goes wrong.
        """
        assert self._workers is not None
        with self._changed:
            self._jobs += 1
        self._workers.submit(self._run, _Job(number, storage, handle, report, settings, failed))

    def drain(self) -> None:
        """Wait until nothing is left to flush."""
        with self._changed:
            while self._waiting or self._jobs:
                self._changed.wait(60.0)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        begun = time.perf_counter()
        stage = "replicate"
        try:
            party = Party(self._collective, f"tier/{job.number}", job.settings.timeout)
            machines = self._machines = self._machines or party.machines()
            catalog, step = self._share(party, machines, job)
            job.handle.restorable.set_result(None)
            stage = "flush"
            self._flush(party, machines, job.storage, catalog, step, job.settings)
            seconds = time.perf_counter() - begun
            phases = {**job.report.phases, "flush": seconds}
            report = replace(job.report, phases=phases, total_seconds=job.report.total_seconds + seconds)
            job.handle.committed.set_result(report)
        except BaseException as error:  # noqa: BLE001  kept for result() and the next save
            text = f"rank {self._collective.rank}, {stage} of {job.storage.url}: "
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
            failure = kind(f"{text}{error if isinstance(error, CheckpointError) else repr(error)}")
            _log.error("%s", failure)
            job.failed(failure)
            job.handle._fail(failure)
        try:
            self._keep_house(job)
        finally:
            with self._changed:
                self._jobs -= 1
                self._changed.notify_all()

    def _share(self, party: Party, machines: Machines, job: _Job) -> tuple[Catalog, _Step]:
        """Have every machine know the step, and partners hold its files."""

        def mine() -> bytes:
            if party.rank != 0:
                return b""
            data = job.storage.hot.read(CATALOG_NAME)
            record = job.storage.record(data) or Record(job.storage.durable.url, UNKNOWN, time.time())
            return msgspec.msgpack.encode(_Step(data, record))

        step = msgspec.msgpack.decode(party.agree("step", mine, lambda words: words[0]), type=_Step)
        catalog = decode(step.catalog)
        party.timeout = job.settings.timeout + sum(file.size for file in catalog.files) / _SLOWEST
        if len(machines.groups) > 1:
            if job.settings.tier_replicas:
                party.agree(
                    "replicas",
                    lambda: replicate(party, machines, job.storage.hot, catalog, job.settings.tier_replicas),
                )
            party.agree("shared", lambda: self._install(machines, job.storage, catalog, step))
        else:
            self._note_ranks(machines, job.storage, step)
        return catalog, step

    def _install(self, machines: Machines, storage: TierStorage, catalog: Catalog, step: _Step) -> None:
        """Commit the step on this machine too, and remove what it replaces here."""
        rank = self._collective.rank
        if not machines.leads(rank):
            return
        self._note_ranks(machines, storage, step)
        if machines.of[rank] == 0:
            return  # rank 0 has done the rest in its save
        named = {file.name for file in catalog.files}
        stale = [name for name, _ in storage.hot.list() if generation_of(name) is not None and name not in named]
        storage.hot.publish(CATALOG_NAME, step.catalog)
        storage.hot.delete(stale)

    def _note_ranks(self, machines: Machines, storage: TierStorage, step: _Step) -> None:
        rank = self._collective.rank
        if machines.leads(rank):
            ranks = machines.groups[machines.of[rank]]
            storage.remember(step.catalog, msgspec.structs.replace(step.record, ranks=ranks))

    def _flush(
        self, party: Party, machines: Machines, storage: TierStorage, catalog: Catalog, step: _Step, force: Settings
    ) -> None:
        flush_together(party, machines, storage, catalog, step.catalog, step.record, force.write_threads)
        if machines.leads(party.rank):
            ranks = machines.groups[machines.of[party.rank]]
            storage.remember(step.catalog, msgspec.structs.replace(step.record, ranks=ranks, flushed=True))

    # --- what earlier jobs left, and what is not needed any more ----------------------------------------------

    def _keep_house(self, job: _Job) -> None:
        """After each step; what fails here fails no save."""
        try:
            run = job.storage.url.rpartition("/")[0]
            # Not after a failure: then other ranks may be gone, and those that are there would wait for them.
            if run not in self._recovered and job.handle.committed.exception() is None:
                self._recovered.add(run)
                self._recover(job)
            if self._machines is not None and self._machines.leads(self._collective.rank):
                self._evict(job)
        except Exception as error:  # noqa: BLE001  logged; the step itself is safe
            _log.warning("%s: the hot tier could not be tidied up: %s", job.storage.url, error)

    def _recover(self, job: _Job) -> None:
        """Flush the steps that killed jobs have left in the memory of these machines."""
        machines = self._machines
        if machines is None:
            return
        party = Party(self._collective, f"tier/{job.number}/left", job.settings.timeout)
        left: dict[str, tuple[TierStorage, bytes, Record]] = {}

        def look() -> list[tuple[str, float]]:
            if machines.leads(party.rank):
                self._remove_unfinished(job)
                for storage, catalog, record in job.storage.neighbours():
                    if not record.flushed and record.saved < self._begun and storage.url not in self._waiting.values():
                        left[storage.url] = storage, catalog, record
            return [(url, record.saved) for url, (_, _, record) in left.items()]

        def choose(words: list[list[tuple[str, float]]]) -> list[tuple[str, int]]:
            newest: dict[str, tuple[float, int]] = {}
            for rank, steps in enumerate(words):
                for url, saved in steps:
                    if saved > newest.get(url, (0.0, 0))[0]:
                        newest[url] = saved, rank
            return [(url, rank) for url, (_, rank) in sorted(newest.items(), key=lambda item: item[1])]

        for number, (url, holder) in enumerate(party.agree("look", look, choose)):
            self._recover_one(Party(self._collective, f"{party.tag}/{number}", party.timeout), job, left, url, holder)

    def _recover_one(
        self, party: Party, job: _Job, left: dict[str, tuple[TierStorage, bytes, Record]], url: str, holder: int
    ) -> None:
        assert self._machines is not None

        def tell() -> bytes:
            return msgspec.msgpack.encode(_Step(*left[url][1:])) if party.rank == holder else b""

        try:
            step = msgspec.msgpack.decode(party.agree("step", tell, lambda words: words[holder]), type=_Step)
            catalog = decode(step.catalog)
            party.timeout += sum(file.size for file in catalog.files) / _SLOWEST
            self._flush(party, self._machines, TierStorage(url), catalog, step, job.settings)
            _log.info("%s, which an earlier job has left in memory, was flushed", url)
        except CheckpointTimeoutError:
            raise
        except CheckpointError as error:
            _log.warning("%s, which an earlier job has left in memory, cannot be flushed: %s", url, error)

    def _remove_unfinished(self, job: _Job) -> None:
        """Remove what saves of killed jobs wrote and did not commit."""
        with self._changed:
            busy = set(self._waiting.values())
        for entry in os.scandir(os.path.dirname(job.storage.hot.root)):
            if not entry.is_dir() or entry.path == job.storage.hot.root:
                continue
            found = LocalStorage(entry.path)
            names = [name for name, _ in found.list()]
            ours = [name for name in names if generation_of(name) is not None]
            if CATALOG_NAME in names or not ours or f"{job.storage.url.rpartition('/')[0]}/{entry.name}" in busy:
                continue
            if max(found.stat(name).modified for name in ours) < self._begun:
                shutil.rmtree(entry.path, ignore_errors=True)

    def _evict(self, job: _Job) -> None:
        """Keep as many hot steps as the settings say: flushed ones for quick restarts, others until they are flushed."""
        with self._changed:
            busy = set(self._waiting.values())
        steps = [item for item in job.storage.neighbours() if item[0].url not in busy]
        steps.sort(key=lambda item: -item[2].saved)
        flushed = [item for item in steps if item[2].flushed]
        failed = [item for item in steps if not item[2].flushed]
        for storage, _, _ in flushed[job.settings.tier_keep :]:
            storage.forget()
        for storage, _, _ in failed[job.settings.tier_waiting :]:
            _log.warning("%s was not flushed, and is removed from memory to make room for newer steps", storage.url)
            storage.forget()
