"""`bytecheckpoint verify`, `diff`, `export` and `repair`."""

from __future__ import annotations

import re
from dataclasses import asdict

from bytecheckpoint.cli.format import plural, print_json, print_notes, printable, progress_bar, size_text
from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.storage import resolve

__all__ = ["diff", "export", "parse_size", "repair", "verify"]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def verify(path: str, *, threads: int, json: bool) -> int:
    """Verify a checkpoint and print the findings. Return 1 if there are any."""
    from bytecheckpoint.cli.ls import explain_missing_catalog
    from bytecheckpoint.monitoring import delivery
    from bytecheckpoint.tools.verify import verify_checkpoint

    storage = resolve(path)
    try:
        with progress_bar("verifying") as progress:
            report = verify_checkpoint(storage, progress, threads=threads)
    except CheckpointNotFoundError as error:
        raise explain_missing_catalog(storage, error) from None
    delivery.finish()  # an alert may be on its way
    if json:
        print_json({"ok": report.ok, **asdict(report)})
        return int(not report.ok)
    for finding in report.findings:
        print(printable(finding.message))
    print_notes(report.notes)
    verdict = "sound" if report.ok else plural(len(report.findings), "finding")
    content = f"{plural(report.tensors, 'tensor')}, {size_text(report.bytes_read)} in {plural(report.files, 'file')}"
    print(
        f"{printable(report.path)}: {content}: {verdict}" + (f"; {printable(report.verdict)}" if report.verdict else "")
    )
    return int(not report.ok)


def diff(a: str, b: str, *, rtol: float, atol: float, json: bool) -> int:
    """Compare two checkpoints and print the differences. Return 1 if there are any."""
    from bytecheckpoint.opening import open as open_checkpoint
    from bytecheckpoint.tools.diff import compare

    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        report = compare(first, second, rtol=rtol, atol=atol)
        if json:
            print_json({"a": first.path, "b": second.path, "equal": report.equal, **asdict(report)})
            return int(not report.equal)
    for difference in report.differences:
        print(printable(difference.message))
    print_notes(report.notes)
    tensors = f"{plural(report.tensors, 'tensor')} ({size_text(report.bytes_compared)})"
    compared = f"{tensors} and {plural(report.values, 'plain value')}"
    print(f"{compared} compared: {'equal' if report.equal else plural(len(report.differences), 'difference')}")
    return int(not report.equal)


def parse_size(text: str) -> int:
    """Parse a number of bytes such as "5GB" (decimal), "2GiB" (binary) or "1000000".

    Raises:
        UsageError: `text` is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    number = 0.0
    if match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        number = float(match[1]) * (1024 if match[3] else 1000) ** power
    if number < 1:
        raise UsageError(f"{text!r} is not a size: write 5GB, 500MB, 2GiB or a number of bytes")
    return int(number)


def export(src: str, dst: str, *, state: str, dtype: str | None, max_shard_size: str, force: bool, json: bool) -> int:
    """Export a checkpoint. Return 1 if the conversion made finite values infinite."""
    from bytecheckpoint.opening import open as open_checkpoint
    from bytecheckpoint.tools.export import export_huggingface

    limit = parse_size(max_shard_size)
    with open_checkpoint(src) as checkpoint, progress_bar("exporting") as progress:
        report = export_huggingface(
            checkpoint, dst, state=state, dtype=dtype, max_shard_bytes=limit, force=force, progress=progress
        )
    if json:
        print_json(asdict(report))
        return int(bool(report.overflowed))
    print_notes(f"{key} is a plain value and was not exported" for key in report.skipped)
    print_notes(f"{name} holds values too large for {dtype}: they became infinite" for name in report.overflowed)
    content = f"{plural(report.tensors, 'tensor')}, {size_text(report.nbytes)} in {plural(len(report.files), 'file')}"
    print(f"{printable(report.path)}: {content}")
    return int(bool(report.overflowed))


def repair(path: str, *, force: bool, json: bool) -> int:
    """Rebuild the catalog. Return 1 if it names damaged blocks (only with force)."""
    from bytecheckpoint.tools.repair import repair_checkpoint

    storage = resolve(path)
    with progress_bar("verifying") as progress:
        report = repair_checkpoint(storage, force=force, progress=progress)
    if json:
        print_json(asdict(report))
        return int(bool(report.findings))
    for finding in report.findings:
        print(printable(finding.message))
    print_notes(report.notes)
    done = f"catalog rebuilt from save {report.generation}" if report.written else "the catalog is sound"
    print(f"{printable(report.path)}: {done}")
    return int(bool(report.findings))
