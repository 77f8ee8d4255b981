"""What the ranks of a load report before the first byte is read, and what rank 0 decides for all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.planning.exchange_plan import plan_shared_reads
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.plans import ReadPlan

__all__ = ["FitDecision", "FitReport", "claimed_bitmap", "decide_fit", "ranges_of", "unexpected_keys"]


class FitReport(msgspec.Struct, frozen=True):
    """What one rank has found: the checkpoint fits.

    Attributes:
        catalog: digest of the catalog that it read.
        claimed: bitmap of the catalog's tensors that it accounts for.
        ranges: the ranges that it reads if it takes part in the exchange: int64 (file, start, stop) triples as bytes.
        host: ranks with the same one are on one machine.
        peer_handshake: for `peer_memory.sees`.
    """

    catalog: bytes
    claimed: bytes
    ranges: bytes = b""
    host: str = ""
    peer_handshake: bytes = b""


class FitDecision(msgspec.Struct, frozen=True):
    """What rank 0 makes of all reports: every rank's report at every rank would not scale.

    Attributes:
        catalogs_differ: the ranks read different catalogs; nothing else is set.
        claimed: bitmap of the catalog's tensors that some rank accounts for.
        shared: columns of `SharedChunks`: what several ranks want.
        hosts: a number for each rank, equal for ranks of one machine, where something is shared.
        handshakes: each rank's, where something is shared.
        chunks: how many of the shared chunks each rank reads in a round.
    """

    catalogs_differ: bool = False
    claimed: bytes = b""
    shared: list[bytes] = []
    hosts: list[int] = []
    handshakes: list[bytes] = []
    chunks: int = 0


def decide_fit(reports: Sequence[FitReport], chunk_bytes: int, chunks: int) -> FitDecision:
    """Compare the ranks' catalogs, join their claims and find what several of them want.

    Args:
        reports: in order of rank.
        chunk_bytes: length of one read.
        chunks: how many chunks each rank reads in a round.
    """
    if len({r.catalog for r in reports}) > 1:
        return FitDecision(catalogs_differ=True)
    claimed = np.bitwise_or.reduce([np.frombuffer(r.claimed, np.uint8) for r in reports]).tobytes()
    shared = plan_shared_reads([np.frombuffer(r.ranges, np.int64).reshape(-1, 3) for r in reports], chunk_bytes)
    if not len(shared):
        return FitDecision(claimed=claimed)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(r.host for r in reports))}
    return FitDecision(
        claimed=claimed,
        shared=shared.to_columns(),
        hosts=[numbers[r.host] for r in reports],
        handshakes=[r.peer_handshake for r in reports],
        chunks=chunks,
    )


def claimed_bitmap(count: int, numbers: Sequence[int]) -> bytes:
    """Mark the tensors that a rank accounts for.

    Args:
        count: of the catalog's tensors.
        numbers: of the rank's tensors, -1 for one that the catalog lacks.
    """
    found = np.array(numbers, np.int64)
    claimed = np.zeros(count, bool)
    claimed[found[found >= 0]] = True
    return np.packbits(claimed).tobytes()


def unexpected_keys(catalog: Catalog, kinds: Collection[str], claimed: bytes) -> list[str]:
    """List what the checkpoint holds, within the kinds asked for, and no rank wants.

    Args:
        catalog: of the checkpoint.
        kinds: asked for.
        claimed: bitmap of the tensors that some rank accounts for.
    """
    wanted = np.unpackbits(np.frombuffer(claimed, np.uint8), count=catalog.count).astype(bool)
    asked = np.isin(catalog.kind.codes, catalog.kind.codes_of([k for k in kinds if k in catalog.kind.values]))
    tree = catalog.slot.codes == catalog.slot.codes_of([VALUES_SLOT])[0]
    unclaimed = np.flatnonzero(asked & ~wanted & ~tree & (catalog.owner == SHARED))
    return [str(catalog.key(i)) for i in unclaimed.tolist()]


def ranges_of(plan: ReadPlan) -> NDArray[np.int64]:
    """Return (file, start, stop) of each range of a plan, shape [n, 3]."""
    return np.stack([plan.file, plan.start, plan.stop], axis=1).astype(np.int64, copy=False)
