"""The steps of one save on one rank. `Saver` decides which of them run in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint._version import __version__
from bytecheckpoint.collectives import Collective
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.save_job import SaveJob
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.handles import SaveHandle, SaveReport
from bytecheckpoint.monitoring.phases import Phases
from bytecheckpoint.representation.names import CATALOG_NAME, escape, new_generation
from bytecheckpoint.representation.shards import LiveState
from bytecheckpoint.saving.call import SLOWEST_WRITE, SaveCall, SaveTask
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.files import FileBatch, RankFiles
from bytecheckpoint.saving.messages import (
    MIXED_PLANS,
    CommitResult,
    DescribeRequest,
    FileRecord,
    PlanDescription,
    Reply,
    RewriteRequest,
    ValuesRequest,
    WriteReport,
    unescaped,
)
from bytecheckpoint.saving.planner import RankPlanner
from bytecheckpoint.saving.state import CapturedState

__all__ = ["SaveSession"]


@dataclass(slots=True)
class _Staged:
    """What an asynchronous save has copied.

    Attributes:
        batch: the files to write.
        pool: holds the chunks that are still to be written.
        chunks: those chunks.
        nbytes: length of the whole image.
    """

    batch: FileBatch
    pool: StagingPool
    chunks: list[tuple[int, int, int, int]]
    nbytes: int


class SaveSession:
    """One save on one rank.

    Args:
        collective: the ranks.
        resources: staging pool, helper process, cached plans.
        call: the arguments.
        task: number of the save; on rank 0, shared with the coordinator.
        channel: to the coordinator.
        states: what the adapter captured.
        phases: of the call.
        committed: called with this rank's report as soon as the checkpoint is committed.

    Attributes:
        stage_name: what is being done, for failure messages.
        blocking_seconds: how long the caller waited; 0.0 until that is known.
        planner: finds this rank's plan.
    """

    def __init__(
        self,
        collective: Collective,
        resources: SaveResources,
        call: SaveCall,
        task: SaveTask,
        channel: CoordinatorChannel,
        states: Sequence[LiveState],
        phases: Phases,
        committed: Callable[[SaveReport], None],
    ) -> None:
        generation = new_generation(collective.world_id, task.sequence)
        task.generation = generation
        if collective.rank == 0:
            task.storage = call.storage
            task.info = _info(call, collective.world_size)
        self.stage_name = "plan"
        self.blocking_seconds = 0.0
        self._state = CapturedState(states)
        self.planner = RankPlanner(collective, resources, call, task, self._state)
        self._files = RankFiles(collective, generation, call.storage, call.settings)
        self._resources = resources
        self._call = call
        self._task = task if collective.rank == 0 else None
        self._channel = channel
        self._phases = phases
        self._committed = committed
        self._staged: _Staged | None = None

    # --- the steps ------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Find out what this rank writes."""
        self.planner.make(self._channel)
        self._phases.mark("plan")

    def prepare(self) -> None:
        """Start the helper process, plan, and touch the pages of the staging pool."""
        settings = self._call.settings
        # Nothing waits for the process to come up: a save that follows at once needs it only in its background half.
        if settings.writer == "process":
            self._resources.helper()
        self.planner.make(self._channel, dry=True)
        nbytes = self._planned_batch().image.nbytes
        self._files.release()
        self._resources.reserve(nbytes, settings, touch=True)

    def write_through(self, handle: SaveHandle) -> None:
        """Write and commit a synchronous save.

        Args:
            handle: its `staged` is set when all bytes are written.
        """
        self.stage_name = "write"
        self._check_target()
        batch = self._planned_batch()
        # A storage that takes whole files gets them from memory, if there is room, else from a spool file.
        whole_files = self._call.storage.capabilities.whole_files
        pool = self._resources.whole_pool(batch.image.nbytes, self._call.settings) if whole_files else None
        if pool is None:
            records = self._finish(batch, self._stream(batch.job, self._resources.pool))
        else:
            try:
                batch.job.open_backend(pool, None)
                records = self._finish(batch, batch.job.write_staged(batch.job.stage(pool)))
            finally:
                self._give_back(pool)
        handle.staged.set_result(None)
        self._commit(records)

    def stage(self, handle: SaveHandle) -> None:
        """Copy everything into the staging pool, so that the caller may go on.

        Args:
            handle: its `staged` is set.
        """
        self.stage_name = "stage"
        batch = self._planned_batch()
        image = batch.image
        pool = self._resources.staging_pool(image.nbytes, self._call.settings)
        if pool.capacity < image.nbytes:
            self._open_backend(batch.job, pool)
        self._staged = _Staged(batch, pool, batch.job.stage(pool), image.nbytes)
        self._phases.mark("stage")
        # The coordinator may still ask for values that another rank's copy stands for.
        for value in self._state.values:
            if self._files.place_of(value)[0] < 0:
                value.data = value.data.clone()
        # The live tensors are not needed any more, and must not be kept alive.
        image.tensors = []
        self._state.release()
        handle.staged.set_result(None)

    def write_staged(self) -> None:
        """Write and commit what `stage` has copied."""
        staged = self._staged
        assert staged is not None
        if staged.pool is self._resources.pool:
            self._write_staged(staged)
            return
        try:
            with self._resources.made_ready(staged.nbytes, self._call.settings):
                self._write_staged(staged)
        finally:
            self._give_back(staged.pool)

    def discard(self) -> None:
        """Remove what this rank wrote, after a failure, unless a commit may still name it."""
        if self._channel.undecided:
            self._files.abort_jobs()
        else:
            self._files.discard()

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _planned_batch(self) -> FileBatch:
        return self._files.add_planned(self.planner.plan, self._state.shards, self.planner.values_to_write())

    def _check_target(self) -> None:
        """On rank 0, before the first byte is written: note what the commit replaces, and refuse what cannot be."""
        if self._task is not None:
            storage = self._call.storage
            self._task.replaces = storage.version(CATALOG_NAME)
            storage.check_publish(CATALOG_NAME, self._task.replaces)

    def _open_backend(self, job: SaveJob, pool: StagingPool) -> None:
        self._check_target()
        by_helper = pool.shared and self._call.settings.writer == "process"
        job.open_backend(pool, self._resources.helper if by_helper else None)

    def _write_staged(self, staged: _Staged) -> None:
        self.stage_name = "write"
        job = staged.batch.job
        if not job.opened:
            self._open_backend(job, staged.pool)
        self._commit(self._finish(staged.batch, job.write_staged(staged.chunks)))

    def _stream(self, job: SaveJob, pool: StagingPool) -> list[NDArray[np.uint64]]:
        # The pool's pages are touched already; touching new ones would cost more than copying into them.
        pool.reserve(job.slot_bytes(), touch=False)
        return job.write_through(pool)

    def _finish(self, batch: FileBatch, sums: list[NDArray[np.uint64]]) -> list[FileRecord]:
        self._phases.mark("write")
        self.stage_name = "finish"
        records = self._files.finish(batch, sums)
        self._phases.mark("finish")
        return records

    def _give_back(self, pool: StagingPool) -> None:
        if self._resources.give_back(pool):
            self.planner.plan.targets.forget()

    # --- commit ---------------------------------------------------------------------------------------------------

    def _commit(self, records: list[FileRecord]) -> None:
        """Report this rank's files, and do what the coordinator asks for until it has committed."""
        self.stage_name = "commit"
        reply = self._report(records)
        while not isinstance(reply, CommitResult):
            reply = self._answer(reply, records)
        self._phases.mark("commit")
        self._files.release()
        total = self._phases.total()
        report = SaveReport(
            path=self._call.storage.url,
            bytes_written=self._files.bytes_written,
            blocking_seconds=self.blocking_seconds or total,
            total_seconds=total,
            phases=dict(self._phases.seconds),
            plan_cached=self.planner.cached,
            generation=self._files.generation,
            replica_differences=self.planner.differences,
        )
        self._committed(report)

    def _answer(self, request: Reply, records: list[FileRecord]) -> Reply:
        """Do what the coordinator asks for; `records` of all this rank's files are brought up to date."""
        plan = self.planner.plan
        if isinstance(request, DescribeRequest):
            description = PlanDescription(plan.table, np.array(plan.rows, np.int64).tobytes())
            return self._channel.ask(description, self._waiting_seconds())
        if isinstance(request, RewriteRequest):
            records[:] = self._rewrite(request)
        else:
            assert isinstance(request, ValuesRequest), request
            records += self._write_values(request)
        return self._report(records)

    def _report(self, records: list[FileRecord]) -> Reply:
        values = [value.record(self._files.place_of(value)) for value in self._state.values]
        report = WriteReport(escape(self._call.storage.url), self.planner.plan.name, records, values)
        return self._channel.ask(report, self._waiting_seconds())

    def _waiting_seconds(self) -> float:
        """Bound the wait for the slowest rank. Its bytes are not known here; this rank's are a measure."""
        return 2 * self._call.settings.timeout + 4 * self._files.bytes_written / SLOWEST_WRITE

    def _rewrite(self, request: RewriteRequest) -> list[FileRecord]:
        """Write anew: what the cached plan made this rank write does not fit what other ranks hold now.

        Raises:
            IncompatibleCheckpointError: only what the cached plan wanted was copied, and the caller has gone on since.
        """
        if not self._state.live:
            raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {request.reason}")
        self._files.start_again()
        self.planner.adopt(request.plan)
        batch = self._planned_batch()
        return self._finish(batch, self._stream(batch.job, self._resources.pool))

    def _write_values(self, request: ValuesRequest) -> list[FileRecord]:
        keys = {unescaped(key) for key in request.keys}
        batch = self._files.add_values([v for v in self._state.values if v.key in keys])
        pool = self._staged.pool if self._staged is not None else self._resources.pool
        records = self._finish(batch, self._stream(batch.job, pool))
        self.planner.plan.write_values |= keys
        return records


def _info(call: SaveCall, world_size: int) -> dict[str, Any]:
    """Collect the facts about the save as a whole that the catalog holds."""
    return {
        "created": time.time(),
        "world_size": world_size,
        "framework": call.framework.name,
        "versions": {"bytecheckpoint": __version__, "torch": str(torch.__version__)},
        "metadata": dict(call.metadata),
    }
