"""Verify a step of a tiered path: the hot copy, the durable copy, and whether a load would succeed with both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.catalogs import read_catalog, read_catalog_file
from bytecheckpoint.errors import CheckpointError, StorageUnavailableError
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME, is_uri
from bytecheckpoint.tiers.names import INTERNAL_FILES
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.verify_files import NO_VIEW, VerifyFinding, VerifyReport, verify_catalog

__all__ = ["verify_tier"]

#: Seconds to wait for the durable storage. Without an answer only the hot copy is verified.
_DURABLE_TIMEOUT = 30.0
#: Kinds of findings after which no block of the file can be read.
_WHOLE_FILE = ("missing", "size", "unreadable")


def verify_tier(storage: TierStorage, progress: Progress | None = None, *, threads: int = 0) -> VerifyReport:
    """Check this machine's hot copy and the durable copy of a step; see `verify`.

    Returns:
        Each finding names its copy. `restorable` says whether a load would succeed despite the findings: it reads each
        block from the nearest copy in which the block is sound. `verdict` says so in words.
    """
    durable, unreachable = _durable_catalog(storage)
    hot = storage.hot_folder.catalog()
    notes: list[str] = []
    findings: list[VerifyFinding] = []
    if unreachable:
        findings.append(_with_copy(_unreadable(unreachable), "durable", storage.durable.url))
    catalog, ranks = _hot_catalog(storage, hot, bool(unreachable), findings, notes)
    if catalog is None:
        return _verify_durable(storage, findings, notes, progress, threads)
    flushed = durable == hot
    if not flushed and not unreachable:
        notes.append(f"not flushed: {storage.durable.url} has {'an older checkpoint' if durable else 'no checkpoint'}")
    hot_progress = progress if unreachable else _half_progress(progress, 0)
    hot_report = verify_catalog(storage.hot, catalog, hot_progress, threads=threads)
    reports = [hot_report]
    writers = {file.name: file.rank for file in catalog.files}
    for finding in hot_report.findings:
        # Files of ranks on other machines are usually missing here.
        if finding.kind != "missing" or not ranks or writers.get(finding.file, -1) in ranks:
            findings.append(_with_copy(finding, "hot", storage.hot.url))
    if not unreachable:
        durable_report = verify_catalog(storage.durable, catalog, _half_progress(progress, 1), threads=threads)
        reports.append(durable_report)
        wanting = {finding.file for finding in findings}
        for finding in durable_report.findings:
            # The pass over the hot copy has found what is wrong with the catalog itself. A flush brings missing files, and
            # may be writing those that the hot copies have.
            if finding.file and (flushed or (finding.kind != "missing" and finding.file in wanting)):
                findings.append(_with_copy(finding, "durable", storage.durable.url))
        notes += durable_report.notes if flushed else ()
    notes += [note for note in hot_report.notes if not INTERNAL_FILES.match(note) and (note != NO_VIEW or not flushed)]
    bad_blocks = [_bad_blocks(report.findings) for report in reports]
    lost = [file.name for file in catalog.files if not is_uri(file.name) and _is_lost(file.name, bad_blocks)]
    restorable = not lost and all(finding.file for finding in hot_report.findings)
    verdict = ""
    if findings or lost:
        verdict = _verdict("a load reads what is wrong in one copy from the other", restorable)
    if lost:
        verdict += f"; {len(lost)} files are in no copy here that is sound (the first: {lost[0]})"
    read = sum(report.bytes_read for report in reports)
    return VerifyReport(
        storage.url, len(catalog.files), read, hot_report.tensors, tuple(findings), tuple(notes), restorable, verdict
    )


def _hot_catalog(
    storage: TierStorage, data: bytes | None, unreachable: bool, findings: list[VerifyFinding], notes: list[str]
) -> tuple[Catalog | None, set[int]]:
    """Return the hot catalog, and the ranks whose files lie beside it (none: not recorded).

    Args:
        storage: the tier.
        data: bytes of the hot catalog, if there is one.
        unreachable: True if the durable storage gives no answer, so that the hot copy counts in any case.
        findings: receives that the hot catalog is damaged.
        notes: receives that the hot catalog is too old.
    """
    if data is None:
        return None, set()
    record = storage.hot_folder.record(data)
    try:
        catalog = decode(data)
    except CheckpointError as error:
        findings.append(_with_copy(_unreadable(f"its catalog is damaged: {error}"), "hot", storage.hot.url))
        return None, set()
    if not unreachable and not storage.hot_copy_counts(data, record):
        notes.append(f"the hot copy ({storage.hot.url}) is of an older save and does not count")
        return None, set()
    return catalog, set(record.ranks) if record is not None else set()


def _verify_durable(
    storage: TierStorage, findings: list[VerifyFinding], notes: list[str], progress: Progress | None, threads: int
) -> VerifyReport:
    """Check the durable copy, because no hot copy counts. `findings` and `notes` say why none does."""
    report = verify_catalog(storage.durable, read_catalog(storage.durable)[0], progress, threads=threads)
    found = [*findings, *(_with_copy(finding, "durable", storage.durable.url) for finding in report.findings)]
    return replace(
        report,
        path=storage.url,
        findings=tuple(found),
        notes=(*notes, *report.notes),
        restorable=not report.findings,
        verdict=_verdict("a load reads the durable copy", not report.findings) if found else "",
    )


def _durable_catalog(storage: TierStorage) -> tuple[bytes | None, str]:
    """Return the bytes of the durable catalog, or why the storage did not answer."""
    try:
        call_with_timeout(_DURABLE_TIMEOUT, lambda: storage.durable.version(CATALOG_NAME))
        return read_catalog_file(storage.durable), ""
    except FileNotFoundError:
        return None, ""
    except StorageUnavailableError as error:
        return None, str(error)


def _verdict(how: str, restorable: bool) -> str:
    return f"restorable: {how}" if restorable else "not restorable from here, unless another machine has sound copies"


def _with_copy(finding: VerifyFinding, copy: str, url: str) -> VerifyFinding:
    return replace(finding, message=f"the {copy} copy ({url}): {finding.message}", copy=copy)


def _unreadable(text: str) -> VerifyFinding:
    return VerifyFinding("unreadable", "", -1, 0, (), 0, text)


def _bad_blocks(findings: Iterable[VerifyFinding]) -> dict[str, set[int] | None]:
    """Return, by file, the blocks that a load cannot read from a copy; None for all blocks."""
    found: dict[str, set[int] | None] = {}
    for finding in findings:
        blocks = found.get(finding.file, set())
        if finding.kind in _WHOLE_FILE or blocks is None:
            found[finding.file] = None
        elif finding.kind == "block":
            found[finding.file] = blocks | set(range(finding.block, finding.block + finding.blocks))
    return found


def _is_lost(name: str, copies: Iterable[dict[str, set[int] | None]]) -> bool:
    """Return whether some block of a file is bad in every copy."""
    bad_everywhere: set[int] | None = None
    for bad in copies:
        blocks = bad.get(name, set())
        if bad_everywhere is None:
            bad_everywhere = blocks
        elif blocks is not None:
            bad_everywhere = bad_everywhere & blocks
    return bad_everywhere is None or bool(bad_everywhere)


def _half_progress(progress: Progress | None, number: int) -> Progress | None:
    """Return the progress callback for the first or second of two passes of equal length."""
    if progress is None:
        return None
    report = progress
    return lambda done, total: report(number * total + done, 2 * total)
