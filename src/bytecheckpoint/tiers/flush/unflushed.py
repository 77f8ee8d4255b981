"""Find and flush the steps that earlier flushes left in the hot tiers, and evict the steps that are not needed any more."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, CorruptCheckpointError, StorageConflictError
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME, generation_of
from bytecheckpoint.settings import Settings
from bytecheckpoint.tiers.current_copy import ask_durable
from bytecheckpoint.tiers.flush.job import flush_together, transfer_limit
from bytecheckpoint.tiers.hot_folder import HotStep
from bytecheckpoint.tiers.machines import Machines
from bytecheckpoint.tiers.names import INTERNAL_FILES, LOCK
from bytecheckpoint.tiers.room import hot_steps
from bytecheckpoint.tiers.run import folders_of_run, run_of, steps_of_run
from bytecheckpoint.tiers.storage import PREFIX, TierStorage
from bytecheckpoint.tuning import tuning

__all__ = ["UnflushedSteps", "evict"]

_log = logging.getLogger("bytecheckpoint")


class UnflushedSteps:
    """The steps that earlier flushes left in the hot tiers of these machines: of killed jobs, or of this job.

    Args:
        begun: start of this job, seconds since 1970. Steps that other jobs saved later are left to those jobs.
    """

    def __init__(self, begun: float) -> None:
        self.begun = begun
        #: Run -> until when ended jobs saved, by a clock that was ahead of this job's.
        self._older: dict[str, float] = {}
        self._flushed_runs: set[str] = set()  # runs of which every step is flushed
        self._failed: dict[str, bytes] = {}  # steps of this job whose flush failed, with their catalogs, oldest first
        self._hopeless: set[str] = set()  # steps that no later flush can take; known to rank 0 only

    # --- the steps of this job ---

    def may_exist(self, run: str) -> bool:
        """Return whether a run may have unflushed steps."""
        return run not in self._flushed_runs

    def on_clock_set_back(self, run: str, saved: float) -> None:
        """Note that steps of a run were saved until this time by a clock that was ahead of the one of this job."""
        self._older.setdefault(run, saved)

    def on_failed(self, url: str, catalog: bytes) -> None:
        """Note that the flush of a step has failed.

        Args:
            url: address of the step.
            catalog: catalog of the step; empty when it is not known.
        """
        self._failed.pop(url, None)
        self._failed[url] = catalog
        self._hopeless.discard(url)
        self._flushed_runs.discard(run_of(url))

    def on_flushed(self, url: str) -> None:
        """Note that a step is in the durable storage."""
        self._failed.pop(url, None)
        self._hopeless.discard(url)

    def has_failed(self, url: str) -> bool:
        """Return whether the flush of this step has failed in this job."""
        return url in self._failed

    def give_up_older(self, newest: int) -> list[tuple[str, bytes]]:
        """Give up all failed steps except the newest. Return URL and catalog of each step that is given up."""
        urls = list(self._failed)[: -newest or None]
        return [(url, self._failed.pop(url, b"")) for url in urls]  # a default, because two threads may pop

    # --- flushing them ---

    def flush(
        self, agreement: Agreement, machines: Machines, storage: TierStorage, busy: Collection[str], settings: Settings
    ) -> None:
        """Flush the unflushed steps of a run, oldest first. Every rank calls it.

        Args:
            agreement: the ranks.
            machines: machines of the ranks.
            storage: a step of the run, which was just flushed.
            busy: URLs of the steps that this job is saving or flushing.
            settings: settings of this job.

        Raises:
            CheckpointTimeoutError: a rank hangs.
        """
        run, leads = run_of(storage.url), machines.leads(agreement.rank)
        found: dict[str, HotStep] = {}

        def look() -> list[tuple[str, float]]:
            if leads:
                found.update(self._find(run, busy))
            return [(url, step.record.saved) for url, step in found.items()]

        order = agreement.agree("look", look, self._in_order)
        left = set()
        for number, (url, holder) in enumerate(order):
            inner = Agreement(agreement.collective, f"{agreement.tag}/{number}", agreement.timeout)
            if not self._flush_step(inner, machines, url, found.get(url), holder, settings):
                left.add(url)
        if leads:
            # Only after the flushes: this machine may have files of a step that only another machine knew.
            self._remove_uncommitted(storage, {*busy, *left})
        if not left:
            self._flushed_runs.add(run)

    def _find(self, run: str, busy: Collection[str]) -> dict[str, HotStep]:
        """Return the unflushed steps on this machine, by URL."""
        older = self._older.get(run, 0.0)
        return {
            storage.url: step
            for storage, step in steps_of_run(run)
            if (step.record.saved < self.begun or step.record.saved <= older or storage.url in self._failed)
            and not step.record.flushed
            and storage.url not in busy
        }

    def _in_order(self, reports: list[list[tuple[str, float]]]) -> list[tuple[str, int]]:
        """Return each step's URL and a rank that has its latest save, oldest step first. Runs on rank 0."""
        latest: dict[str, tuple[float, int]] = {}
        for rank, steps in enumerate(reports):
            for url, saved in steps:
                if url not in self._hopeless and saved > latest.get(url, (0.0, 0))[0]:
                    latest[url] = saved, rank
        return [(url, rank) for url, (_, rank) in sorted(latest.items(), key=lambda item: item[1])]

    def _flush_step(
        self,
        agreement: Agreement,
        machines: Machines,
        url: str,
        found: HotStep | None,
        holder: int,
        settings: Settings,
    ) -> bool:
        """Flush one step. Return whether it is settled: False if a later attempt may succeed."""

        def send() -> HotStep | None:
            return found if agreement.rank == holder else None

        try:
            step = agreement.agree(
                "step", send, lambda steps: steps[holder], reports=HotStep | None, decisions=HotStep | None
            )
            assert step is not None
            agreement.timeout += transfer_limit(decode(step.catalog))
            flush_together(agreement, machines, TierStorage(url), step, settings.storage.write_threads)
        except CheckpointTimeoutError:
            raise
        except CheckpointError as error:
            _log.warning("%s, which is left in memory, cannot be flushed: %s", url, error)
            if not isinstance(error, StorageConflictError | CorruptCheckpointError):
                return False
            self._hopeless.add(url)
        else:
            self.on_flushed(url)
            _log.info("%s, which was left in memory, is flushed", url)
        return True

    def _remove_uncommitted(self, storage: TierStorage, busy: Collection[str]) -> None:
        """Remove the files that saves of killed jobs did not commit, or replaced and did not remove."""
        for step in folders_of_run(run_of(storage.url)):
            if step.url == storage.url or step.url in busy:
                continue
            with contextlib.suppress(CheckpointError, FileNotFoundError):  # gone meanwhile
                needed = step.hot_folder.needed_files()
                names = [name for name, _ in step.hot.list() if name not in needed and _is_of_a_save(name)]
                times = [step.hot.stat(name).modified for name in names if name != LOCK]
                if max(times, default=os.stat(step.hot.root).st_mtime) < self.begun:
                    step.hot_folder.remove(names)


