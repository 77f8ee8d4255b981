"""Save on one rank in five steps: capture, agree on a plan, stage, write, commit. Each returns the next one's input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from bytecheckpoint.collectives import Collective
from bytecheckpoint.engine.assembly import Bytes
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.errors import IncompatibleCheckpointError, StorageError
from bytecheckpoint.frameworks.configurations import configuration_of
from bytecheckpoint.frameworks.selection import select_states
from bytecheckpoint.handles import SaveReport
from bytecheckpoint.planning.local_table import LocalTable, factored
from bytecheckpoint.representation.names import escape, new_generation, unescape
from bytecheckpoint.representation.shards import LiveState
from bytecheckpoint.saving.background import copy_volatile, current_trial
from bytecheckpoint.saving.capture import CapturedState, KnownCapture, resolve_lazy_views
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.copies import Samples, full_digests, sample
from bytecheckpoint.saving.file_layout import FileOrigin
from bytecheckpoint.saving.messages import (
    MIXED_PLANS,
    AssemblyReply,
    AssemblyRequest,
    CommitFacts,
    CommitResult,
    DescribeRequest,
    PlanDescription,
    PlanRequest,
    PlanResponse,
    RankChecks,
    RankSamples,
    Reply,
    RewriteRequest,
    SamplesRequest,
    ValuesRequest,
    WriteReport,
    unescaped,
)
from bytecheckpoint.saving.piece_writer import PieceWriter
from bytecheckpoint.saving.rank_files import StagedFiles, WrittenFiles
from bytecheckpoint.saving.rank_plan import AgreedPlan, make_rank_plan
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.saving.steps import steps_of_shards
from bytecheckpoint.saving.writer import RankWriter
from bytecheckpoint.tracing.operation import Operation, retries_so_far, span
from bytecheckpoint.tuning import tuning

__all__ = ["Save", "StagedSave", "WrittenSave"]


@dataclass(frozen=True, slots=True)
class StagedSave:
    """A save whose bytes are staged.

    Attributes:
        agreed: plan of the save.
        checks: facts that the coordinator compares between ranks.
        samples: elements of replicas that the coordinator may ask for; None if it may not.
        files: staged files.
    """

    agreed: AgreedPlan
    checks: RankChecks
    samples: Samples | None
    files: StagedFiles


@dataclass(frozen=True, slots=True)
class WrittenSave:
    """A save whose files are durable.

    Attributes:
        agreed: plan of the save.
        checks: facts that the coordinator compares between ranks.
        samples: elements of replicas that the coordinator may ask for; None if it may not.
        files: written files.
        whole: True if cut tensors were joined.
    """

    agreed: AgreedPlan
    checks: RankChecks
    samples: Samples | None
    files: WrittenFiles
    whole: bool = False


class Save:
    """One save on one rank. The caller decides which thread runs which step.

    Args:
        collective: ranks of the save.
        resources: staging pools, helper process and cached plans of this rank.
        request: arguments of the save.
        channel: this rank's messages in the save.
        operation: measurements of the save.
    """

    def __init__(
        self,
        collective: Collective,
        resources: SaveResources,
        request: SaveRequest,
        channel: CoordinatorChannel,
        operation: Operation,
    ) -> None:
        generation = new_generation(collective.world_id, channel.number)
        self._collective = collective
        self._resources = resources
        self._request = request
        self._channel = channel
        self._operation = operation
        self._origin = FileOrigin(collective.rank, collective.world_size, generation, request.storage.file_suffix)
        self._pieces = PieceWriter(self._origin, request, resources.earlier, channel.stop.cancel, operation)
        self._writer = RankWriter(self._origin, request, resources, channel.stop.cancel, operation)

    # --- the steps ------------------------------------------------------------------------------------------------

    def capture(self) -> CapturedState:
        """Read the caller's objects. Run it in the caller's thread."""
        request, states = self._request, self._request.states
        key = states.identity()
        known = None if key is None else self._resources.captures.get(key)
        live: Sequence[LiveState] | None = None if known is None else known.again(states.objects)
        self._operation.count("captured again", int(live is not None))
        if live is None:
            live = select_states(states.framework.capture(states.objects, names=states.names), states.selection)
            resolve_lazy_views(live)
            known = None
            if key is not None and (known := KnownCapture.of(live)) is not None:
                self._resources.captures.add(key, known)
        background = request.mode is SaveMode.BACKGROUND
        if background:
            self._operation.count("copied in the call", nbytes=copy_volatile(live))
        self._operation.step = request.step
        captured = CapturedState.of(
            live,
            states.selection.report(),
            request.settings.timeout,
            facts=None if known is None else known.facts,
            proof=request.settings.staging.check if background else "none",
        )
        if not background and (trial := current_trial()) is not None:
            trial.begin(captured.shards, states.reason_to_block())
        return replace(captured, incremental=bool(request.incremental))

    def take_pieces(self, captured: CapturedState) -> None:
        """Ask the providers among the caller's objects for their pieces. Run it in the caller's thread."""
        self._pieces.take(captured)

    def agree_plan(self, captured: CapturedState, *, dry: bool = False) -> AgreedPlan:
        """Take the plan from the cache, or ask the coordinator for one.

        Args:
            captured: live objects.
            dry: True to ask in any case, and only plan (`prepare`).
        """
        self._operation.phase = "plan"
        table, key = captured.describe()
        if self._whole and (view := self._request.states.view) is not None:
            key += f"{self._whole}:{view.names}".encode()
        plan = None if dry else self._resources.plans.get(key)
        layout = self._layout(captured) if self._origin.rank == 0 else b""
        if plan is not None:
            agreed = AgreedPlan(captured, key, plan, cached=True, layout=layout)
        else:
            if self._origin.world_size > 1:
                captured.hash_values()  # the coordinator compares them between ranks
            values = [value.record() for value in captured.values]
            selection = self._request.states.selection.report(look_for_similar=True)
            table = factored(table)
            request = PlanRequest(self._url, table, values, dry, self._collective.host, selection, whole=self._whole)
            response = self._ask_for_plan(request)
            plan = make_rank_plan(captured, table, self._origin, response)
            agreed = self._adopt(AgreedPlan(captured, key, plan, cached=False, layout=layout), response)
        if not dry:
            self._operation.count("left to others", nbytes=agreed.plan.spared)
            self._operation.count("cached plan", int(agreed.cached))
            self._operation.mark("plan")
        return agreed

    def stage(self, agreed: AgreedPlan, shared: SharedCopy | None = None) -> StagedSave:
        """Copy the planned bytes, unless the caller waits until they are written.

        Args:
            agreed: plan of the save.
            shared: copy in the background, in which other threads take part; None if the caller waits.

        Raises:
            IncompatibleCheckpointError: replicas on this rank differ.
            StateChangedError: the program has changed the state during a copy in the background.
        """
        self._writer.piece_files = self._pieces.adopt()
        if self._live:
            return StagedSave(agreed, *self._read_checks(agreed), self._writer.stage_live(agreed))
        files, copy_values = self._writer.copy(agreed, shared)
        checks, samples = self._read_checks(agreed)
        proof, copies, later = agreed.captured.proof, agreed.captured.copies, frozenset[int]()
        if proof is not None:
            copied = files.pool if files.opened is None else None  # else the bytes have passed through the pool
            images = [file.image for file in files.files if not file.values]
            sources = agreed.plan.image.sources
            later = frozenset(sources[number][0] for number in self._writer.to_compare)
            with span("prove"), copies.queued():
                proof.check(sources, images, copied, later)
            assert shared is not None, "a save with a proof copies in the background"
            shared.copied.set_result(proof.storages())  # the values are copies that the call made
        files = copy_values()
        if proof is not None and later:
            self._writer.compare_rest(agreed)
            with span("prove"), copies.queued():
                proof.check((), (), None)
        agreed.captured.release()
        return StagedSave(agreed, checks, samples, files)

    def write(self, staged: StagedSave) -> WrittenSave:
        """Write the staged bytes to durable files.

        Raises:
            StorageError: somebody has removed a file that this save shares with an earlier one.
        """
        joined = self._assemble(staged)
        files = self._writer.write(joined or staged.files, staged.agreed)
        if self._live and self._writer.lost_files():
            files = self._writer.write_anew(staged.agreed)
        self._pieces.write(self._writer.file_names)
        if lost := self._writer.lost_files():
            raise StorageError(
                f"{self._request.storage.url}: {lost[0]}, which this save shares with an earlier one, was removed during "
                "the save; nobody else may remove files there. Save again"
            )
        return WrittenSave(staged.agreed, staged.checks, staged.samples, files, joined is not None)

    def _assemble(self, staged: StagedSave) -> StagedFiles | None:
        """Join cut tensors with the other ranks; return None if none are joined."""
        plan = staged.agreed.plan
        if plan.assembly is None:
            return None
        self._operation.phase = "write"
        reply = self._channel.ask(AssemblyRequest(plan.name, staged.files.whole is not None))
        assert isinstance(reply, AssemblyReply), reply
        if not reply.join:
            return None

        def exchange(number: int, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes]) -> None:
            tag = f"save/{self._channel.number}/assembly/{number}"
            timeout, cancel = self._request.settings.timeout, self._channel.stop.cancel
            self._collective.exchange(tag, outgoing, incoming, timeout=timeout, cancel=cancel)

        return self._writer.assemble(staged.files, staged.agreed, exchange)

    def commit(self, written: WrittenSave) -> SaveReport:
        """Report the files, and answer the coordinator's requests until it has committed.

        Returns:
            The report of this rank. `blocking_seconds` is the whole time, as in a synchronous save.
        """
        self._operation.phase = "commit"
        reply = self._report(written)
        while not isinstance(reply, CommitResult):
            plan = written.agreed.plan
            if isinstance(reply, DescribeRequest):
                reply = self._channel.ask(PlanDescription(plan.table, plan.image.rows.tobytes()))
                continue
            if isinstance(reply, SamplesRequest):
                assert written.samples is not None, "they were asked for because of their digests"
                samples = written.samples.take(np.frombuffer(reply.rows, np.int64))
                reply = self._channel.ask(RankSamples(samples.data.tobytes(), samples.lengths.tobytes()))
                continue
            written = self._correct(written, reply)
            reply = self._report(written)
        self._operation.mark("commit")
        self._resources.plans.add(written.agreed.key, replace(written.agreed.plan, compared=True))
        self._writer.remember(written.files)
        self._pieces.remember()
        total = self._operation.seconds()
        encoded = self._encoded(written.files)
        spared = sum(record.size - encoded[record.name] for record in written.files.records if record.name in encoded)
        return SaveReport(
            path=self._request.storage.url,
            bytes_written=written.files.nbytes - spared + self._pieces.nbytes,
            bytes_adopted=written.files.nbytes_adopted + self._pieces.nbytes_adopted,
            blocking_seconds=total,
            total_seconds=total,
            phases=self._operation.seconds_by_phase(),
            plan_cached=written.agreed.cached,
            replica_drift={unescape(name): part for name, part in reply.drift.items()},
            generation=self._origin.generation,
            staging=self._request.staging,
            view=reply.view,
            fingerprint={unescape(state): digest for state, digest in reply.fingerprints.items()},
            **retries_so_far(),
        )

    def prewarm(self, agreed: AgreedPlan) -> None:
        """Touch the staging memory that a save by this plan needs, in place of the further steps."""
        self._writer.prewarm(agreed)

    def discard(self) -> None:
        """Remove the files of this rank after a failure, unless a commit may still name them."""
        self._pieces.end()
        if self._channel.may_be_committed:
            self._writer.abort()
        else:
            self._writer.discard(self._pieces.file_names)

    # --- parts of these -------------------------------------------------------------------------------------------

    @property
    def _live(self) -> bool:
        """True if the caller waits, so the live tensors keep their contents until the commit."""
        return self._request.mode is SaveMode.SYNCHRONOUS

    @property
    def _whole(self) -> str:
        """Escaped name of the state whose tensors should lie whole in files; "" if none should."""
        view = self._request.states.view
        # An incremental save uses files of earlier checkpoints again, as they are.
        return "" if view is None or self._request.incremental else escape(view.whole)

    @property
    def _url(self) -> str:
        return escape(self._request.storage.url)

    def _layout(self, captured: CapturedState) -> bytes:
        """Describe how the objects are distributed, and what their configurations say, as JSON for the catalog."""
        layouts = {state: layout() for state, layout in captured.layouts.items()}
        states = self._request.states
        found = {"framework": states.framework.name, "kinds": layouts, "config": configuration_of(states.objects)}
        return json.dumps(found).encode()

    def _ask_for_plan(self, request: PlanRequest) -> PlanResponse:
        """Ask the coordinator for a plan. It need not get the same columns from thousands of ranks."""
        table = request.table
        if table.nbytes() * self._origin.world_size > tuning().all_tables_bytes:
            place = LocalTable((), b"", b"", place=table.place)
            request = structs.replace(request, table=place, form=table.form_digest())
        response = self._channel.ask(request)
        if isinstance(response, DescribeRequest):
            response = self._channel.ask(PlanDescription(table, b""))
        assert isinstance(response, PlanResponse), response
        return response

    def _adopt(self, agreed: AgreedPlan, response: PlanResponse) -> AgreedPlan:
        """Cache a new plan."""
        self._resources.plans.add(agreed.key, agreed.plan)
        self._resources.pools.local_ranks = response.local_ranks or self._resources.pools.local_ranks
        return agreed

    def _read_checks(self, agreed: AgreedPlan) -> tuple[RankChecks, Samples | None]:
        """Read optimizer steps, digests and samples of replicas from the live tensors, before training changes them."""
        captured, extent = agreed.captured, self._request.check_replicas
        drift = captured.check_replicas(agreed.plan.copies.here, exact=extent == "full")
        optimizer_steps, rows, digests = b"", np.zeros(0, np.int64), np.zeros(0, np.uint64)
        samples = None
        with captured.copies.queued():
            if "step=" not in self._request.steps:
                optimizer_steps = steps_of_shards(captured.shards).tobytes()
            if self._origin.world_size > 1 and extent == "full":
                digests = full_digests(captured.shards)
                rows = np.arange(len(digests))
            elif extent == "sampled" and not agreed.plan.compared and len(agreed.plan.copies.elsewhere):
                samples = sample(captured.shards, agreed.plan.copies.elsewhere)
                rows = np.flatnonzero(samples.lengths)
                digests = samples.digests()[rows]
        steps = {escape(name): step for name, step in self._request.steps.items()}
        drift = {} if agreed.plan.compared else {escape(name): part for name, part in drift.items()}
        streams = {escape(name): count for name, count in captured.streams.items()}
        return RankChecks(steps, optimizer_steps, extent, rows.tobytes(), digests.tobytes(), drift, streams), samples

    def _report(self, written: WrittenSave) -> Reply:
        """Report the written files to the coordinator."""
        agreed, files = written.agreed, written.files
        piece_files, pieces = self._pieces.records(len(files.adopted) + len(files.records))
        facts = CommitFacts(files.replaces, agreed.layout) if self._origin.rank == 0 else None
        return self._channel.ask(
            WriteReport(
                self._url,
                agreed.plan.name,
                [*files.adopted, *files.records, *piece_files],
                [*(value.record(files.places.get(value.key, (-1, 0))) for value in files.values), *pieces],
                agreed.captured.selection,
                written.checks,
                facts,
                self._encoded(files),
                written.whole,
            )
        )

    def _encoded(self, files: WrittenFiles) -> dict[str, int]:
        """Return the stored bytes of the files that are kept as differences, by name."""
        found = {record.name: self._request.storage.encoded_bytes(record.name) for record in files.records}
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def _correct(self, written: WrittenSave, request: Reply) -> WrittenSave:
        """Write again, or write more, as the coordinator requests.

        Raises:
            IncompatibleCheckpointError: the save staged only the bytes that the cached plan named, and the caller has
                changed the others since.
        """
        agreed, captured = written.agreed, written.agreed.captured
        if isinstance(request, RewriteRequest):
            # The cached plan no longer fits the states of the other ranks.
            if not self._live:
                raise IncompatibleCheckpointError(f"{MIXED_PLANS}: {request.reason}")
            plan = make_rank_plan(captured, agreed.plan.table, self._origin, request.plan)
            agreed = self._adopt(replace(agreed, plan=plan, cached=False), request.plan)
            return replace(written, agreed=agreed, files=self._writer.write_anew(agreed), whole=False)
        assert isinstance(request, ValuesRequest), request
        keys = frozenset(unescaped(key) for key in request.keys)
        files = self._writer.write_values(keys, written.files, captured.copies, live=self._live)
        values = replace(agreed.plan.values, written=agreed.plan.values.written | keys)
        agreed = replace(agreed, plan=replace(agreed.plan, values=values))
        return replace(written, agreed=agreed, files=files)
