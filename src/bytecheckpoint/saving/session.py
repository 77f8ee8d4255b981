"""The steps of one save on one rank. `Saver` decides which of them run in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from bytecheckpoint._version import __version__
from bytecheckpoint.collectives import Collective
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.handles import SaveHandle, SaveReport
from bytecheckpoint.representation.names import escape, new_generation
from bytecheckpoint.representation.shards import LiveState
from bytecheckpoint.saving.call import SaveCall, SaveTask
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.copies import full_digests, sampled_digests
from bytecheckpoint.saving.file_layout import FileOrigin
from bytecheckpoint.saving.files import RankFiles
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
from bytecheckpoint.saving.steps import steps_of_objects, steps_of_shards
from bytecheckpoint.saving.writer import RankWriter
from bytecheckpoint.tracing.operation import Operation, retries_so_far

__all__ = ["SaveSession"]


class SaveSession:
    """One save on one rank.

    Args:
        collective: the ranks.
        resources: staging pool, helper process, cached plans.
        call: the arguments of the save.
        task: number of the save; on rank 0, shared with the coordinator.
        channel: to the coordinator.
        states: what the adapter captured.
        operation: this rank's part of the save.

    Attributes:
        call: as given.
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
        operation: Operation,
    ) -> None:
        task.generation = new_generation(collective.world_id, task.number)
        if collective.rank == 0:
            task.storage = call.storage
            task.info = _info(call, collective.world_size)
        self.call = call
        self.blocking_seconds = 0.0
        origin = FileOrigin(collective.rank, collective.world_size, task.generation)
        state = CapturedState(states, call.selection.report(), call.settings.timeout)
        self.planner = RankPlanner(origin, resources, call, task, state, collective.host)
        own_task = task if collective.rank == 0 else None
        self._files = RankFiles(origin, call.storage, call.settings, self.planner.state.copies)
        self._writer = RankWriter(self.planner, self._files, resources, call, own_task, operation)
        self._channel = channel
        channel.on_stop = self._files.stop
        if channel.stopped is not None:
            self._files.stop(channel.stopped)
        self._operation = operation
        # Now: in a background save the caller's counters go on.
        self._steps = steps_of_objects(call.states) if call.step is None else {"step=": call.step}
        self._optimizer_steps = self._digests = b""
        operation.phase = "plan"
        operation.step = next(iter(self._steps.values()), None)

    # --- the steps ------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Find this rank's plan."""
        self.planner.make(self._channel)
        self._operation.count("left to others", nbytes=self.planner.plan.spared)
        self._operation.count("cached plan", int(self.planner.cached))
        self._operation.mark("plan")

    def prepare(self) -> None:
        """Plan, and touch the pages of the staging pool."""
        self.planner.make(self._channel, dry=True)
        self._writer.prepare()

    def write_through(self, handle: SaveHandle) -> SaveReport:
        """Write and commit a synchronous save.

        Args:
            handle: its `staged` is set when all bytes are written.
        """
        records = self._writer.write_through()
        self._read_shards()
        handle.staged.set_result(None)
        return self._commit(records)

    def stage(self, handle: SaveHandle) -> None:
        """Copy everything into the staging pool, so that the caller may go on.

        Args:
            handle: its `staged` is set.
        """
        self._writer.stage()
        self._read_shards()
        # The live tensors are not needed any more, and must not be kept alive.
        self.planner.state.release()
        handle.staged.set_result(None)

    def write_staged(self) -> SaveReport:
        """Write and commit what `stage` has copied."""
        return self._commit(self._writer.write_staged())

    def end(self) -> None:
        """End the part of this rank in the save."""
        self._channel.close()

    def discard(self) -> None:
        """Remove what this rank wrote, after a failure, unless a commit may still name it."""
        if self._channel.undecided:
            self._files.abort_jobs()
        else:
            self._files.discard()
        self.planner.state.release_values()

    # --- commit ---------------------------------------------------------------------------------------------------

    def _commit(self, records: list[FileRecord]) -> SaveReport:
        """Report this rank's files, and do what the coordinator asks for until it has committed."""
        self._operation.phase = "commit"
        reply = self._report(records)
        while not isinstance(reply, CommitResult):
            reply = self._answer(reply, records)
        self._operation.mark("commit")
        self.planner.plan.compared = True
        self._files.release()
        self.planner.state.release_values()
        total = self._operation.seconds()
        return SaveReport(
            path=self.call.storage.url,
            bytes_written=self._files.bytes_written,
            blocking_seconds=self.blocking_seconds or total,
            total_seconds=total,
            phases=self._operation.seconds_by_phase(),
            plan_cached=self.planner.cached,
            generation=self._files.origin.generation,
            **retries_so_far(),
        )

    def _read_shards(self) -> None:
        """Read from the live tensors, which still hold what is saved, what ranks compare: steps, and copies."""
        state, check = self.planner.state, self.call.check_replicas
        with state.copies.queued():
            if self.call.step is None:
                self._optimizer_steps = steps_of_shards(state.shards).tobytes()
            alone = self._files.origin.world_size == 1
            if not alone and (check or (check is None and not self.planner.plan.compared)):
                self._digests = (full_digests if check else sampled_digests)(state.shards).tobytes()

    def _answer(self, request: Reply, records: list[FileRecord]) -> Reply:
        """Do what the coordinator asks for, update the `records` of this rank's files, and report."""
        plan = self.planner.plan
        if isinstance(request, DescribeRequest):
            description = PlanDescription(plan.table, plan.rows.tobytes())
            return self._channel.ask(description, self.call.settings.timeout)
        if isinstance(request, RewriteRequest):
            records[:] = self._rewrite(request)
        else:
            assert isinstance(request, ValuesRequest), request
            records += self._write_values(request)
        return self._report(records)

    def _report(self, records: list[FileRecord]) -> Reply:
        self.planner.state.hash_values()
        values = [value.record(self._files.place_of(value)) for value in self.planner.state.values]
        steps = {escape(name): step for name, step in self._steps.items()}
        report = WriteReport(
            escape(self.call.storage.url),
            self.planner.plan.name,
            records,
            values,
            steps,
            self._optimizer_steps,
            self.planner.state.selection,
            self.call.check_replicas,
            self._digests,
        )
        return self._channel.ask(report, self.call.settings.timeout)

    def _rewrite(self, request: RewriteRequest) -> list[FileRecord]:
        """Write by the plan in `request`, because the cached plan does not fit the other ranks' states any more.

        Raises:
            IncompatibleCheckpointError: the save staged only what the cached plan named, and the caller has gone on since.
        """
        if not self.planner.state.live:
            raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {request.reason}")
        self.planner.adopt(request.plan)
        return self._writer.rewrite()

    def _write_values(self, request: ValuesRequest) -> list[FileRecord]:
        keys = {unescaped(key) for key in request.keys}
        records = self._writer.write_values([v for v in self.planner.state.values if v.key in keys])
        self.planner.plan.write_values |= keys
        return records


def _info(call: SaveCall, world_size: int) -> dict[str, Any]:
    """Collect what the catalog says about the save as a whole."""
    return {
        "created": time.time(),
        "world_size": world_size,
        "framework": call.framework.name,
        "versions": {"bytecheckpoint": __version__, "torch": str(torch.__version__)},
        "metadata": dict(call.metadata),
    }
