"""Two threads of a rank that copy committed hot steps: to other machines' memory, and to the durable storage."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.concurrency import Workers
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError, StorageError, listed
from bytecheckpoint.handles import SaveHandle, SaveReport, fail_handle
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME, companions, generation_of
from bytecheckpoint.settings import Settings
from bytecheckpoint.tiers.copying import own_files
from bytecheckpoint.tiers.flush.job import flush_together, transfer_limit
from bytecheckpoint.tiers.flush.unflushed import UnflushedSteps, evict
from bytecheckpoint.tiers.hot_folder import UNKNOWN, HotStep, StepRecord
from bytecheckpoint.tiers.machines import Machines, find_machines
from bytecheckpoint.tiers.replicas import replicate
from bytecheckpoint.tiers.run import run_of, steps_of_run
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tracing.operation import Operation

__all__ = ["Flusher"]

_log = logging.getLogger("bytecheckpoint")


class Flusher:
    """The flushes of one rank of one world, in the order of the saves.

    One thread replicates and another one flushes, so replicas of a step do not wait for the flush of an earlier step
    (decision 0018).

    Args:
        collective: the ranks that save together.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._replicating: Workers | None = None
        self._flushing: Workers | None = None
        self._busy: dict[int, str] = {}  # saves that are not durable yet: id of the handle, URL
        self._pending = 0  # flushes that have not ended
        self._changed = threading.Condition()
        self._machines: Machines | None = None
        self._unflushed = UnflushedSteps(time.time())

    # --- called by saves ---

    def expect(self, handle: SaveHandle, url: str, settings: Settings) -> None:
        """Register a save that begins. Wait until the tier has room for another unflushed step.

        A save also waits for an earlier save to the same path.

        Args:
            handle: handle of the save.
            url: address of the tier.
            settings: settings of the save.
        """
        if self._replicating is None:
            self._replicating, self._flushing = Workers(1, "bytecheckpoint-share"), Workers(1, "bytecheckpoint-flush")
        level = logging.INFO
        with self._changed:
            while len(self._busy) >= settings.tier.waiting or url in self._busy.values():
                busy = listed([*self._busy.values()])
                _log.log(level, "the save of %s waits, because these are not durable yet: %s", url, busy)
                level = logging.WARNING
                # Every save and every flush ends within its own time limits, and notifies.
                self._changed.wait(60.0)
            self._busy[id(handle)] = url
        handle.committed.add_done_callback(lambda _: self._on_save_over(id(handle)))

    def take(
        self,
        number: int,
        storage: TierStorage,
        handle: SaveHandle,
        report: SaveReport,
        settings: Settings,
        operation: Operation,
        on_failure: Callable[[CheckpointError], None],
    ) -> None:
        """Take over a step that was committed in the hot tier. Every rank calls it for every save, in order.

        Args:
            number: save number, the same on all ranks.
            storage: tier that holds the step.
            handle: handle whose `restorable` and `committed` are set.
            report: report of the save, for `committed`.
            settings: settings of the save.
            operation: this rank's part of the save.
            on_failure: callback, given the error of a flush that fails.
        """
        assert self._replicating is not None
        with self._changed:
            self._pending += 1
        flush = PendingFlush(number, storage, handle, report, settings, on_failure, operation)
        self._replicating.submit(self._replicate, flush)

    def drain(self) -> None:
        """Wait until all flushes have ended."""
        with self._changed:
            while self._busy or self._pending:
                self._changed.wait(60.0)

    def _on_save_over(self, save: int) -> None:
        with self._changed:
            self._busy.pop(save, None)
            self._changed.notify_all()

    def _busy_urls(self) -> set[str]:
        with self._changed:
            return set(self._busy.values())

    # --- the first thread: replicas ---

    def _replicate(self, flush: PendingFlush) -> None:
        """Bring the step to every machine, and its files to the partners. Then the step is restorable."""
        flush.operation.phase = Stage.REPLICATE.value
        try:
            agreement = Agreement(self._collective, f"tier/{flush.number}", flush.settings.timeout)
            machines = self._machines = self._machines or find_machines(agreement, flush.storage.hot_root)
            flush.step = agreement.agree(
                "step", lambda: self._find_step(flush.storage), lambda steps: steps[0],
                reports=HotStep | None, decisions=HotStep | None,
            )  # fmt: skip
            agreement.timeout = flush.timeout
            if self._share(agreement, machines, flush):
                flush.set_restorable()
        except BaseException as error:  # noqa: BLE001  raised by result() and the next save
            self._fail(flush, error)
            return
        flush.operation.mark(Stage.REPLICATE.value)
        flush.operation.phase = Stage.FLUSH.value
        assert self._flushing is not None
        self._flushing.submit(self._flush, flush, machines)

    def _find_step(self, storage: TierStorage) -> HotStep | None:
        """Return the step that rank 0 has committed; None on other ranks."""
        if self._collective.rank != 0:
            return None
        catalog = storage.hot.read(CATALOG_NAME)
        record = storage.hot_folder.record(catalog) or StepRecord(storage.durable.url, UNKNOWN, time.time())
        return HotStep(catalog, record)

    def _share(self, agreement: Agreement, machines: Machines, flush: PendingFlush) -> bool:
        """Bring the step to the other machines. Return False if that fails, which does not harm the flush."""
        replicas = flush.settings.tier.replicas if len(machines.groups) > 1 else 0
        try:
            agreement.agree("present", lambda: self._check_presence(flush), lambda _: None)
            if replicas:
                agreement.agree(
                    "replicas",
                    lambda: replicate(agreement, machines, flush.storage.hot, flush.catalog, replicas),
                    lambda _: None,
                )
            agreement.agree("shared", lambda: self._commit_here(machines, flush), lambda _: None)
        except (PeerLostError, CheckpointTimeoutError):
            raise
        except Exception as error:  # noqa: BLE001  logged; the flush needs no replicas
            _log.warning("%s is not restorable before its flush: %s", flush.storage.url, error)
            return False
        return True

    def _check_presence(self, flush: PendingFlush) -> None:
        """Check that this rank's files are where it reads them: rank 0 cannot see those of other machines."""
        files = [flush.catalog.files[number] for number in own_files(flush.catalog)]
        present = dict(flush.storage.hot.list())
        lacking = {
            f.name: f.stored_bytes
            for f in files
            if f.rank == self._collective.rank and present.get(f.name) != f.stored_bytes
        }
        if lacking:  # the hot tier had no room for them
            present = dict(flush.storage.durable.list())
        for name, size in lacking.items():
            if present.get(name) != size:
                raise StorageError(f"{flush.storage.hot.url}/{name} is not there with its {size} bytes")

    def _commit_here(self, machines: Machines, flush: PendingFlush) -> None:
        """Commit the step on this machine too, and remove what it replaces here."""
        rank, storage, step = self._collective.rank, flush.storage, flush.agreed_step
        if not machines.leads(rank):
            return
        saved, ranks = self._time_of(flush), machines.ranks_beside(rank)
        if machines.machine_of[rank] == 0:  # rank 0 has committed it in its save
            storage.hot_folder.update_record(step, ranks, saved=saved)
            return
        storage.hot_folder.write_record(step.catalog, msgspec.structs.replace(step.record, ranks=ranks, saved=saved))
        named = {file.name for file in flush.catalog.files}
        named |= companions(named)
        replaced = [name for name, _ in storage.hot.list() if generation_of(name) is not None and name not in named]
        storage.hot.publish(CATALOG_NAME, step.catalog)
        storage.hot.delete(replaced)
        storage.hot_folder.remove_other_records(step.catalog)

    def _time_of(self, flush: PendingFlush) -> float:
        """Return when the step was saved: after all older steps of the run on this machine, also if a clock was ahead."""
        busy, run, saved = self._busy_urls(), run_of(flush.storage.url), flush.agreed_step.record.saved
        older = max((step.record.saved for tier, step in steps_of_run(run) if tier.url not in busy), default=0.0)
        if older < saved:
            return saved
        self._unflushed.on_clock_set_back(run, older)
        return older + 1e-3

    # --- the second thread: the flush ---

    def _flush(self, flush: PendingFlush, machines: Machines) -> None:
        """Copy the step to the durable storage. Then flush the steps that earlier flushes left."""
        flush.stage = Stage.FLUSH
        agreement = Agreement(self._collective, f"tier/{flush.number}/flush", flush.timeout)
        try:
            flush_together(agreement, machines, flush.storage, flush.agreed_step, flush.settings.storage.write_threads)
        except BaseException as error:  # noqa: BLE001  raised by result() and the next save
            self._fail(flush, error)
            return
        self._unflushed.on_flushed(flush.storage.url)
        flush.operation.mark(Stage.FLUSH.value)
        flush.set_committed()
        # Not after a failure: other ranks may be gone then, and this rank would wait for them.
        try:
            run = run_of(flush.storage.url)
            if agreement.agree("look", lambda: self._unflushed.may_exist(run), any):
                inner = Agreement(self._collective, f"tier/{flush.number}/left", flush.settings.timeout)
                self._unflushed.flush(inner, machines, flush.storage, self._busy_urls(), flush.settings)
        except Exception as error:  # noqa: BLE001  logged; the step itself is safe
            _log.warning("%s: what is left in memory cannot be flushed: %s", flush.storage.url, error)
        self._end(flush)

    # --- the end of a flush, on either thread ---

    def _fail(self, flush: PendingFlush, error: BaseException) -> None:
        failure = flush.describe(self._collective.rank, error)
        _log.error("%s", failure)
        self._unflushed.on_failed(flush.storage.url, flush.step.catalog if flush.step is not None else b"")
        flush.set_failed(failure)
        self._end(flush)

    def _end(self, flush: PendingFlush) -> None:
        """Evict the steps that are not needed any more. A failure here fails no save."""
        try:
            if self._machines is not None and self._machines.leads(self._collective.rank):
                evict(flush.storage, self._busy_urls(), self._remove, flush.settings, self._unflushed.begun)
                self._remove_orphans(flush)
        except Exception as error:  # noqa: BLE001  logged; the step itself is safe
            _log.warning("%s: the hot tier could not be tidied up: %s", flush.storage.url, error)
        finally:
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _remove_orphans(self, flush: PendingFlush) -> None:
        """Remove files of given-up steps that have no catalog on this machine: nothing else would find them."""
        orphans = self._unflushed.give_up_older(flush.settings.tier.waiting)
        if flush.step is not None and not self._unflushed.has_failed(flush.storage.url):
            orphans.append((flush.storage.url, flush.step.catalog))
        for url, catalog in orphans:
            storage = TierStorage(url)
            if catalog and storage.hot_folder.catalog() is None:
                self._remove(storage, catalog)

    def _remove(self, storage: TierStorage, catalog: bytes) -> None:
        with self._changed:  # so that no save begins meanwhile
            if storage.url not in self._busy.values():
                storage.hot_folder.remove_step(catalog)


