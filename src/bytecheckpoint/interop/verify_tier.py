"""Verifying a step behind a tier: each copy for itself, and what a load would make of what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..engine.catalogs import read_catalog
from ..errors import CheckpointError, StorageUnavailableError
from ..representation.catalog import Catalog
from ..representation.catalog_file import decode
from ..representation.names import CATALOG_NAME, is_uri
from ..storage.parallel import within
from ..storage.tier import TierStorage
from .verify import Finding, Progress, VerifyReport, verify_catalog

__all__ = ["verify_tier"]

#: Seconds for the durable storage's first word; without it only the hot copy is verified.
_PATIENCE = 30.0
#: Damage that leaves nothing of a file to read.
_WHOLE = ("missing", "size", "unreadable")


def verify_tier(storage: TierStorage, progress: Progress | None = None, *, threads: int = 0) -> VerifyReport:
    """Check the hot copy of this machine and the durable one; see `verify_checkpoint`.

    Returns:
        Findings say which copy they are about. `restorable` tells whether a load would succeed all the same, since it
        reads each block from the nearest copy in which that is sound; `verdict` says so in words.
    """
    durable, away = _durable_catalog(storage)
    hot = storage.hot_catalog()
    notes: list[str] = []
    findings: list[Finding] = []
    if away:
        findings.append(_about("durable", "unreadable", storage.durable.url, away))
    catalog: Catalog | None = None
    record = None
    if hot is not None:
        record = storage.record(hot)
        try:
            catalog = decode(hot)
        except CheckpointError as error:
            findings.append(_about("hot", "unreadable", storage.hot.url, f"its catalog is damaged: {error}"))
        else:
            if not away and not storage.supersedes(hot, record):
                notes.append(f"the hot copy ({storage.hot.url}) is of an older save and does not count")
                catalog = None
    if catalog is None or hot is None:
        report = verify_catalog(storage.durable, read_catalog(storage.durable)[0], progress, threads=threads)
        found = [*findings, *(_told(finding, "durable", storage.durable.url) for finding in report.findings)]
        verdict = "" if not found else _words("a load reads the durable copy", not report.findings)
        return replace(
            report,
            path=storage.url,
            findings=tuple(found),
            notes=(*notes, *report.notes),
            restorable=not report.findings,
            verdict=verdict,
        )
    flushed = durable == hot
    if not flushed and not away:
        notes.append(f"not flushed: {storage.durable.url} has {'an older checkpoint' if durable else 'no checkpoint'}")
    # The files of other machines' ranks are missing here as a rule.
    ranks = set(record.ranks) if record is not None else set()
    near = verify_catalog(storage.hot, catalog, _half(progress, 0), threads=threads)
    bad = {"hot": _bad_blocks(near.findings)}
    findings += [
        _told(finding, "hot", storage.hot.url)
        for finding in near.findings
        if not (finding.kind == "missing" and ranks and _rank(catalog, finding.file) not in ranks)
    ]
    read = near.bytes_read
    if not away:
        far = verify_catalog(storage.durable, catalog, _half(progress, 1), threads=threads)
        read += far.bytes_read
        bad["durable"] = _bad_blocks(far.findings)
        findings += [
            _told(finding, "durable", storage.durable.url)
            for finding in far.findings
            if finding.file and (flushed or finding.kind != "missing")
        ]
        notes += far.notes if flushed else ()
    lost = [file.name for file in catalog.files if not is_uri(file.name) and _lost(file.name, bad.values())]
    holes = any(not finding.file for finding in near.findings)
    restorable = not lost and not holes
    if findings or lost:
        where = f"; {len(lost)} files are in no copy here that is sound (the first: {lost[0]})" if lost else ""
        verdict = _words("a load reads what is wrong in one copy from the other", restorable) + where
    else:
        verdict = ""
    notes += [note for note in near.notes if not note.startswith("tier")]
    return VerifyReport(
        storage.url, len(catalog.files), read, near.tensors, tuple(findings), tuple(notes), restorable, verdict
    )


def _durable_catalog(storage: TierStorage) -> tuple[bytes | None, str]:
    """The durable catalog's bytes, or why the storage cannot be asked."""
    try:
        within(_PATIENCE, lambda: storage.durable.version(CATALOG_NAME))
        return storage.durable.read(CATALOG_NAME), ""
    except FileNotFoundError:
        return None, ""
    except StorageUnavailableError as error:
        return None, str(error)


def _words(how: str, restorable: bool) -> str:
    return f"restorable: {how}" if restorable else "not restorable from here, unless another machine has sound copies"


def _about(copy: str, kind: str, url: str, text: str) -> Finding:
    return Finding(kind, "", -1, 0, (), 0, f"the {copy} copy ({url}): {text}", copy)


def _told(finding: Finding, copy: str, url: str) -> Finding:
    return replace(finding, message=f"the {copy} copy ({url}): {finding.message}", copy=copy)


def _rank(catalog: Catalog, name: str) -> int:
    return next((file.rank for file in catalog.files if file.name == name), -1)


def _bad_blocks(findings: Iterable[Finding]) -> dict[str, set[int] | None]:
    """By file, the blocks that a load cannot take from a copy; None for all of them."""
    found: dict[str, set[int] | None] = {}
    for finding in findings:
        blocks = found.get(finding.file, set())
        if finding.kind in _WHOLE or blocks is None:
            found[finding.file] = None
        elif finding.kind == "block":
            found[finding.file] = blocks | set(range(finding.block, finding.block + finding.blocks))
    return found


def _lost(name: str, copies: Iterable[dict[str, set[int] | None]]) -> bool:
    """Whether some block of a file is bad in every copy."""
    left: set[int] | None = None
    for bad in copies:
        here = bad.get(name, set())
        left = here if left is None else left if here is None else left & here
    return left is None or bool(left)


def _half(progress: Progress | None, number: int) -> Progress | None:
    """Progress of the first or the second of two passes of equal length."""
    if progress is None:
        return None
    told = progress
    return lambda done, total: told(number * total + done, 2 * total)
