"""Verify a checkpoint, whatever storage it is in. Torch is not needed."""

from __future__ import annotations

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.storage import Storage
from bytecheckpoint.tools.verify_files import Finding, Progress, VerifyReport, verify_catalog
from bytecheckpoint.tools.verify_tier import verify_tier

__all__ = ["Finding", "Progress", "VerifyReport", "verify_checkpoint"]


def verify_checkpoint(storage: Storage, progress: Progress | None = None, *, threads: int = 0) -> VerifyReport:
    """Check every byte of a checkpoint: sizes, headers, block checksums, and that every tensor is complete.

    Args:
        storage: where the checkpoint is.
        progress: called as (bytes checked, bytes in all), from one thread at a time.
        threads: concurrent reads; 0 uses as many as a load.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CorruptCheckpointError: the catalog itself is damaged.
        IncompatibleCheckpointError: a newer version wrote it.
    """
    tier = storage.tier_to_flush()
    if tier is not None:
        return verify_tier(tier, progress, threads=threads)
    catalog, _ = read_catalog(storage)
    return verify_catalog(storage, catalog, progress, threads=threads)
