"""The steps of a load on one rank: open, fit, read, install."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from bytecheckpoint.arguments import value_of
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.engine.exchange import ChunkExchange
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import peer_handshake
from bytecheckpoint.engine.reading import read_all
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import CheckpointReplacedError, listed
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.tensors.allocation import memory_for
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.layouts import Layout
from bytecheckpoint.layouts.layout import identity_of
from bytecheckpoint.loading.catalog_exchange import CatalogExchange, OpenCheckpoint
from bytecheckpoint.loading.decision import (
    FitDecision,
    FitReport,
    NamesReport,
    OpenDecision,
    OpenReport,
    check_alike,
    decide_fit,
    decide_open,
    join_names,
    ranges_of,
    recognized_bitmap,
    unexpected_names,
)
from bytecheckpoint.loading.fit import (
    Fit,
    fit_wanted,
    lost_positions,
    read_length,
    refuse_mismatches,
    refuse_missing,
    refuse_shared_memory,
    refuse_unexpected,
    wanted_boxes,
)
from bytecheckpoint.loading.live_names import LiveNames, names_below_wrappers
from bytecheckpoint.loading.request import LoadRequest
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.planning.chained_layouts import lay_out_through
from bytecheckpoint.planning.exchange_plan import exchange_plan_of_rank
from bytecheckpoint.planning.part_space import choose_layout
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.plans import SharedChunks
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.tracing.operation import Operation, retries_so_far, span

__all__ = ["FilledStates", "FittedLoad", "Load"]

_log = logging.getLogger("bytecheckpoint")
_Own = TypeVar("_Own")
_Report = TypeVar("_Report")
_Decision = TypeVar("_Decision")
#: Smallest number of chunks that each rank reads in a round of an exchange.
_FEWEST_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class _OpenedLoad:
    """The result of `open`.

    Attributes:
        request: checked arguments.
        exchange: this rank's part in reading the catalog.
        own: checkpoint as far as this rank has read it; None if rank 0 sends the catalog.
        decision: rank 0's decision.
        live: tensors of all ranks' modules, if a layout is to be bound to them.
    """

    request: LoadRequest
    exchange: CatalogExchange
    own: OpenCheckpoint | None
    decision: OpenDecision
    live: NamesReport | None = None


@dataclass(frozen=True, slots=True)
class FittedLoad:
    """The result of `fit` on one rank, before the ranks agree.

    Attributes:
        request: checked arguments.
        exchange: this rank's part in reading the catalog.
        checkpoint: open checkpoint.
        catalog: its catalog; of a large one, the rows that this rank needs.
        view: catalog as the adapter sees it.
        destination: live objects to fill.
        fit: ranges to read, and the memory that they fill.
        exchanges: True if this rank exchanges chunks with other ranks.
    """

    request: LoadRequest
    exchange: CatalogExchange
    checkpoint: OpenCheckpoint
    catalog: Catalog
    view: SavedView
    destination: Destination
    fit: Fit
    exchanges: bool


@dataclass(frozen=True, slots=True)
class FilledStates:
    """The result of `read`: the tensors of this rank are filled, on all ranks.

    Attributes:
        fitted: result of `fit`.
        bytes_read: bytes that this rank read from storage.
        bytes_received: bytes that this rank received from other ranks.
        unexpected: names that the checkpoint holds and no rank wants.
        recognizes_some: True if some rank wants something of the checkpoint.
        prepare_save: True if some rank wants the next save prepared.
        rank: this rank.
    """

    fitted: FittedLoad
    bytes_read: int
    bytes_received: int
    unexpected: list[str]
    recognizes_some: bool
    prepare_save: bool
    rank: int

    @property
    def file_names(self) -> list[str]:
        """The names of the checkpoint's files."""
        return [file.name for file in self.fitted.catalog.files]

    def install(self, operation: Operation) -> LoadReport:
        """Install plain values, optimizer state and hyperparameters.

        Raises:
            IncompatibleCheckpointError: an object rejects its state.
        """
        operation.phase = "apply"
        destination, view, trees = self.fitted.destination, self.fitted.view, self.fitted.checkpoint.trees
        destination.apply()
        operation.mark("apply")
        notes = [*destination.mismatches, *destination.notes, *self._warn_of_nothing()]
        if view.from_rank_0:
            names = ", ".join(dict.fromkeys(view.from_rank_0))
            notes.append(f"rank {self.rank} has no copy of its own and got rank 0's: {names}")
        return LoadReport(
            path=self.fitted.checkpoint.files.url,
            bytes_read=self.bytes_read + trees.bytes_read,
            bytes_received=self.bytes_received + self.fitted.exchange.machine_reads.bytes_received,
            total_seconds=operation.seconds(),
            phases=operation.seconds_by_phase(),
            missing=tuple(destination.missing),
            unexpected=tuple(self.unexpected),
            cast=tuple(self.fitted.fit.converted),
            notes=tuple(notes),
            **retries_so_far(),
        )

    def _warn_of_nothing(self) -> list[str]:
        """Warn if the checkpoint holds nothing that any rank wants; return the warning."""
        missing, states = self.fitted.destination.missing, self.fitted.request.states
        if self.recognizes_some or not all(
            any(name == state or name.startswith(f"{state}/") for name in missing) for state in states
        ):
            return []
        url = self.fitted.checkpoint.files.url
        warning = f"{url} holds nothing that the states want ({listed(missing)}): nothing was loaded"
        if self.rank == 0:
            _log.warning("%s; compare the names", warning)
        return [warning]


