"""Verify a checkpoint in any storage. Torch is not needed."""

from __future__ import annotations

import time

from bytecheckpoint.engine.catalogs import read_catalog, read_catalog_file
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, IncompatibleCheckpointError
from bytecheckpoint.formats.detect import find_instead
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.delivery import deliver_alert
from bytecheckpoint.monitoring.record import path_without_secrets
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.subject import Subject, storage_of
from bytecheckpoint.tools.verify_files import VerifyFinding, VerifyReport, verify_catalog
from bytecheckpoint.tools.verify_foreign import verify_foreign
from bytecheckpoint.tools.verify_tier import verify_tier

__all__ = ["VerifyFinding", "VerifyReport", "verify"]

#: Attempts to verify a checkpoint that is replaced, moved or evicted meanwhile.
_ATTEMPTS = 3


def verify(checkpoint: Subject, progress: Progress | None = None, *, threads: int = 0) -> VerifyReport:
    """Check every byte of a checkpoint: sizes, headers, block checksums, and that every tensor is complete.

    Findings also become an alert for the sinks of the setting `metrics`. If another save replaces the checkpoint meanwhile,
    the new checkpoint is verified. A checkpoint of another program is checked against the sums that its own format has; the
    notes say which.

    Args:
        checkpoint: path, storage or open checkpoint.
        progress: function of (bytes checked, bytes in all), called by one thread at a time.
        threads: number of concurrent reads; 0 for as many as a load makes.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CorruptCheckpointError: the catalog itself is damaged.
        IncompatibleCheckpointError: a newer version wrote it, or it is replaced all the time.
    """
    storage = storage_of(checkpoint)
    for _ in range(_ATTEMPTS):
        before = _catalogs(storage)
        report = _verify(storage, progress, threads)
        if report.ok:
            return report
        if _catalogs(storage) == before:
            _alert(storage, report)
            return report
        # A save, a cooldown or an eviction has removed files that were to be verified.
    raise IncompatibleCheckpointError(
        f"{storage.url} was replaced {_ATTEMPTS} times while it was being verified; verify one that is not being saved"
    )


def _alert(storage: Storage, report: VerifyReport) -> None:
    """Hand the findings to the sinks of the setting `metrics`, if there are alerts."""
    if settings().monitoring.alerts != "off":
        path = path_without_secrets(storage.url)
        text = f"{path}: {len(report.findings)} findings in a verification, the first: {report.findings[0].message}"
        deliver_alert(Alert(rule="verification", severity="critical", text=text, path=path, time=time.time()))


def _verify(storage: Storage, progress: Progress | None, threads: int) -> VerifyReport:
    tier = tier_of(storage)
    if tier is not None:
        return verify_tier(tier, progress, threads=threads)
    try:
        catalog, _ = read_catalog(storage)
    except CheckpointNotFoundError as error:
        return verify_foreign(find_instead(storage, error), progress, threads=threads)
    return verify_catalog(storage, catalog, progress, threads=threads)


def _catalogs(storage: Storage) -> list[bytes]:
    """Return the catalogs of all copies, b"" for those that cannot be read."""
    tier = tier_of(storage)
    found = []
    for place in (storage,) if tier is None else (tier.hot, tier.durable):
        try:
            found.append(read_catalog_file(with_time_limits(place)))
        except (FileNotFoundError, CheckpointError):
            found.append(b"")
    return found
