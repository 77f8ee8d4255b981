"""One load on one rank: its attempts, and the steps of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.exchange import Exchange
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import peer_handshake
from bytecheckpoint.engine.reading import read_all
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.frameworks.base import Destination, Framework
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.loading.decision import (
    FitDecision,
    FitReport,
    decide_fit,
    ranges_of,
    recognized_bitmap,
    unexpected_keys,
)
from bytecheckpoint.loading.fit import Fit, fit_wanted, listed, read_length, refuse_missing
from bytecheckpoint.loading.saved import SavedView
from bytecheckpoint.monitoring.garbage_collection import gc_paused
from bytecheckpoint.monitoring.phases import Phases
from bytecheckpoint.planning.exchange_plan import exchange_plan_of_rank
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.representation.plans import SharedChunks
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage

__all__ = ["FIRST_STEP", "LoadCall", "load_states"]

#: The first step in which the ranks of a load agree.
FIRST_STEP = "fit"

#: Seconds to wait after each attempt: where ranks see different checkpoints, caches of a network file system may need a
#: moment.
_PAUSES = (0.0, 1.0, 0.0)
#: Chunks that each rank reads in a round of an exchange, at least.
_FEWEST_CHUNKS = 2


@dataclass(frozen=True, slots=True)
class LoadCall:
    """The arguments of one load.

    Attributes:
        find: checks the arguments and returns storage and adapter; called anew by each attempt.
        states: what to fill.
        names: explicit parameter names.
        settings: in force at the call.
        overlap: exchange what several ranks want.
        strict: refuse missing and unexpected keys.
        cast: convert dtypes.
        wants_prepare: returns whether this rank wants its next save prepared; called when its bytes are there.
        prepare: prepares the next save; called on every rank or on none.
    """

    find: Callable[[], tuple[Storage, Framework]]
    states: MutableMapping[str, object]
    names: Mapping[Any, Any] | None
    settings: Settings
    overlap: bool
    strict: bool
    cast: bool
    wants_prepare: Callable[[], bool]
    prepare: Callable[[], None]


def load_states(collective: Collective, number: int, call: LoadCall) -> LoadReport:
    """Load a checkpoint; start again if another save replaced it meanwhile.

    Args:
        collective: the ranks; all of them call this.
        number: number of the load, equal on all ranks.
        call: the arguments.

    Returns:
        This rank's report.
    """
    phases = Phases()
    for attempt, pause in enumerate(_PAUSES):
        try:
            last = attempt + 1 == len(_PAUSES)
            return _Attempt(collective, f"load/{number}.{attempt}", call, phases, last=last).run()
        except CheckpointReplacedError:
            time.sleep(pause)
    raise IncompatibleCheckpointError(
        f"the checkpoint was replaced {len(_PAUSES)} times while it was being loaded; load one that is not being saved"
    )


@dataclass(slots=True)
class _OpenCheckpoint:
    """A checkpoint that is being loaded, and what this rank wants of it.

    Attributes:
        storage: where it is.
        catalog: its catalog.
        data: the bytes of the catalog.
        files: its files.
        view: the catalog as the adapter sees it.
        destination: what this rank fills.
        fit: what this rank reads.
        exchanges: whether this rank exchanges with others what several want.
        bytes_read: bytes read from storage.
        bytes_received: bytes received from other ranks.
    """

    storage: Storage
    catalog: Catalog
    data: bytes
    files: FileSet
    view: SavedView
    destination: Destination
    fit: Fit
    exchanges: bool
    bytes_read: int = 0
    bytes_received: int = 0


class _Attempt:
    """One attempt of a load. The ranks agree twice: before the first byte is read, and before values are installed."""

    def __init__(self, collective: Collective, tag: str, call: LoadCall, phases: Phases, *, last: bool) -> None:
        self._collective = collective
        self._tag = tag
        self._call = call
        self._phases = phases
        self._last = last
        self._opened: _OpenCheckpoint | None = None

    def run(self) -> LoadReport:
        """Load, or raise `CheckpointReplacedError` on all ranks."""
        timeout = self._call.settings.timeout
        agreement = Agreement(self._collective, self._tag, timeout, urgent=(CheckpointReplacedError,))
        with contextlib.ExitStack() as stack:  # open until all ranks are done: they read this rank's memory
            decision: FitDecision = agreement.agree(
                FIRST_STEP, lambda: self._fit(stack), self._decide, reports=FitReport, decisions=FitDecision
            )
            unexpected = self._check_decision(decision)
            self._phases.mark("agree")
            prepare = agreement.agree("read", lambda: self._read(stack, decision), any, reports=bool, decisions=bool)
        try:
            return self._install(unexpected)
        finally:
            # Even if objects of this rank refuse their values: a preparation takes the number of a save on every rank.
            if prepare:
                self._call.prepare()

    # --- the steps ------------------------------------------------------------------------------------------------

    def _fit(self, stack: contextlib.ExitStack) -> FitReport:
        """Open the checkpoint and plan what this rank reads."""
        call = self._call
        storage, adapter = call.find()
        catalog, data = read_catalog(storage)
        with _detect_replacement(storage, data):
            files = stack.enter_context(FileSet(storage, catalog))
            self._phases.mark("catalog")
            chunk_bytes = read_length(catalog, self._collective.world_size, call.settings)
            view = SavedView(catalog, files, self._collective.rank)
            with gc_paused():
                destination = adapter.destination(call.states, view, strict=call.strict, names=call.names)
                destination.missing = list(dict.fromkeys(destination.missing))  # replicas lack the same tensor
                self._phases.mark("destination")
                refuse_missing(storage.url, destination.missing if call.strict else ())
                fit = fit_wanted(storage.url, catalog, view, destination.wanted, chunk_bytes, cast=call.cast)
                self._phases.mark("plan")
        ranges = ranges_of(fit.plan)
        exchanges = self._exchanges(files, ranges)
        self._opened = _OpenCheckpoint(storage, catalog, data, files, view, destination, fit, exchanges)
        return FitReport(
            catalog=xxhash.xxh3_128_digest(data),
            recognized=recognized_bitmap(catalog.count, view.numbers(list(destination.recognized))),
            ranges=ranges.tobytes() if exchanges else b"",
            host=self._collective.host,
            peer_handshake=peer_handshake() if exchanges else b"",
        )

    def _decide(self, reports: list[FitReport]) -> FitDecision:
        """On rank 0, sum up the reports of all ranks."""
        opened = self._checkpoint
        # Half of the readers take a round's chunks while the other half reads the next.
        chunks_per_round = max(opened.files.threads(self._call.settings.read_threads) // 2, _FEWEST_CHUNKS)
        return decide_fit(reports, opened.fit.chunk_bytes, chunks_per_round)

    def _check_decision(self, decision: FitDecision) -> list[str]:
        """Refuse different catalogs, and keys that no rank wants if the load is strict; return those keys."""
        opened = self._checkpoint
        url = opened.storage.url
        if decision.catalogs_differ:
            kind = IncompatibleCheckpointError if self._last else CheckpointReplacedError
            raise kind(
                f"ranks see different checkpoints at {url}; it was replaced during the load, or the path is "
                f"not shared; load again"
            )
        unexpected = unexpected_keys(opened.catalog, self._call.states, decision.recognized)
        if unexpected and self._call.strict:
            raise IncompatibleCheckpointError(
                f"{url} holds {listed(unexpected)}, which no rank wants; load with strict=False to ignore that"
            )
        return unexpected

    def _read(self, stack: contextlib.ExitStack, decision: FitDecision) -> bool:
        """Fill the destinations; return whether this rank wants its next save prepared."""
        opened = self._checkpoint
        with _detect_replacement(opened.storage, opened.data):
            scatter = ScatterPlan(opened.fit.plan, opened.fit.targets)
            exchange, private = self._exchange(scatter, decision)
            if exchange is not None:
                # Other ranks copy from this rank's memory until all have agreed; the stack is closed then.
                stack.callback(exchange.release)
                exchange.run()
                opened.bytes_read, opened.bytes_received = exchange.read, exchange.received
            threads = self._call.settings.read_threads
            opened.bytes_read += read_all(
                opened.files, scatter, private, threads=threads, chunk_bytes=opened.fit.chunk_bytes
            )
            opened.destination.check()
        self._phases.mark("read")
        return self._call.wants_prepare()

    def _install(self, unexpected: list[str]) -> LoadReport:
        """Install values, optimizer state and hyperparameters."""
        opened = self._checkpoint
        opened.destination.apply()
        self._phases.mark("apply")
        notes = list(opened.destination.notes)
        if opened.view.from_rank_0:
            notes.append(
                f"rank {self._collective.rank} has no copy of its own and got rank 0's: "
                + ", ".join(dict.fromkeys(opened.view.from_rank_0))
            )
        total = self._phases.total()
        return LoadReport(
            path=opened.storage.url,
            bytes_read=opened.bytes_read + opened.view.bytes_read,
            bytes_received=opened.bytes_received,
            blocking_seconds=total,
            total_seconds=total,
            phases=dict(self._phases.seconds),
            missing=tuple(opened.destination.missing),
            unexpected=tuple(unexpected),
            cast=tuple(opened.fit.converted),
            notes=tuple(notes),
        )

    # --- parts of the steps ---------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> _OpenCheckpoint:
        assert self._opened is not None, "the checkpoint is open"
        return self._opened

    def _exchanges(self, files: FileSet, ranges: Int64s) -> bool:
        """Whether this rank exchanges with others: not if it reads from memory, which a copy from a rank is too."""
        return self._call.overlap and self._collective.world_size > 1 and not files.is_cached(ranges)

    def _exchange(self, scatter: ScatterPlan, decision: FitDecision) -> tuple[Exchange | None, Sequence[int]]:
        """Plan the exchange of what several ranks want; return it with the ranges that this rank reads for itself."""
        opened = self._checkpoint
        shared = SharedChunks.from_columns(decision.shared)
        if not len(shared):
            return None, range(len(scatter.plan.file))
        # A rank that does not exchange still takes part in the others' messages.
        ranges = ranges_of(scatter.plan)
        plan = exchange_plan_of_rank(shared, ranges if opened.exchanges else ranges[:0], opened.fit.chunk_bytes)
        exchange = Exchange(
            self._collective,
            f"{self._tag}/exchange",
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


@contextlib.contextmanager
def _detect_replacement(storage: Storage, catalog: bytes) -> Iterator[None]:
    """Turn a damaged read into `CheckpointReplacedError` if another save has replaced `catalog` and removed its files."""
    try:
        yield
    except CorruptCheckpointError as error:
        replaced = False
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            replaced = storage.read(CATALOG_NAME) != catalog
        if replaced:
            raise CheckpointReplacedError(str(error)) from error
        raise