class Load:
    """One attempt of a load on one rank: open, fit, read. Each step returns the arguments of the next one.

    All ranks agree after each step, so that all continue or all fail.

    Args:
        collective: ranks of the load.
        tag: tag of the messages, unique to this attempt.
        settings: settings in force at the call.
        operation: measurements of this load.
        stack: exit stack of the attempt, which closes files and releases memory when all ranks are done.
    """

    def __init__(
        self, collective: Collective, tag: str, settings: Settings, operation: Operation, stack: contextlib.ExitStack
    ) -> None:
        self._collective = collective
        self._tag = tag
        self._settings = settings
        self._operation = operation
        self._stack = stack
        self._cancel = Cancellation()
        stop = stack.enter_context(StopSignal(collective, tag, self._cancel))
        self._agreement = Agreement(collective, tag, settings.timeout, urgent=(CheckpointReplacedError,), stop=stop)

    def _agree(
        self,
        step: str,
        work: Callable[[], tuple[_Own, _Report]],
        decide: Callable[[_Own, list[_Report]], _Decision],
        reports: Any,
        decisions: Any,
    ) -> tuple[_Own, _Decision]:
        """Run a step on every rank; return its result on this rank, and rank 0's decision upon the reports of all."""
        own: list[_Own] = []

        def report() -> _Report:
            result, message = work()
            own.append(result)
            return message

        decision: _Decision = self._agreement.agree(
            step, report, lambda gathered: decide(own[0], gathered), reports=reports, decisions=decisions
        )
        return own[0], decision

    # --- open -----------------------------------------------------------------------------------------------------

    def open(self, storage: Storage | Exception, request: LoadRequest | Exception, *, last: bool) -> _OpenedLoad:
        """Read the catalog. Live objects are not asked before: their hooks may communicate, so all ranks run them or none.

        Args:
            storage: storage of the checkpoint, or an error to raise on all ranks.
            request: checked arguments, or an error to raise on all ranks.
            last: True in the last attempt.

        Raises:
            CheckpointReplacedError: ranks see different catalogs, and this is not the last attempt.
            IncompatibleCheckpointError: ranks see different catalogs.
        """
        self._operation.phase = "open"

        def work() -> tuple[tuple[LoadRequest, CatalogExchange, OpenCheckpoint | None], OpenReport]:
            found, checked = value_of(storage), value_of(request)
            timeout = self._settings.timeout
            exchange = CatalogExchange(self._collective, self._tag, found, timeout, self._cancel, self._stack)
            own, report = exchange.read()
            self._operation.mark("catalog")
            report = msgspec.structs.replace(report, layout=identity_of(checked.matching.layout))
            return (checked, exchange, own), report

        (checked, exchange, own), decision = self._agree("open", work, _decide_open, OpenReport, OpenDecision)
        check_alike(decision, value_of(storage).url, last=last)
        self._operation.mark("agree")
        live = None
        if checked.matching.layout is not None:
            gathered = self._agree("names", lambda: (None, checked.live_names()), _join_names, NamesReport, NamesReport)
            live = gathered[1]
        return _OpenedLoad(checked, exchange, own, decision, live)

    # --- fit ------------------------------------------------------------------------------------------------------

    def fit(self, opened: _OpenedLoad) -> tuple[FittedLoad, FitDecision]:
        """Match the checkpoint with the live objects, and plan the reads of this rank.

        Raises:
            IncompatibleCheckpointError: the checkpoint does not fit.
        """
        self._operation.phase = "fit"
        fitted, decision = self._agree("fit", lambda: self._fit(opened), self._decide_fit, FitReport, FitDecision)
        self._operation.mark("agree")
        return fitted, decision

    def _fit(self, opened: _OpenedLoad) -> tuple[FittedLoad, FitReport]:
        request, matching, world_size = opened.request, opened.request.matching, self._collective.world_size
        checkpoint = opened.exchange.complete(opened.own, opened.decision)
        catalog, groups, url = checkpoint.reader.catalog, checkpoint.reader.groups, checkpoint.files.url
        advised = matching.layout is None and ("config" in catalog.info or catalog.info.get("format") == "megatron")
        with checkpoint.detect_replacement():
            chunk_bytes = read_length(catalog, world_size, self._settings)
            laid = None
            if matching.layout is not None and opened.live is not None:
                if groups is not None:
                    catalog, groups = opened.exchange.rows(checkpoint, None), None
                    checkpoint.files.replace_catalog(catalog)
                    checkpoint.trees.replace_catalog(catalog)
                # What is not selected needs no rule; what is selected and has none is missing or unexpected below.
                part = matching.selection.active
                here = opened.live.live_side([s for s in catalog.states() if part or not request.strict_about(s)])
                layouts: Sequence[Layout] | None
                if matching.layout == "auto":
                    layouts = choose_layout(catalog, here, partial(request.layout_of_tables, catalog, here))
                else:
                    layouts = matching.layout
                if layouts is not None:
                    laid = lay_out_through(catalog, layouts, here)
                    catalog = laid.catalog
                    checkpoint.trees.show(catalog, laid.stored)
            selection = copy.deepcopy(matching.selection)
            rename = matching.rename
            if rename is None and laid is None and catalog.is_foreign:
                stored = names_below_wrappers(catalog)
                rename = (lambda name: stored.get(name, name)) if stored else None
            live = LiveNames(selection, rename, request.states.keys())
            shown = {} if laid is None else laid.names
            view = SavedView(catalog, checkpoint.trees, self._collective.rank, live, groups, shown)
            with gc_paused(), memory_for(url):
                destination = request.framework.destination(
                    request.states, view, strict=matching.strict, names=matching.names
                )
                # Replicas lack the same tensor.
                unused = () if laid is None else laid.unused
                destination.missing = [
                    m for m in dict.fromkeys(destination.missing) if not live.hides(m) and m not in unused
                ]
                self._operation.mark("destination")
                request.check_strict(catalog, destination)
                missing = list(filter(request.strict_about, destination.missing))
                live.note_saved(chain((TensorKey(s, "", VALUES_SLOT) for s in request.states), view.index.keys))
                refuse_shared_memory(destination.wanted)
                advice = "".join(f"; {reason}" for reason in catalog.info.get("left_out", ()))
                if advised and any(key.startswith("model/") for key in missing):
                    advice += '; layout="auto" loads the same model under other names'
                if selection.unmatched:
                    advice += f"; no name here matches the pattern {selection.unmatched[0]!r}"
                unused_states = (state for state in catalog.states() if state not in request.states)
                names = chain(view.other_names(destination.recognized), unused_states)
                refuse_missing(url, missing, names, advice)
                destination.notes += [*checkpoint.reader.notes(), *(() if laid is None else laid.notes)]
                destination.mismatches += lost_positions(catalog, request.states, world_size)
                refuse_mismatches(url, request.refused_mismatches(destination))
                loaded, others = view.extra_state_names(destination.extra_states, world_size)
                boxes = wanted_boxes(view, destination.wanted)
                if groups is not None:
                    near = BoxTable.concat([boxes, view.boxes_of(destination.streamed)])
                    catalog = opened.exchange.rows(checkpoint, near)
                    checkpoint.files.replace_catalog(catalog)
                    checkpoint.trees.replace_catalog(catalog)
                rows = checkpoint.trees.rows
                fit = fit_wanted(
                    catalog,
                    rows,
                    view.tensors,
                    destination.wanted,
                    boxes,
                    url,
                    chunk_bytes,
                    cast=matching.cast,
                    laid=laid,
                )
                self._operation.mark("plan")
        ranges = ranges_of(fit.plan)
        exchanges = request.overlap and self._exchanges(checkpoint.files, ranges)
        fitted = FittedLoad(request, opened.exchange, checkpoint, catalog, view, destination, fit, exchanges)
        return fitted, FitReport(
            recognized=recognized_bitmap(catalog.count, view.numbers(list(destination.recognized)) + view.skipped()),
            ranges=ranges.tobytes() if exchanges else b"",
            host=self._collective.host,
            peer_handshake=peer_handshake() if exchanges else b"",
            strict=request.comparable_strict(),
            selection=selection.report(look_for_similar=True),
            extra_states=loaded,
            other_extra_states=others,
        )

    def _exchanges(self, files: FileSet, ranges: Int64s) -> bool:
        """Return whether this rank exchanges with others: not if it reads from memory, where a copy is no quicker."""
        if self._collective.world_size == 1:
            return False
        cached = files.is_cached(ranges)
        self._operation.count("from memory", int(cached))
        return not cached

    def _decide_fit(self, fitted: FittedLoad, reports: list[FitReport]) -> FitDecision:
        """Join the reports of all ranks, on rank 0."""
        # Half of the readers take a round's chunks while the other half reads the next.
        threads = fitted.checkpoint.files.threads(self._settings.storage.read_threads)
        return decide_fit(reports, fitted.fit.chunk_bytes, max(threads // 2, _FEWEST_CHUNKS))

    # --- read -----------------------------------------------------------------------------------------------------

    def read(self, fitted: FittedLoad, decision: FitDecision) -> FilledStates:
        """Read the planned ranges into the live objects.

        Raises:
            IncompatibleCheckpointError: the load is strict, and the checkpoint holds something that no rank wants.
            CorruptCheckpointError: bytes do not match their checksums.
        """
        self._operation.phase = "read"
        rank = self._collective.rank
        (nbytes, received, unexpected), prepare_save = self._agree(
            "read", lambda: self._read(fitted, decision), lambda _, wants: any(wants), bool, bool
        )
        return FilledStates(fitted, nbytes, received, unexpected, any(decision.recognized), prepare_save, rank)

    def _read(self, fitted: FittedLoad, decision: FitDecision) -> tuple[tuple[int, int, list[str]], bool]:
        """Fill the destinations; return bytes read and received with unwanted names, and whether to prepare a save."""
        request, destination, files = fitted.request, fitted.destination, fitted.checkpoint.files
        states = {*request.states, *destination.states}
        unexpected = unexpected_names(fitted.catalog, states, decision, request.matching.selection)
        refused = list(filter(request.strict_about, unexpected))
        refuse_unexpected(files.url, refused, (str(shard.key) for shard in destination.wanted))
        nbytes = received = 0
        with fitted.checkpoint.detect_replacement():
            scatter = ScatterPlan(fitted.fit.plan, fitted.fit.targets)
            self._operation.planned_bytes = fitted.fit.plan.nbytes
            exchange, private = self._plan_exchange(fitted, scatter, decision)
            if exchange is not None:
                # Other ranks copy from this rank's memory until all have agreed; the stack is closed then.
                self._stack.callback(exchange.release)
                with span("exchange"):
                    exchange.run()
                self._operation.count("exchanged", nbytes=exchange.received)
                nbytes, received = exchange.read, exchange.received
            threads = self._settings.storage.read_threads
            nbytes += read_all(files, scatter, private, threads=threads, chunk_bytes=fitted.fit.chunk_bytes)
            files.check_unchanged()
            if fitted.fit.parts is not None:
                fitted.fit.parts.finish()
            destination.check()
            refuse_mismatches(files.url, request.refused_mismatches(destination))
        self._operation.mark("read")
        return (nbytes, received, unexpected), request.prepare_save

    def _plan_exchange(
        self, fitted: FittedLoad, scatter: ScatterPlan, decision: FitDecision
    ) -> tuple[ChunkExchange | None, Sequence[int]]:
        """Plan the exchange of shared chunks; return it with the ranges that this rank reads for itself."""
        shared = SharedChunks.from_columns(decision.shared)
        if not len(shared):
            return None, range(len(scatter.plan.file))
        # A rank that does not exchange still takes part in the others' messages.
        ranges = ranges_of(scatter.plan)
        plan = exchange_plan_of_rank(shared, ranges if fitted.exchanges else ranges[:0], fitted.fit.chunk_bytes)
        exchange = ChunkExchange(
            self._agreement.part("exchange"),
            plan,
            decision.hosts,
            decision.handshakes,
            fitted.checkpoint.files,
            scatter,
            chunk_bytes=fitted.fit.chunk_bytes,
            chunks_per_round=decision.chunks_per_round,
            settings=self._settings,
        )
        return exchange, plan.private.tolist() if fitted.exchanges else range(len(ranges))


def _join_names(_: None, reports: list[NamesReport]) -> NamesReport:
    """Join the names of all ranks, on rank 0."""
    return join_names(reports)


def _decide_open(
    own: tuple[LoadRequest, CatalogExchange, OpenCheckpoint | None], reports: list[OpenReport]
) -> OpenDecision:
    """Compare the catalogs of all ranks, on rank 0."""
    checkpoint = own[2]
    assert checkpoint is not None, "rank 0 reads the catalog"
    return decide_open(reports, checkpoint.reader.head)
