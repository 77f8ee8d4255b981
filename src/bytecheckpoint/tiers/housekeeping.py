"""What is left in a hot tier: steps that no flush has taken yet are made up for, and what is not needed goes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable

import msgspec

from ..errors import CheckpointError, CheckpointTimeoutError, CorruptCheckpointError, StorageConflictError
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, generation_of
from ..settings import Settings
from ..storage.tier import HOUSEHOLD, LOCK, Record, TierStorage, unplaced
from .job_flush import SLOWEST, HotStep, flush_together
from .party import Machines, Party

__all__ = ["Leftovers", "evict"]

_log = logging.getLogger("bytecheckpoint")

_Found = dict[str, tuple[TierStorage, bytes, Record]]


class Leftovers:
    """The steps in these machines' memory that earlier flushes should have taken: of killed jobs, or of this one.

    Args:
        begun: when this job began, seconds since 1970. What others saved later may be on its way.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._clean: set[str] = set()  # runs in which nothing is left
        self._failed: dict[str, bytes] = {}  # steps whose flush failed here, with their catalogs, oldest first
        self._hopeless: set[str] = set()  # steps that no later flush can take; known to rank 0 only

    def expected(self, run: str) -> bool:
        """Whether steps of a run may be left."""
        return run not in self._clean

    def failed(self, run: str, url: str, catalog: bytes) -> None:
        """The flush of a step has failed.

        Args:
            run: the folder of steps.
            url: of the step.
            catalog: of the step; empty when it is not known.
        """
        self._failed.pop(url, None)
        self._failed[url] = catalog
        self._hopeless.discard(url)
        self._clean.discard(run)

    def flushed(self, url: str) -> None:
        """A step has reached the durable storage."""
        self._failed.pop(url, None)
        self._hopeless.discard(url)

    def give_up_all_but(self, newest: int) -> list[tuple[str, bytes]]:
        """Give up steps of this job whose flush failed; returns their URLs and catalogs."""
        urls = list(self._failed)[: -newest or None]
        return [(url, self._failed.pop(url, b"")) for url in urls]  # two threads may do so

    def own(self, url: str) -> bool:
        """Whether it is a step of this job whose flush failed."""
        return url in self._failed

    def flush(self, party: Party, machines: Machines, storage: TierStorage, busy: set[str], settings: Settings) -> None:
        """Flush what is left of the run of `storage`, oldest first; all ranks call it.

        Args:
            party: the ranks.
            machines: who stands where.
            storage: a step of the run, which was just flushed.
            busy: URLs of the steps that are on their way.
            settings: of this job.

        Raises:
            CheckpointTimeoutError: a rank hangs.
        """
        left: _Found = {}

        def look() -> list[tuple[str, float]]:
            if machines.leads(party.rank):
                for step, catalog, record in storage.neighbours():
                    due = record.saved < self._begun or step.url in self._failed
                    if due and not record.flushed and step.url not in busy:
                        left[step.url] = step, catalog, record
            return [(url, record.saved) for url, (_, _, record) in left.items()]

        def choose(words: list[list[tuple[str, float]]]) -> list[tuple[str, int]]:
            newest: dict[str, tuple[float, int]] = {}
            for rank, steps in enumerate(words):
                for url, saved in steps:
                    if url not in self._hopeless and saved > newest.get(url, (0.0, 0))[0]:
                        newest[url] = saved, rank
            return [(url, rank) for url, (_, rank) in sorted(newest.items(), key=lambda item: item[1])]

        again = set()
        for number, (url, holder) in enumerate(party.agree("look", look, choose)):
            inner = Party(party.collective, f"{party.tag}/{number}", party.timeout)
            if not self._flush_one(inner, machines, left, url, holder, settings):
                again.add(url)
        if machines.leads(party.rank):
            # Only now: a machine may have files of a step that was committed on another one, and not yet told here.
            self._remove_remains(storage, busy | again)
        if not again:
            self._clean.add(storage.url.rpartition("/")[0])

    def _flush_one(
        self, party: Party, machines: Machines, left: _Found, url: str, holder: int, settings: Settings
    ) -> bool:
        """Whether there is nothing more to do about this step."""

        def tell() -> bytes:
            return msgspec.msgpack.encode(HotStep(*left[url][1:])) if party.rank == holder else b""

        try:
            step = msgspec.msgpack.decode(party.agree("step", tell, lambda words: words[holder]), type=HotStep)
            party.timeout += sum(file.size for file in decode(step.catalog).files) / SLOWEST
            flush_together(party, machines, TierStorage(url), step, settings.write_threads)
        except CheckpointTimeoutError:
            raise
        except CheckpointError as error:
            _log.warning("%s, which is left in memory, cannot be flushed: %s", url, error)
            if not isinstance(error, StorageConflictError | CorruptCheckpointError):
                return False
            self._hopeless.add(url)
        else:
            self.flushed(url)
            _log.info("%s, which was left in memory, is flushed", url)
        return True

    def _remove_remains(self, storage: TierStorage, busy: set[str]) -> None:
        """Remove what saves of killed jobs wrote and did not commit, or replaced and did not remove."""
        run = storage.url.rpartition("/")[0]
        for entry in os.scandir(os.path.dirname(storage.hot.root)):
            with contextlib.suppress(CheckpointError, FileNotFoundError):  # not ours, or gone meanwhile
                step = TierStorage(f"{run}/{unplaced(entry.name)}")
                if not entry.is_dir() or step.url == storage.url or step.url in busy:
                    continue
                needed = step.needed()
                remains = [name for name, _ in step.hot.list() if name not in needed and _ours(name)]
                times = [step.hot.stat(name).modified for name in remains if name != LOCK]
                if max(times, default=entry.stat().st_mtime) < self._begun:
                    step.remove(remains)


def _ours(name: str) -> bool:
    return generation_of(name) is not None or name == CATALOG_NAME or HOUSEHOLD.fullmatch(name) is not None


def evict(
    storage: TierStorage, busy: set[str], forget: Callable[[TierStorage, bytes], None], settings: Settings
) -> None:
    """Keep as many hot steps of a run as the settings say: flushed ones for quick restarts, others until they are flushed.

    Args:
        storage: any step of the run.
        busy: URLs of the steps that are on their way, which count for nothing here.
        forget: removes a step from memory, given its catalog, unless a save to its path is under way.
        settings: how many.
    """
    found = (item for item in storage.neighbours() if item[0].url not in busy)
    steps = sorted(found, key=lambda item: item[2].saved, reverse=True)
    flushed = [item for item in steps if item[2].flushed]
    failed = [item for item in steps if not item[2].flushed]
    for step, catalog, _ in flushed[settings.tier_keep :]:
        forget(step, catalog)
    for step, catalog, _ in failed[settings.tier_waiting :]:
        _log.warning("%s was not flushed, and is removed from memory to make room for newer steps", step.url)
        forget(step, catalog)
