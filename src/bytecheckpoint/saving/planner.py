"""Find out what one rank writes: from its plan cache, or by asking the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.engine.staging import KnownTargets
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.planning.local_table import all_rows
from bytecheckpoint.planning.replicas import group_equal, repeated_rows
from bytecheckpoint.representation.names import escape
from bytecheckpoint.saving.call import SaveCall, SaveTask
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.file_layout import FileOrigin, LocalPlan, lay_out_rows
from bytecheckpoint.saving.messages import PlanRequest, PlanResponse, unescaped
from bytecheckpoint.saving.state import CapturedState, Value

__all__ = ["RankPlanner"]


class RankPlanner:
    """One rank's plan in one save.

    Args:
        origin: of the files that this rank writes.
        resources: with the cached plans; gets the number of ranks on this machine.
        call: the arguments of the save.
        task: on rank 0, gets the layout for the catalog.
        state: the captured state.
        host: of this rank (`Collective.host`).

    Attributes:
        state: as given.
        cached: the plan of an earlier save is used.
    """

    def __init__(
        self,
        origin: FileOrigin,
        resources: SaveResources,
        call: SaveCall,
        task: SaveTask,
        state: CapturedState,
        host: str,
    ) -> None:
        self.state = state
        self.cached = False
        self._origin = origin
        self._resources = resources
        self._plans = resources.plans
        self._call = call
        self._task = task
        self._host = host
        self._plan: LocalPlan | None = None

    @property
    def plan(self) -> LocalPlan:
        """The plan, once there is one."""
        assert self._plan is not None, "no plan was made"
        return self._plan

    def make(self, channel: CoordinatorChannel, *, dry: bool = False) -> None:
        """Take the plan from the cache, or ask the coordinator for one.

        Args:
            channel: to the coordinator.
            dry: ask in any case, and only plan (`prepare`).

        Raises:
            IncompatibleCheckpointError: replicas on this rank differ.
        """
        table, key = self.state.described()
        cached = None if dry else self._plans.get(key)
        if cached is not None:
            self._plan, self.cached = cached, True
            self._task.layout = cached.layout
            self.state.check_replicas(cached.replicas)
            return
        if self._origin.rank == 0:
            self._task.layout = {"framework": self._call.framework.name, "kinds": self.state.layouts()}
        self.hash_values()
        values = [value.record() for value in self.state.values]
        selection = self._call.selection.report(look_for_similar=True)
        request = PlanRequest(escape(self._call.storage.url), table, values, dry, self._host, selection)
        response = channel.ask(request, self._call.settings.timeout)
        assert isinstance(response, PlanResponse), response
        self.adopt(response)
        if not dry:
            self.state.check_replicas(self.plan.replicas)

    def adopt(self, response: PlanResponse) -> None:
        """Make the coordinator's response this rank's plan, and cache it."""
        table, key = self.state.described()
        rows = np.frombuffer(response.rows, np.int64)
        with gc_paused():
            files, sources = lay_out_rows(self.state.shards, rows, self._origin)
        self._plan = LocalPlan(
            name=response.plan,
            rows=rows,
            sources=sources,
            files=files,
            write_values={unescaped(value) for value in response.values},
            known_values={value.key for value in self.state.values},
            table=table,
            replicas=repeated_rows(group_equal(all_rows([table])[1])),
            layout=self._task.layout,
            targets=KnownTargets(len(files)),
            nbytes=response.nbytes,
            spared=sum(s.data.nbytes for s in self.state.shards) - sum(file.image.nbytes for file in files),
        )
        self.cached = False
        self._plans.add(key, self._plan)
        self._resources.local_ranks = response.local_ranks or self._resources.local_ranks

    def hash_values(self) -> None:
        """Hash the values for the coordinator, which compares them between ranks. Call it before they change."""
        if self._origin.world_size > 1:
            self.state.hash_values()

    def values_to_write(self) -> Sequence[Value]:
        """List the values that this rank writes: those that the plan gives it, and those that the plan does not know."""
        plan = self.plan
        return [v for v in self.state.values if v.key in plan.write_values or v.key not in plan.known_values]
