"""The messages of a load: the reports of the ranks before the first byte is read, and the decisions of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import different_paths
from bytecheckpoint.engine.catalogs import CatalogHead
from bytecheckpoint.errors import CheckpointReplacedError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.selection import NameSelection, SelectionReport, check_selections
from bytecheckpoint.planning.exchange_plan import plan_shared_reads
from bytecheckpoint.planning.part_space import LiveSide
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.representation.plans import ReadPlan
from bytecheckpoint.representation.shards import TensorKey

__all__ = [
    "FitDecision",
    "FitReport",
    "NamesReport",
    "OpenDecision",
    "OpenReport",
    "check_alike",
    "decide_fit",
    "decide_open",
    "join_names",
    "ranges_of",
    "recognized_bitmap",
    "unexpected_keys",
    "unexpected_names",
]


class OpenReport(msgspec.Struct, frozen=True):
    """The report of a rank that can open the checkpoint.

    Attributes:
        digest: digest of the catalog's identity; empty if this rank gets the catalog from rank 0.
        host: name of this rank's machine; "" if this rank serves no pieces.
        url: URL of the checkpoint.
        versions: digest of the versions of the files of another program; empty for a checkpoint of this package.
        layout: argument of `load`, in a form that can be compared.
    """

    digest: bytes
    host: str = ""
    url: str = ""
    versions: bytes = b""
    layout: str = "None"


class OpenDecision(msgspec.Struct, frozen=True):
    """The decision of rank 0 upon the reports of all ranks.

    Attributes:
        alike: True if all ranks that have read the catalog see the same one.
        hosts: number of the machine of each rank that serves pieces, -1 for other ranks; empty if no rank serves any.
        head: head of the catalog, if a rank needs it.
        paths: sentence about the paths of the ranks, if these differ.
    """

    alike: bool = True
    hosts: list[int] = []
    head: CatalogHead | None = None
    paths: str = ""

    def servers(self, rank: int) -> list[int]:
        """Return the ranks that serve pieces on the machine of `rank`; none if `rank` serves none itself."""
        host = self.hosts[rank] if self.hosts else -1
        return [other for other, found in enumerate(self.hosts) if found == host] if host >= 0 else []


def decide_open(reports: Sequence[OpenReport], head: Callable[[], CatalogHead]) -> OpenDecision:
    """Compare the catalogs of all ranks, and find the ranks of each machine.

    Args:
        reports: reports in order of rank.
        head: function that returns the head of the catalog, as rank 0 has read it.

    Raises:
        UsageError: a rank that gets the catalog from rank 0 looks at another path, or ranks have different layouts.
    """
    for rank, report in enumerate(reports):  # here, because only ranks with a layout take part in the next step
        if report.layout != reports[0].layout:
            raise UsageError(
                f"rank 0 loads with layout={reports[0].layout}, rank {rank} with layout={report.layout}; give all ranks "
                "the same"
            )
    paths = different_paths({rank: report.url for rank, report in enumerate(reports)}, "at")
    if any(report.digest == b"" and report.url != reports[0].url for report in reports):
        raise UsageError(f"ranks load from different paths: {paths}; give all the same path")
    digests = {report.digest for report in reports}
    numbers = {host: number for number, host in enumerate(dict.fromkeys(r.host for r in reports if r.host))}
    hosts = [numbers.get(report.host, -1) for report in reports] if numbers else []
    alike = len(digests - {b""}) == 1
    # The catalog of another program's checkpoint has nothing that two steps of a run do not share. Machines may have copies
    # of the files under one path.
    alike &= not paths or len({report.versions for report in reports}) == 1
    return OpenDecision(alike, hosts, head() if b"" in digests else None, paths)


def check_alike(decision: OpenDecision, url: str, *, last: bool) -> None:
    """Refuse different catalogs.

    Args:
        decision: decision of rank 0.
        url: URL of the checkpoint.
        last: True in the last attempt of the load.

    Raises:
        CheckpointReplacedError: catalogs differ, and this is not the last attempt.
        IncompatibleCheckpointError: catalogs differ.
    """
    if decision.alike:
        return
    error = IncompatibleCheckpointError if last else CheckpointReplacedError
    if decision.paths:
        raise error(f"ranks see different checkpoints: {decision.paths}; give all the same path, and load again")
    raise error(
        f"ranks see different checkpoints at {url}; it was replaced during the load, or the path is not shared; load again"
    )


class NamesReport(msgspec.Struct, frozen=True):
    """The tensors of a rank's modules, or of those of all ranks, to which a layout is bound.

    Attributes:
        shapes: global shape of each tensor, by state and name.
        config: plain values of the configurations of the modules.
        left_out: state and name of the tensors that the load does not select.
    """

    shapes: dict[str, dict[str, list[int]]] = {}
    config: dict[str, bool | int | float | str] = {}
    left_out: list[tuple[str, str]] = []

    def live_side(self, lenient: Collection[str]) -> LiveSide:
        """Return them for planning; a load is not strict about the states in `lenient`."""
        shapes = {state: {name: tuple(shape) for name, shape in own.items()} for state, own in self.shapes.items()}
        return LiveSide(shapes, self.config, lenient, {*self.left_out})


def join_names(reports: Sequence[NamesReport]) -> NamesReport:
    """Join the names of all ranks."""
    joined = NamesReport({}, {}, list({pair for report in reports for pair in report.left_out}))
    for report in reports:
        joined.config.update(report.config)
        for state, own in report.shapes.items():
            joined.shapes.setdefault(state, {}).update(own)
    return joined


class FitReport(msgspec.Struct, frozen=True):
    """The report of a rank whose live objects the checkpoint fits.

    Attributes:
        recognized: bitmap of the catalog's tensors that this rank recognizes (see `Destination`).
        ranges: byte ranges that it reads if it takes part in the exchange: int64 (file, start, stop) triples as bytes.
        host: name of its machine.
        peer_handshake: handshake of `peer_memory`; empty for a rank that takes no part in the exchange.
        strict: argument of `load`, in a form that can be compared.
        selection: names that it selects.
        extra_states: names of the extra states that it loads or leaves alone.
        other_extra_states: names of other extra states in its share of the trees.
    """

    recognized: bytes
    ranges: bytes = b""
    host: str = ""
    peer_handshake: bytes = b""
    strict: bool | dict[str, bool] = True
    selection: SelectionReport = SelectionReport()
    extra_states: list[str] = []
    other_extra_states: list[str] = []


class FitDecision(msgspec.Struct, frozen=True):
    """The decision of rank 0: a summary of all reports, which grows less with the number of ranks than they do.

    Attributes:
        recognized: bitmap of the catalog's tensors that some rank recognizes.
        other_extra_states: names of the extra states of modules that no rank loads.
        shared: columns of `SharedChunks`, the chunks that several ranks want.
        hosts: number of each rank's machine; empty without shared chunks.
        handshakes: handshake of each rank; empty without shared chunks.
        chunks_per_round: largest number of shared chunks that each rank reads in a round.
    """

    recognized: bytes = b""
    other_extra_states: list[str] = []
    shared: list[bytes] = []
    hosts: list[int] = []
    handshakes: list[bytes] = []
    chunks_per_round: int = 0


def decide_fit(reports: Sequence[FitReport], chunk_bytes: int, chunks_per_round: int) -> FitDecision:
    """Join the reports of all ranks, and find the chunks that several of them want.

    Args:
        reports: reports in order of rank.
        chunk_bytes: length of one read.
        chunks_per_round: largest number of shared chunks that each rank reads in a round.

    Raises:
        UsageError: ranks gave arguments that do not fit together.
    """
    check_selections([r.selection for r in reports])
    for rank, report in enumerate(reports):
        if report.strict != reports[0].strict:
            raise UsageError(
                f"rank 0 loads with strict={reports[0].strict}, rank {rank} with strict={report.strict}; give all ranks "
                "the same"
            )
    recognized = np.bitwise_or.reduce([np.frombuffer(r.recognized, np.uint8) for r in reports]).tobytes()
    loaded = {name for report in reports for name in report.extra_states}
    others = sorted({name for report in reports for name in report.other_extra_states} - loaded)
    shared = plan_shared_reads([np.frombuffer(r.ranges, np.int64).reshape(-1, 3) for r in reports], chunk_bytes)
    if not len(shared):
        return FitDecision(recognized=recognized, other_extra_states=others)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(r.host for r in reports))}
    return FitDecision(
        recognized=recognized,
        other_extra_states=others,
        shared=shared.to_columns(),
        hosts=[numbers[r.host] for r in reports],
        handshakes=[r.peer_handshake for r in reports],
        chunks_per_round=chunks_per_round,
    )


def recognized_bitmap(count: int, numbers: Sequence[int]) -> bytes:
    """Make the bitmap of the tensors that a rank recognizes.

    Args:
        count: number of tensors in the catalog.
        numbers: numbers of the recognized tensors in the catalog, -1 for one that it lacks.
    """
    found = np.array(numbers, np.int64)
    recognized = np.zeros(count, bool)
    recognized[found[found >= 0]] = True
    return np.packbits(recognized).tobytes()


def unexpected_keys(catalog: Catalog, states: Collection[str], recognized: bytes) -> list[TensorKey]:
    """List the keys of the checkpoint that no rank recognizes.

    Args:
        catalog: catalog of the checkpoint.
        states: the states that the caller loads; keys of others are left out.
        recognized: bitmap of the tensors that some rank recognizes.
    """
    known = np.unpackbits(np.frombuffer(recognized, np.uint8), count=catalog.count).astype(bool)
    asked = np.isin(catalog.state.codes, catalog.state.codes_of([k for k in states if k in catalog.state.values]))
    # Every rank knows the tree of a state; those of its parts are for the ranks that choose them.
    tree = (catalog.slot.codes == catalog.slot.code_of(VALUES_SLOT)) & (catalog.fqn.codes == catalog.fqn.code_of(""))
    unexpected = np.flatnonzero(asked & ~known & ~tree & (catalog.owner == SHARED))
    keys = (catalog.key(i) for i in unexpected.tolist())
    return [key._replace(slot="") if key.slot == VALUES_SLOT else key for key in keys]


def unexpected_names(
    catalog: Catalog, states: Collection[str], decision: FitDecision, selection: NameSelection
) -> list[str]:
    """List the names that the checkpoint holds, the load selects and no rank wants.

    Args:
        catalog: catalog of the checkpoint.
        states: states that the caller loads.
        decision: decision of rank 0.
        selection: selection of the load.
    """
    keys = unexpected_keys(catalog, states, decision.recognized)
    return [*(str(key) for key in keys if selection.takes_any(key)), *map(unescape, decision.other_extra_states)]


def ranges_of(plan: ReadPlan) -> NDArray[np.int64]:
    """Return (file, start, stop) of each range of a plan, shape [n, 3]."""
    return np.stack([plan.file, plan.start, plan.stop], axis=1).astype(np.int64, copy=False)
