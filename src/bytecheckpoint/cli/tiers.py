"""`bytecheckpoint flush` and `bytecheckpoint cooldown`. Torch is not imported."""

from __future__ import annotations

import re
from dataclasses import asdict

from bytecheckpoint.cli.format import (
    format_time,
    plural,
    print_json,
    print_table,
    printable,
    progress_bar,
    size_text,
)
from bytecheckpoint.errors import CheckpointError, UsageError

__all__ = ["cooldown", "flush", "parse_age"]

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_age(text: str) -> float:
    """Parse an age such as "90", "30m", "12h", "7d" or "2w".

    Raises:
        UsageError: `text` is not an age.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def cooldown(root: str, cold: str, *, older_than: str, keep: int, apply: bool, json: bool) -> int:
    """Move older steps to a cold folder, or print the plan. Return 1 if a step cannot be moved."""
    from bytecheckpoint.tiers.cooldown import cool, plan_cooldown

    steps = plan_cooldown(root, cold, older_than=parse_age(older_than), keep=keep)
    if apply:
        total = sum(step.nbytes for step in steps if step.action == "move")
        with progress_bar("moving") as progress:
            moved = 0

            def add(nbytes: int) -> None:
                nonlocal moved
                moved += nbytes
                if progress is not None:
                    progress(moved, total)

            steps = [cool(step, add) for step in steps]
    bad = any(step.error or step.action == "skip" for step in steps)
    if json:
        print_json({"ok": not bad, "applied": apply, "steps": [asdict(step) for step in steps]})
        return int(bad)
    print_table(
        ["name", "saved", "size>", "action", "reason"],
        [
            [
                step.name,
                format_time(step.created) if step.created else "",
                size_text(step.nbytes) if step.nbytes else "",
                "moved" if step.done and step.action == "move" else "finished" if step.done else step.action,
                printable(step.error or step.reason),
            ]
            for step in steps
        ],
    )
    chosen = [step for step in steps if step.action in ("move", "finish")]
    if apply:
        print(f"{plural(sum(step.done for step in chosen), 'step')} moved or finished")
    else:
        print(f"{plural(len(chosen), 'step')} would be moved or finished; nothing was changed (--apply does it)")
    return int(bad)


def flush(path: str, *, replicas: bool, json: bool) -> int:
    """Flush the steps that a job left in this machine's hot tier. Return 1 if a step is incomplete or fails."""
    from bytecheckpoint.tiers.flush.machine import flush as flush_step
    from bytecheckpoint.tiers.flush.machine import unflushed

    reports = []
    for step in unflushed(path):
        try:
            reports.append(asdict(flush_step(step, replicas=replicas)))
        except CheckpointError as error:
            reports.append({"path": step.durable.url, "state": "failed", "error": str(error)})
    good = all(report["state"] in ("committed", "already there") for report in reports)
    if json:
        print_json({"ok": good, "steps": reports})
        return int(not good)
    for report in reports:
        line = f"{printable(report['path'])}: {report['state']}"
        if report["state"] == "failed":
            line += f": {printable(report['error'])}"
        else:
            line += f", {size_text(report['nbytes'])} copied in {plural(report['files'], 'file')}"
        if report.get("lacking"):
            line += f"; {plural(len(report['lacking']), 'file')} lacking, first {printable(report['lacking'][0])}"
        print(line)
    if not reports:
        print("nothing to flush")
    return int(not good)
