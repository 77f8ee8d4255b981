"""Coordinate a save on rank 0: plan for all ranks, wait until all files are durable, commit, reply to every rank.

The coordinator runs on a thread of its own and exchanges the same messages with its own rank as with the others, so there
is one protocol (docs/architecture.md, "A save"). It ends with a reply to every rank that waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from bytecheckpoint._version import __version__
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.engine.save_resources import PlanCache
from bytecheckpoint.engine.view_files import VIEW_INDEX, publish_view, view_info
from bytecheckpoint.errors import CheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.failures import Failure
from bytecheckpoint.frameworks.configurations import configuration_of
from bytecheckpoint.planning.assembly import Assembly, plan_assembly
from bytecheckpoint.planning.file_tensors import catalog_of_plan, named_tensors
from bytecheckpoint.planning.local_table import LocalTable
from bytecheckpoint.planning.planned_rows import SavePlan
from bytecheckpoint.representation.catalog_file import encode as encode_catalog
from bytecheckpoint.representation.fingerprints import stored_fingerprint
from bytecheckpoint.representation.names import CATALOG_NAME, escape, new_generation, unescape
from bytecheckpoint.saving.commit import (
    build_catalog,
    may_have_committed,
    remove_stale_files,
    stale_files,
    stale_uploads,
)
from bytecheckpoint.saving.copies import CopyComparison, DifferingCopies, Samples
from bytecheckpoint.saving.messages import (
    NEXT_STEP,
    AssemblyReply,
    AssemblyRequest,
    CommitResult,
    DescribeRequest,
    PlanDescription,
    PlanRequest,
    PlanResponse,
    Reply,
    RewriteRequest,
    SamplesRequest,
    SaveFailed,
    SaveStep,
    ValuesRequest,
    WriteReport,
    decode,
    encode,
    reply_tag,
    tag,
)
from bytecheckpoint.saving.plans import (
    GlobalPlan,
    assign_values,
    check_arguments,
    check_calls,
    check_reports,
    plan_around,
    unwritten_values,
)
from bytecheckpoint.saving.request import SaveRequest
from bytecheckpoint.storage import Storage
from bytecheckpoint.tracing.operation import span

__all__ = ["Coordinator", "refuse_save"]

_log = logging.getLogger("bytecheckpoint")
#: Columns of tables that thousands of ranks have in common.
_ALIKE = ("ndims", "boxes", "repeats", "axes")
#: Replies that are encoded and sent at a time: to some tens of machines.
_REPLIES = 256


def _shared(message: Any, known: dict[bytes, bytes]) -> Any:
    """Let a message use the columns of earlier ones that are equal: thousands of ranks hold the same tensors."""
    if not isinstance(message, PlanRequest | PlanDescription):
        return message
    table = message.table
    columns = {name: known.setdefault(column, column) for name in _ALIKE if (column := getattr(table, name))}
    tensors = tuple(known.setdefault(piece, piece) for piece in table.tensors)
    return structs.replace(message, table=structs.replace(table, tensors=tensors, **columns))


def refuse_save(collective: Collective, number: int, failure: Failure) -> None:
    """Fail a save on the other ranks, as rank 0, in place of a coordinator.

    Args:
        collective: ranks of the save.
        number: save number.
        failure: failure of rank 0.
    """
    others = range(1, collective.world_size)
    with contextlib.suppress(CheckpointError):  # a rank that is gone needs no reply
        reply = encode(SaveFailed(failure))
        collective.send_each(reply_tag(number, SaveStep.FIRST), dict.fromkeys(others, reply))
    for step in SaveStep:
        collective.forget(tag(number, step))


class Coordinator:
    """Coordinates one save of all ranks.

    Args:
        collective: ranks of the save.
        number: save number.
        plans: plans of this world's earlier saves, by name.
        request: arguments of rank 0's save.
        stop: rank 0's broadcast of a failure. A failure of any rank ends the wait for messages.
    """

    def __init__(
        self,
        collective: Collective,
        number: int,
        plans: PlanCache[str, GlobalPlan],
        request: SaveRequest,
        stop: StopSignal,
    ) -> None:
        self._collective = collective
        self._number = number
        self._plans = plans
        self._request = request
        self._stop = stop
        self._info = _info(request, collective.world_size)
        #: The step of the next reply to each rank. A rank to which no reply is due is not in it.
        self._due: dict[int, SaveStep] = dict.fromkeys(range(collective.world_size), SaveStep.FIRST)

    def run(self) -> None:
        """Run the save to its end. Never raises: every waiting rank gets the failure as its reply."""
        try:
            reports, plan, drift = self._collect_reports()
        except BaseException as error:  # noqa: BLE001  every rank gets it
            failure = Failure.of(error, rank=0, stage="coordination")
            self._stop.fail(failure)  # ranks that still write get no reply soon
            self._fail(SaveFailed(failure))
            return
        if reports:
            self._commit(reports, plan, drift)

    def _fail(self, reply: SaveFailed) -> None:
        """Reply to every rank with a failure. The next save plans anew."""
        self._plans.clear()
        self._reply_to_all(reply)
        for step in SaveStep:
            self._collective.forget(tag(self._number, step))

    def _collect_reports(self) -> tuple[dict[int, WriteReport], GlobalPlan, dict[str, float]]:
        """Plan, and wait until all ranks have written.

        Returns:
            Reports of all ranks, none for a preparation; the plan that they follow; the drift of replicas by name.
        """
        first = self._answer_assembly(self._collect(self._due, SaveStep.FIRST))
        requests: dict[int, PlanRequest] = {r: m for r, m in first.items() if isinstance(m, PlanRequest)}
        reports: dict[int, WriteReport] = {r: m for r, m in first.items() if isinstance(m, WriteReport)}
        check_calls(first)
        plan, ranks, reply = self._plan(requests, reports)
        if requests and all(r.dry for r in requests.values()):
            self._stop.settle()  # `prepare` ends with the plan
            self._reply(ranks, reply)
            return {}, plan, {}
        self._reply(ranks, reply)
        reports.update(self._answer_assembly(self._collect(ranks, SaveStep.REPORT)))
        differing = check_reports(reports, plan)
        drift = self._compare(differing) if differing else {}
        for report in reports.values():
            for name, part in report.checks.drift.items():
                drift[name] = max(drift.get(name, 0.0), part)
        self._complete_values(reports)
        self._stop.settle()
        return reports, plan, drift

    def _answer_assembly(self, messages: dict[int, Any]) -> dict[int, Any]:
        """Tell ranks that have staged their boxes whether they join cut tensors, and wait for their reports.

        They do if all ranks are ready and follow one plan. Else some rank has other states than before.

        Args:
            messages: message of each rank.

        Returns:
            The messages, with the reports in place of the requests.
        """
        requests = {rank: found for rank, found in messages.items() if isinstance(found, AssemblyRequest)}
        if not requests:
            return messages
        plan = self._cached_plan(requests)
        if lacking := [rank for rank, request in requests.items() if not request.ready]:
            _log.warning(
                "save %d: %s lacks the staging memory to join cut tensors, so the view is written as files, which take the "
                "bytes of the model once more: raise staging_bytes, or free memory",
                self._number, names_of_ranks(lacking),
            )  # fmt: skip
        joined = not lacking and len(requests) == self._collective.world_size
        reply = AssemblyReply(joined and plan is not None and plan.assembly is not None)
        self._reply(list(requests), lambda rank: reply)
        return messages | self._collect(requests, SaveStep.ASSEMBLY)

    # --- messages -------------------------------------------------------------------------------------------------

    def _collect(self, ranks: Collection[int], step: SaveStep) -> dict[int, Any]:
        """Wait for the message of `step` from each of `ranks`; raise the first failure among them."""
        order = sorted(ranks)
        if not order:
            return {}
        timeout = self._request.settings.timeout
        received = self._collective.collect(order, tag(self._number, step), timeout=timeout, cancel=self._stop.cancel)
        known: dict[bytes, bytes] = {}
        messages: dict[int, Any] = {}
        for place, rank in enumerate(order):
            messages[rank] = _shared(decode(received[place]), known)
            received[place] = b""  # else all messages would be held twice
        return messages

    def _reply_to_all(self, reply: Reply) -> None:
        """Send one reply to all ranks to which one is due."""
        self._reply(list(self._due), lambda rank: reply)

    def _reply(self, ranks: Sequence[int], reply: Callable[[int], Reply]) -> None:
        """Send the replies that are due to ranks; `reply` makes that of a rank."""
        for first in range(0, len(ranks), _REPLIES):  # those of all ranks would take much memory
            part = {rank: reply(rank) for rank in ranks[first : first + _REPLIES]}
            encoded = {id(one): encode(one) for one in part.values()}
            by_step: dict[SaveStep, dict[int, bytes]] = {}
            for rank, one in part.items():
                by_step.setdefault(self._due.pop(rank), {})[rank] = encoded[id(one)]
                if type(one) in NEXT_STEP:
                    self._due[rank] = NEXT_STEP[type(one)]
            for step, payloads in by_step.items():
                try:
                    self._collective.send_each(reply_tag(self._number, step), payloads)
                except CheckpointError as error:
                    names = names_of_ranks(payloads)
                    _log.warning("save %d: no reply can be sent to %s: %s", self._number, names, error)

    # --- plan -----------------------------------------------------------------------------------------------------

    def _plan(
        self, requests: dict[int, PlanRequest], reports: dict[int, WriteReport]
    ) -> tuple[GlobalPlan, list[int], Callable[[int], Reply]]:
        """Find or make the plan that this save follows.

        Args:
            requests: requests of the ranks that asked for a plan.
            reports: reports of the ranks that have written by a cached plan.

        Returns:
            The plan, the ranks that asked for one or must write anew, and a function that makes the reply to such a rank.
        """
        old = self._cached_plan(reports) if reports else None
        if old is not None and not requests:
            return old, [], lambda rank: CommitResult()
        check_arguments({**requests, **reports})
        tables = self._tables(requests)
        if old is not None:
            tables |= {rank: old.tables[rank] for rank in reports}
            fixed = {rank: old.columns.locals_of(rank) for rank in reports}
        else:
            described = self._describe(reports)
            tables |= {rank: description.table for rank, description in described.items()}
            fixed = {rank: np.frombuffer(description.rows, np.int64) for rank, description in described.items()}
        return self._make_plan([tables[rank] for rank in range(len(tables))], fixed, requests, reports)

    def _cached_plan(self, reports: Mapping[int, WriteReport | AssemblyRequest]) -> GlobalPlan | None:
        """Find the plan that all of these ranks followed, if it is cached."""
        found = next((plan for plan in self._plans.newest_first() if plan.fits(reports)), None)
        if found is not None:
            self._plans.get(found.name)  # ranks keep the plans that they used last, so this side does too
        return found

    def _tables(self, requests: Mapping[int, PlanRequest]) -> dict[int, LocalTable]:
        """Return the tables of ranks; ask one rank for each form that they have in common."""
        first: dict[bytes, int] = {}
        for rank, request in requests.items():
            if request.form:
                first.setdefault(request.form, rank)
        forms = self._describe(first.values()) if first else {}
        return {
            rank: structs.replace(forms[first[request.form]].table, place=request.table.place)
            if request.form
            else request.table
            for rank, request in requests.items()
        }

    def _describe(self, ranks: Collection[int]) -> dict[int, PlanDescription]:
        """Ask ranks for their shards, and for the rows that they wrote by unknown plans."""
        request = DescribeRequest()
        self._reply(list(ranks), lambda rank: request)
        return self._collect(ranks, SaveStep.DESCRIPTION)

    def _make_plan(
        self,
        tables: list[LocalTable],
        fixed: Mapping[int, NDArray[np.int64]],
        requests: Mapping[int, PlanRequest],
        reports: Mapping[int, WriteReport],
    ) -> tuple[GlobalPlan, list[int], Callable[[int], Reply]]:
        """Make a plan in which the ranks keep the rows that they wrote (`fixed`), if possible; return as `_plan` does."""
        with span("make plan"):
            columns, rewrite_reason = plan_around(tables, fixed)
        name = f"{self._collective.world_id}-{self._number}"
        values = {rank: request.values for rank, request in requests.items()}
        if rewrite_reason:
            values |= {rank: report.values for rank, report in reports.items()}
        expected = [name if rank in values else reports[rank].plan for rank in range(len(tables))]
        assembly = None
        whole = {request.whole for request in requests.values()}
        if len(requests) == len(tables) and len(whole) == 1 and (state := whole.pop()):
            with span("plan assembly"):
                assembly = self._plan_assembly(columns, state)
        plan = GlobalPlan(name, columns, tables, expected, assembly)
        self._plans.add(name, plan)
        assigned = assign_values(values, whole_world=len(values) == len(tables))
        nbytes = columns.total_bytes()
        on_host = Counter(request.host for request in requests.values())

        def reply(rank: int) -> Reply:
            rows, copied = columns.locals_of(rank).tobytes(), columns.copied_of(rank).tobytes()
            local_ranks = on_host[requests[rank].host] if len(requests) == len(tables) else 0
            moves = None if assembly is None else assembly.moves_of(rank)
            response = PlanResponse(name, rows, copied, sorted(assigned[rank]), local_ranks, nbytes, moves)
            return response if rank in requests else RewriteRequest(response, rewrite_reason)

        return plan, list(values), reply

    def _plan_assembly(self, columns: SavePlan, state: str) -> Assembly | None:
        """Plan how ranks join the tensors of a state as the view wants them; None if they cannot."""
        view, files = self._request.states.view, None
        assert view is not None, "rank 0 asked for whole tensors"
        if view.names:
            stored = catalog_of_plan(columns, state, configuration_of(self._request.states.objects))
            try:
                files = named_tensors(columns, state, stored, view.shown(stored))
            except (UsageError, IncompatibleCheckpointError):
                pass  # `describe` says so, or the view becomes files
            if files is None:
                return None
        return plan_assembly(columns, state, self._collective.world_size, files)

    # --- commit ---------------------------------------------------------------------------------------------------

    def _compare(self, differing: DifferingCopies) -> dict[str, float]:
        """Compare the elements of replicas whose digests differ; return their drift by escaped name."""
        comparison = CopyComparison(differing)
        holders = np.unique(differing.rank).tolist()
        for first in range(0, len(holders), _REPLIES):  # elements of all ranks would take much memory
            ranks = holders[first : first + _REPLIES]
            self._reply(ranks, lambda rank: SamplesRequest(comparison.rows_of(rank).tobytes()))
            for rank, found in self._collect(ranks, SaveStep.SAMPLES).items():
                lengths = np.frombuffer(found.lengths, np.int64)
                comparison.add(rank, Samples(np.frombuffer(found.data, np.uint8), lengths))
        return {escape(name): part for name, part in comparison.drift().items()}

    def _complete_values(self, reports: dict[int, WriteReport]) -> None:
        """Have values written that no longer equal the copy that stood for them."""
        unwritten = unwritten_values({rank: report.values for rank, report in reports.items()})
        self._reply(list(unwritten), lambda rank: ValuesRequest(sorted(unwritten[rank])))
        reports.update(self._collect(unwritten, SaveStep.VALUES))

    def _commit(self, reports: Mapping[int, WriteReport], plan: GlobalPlan, drift: dict[str, float]) -> None:
        """Commit, and reply to every rank; all of them wait for it."""
        data = b""
        try:
            facts = reports[0].commit
            assert facts is not None, "rank 0 reports them"
            storage, replaces = self._request.storage, facts.replaces
            with span("make catalog"):
                generation = new_generation(self._collective.world_id, self._number)
                info = {**self._info, "layout": json.loads(facts.layout)}
                catalog = build_catalog(plan.written(reports), reports, generation, info)
                view: dict[str, bytes] = {}
                if (wanted := self._request.states.view) is not None:
                    named = {name: catalog.files[file].name for name, file in plan.named_files(reports).items()}
                    view, catalog = wanted.describe(catalog, lambda: named)
                    catalog = replace(catalog, info={**catalog.info, **view_info(view, generation)})
                found = stored_fingerprint(catalog)
                fingerprints = {} if found is None else {escape(name): text for name, text in found.states.items()}
            encoded = encode_catalog(catalog)
            uploads = stale_uploads(storage)
            # Listed right before the commit, so that it names no file that somebody has removed. Files that appear later
            # belong to a save that begins later.
            stale = stale_files(storage, {f.name: f.stored_bytes for f in catalog.files}, replaces, view)
            if VIEW_INDEX in stale:  # behind the commit it would show the weights of the replaced checkpoint
                storage.delete([VIEW_INDEX])
                stale.remove(VIEW_INDEX)
            data = encoded  # from here on the commit may have happened
            with span("publish", len(data), CATALOG_NAME):
                storage.publish(CATALOG_NAME, data, expected=replaces)
        except BaseException as error:  # noqa: BLE001  every rank gets it
            unknown = bool(data) and may_have_committed(self._request.storage, data, error)
            failure = Failure.of(error, rank=0, stage="commit" if data else "coordination")
            self._fail(SaveFailed(failure, commit_unknown=unknown))
            return
        form: Literal["", "index", "files"] = "index" if VIEW_INDEX in view else "files" if view else ""
        with span("publish view"):
            _publish_view(storage, view)
        with span("remove replaced"):
            remove_stale_files(storage, stale, uploads)
        if drift:
            name = max(drift, key=drift.__getitem__)
            _log.warning(
                "save %d: the copies of %d replicated tensors differ by rounding, those of %s most (%.1e of its largest "
                "element); one copy of each is stored. check_replicas='full' refuses such a save",
                self._number, len(drift), unescape(name), drift[name],
            )  # fmt: skip
        self._reply_to_all(CommitResult(drift, fingerprints, form))


def _publish_view(storage: Storage, view: Mapping[str, bytes]) -> None:
    """Publish a view after the commit. Never raises: nothing may report a committed save as failed."""
    try:
        publish_view(storage, view)
    except Exception as error:  # noqa: BLE001  the save is committed
        _log.warning("%s is committed without its view for other programs: %s", storage.url, error)


def _info(request: SaveRequest, world_size: int) -> dict[str, Any]:
    """Collect the facts in the catalog about the save as a whole."""
    return {
        "created": time.time(),
        "world_size": world_size,
        "framework": request.states.framework.name,
        "versions": {"bytecheckpoint": __version__, "torch": str(torch.__version__)},
        "metadata": dict(request.metadata or {}),
    }
