"""One rank's threads that take committed hot steps further: to other machines' memory, and to the durable storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ..collectives import Collective
from ..engine.workers import Workers
from ..errors import CheckpointError, CheckpointTimeoutError, PeerLostError
from ..handles import SaveHandle, SaveReport
from ..representation.catalog import Catalog
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, generation_of
from ..settings import Settings
from ..storage import resolve
from ..storage.tier import PREFIX, UNKNOWN, Record, TierStorage
from .housekeeping import Leftovers, evict
from .job_flush import SLOWEST, HotStep, flush_together
from .party import Machines, Party
from .replicas import replicate

__all__ = ["Flusher"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    storage: TierStorage
    handle: SaveHandle
    report: SaveReport
    settings: Settings
    failed: Callable[[CheckpointError], None]
    begun: float

    @property
    def run(self) -> str:
        """The folder of steps that it belongs to."""
        return self.storage.url.rpartition("/")[0]


def _patience(job: _Job, catalog: Catalog) -> float:
    """Seconds that one stage may take."""
    return job.settings.timeout + sum(file.size for file in catalog.files) / SLOWEST


class Flusher:
    """The flushes of one rank of one world, in the order of the saves.

    Args:
        collective: the ranks that save together.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        # Two threads: copies in other machines' memory do not wait for the flush of an earlier step.
        self._sharing: Workers | None = None
        self._flushing: Workers | None = None
        self._waiting: dict[int, str] = {}  # saves that are not committed in the durable storage: handle, URL
        self._jobs = 0
        self._changed = threading.Condition()
        self._machines: Machines | None = None
        self._leftovers = Leftovers(time.time())

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
        if self._sharing is None:
            self._sharing, self._flushing = Workers(1, "bytecheckpoint-share"), Workers(1, "bytecheckpoint-flush")
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
        assert self._sharing is not None
        with self._changed:
            self._jobs += 1
        begun = time.perf_counter() - report.total_seconds
        self._sharing.submit(self._share, _Job(number, storage, handle, report, settings, failed, begun))

    def drain(self) -> None:
        """Wait until nothing is left to flush."""
        with self._changed:
            while self._waiting or self._jobs:
                self._changed.wait(60.0)

    def _busy(self) -> set[str]:
        with self._changed:
            return set(self._waiting.values())

    # --- the threads ------------------------------------------------------------------------------------------

    def _share(self, job: _Job) -> None:
        """The first thread: other machines know the step and hold copies, so it is restorable."""
        step: HotStep | None = None
        try:
            party = Party(self._collective, f"tier/{job.number}", job.settings.timeout)
            machines = self._machines = self._machines or party.machines()

            def mine() -> bytes:
                if party.rank != 0:
                    return b""
                data = job.storage.hot.read(CATALOG_NAME)
                record = job.storage.record(data) or Record(job.storage.durable.url, UNKNOWN, time.time())
                return msgspec.msgpack.encode(HotStep(data, record))

            step = msgspec.msgpack.decode(party.agree("step", mine, lambda words: words[0]), type=HotStep)
            catalog = decode(step.catalog)
            party.timeout = _patience(job, catalog)
            if self._replicate(party, machines, job, catalog, step):
                job.handle.restorable.set_result(None)
        except BaseException as error:  # noqa: BLE001  kept for result() and the next save
            self._fail(job, step, "replicate", error)
            self._end(job, step)
            return
        assert self._flushing is not None
        self._flushing.submit(self._flush, job, machines, step, catalog)

    def _flush(self, job: _Job, machines: Machines, step: HotStep, catalog: Catalog) -> None:
        """The second thread: the step goes to the durable storage."""
        begun = time.perf_counter()
        party = Party(self._collective, f"tier/{job.number}/flush", _patience(job, catalog))
        try:
            flush_together(party, machines, job.storage, step, job.settings.write_threads)
        except BaseException as error:  # noqa: BLE001  kept for result() and the next save
            self._fail(job, step, "flush", error)
            self._end(job, step)
            return
        seconds = time.perf_counter() - begun
        phases = {**job.report.phases, "flush": seconds}
        report = replace(job.report, phases=phases, total_seconds=time.perf_counter() - job.begun)
        self._leftovers.flushed(job.storage.url)
        if not job.handle.restorable.done():
            job.handle.restorable.set_result(None)
        job.handle.committed.set_result(report)
        # Not after a failure: then other ranks may be gone, and those that are there would wait for them.
        try:
            if party.agree("look", lambda: self._leftovers.expected(job.run), any):
                inner = Party(self._collective, f"tier/{job.number}/left", job.settings.timeout)
                self._leftovers.flush(inner, machines, job.storage, self._busy(), job.settings)
        except Exception as error:  # noqa: BLE001  logged; the step itself is safe
            _log.warning("%s: what is left in memory cannot be flushed: %s", job.storage.url, error)
        self._end(job, step)

    def _fail(self, job: _Job, step: HotStep | None, stage: str, error: BaseException) -> None:
        text = f"rank {self._collective.rank}, {stage} of {job.storage.url}: "
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = kind(f"{text}{error if isinstance(error, CheckpointError) else repr(error)}")
        _log.error("%s", failure)
        self._leftovers.failed(job.run, job.storage.url, step.catalog if step is not None else b"")
        job.failed(failure)
        job.handle._fail(failure)

    def _replicate(self, party: Party, machines: Machines, job: _Job, catalog: Catalog, step: HotStep) -> bool:
        """Have every machine know the step, and partners hold its files; whether they do."""
        if len(machines.groups) == 1:
            self._note_ranks(machines, job.storage, step)
            return True
        try:
            if job.settings.tier_replicas:
                party.agree(
                    "replicas",
                    lambda: replicate(party, machines, job.storage.hot, catalog, job.settings.tier_replicas),
                )
            party.agree("shared", lambda: self._install(machines, job.storage, catalog, step))
        except (PeerLostError, CheckpointTimeoutError):
            raise
        except Exception as error:  # noqa: BLE001  the durable storage needs no copies: the sooner it has the step
            _log.warning("%s cannot be copied to other machines, so it is flushed first: %s", job.storage.url, error)
            return False
        return True

    def _install(self, machines: Machines, storage: TierStorage, catalog: Catalog, step: HotStep) -> None:
        """Commit the step on this machine too, and remove what it replaces here."""
        rank = self._collective.rank
        if not machines.leads(rank):
            return
        if machines.of[rank] == 0:  # rank 0 has done the rest in its save
            self._note_ranks(machines, storage, step)
            return
        ranks = machines.groups[machines.of[rank]]
        storage.remember(step.catalog, msgspec.structs.replace(step.record, ranks=ranks))
        named = {file.name for file in catalog.files}
        stale = [name for name, _ in storage.hot.list() if generation_of(name) is not None and name not in named]
        storage.hot.publish(CATALOG_NAME, step.catalog)
        storage.hot.delete(stale)
        storage.forget_records(but=step.catalog)

    def _note_ranks(self, machines: Machines, storage: TierStorage, step: HotStep) -> None:
        rank = self._collective.rank
        if machines.leads(rank):
            storage.note(step.catalog, step.record, machines.groups[machines.of[rank]])

    # --- what is not needed any more --------------------------------------------------------------------------

    def _end(self, job: _Job, step: HotStep | None) -> None:
        """The last of a job, whatever became of it; what fails here fails no save."""
        try:
            if self._machines is not None and self._machines.leads(self._collective.rank):
                evict(job.storage, self._busy(), self._forget, job.settings)
                # Files without a catalog, where that found no room: nobody else would remove them.
                orphans = self._leftovers.give_up_all_but(job.settings.tier_waiting)
                if step is not None and not self._leftovers.own(job.storage.url):
                    orphans.append((job.storage.url, step.catalog))
                for url, catalog in orphans:
                    storage = TierStorage(url)
                    if catalog and storage.hot_catalog() is None:
                        self._forget(storage, catalog)
        except Exception as error:  # noqa: BLE001  logged; the step itself is safe
            _log.warning("%s: the hot tier could not be tidied up: %s", job.storage.url, error)
        finally:
            with self._changed:
                self._jobs -= 1
                self._changed.notify_all()

    def _forget(self, storage: TierStorage, catalog: bytes) -> None:
        with self._changed:  # no save begins meanwhile
            if storage.url not in self._waiting.values():
                storage.forget(catalog)
