"""One load on one rank: its attempts, and the steps of each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from itertools import chain

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.engine.exchange import Exchange
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import peer_handshake
from bytecheckpoint.engine.reading import read_all
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import CheckpointReplacedError, IncompatibleCheckpointError, listed
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.frameworks.base import Destination, is_strict
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.loading.call import LoadCall, check_strict_states, plain_strict
from bytecheckpoint.loading.decision import (
    FitDecision,
    FitReport,
    OpenDecision,
    OpenReport,
    decide_fit,
    ranges_of,
    recognized_bitmap,
    unexpected_keys,
)
from bytecheckpoint.loading.fit import (
    fit_wanted,
    lost_positions,
    read_length,
    refuse_mismatches,
    refuse_missing,
    refuse_unexpected,
    wanted_boxes,
)
from bytecheckpoint.loading.live_names import LiveNames
from bytecheckpoint.loading.open_checkpoint import OpenCheckpoint, detect_replacement, refused_mismatches
from bytecheckpoint.loading.opening import Opening
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.planning.exchange_plan import exchange_plan_of_rank
from bytecheckpoint.planning.read_plan import groups_to_read, stored_rows
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.plans import SharedChunks
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.tracing.operation import Operation, pause, retries_so_far, span

__all__ = ["FIRST_STEP", "load_states"]

#: The first step in which the ranks of a load agree.
FIRST_STEP = "open"

_log = logging.getLogger("bytecheckpoint")
#: Seconds to wait after each attempt: where ranks see different checkpoints, caches of a network file system may need a
#: moment.
_PAUSES = (0.0, 1.0, 0.0)
#: Chunks that each rank reads in a round of an exchange, at least.
_FEWEST_CHUNKS = 2


def load_states(collective: Collective, number: int, call: LoadCall, operation: Operation) -> LoadReport:
    """Load a checkpoint; start again if another save replaced it meanwhile.

    Args:
        collective: the ranks; all of them call this.
        number: number of the load, equal on all ranks.
        call: the arguments.
        operation: this rank's part of the load.

    Returns:
        This rank's report.
    """
    for attempt, seconds in enumerate(_PAUSES):
        try:
            last = attempt + 1 == len(_PAUSES)
            operation.attempt = attempt + 1
            return _Attempt(collective, f"load/{number}.{attempt}", call, operation, last=last).run()
        except CheckpointReplacedError:
            pause(seconds)
    raise IncompatibleCheckpointError(
        f"the checkpoint was replaced {len(_PAUSES)} times while it was being loaded; load one that is not being saved"
    )


class _Attempt:
    """One attempt of a load. The ranks agree on the checkpoint, on what each reads of it, and to install what was read."""

    def __init__(self, collective: Collective, tag: str, call: LoadCall, operation: Operation, *, last: bool) -> None:
        self._collective = collective
        self._tag = tag
        self._call = call
        self._operation = operation
        self._last = last
        self._opening = Opening(collective, tag, call)
        self._opened: OpenCheckpoint | None = None

    def run(self) -> LoadReport:
        """Load, or raise `CheckpointReplacedError` on all ranks."""
        with contextlib.ExitStack() as stack:  # open until all ranks are done: they read this rank's memory
            cancel = Cancellation()
            cancel.on_set(self._opening.stop)
            stop = stack.enter_context(StopSignal(self._collective, self._tag, cancel))
            timeout = self._call.settings.timeout
            agreement = Agreement(self._collective, self._tag, timeout, urgent=(CheckpointReplacedError,), stop=stop)
            # Before the live objects are asked for their state: their hooks may communicate, so all ranks run them or none.
            decided: OpenDecision = agreement.agree(
                FIRST_STEP,
                lambda: self._open(stack),
                self._opening.decide,
                reports=OpenReport,
                decisions=OpenDecision,
            )
            self._opening.check(decided, last=self._last)
            self._operation.mark("agree")
            decision: FitDecision = agreement.agree(
                "fit", lambda: self._fit(decided, stack), self._decide, reports=FitReport, decisions=FitDecision
            )
            unexpected = self._check_decision(decision)
            self._operation.mark("agree")
            prepare = agreement.agree(
                "read", lambda: self._read(agreement, stack, decision), any, reports=bool, decisions=bool
            )
        try:
            return self._install(decision, unexpected)
        finally:
            # Even if objects of this rank refuse their values: a preparation takes the number of a save on every rank.
            if prepare:
                self._call.prepare()

    # --- the steps ------------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack) -> OpenReport:
        """Open the checkpoint."""
        self._operation.phase = "open"
        report = self._opening.open(stack)
        self._operation.mark("catalog")
        return report

    def _fit(self, decided: OpenDecision, stack: contextlib.ExitStack) -> FitReport:
        """Plan what this rank reads."""
        self._operation.phase = "fit"
        call = self._call
        arguments, reader, files, trees = self._opening.share(decided, stack)
        catalog, groups = reader.catalog, reader.groups
        storage, states, selection = arguments.storage, arguments.states, arguments.selection
        with detect_replacement(reader):
            chunk_bytes = read_length(catalog, self._collective.world_size, call.settings)
            live = LiveNames(selection, arguments.rename, states.keys())
            view = SavedView(catalog, trees, self._collective.rank, live, groups)
            with gc_paused():
                destination = arguments.framework.destination(states, view, strict=arguments.strict, names=call.names)
                # Replicas lack the same tensor.
                destination.missing = [m for m in dict.fromkeys(destination.missing) if not live.hides(m)]
                self._operation.mark("destination")
                check_strict_states(arguments, catalog, destination)
                missing = [m for m in destination.missing if is_strict(arguments.strict, arguments.state_of(m))]
                live.note_saved(chain((TensorKey(state, "", VALUES_SLOT) for state in states), catalog.keys()))
                refuse_missing(storage.url, missing, view.other_names(destination.recognized), selection.unmatched)
                destination.mismatches += lost_positions(catalog, states, self._collective.world_size)
                refuse_mismatches(storage.url, refused_mismatches(arguments, destination))
                loaded, others = self._extra_states(view, live, destination)
                boxes = wanted_boxes(view, destination.wanted)
                if groups is not None:
                    catalog = self._opening.rows(groups_to_read(groups, boxes))
                    files.use(catalog)
                    view.rows = stored_rows(catalog)
                fit = fit_wanted(storage.url, catalog, view, destination.wanted, boxes, chunk_bytes, cast=call.cast)
                self._operation.mark("plan")
        ranges = ranges_of(fit.plan)
        exchanges = self._exchanges(files, ranges)
        self._opened = OpenCheckpoint(arguments, catalog, reader, files, trees, view, destination, fit, exchanges)
        return FitReport(
            recognized=recognized_bitmap(catalog.count, view.numbers(list(destination.recognized)) + view.skipped()),
            ranges=ranges.tobytes() if exchanges else b"",
            host=self._collective.host,
            peer_handshake=peer_handshake() if exchanges else b"",
            strict=plain_strict(arguments.strict),
            selection=selection.report(look_for_similar=True),
            extra_states=loaded,
            other_extra_states=others,
        )

    def _extra_states(self, view: SavedView, live: LiveNames, destination: Destination) -> tuple[list[str], list[str]]:
        """Return the names of the extra states that this rank loads or leaves alone, and of others in the checkpoint."""
        loaded = {(state, name) for state, names in destination.extra_states.items() for name in names}
        loaded |= {name for name in live.skipped if name[0] in destination.extra_states}
        found = {(k, n) for k in destination.extra_states for n in view.extra_states(k, self._collective.world_size)}
        others = [name for name in found - loaded if live.selection.takes(*name)]
        return _escaped(loaded), _escaped(others)

    def _decide(self, reports: list[FitReport]) -> FitDecision:
        """On rank 0, sum up the reports of all ranks."""
        opened = self._checkpoint
        # Half of the readers take a round's chunks while the other half reads the next.
        chunks_per_round = max(opened.files.threads(self._call.settings.storage.read_threads) // 2, _FEWEST_CHUNKS)
        return decide_fit(reports, opened.fit.chunk_bytes, chunks_per_round)

    def _check_decision(self, decision: FitDecision) -> list[str]:
        """Refuse keys that no rank wants if the load is strict; return those keys."""
        opened = self._checkpoint
        url = opened.storage.url
        arguments = opened.arguments
        keys = unexpected_keys(opened.catalog, {*arguments.states, *opened.destination.states}, decision.recognized)
        unexpected = [str(key) for key in keys if arguments.selection.takes_any(key)]
        unexpected += map(unescape, decision.other_extra_states)
        refused = [name for name in unexpected if is_strict(arguments.strict, arguments.state_of(name))]
        refuse_unexpected(url, refused, (str(shard.key) for shard in opened.destination.wanted))
        return unexpected

    def _read(self, agreement: Agreement, stack: contextlib.ExitStack, decision: FitDecision) -> bool:
        """Fill the destinations; return whether this rank wants its next save prepared."""
        self._operation.phase = "read"
        opened = self._checkpoint
        with detect_replacement(opened.reader):
            scatter = ScatterPlan(opened.fit.plan, opened.fit.targets)
            self._operation.planned_bytes = opened.fit.plan.nbytes
            exchange, private = self._exchange(agreement.part("exchange"), scatter, decision)
            if exchange is not None:
                # Other ranks copy from this rank's memory until all have agreed; the stack is closed then.
                stack.callback(exchange.release)
                with span("exchange"):
                    exchange.run()
                self._operation.count("exchanged", nbytes=exchange.received)
                opened.bytes_read, opened.bytes_received = exchange.read, exchange.received
            threads = self._call.settings.storage.read_threads
            opened.bytes_read += read_all(
                opened.files, scatter, private, threads=threads, chunk_bytes=opened.fit.chunk_bytes
            )
            opened.destination.check()
            refuse_mismatches(opened.storage.url, refused_mismatches(opened.arguments, opened.destination))
        self._operation.mark("read")
        return self._call.wants_prepare()

    def _install(self, decision: FitDecision, unexpected: list[str]) -> LoadReport:
        """Install values, optimizer state and hyperparameters."""
        self._operation.phase = "apply"
        opened = self._checkpoint
        opened.destination.apply()
        self._operation.mark("apply")
        notes = [*opened.destination.mismatches, *opened.destination.notes, *self._warn_of_nothing(decision)]
        if opened.view.from_rank_0:
            notes.append(
                f"rank {self._collective.rank} has no copy of its own and got rank 0's: "
                + ", ".join(dict.fromkeys(opened.view.from_rank_0))
            )
        total = self._operation.seconds()
        return LoadReport(
            path=opened.storage.url,
            bytes_read=opened.bytes_read + opened.trees.bytes_read,
            bytes_received=opened.bytes_received + self._opening.shared.bytes_received,
            total_seconds=total,
            phases=self._operation.seconds_by_phase(),
            missing=tuple(opened.destination.missing),
            unexpected=tuple(unexpected),
            cast=tuple(opened.fit.converted),
            notes=tuple(notes),
            **retries_so_far(),
        )

    def _warn_of_nothing(self, decision: FitDecision) -> list[str]:
        """Warn if the checkpoint holds nothing that any rank wants; return the warning."""
        opened = self._checkpoint
        missing = opened.destination.missing
        if any(decision.recognized) or not all(
            any(name == state or name.startswith(f"{state}/") for name in missing) for state in opened.arguments.states
        ):
            return []
        warning = f"{opened.storage.url} holds nothing that the states want ({listed(missing)}): nothing was loaded"
        if self._collective.rank == 0:
            _log.warning("%s; compare the names", warning)
        return [warning]

    # --- parts of the steps ---------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> OpenCheckpoint:
        assert self._opened is not None, "the checkpoint is open"
        return self._opened

    def _exchanges(self, files: FileSet, ranges: Int64s) -> bool:
        """Whether this rank exchanges with others: not if it reads from memory, which a copy from a rank is too."""
        if not self._call.overlap or self._collective.world_size == 1:
            return False
        cached = files.is_cached(ranges)
        self._operation.count("from memory", int(cached))
        return not cached

    def _exchange(
        self, agreement: Agreement, scatter: ScatterPlan, decision: FitDecision
    ) -> tuple[Exchange | None, Sequence[int]]:
        """Plan the exchange of what several ranks want; return it with the ranges that this rank reads for itself."""
        opened = self._checkpoint
        shared = SharedChunks.from_columns(decision.shared)
        if not len(shared):
            return None, range(len(scatter.plan.file))
        # A rank that does not exchange still takes part in the others' messages.
        ranges = ranges_of(scatter.plan)
        plan = exchange_plan_of_rank(shared, ranges if opened.exchanges else ranges[:0], opened.fit.chunk_bytes)
        exchange = Exchange(
            agreement,
            plan,
            decision.hosts,
            decision.handshakes,
            opened.files,
            scatter,
            chunk_bytes=opened.fit.chunk_bytes,
            chunks_per_round=decision.chunks_per_round,
            settings=self._call.settings,
        )
        return exchange, plan.private.tolist() if opened.exchanges else range(len(ranges))


def _escaped(names: Iterable[tuple[str, str]]) -> list[str]:
    return [escape(str(TensorKey(*name))) for name in sorted(names)]