def _is_removed(step: TierStorage) -> bool:
    return not ask_durable(step.url, lambda: step.durable.version(CATALOG_NAME), tuning().tier_save_timeout)


def _is_of_a_save(name: str) -> bool:
    return generation_of(name) is not None or name == CATALOG_NAME or INTERNAL_FILES.fullmatch(name) is not None


def evict(
    storage: TierStorage,
    busy: Collection[str],
    remove: Callable[[TierStorage, bytes], None],
    settings: Settings,
    begun: float,
) -> None:
    """Remove the oldest hot steps of a run, beyond the numbers of flushed and unflushed steps that the settings keep.

    A step that was flushed and that somebody has removed from the durable storage since goes too: its remover could
    not reach this machine's copy, which must not count as a step of the run. Of other runs all flushed steps go that
    were saved before this job began: their jobs have ended, or will save others.

    Args:
        storage: any step of the run; the one that was just flushed, if that has succeeded.
        busy: URLs of the steps that this job is saving or flushing; they do not count.
        remove: removes a step from the hot tier, given its catalog, unless a save to its path is under way.
        settings: how many.
        begun: start of this job, seconds since 1970.
    """
    found = [(tier, step) for tier, step in steps_of_run(run_of(storage.url)) if tier.url not in busy]
    found.sort(key=lambda item: item[1].record.saved, reverse=True)
    flushed = [(tier, step) for tier, step in found if step.record.flushed]
    unflushed = [(tier, step) for tier, step in found if not step.record.flushed]
    answers = any(tier.url == storage.url for tier, _ in flushed)  # else the durable storage may be away
    for number, (tier, step) in enumerate(flushed):
        if number >= settings.tier.keep or (answers and tier.url != storage.url and _is_removed(tier)):
            remove(tier, step.catalog)
    for tier, step in unflushed[settings.tier.waiting :]:
        _log.warning("%s was not flushed, and is removed from memory to make room for newer steps", tier.url)
        remove(tier, step.catalog)
    for folder, step in hot_steps(storage.hot_root, lambda record: record.flushed and record.saved < begun):
        if run_of(TierStorage(f"{PREFIX}{step.record.url}").url) != run_of(storage.url):
            folder.remove_step(step.catalog)
