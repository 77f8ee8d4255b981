"""Steps in the hot tiers that earlier flushes did not take, and the eviction of what is not needed any more."""

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
from bytecheckpoint.tiers.flush.job import flush_together, time_for
from bytecheckpoint.tiers.hot_folder import HotStep
from bytecheckpoint.tiers.machines import Machines
from bytecheckpoint.tiers.names import INTERNAL_FILES, LOCK
from bytecheckpoint.tiers.run import folders_of_run, run_of, steps_of_run
from bytecheckpoint.tiers.storage import TierStorage

__all__ = ["UnflushedSteps", "evict"]

_log = logging.getLogger("bytecheckpoint")


class UnflushedSteps:
    """The steps in these machines' hot tiers that earlier flushes did not take: of killed jobs, or of this job.

    Args:
        begun: when this job began, seconds since 1970. What other jobs saved later, they may be flushing now.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._flushed_runs: set[str] = set()  # runs of which every step is flushed
        self._failed: dict[str, bytes] = {}  # steps of this job whose flush failed, with their catalogs, oldest first
        self._hopeless: set[str] = set()  # steps that no later flush can take; known to rank 0 only

    # --- the steps of this job ---

    def may_exist(self, run: str) -> bool:
        """Whether a run may have unflushed steps."""
        return run not in self._flushed_runs

    def on_failed(self, url: str, catalog: bytes) -> None:
        """Note that the flush of a step has failed.

        Args:
            url: of the step.
            catalog: of the step; empty when it is not known.
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
        """Whether it is a step of this job whose flush failed."""
        return url in self._failed

    def give_up_older(self, newest: int) -> list[tuple[str, bytes]]:
        """Give up failed steps but for the newest; returns URLs and catalogs of those that are given up."""
        urls = list(self._failed)[: -newest or None]
        return [(url, self._failed.pop(url, b"")) for url in urls]  # two threads may do so

    # --- flushing them ---

    def flush(
        self, agreement: Agreement, machines: Machines, storage: TierStorage, busy: Collection[str], settings: Settings
    ) -> None:
        """Flush the unflushed steps of a run, oldest first. Every rank calls it.

        Args:
            agreement: the ranks.
            machines: which ranks share a machine.
            storage: a step of the run, which was just flushed.
            busy: URLs of the steps that this job is saving or flushing.
            settings: of this job.

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
            # Only now: a machine may have files of a step that another machine knows, and this one did not.
            self._remove_uncommitted(storage, {*busy, *left})
        if not left:
            self._flushed_runs.add(run)

    def _find(self, run: str, busy: Collection[str]) -> dict[str, HotStep]:
        """The unflushed steps on this machine, by URL."""
        return {
            storage.url: step
            for storage, step in steps_of_run(run)
            if (step.record.saved < self._begun or storage.url in self._failed)
            and not step.record.flushed
            and storage.url not in busy
        }

    def _in_order(self, reports: list[list[tuple[str, float]]]) -> list[tuple[str, int]]:
        """URL, and a rank that knows the latest save of the step; oldest step first. Runs on rank 0."""
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
        """Flush one step; whether a later attempt is useless."""

        def send() -> HotStep | None:
            return found if agreement.rank == holder else None

        try:
            step = agreement.agree(
                "step", send, lambda steps: steps[holder], reports=HotStep | None, decisions=HotStep | None
            )
            assert step is not None
            agreement.timeout += time_for(decode(step.catalog))
            flush_together(agreement, machines, TierStorage(url), step, settings.write_threads)
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
        """Remove files that saves of killed jobs wrote and did not commit, or replaced and did not remove."""
        for step in folders_of_run(run_of(storage.url)):
            if step.url == storage.url or step.url in busy:
                continue
            with contextlib.suppress(CheckpointError, FileNotFoundError):  # gone meanwhile
                needed = step.hot_folder.needed_files()
                names = [name for name, _ in step.hot.list() if name not in needed and _is_of_a_save(name)]
                times = [step.hot.stat(name).modified for name in names if name != LOCK]
                if max(times, default=os.stat(step.hot.root).st_mtime) < self._begun:
                    step.hot_folder.remove(names)


def _is_of_a_save(name: str) -> bool:
    return generation_of(name) is not None or name == CATALOG_NAME or INTERNAL_FILES.fullmatch(name) is not None


def evict(
    storage: TierStorage, busy: Collection[str], remove: Callable[[TierStorage, bytes], None], settings: Settings
) -> None:
    """Keep as many hot steps of a run as the settings say: flushed ones for quick restarts, others until they are flushed.

    Args:
        storage: any step of the run.
        busy: URLs of the steps that this job is saving or flushing; they do not count.
        remove: removes a step from the hot tier, given its catalog, unless a save to its path is under way.
        settings: how many.
    """
    found = (item for item in steps_of_run(run_of(storage.url)) if item[0].url not in busy)
    steps = sorted(found, key=lambda item: item[1].record.saved, reverse=True)
    flushed = [item for item in steps if item[1].record.flushed]
    unflushed = [item for item in steps if not item[1].record.flushed]
    for place, step in flushed[settings.tier_keep :]:
        remove(place, step.catalog)
    for place, step in unflushed[settings.tier_waiting :]:
        _log.warning("%s was not flushed, and is removed from memory to make room for newer steps", place.url)
        remove(place, step.catalog)