class Stage(StrEnum):
    """The stage of a flush. The values appear in errors, and two of them are phases of the save."""

    REPLICATE = "replicate"  # all machines get the catalog, and partners the files; then the step is restorable
    FLUSH = "flush"  # the files go to the durable storage
    COMMITTED = "committed"  # the durable storage has the step
    FAILED = "failed"


@dataclass
class PendingFlush:
    """One save that is committed in the hot tier, on one rank.

    Attributes:
        number: save number, the same on all ranks.
        storage: tier that holds the step.
        handle: handle whose `restorable` and `committed` are set.
        report: report of the save so far.
        settings: settings of the save.
        on_failure: callback, given the error if the step never became restorable.
        operation: this rank's part of the save.
        stage: how far the flush is.
        step: the step, once the ranks have agreed upon it.
    """

    number: int
    storage: TierStorage
    handle: SaveHandle
    report: SaveReport
    settings: Settings
    on_failure: Callable[[CheckpointError], None]
    operation: Operation
    stage: Stage = Stage.REPLICATE
    step: HotStep | None = None

    @property
    def agreed_step(self) -> HotStep:
        """The step; only after the ranks have agreed upon it."""
        assert self.step is not None
        return self.step

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The catalog of the step; only after the ranks have agreed upon it."""
        return decode(self.agreed_step.catalog)

    @property
    def timeout(self) -> float:
        """Seconds that one stage may take."""
        return self.settings.timeout + transfer_limit(self.catalog)

    def set_restorable(self) -> None:
        """Report that the loss of a machine does not lose the step any more."""
        if not self.handle.restorable.done():
            self.handle.restorable.set_result(None)

    def set_committed(self) -> None:
        """Report that the durable storage has the step."""
        self.stage = Stage.COMMITTED
        self.set_restorable()
        operation = self.operation
        report = replace(
            self.report,
            phases=operation.seconds_by_phase(),
            total_seconds=operation.seconds(),
            retries=operation.retries,
            retry_seconds=operation.retry_seconds,
        )
        self.handle.committed.set_result(report)

    def describe(self, rank: int, error: BaseException) -> CheckpointError:
        """Return the error to report when this stage has failed on this rank."""
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        cause = error if isinstance(error, CheckpointError) else repr(error)
        return kind(f"rank {rank}, {self.stage} of {self.storage.url}: {cause}")

    def set_failed(self, failure: CheckpointError) -> None:
        """Report that the flush has failed. Later saves continue if a restart can use the step."""
        self.stage = Stage.FAILED
        if not self.handle.restorable.done():
            self.on_failure(failure)
        fail_handle(self.handle, failure)
